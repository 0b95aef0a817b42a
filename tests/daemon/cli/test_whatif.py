"""`whatif`: a script's steps, the prices of codecs, and what the command tells of them."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.cli.commands import planning as command
from meshtrain.cli.planning import codec_prices as prices_module
from meshtrain.cli.planning import other_programs
from meshtrain.cli.planning.codec_prices import ProcessorPrices, processor_prices
from meshtrain.cli.planning.other_programs import OtherPrograms
from meshtrain.cli.planning.verdict import COLUMNS
from meshtrain.cli.submission.measuring import NotMeasured
from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages
from meshwire.memory_layout.footprint import Measurement, ModelSize
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.planning.kept_prices import NAME
from meshwire.planning.price import CodecPrice
from meshwire.planning.quality import EVIDENCE
from meshwire.planning.step_trace import StepTrace, TracedScript
from tests.daemon.fakedaemon import run

pytestmark = pytest.mark.usefixtures("plain_environment")

VALUES, TENSORS = 2_900_000, 10
SIZE = ModelSize(parameters=4, frozen=0, buffers=0, optimizer="AdamW", optimizer_state=8, optimizer_known=True)


def traced(values: int = VALUES, step_s: float = 0.157) -> TracedScript:
    """The transformer that was measured from outside: 51 samples a second alone."""
    shape = (values // TENSORS // 100, 100)
    specs = (TensorSpec(name=f"t{at}", shape=shape, dtype="float32", kind="parameter") for at in range(TENSORS))
    manifest = ModelManifest(tensors=tuple(specs), optimizer="AdamW")
    step = StepTrace(
        samples=8,
        steps=20,
        threads=4,
        before_s=0.3 * step_s,
        backward_s=0.6 * step_s,
        after_s=0.1 * step_s,
        copy_s=0.002,
        ready=tuple(1 - at / TENSORS for at in range(TENSORS)),
    )
    return TracedScript(measurement=Measurement(manifest=manifest, size=SIZE), step=step)


@pytest.fixture
def known_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script whose steps are known, on a processor whose codecs are, and that does nothing else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it is not run')\n")
    monkeypatch.setattr(command, "trace", lambda *_: traced())
    fixed = {tried.codec: CodecPrice(0.5e-9, 0.5e-9) for tried in EVIDENCE}
    monkeypatch.setattr(command, "processor_prices", lambda *_: ProcessorPrices(fixed))
    monkeypatch.setattr(OtherPrograms, "part", lambda _: 0.0)


def table(shown: Any) -> dict[tuple[str, str], list[str]]:
    """Cells of the rows, by rate and number of laptops."""
    rows = [line.split("  ") for line in shown.stdout.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows[1:]]
    return {(row[0], row[1]): row[2:] for row in cells}


@pytest.mark.usefixtures("known_script")
def test_the_table_has_the_best_and_the_default_for_each_network() -> None:
    shown = run("whatif", "train.py", "--wired", "--mbit", "20,1000", "--peers", "2,4")
    assert shown.exit_code == 0, shown.stderr
    header, *_ = shown.stdout.splitlines()
    assert header.split() == " ".join(COLUMNS).split()
    rows = table(shown)
    assert list(rows) == [("20", "2"), ("20", "4"), ("1,000", "2"), ("1,000", "4")]
    assert rows["20", "2"][0] == "train alone"
    assert rows["20", "2"][-1] == "0.067x", "0.065 was measured between namespaces"
    assert rows["1,000", "4"][-2] == "computing"
    network, training = ({key: float(row[at].rstrip("%")) for key, row in rows.items()} for at in (-4, -3))
    assert network["20", "2"] > 60 > network["1,000", "4"] > 0
    assert training["20", "2"] < 90 < training["1,000", "4"] <= 100
    assert "51 samples/s" in shown.stderr
    assert "2,900,000 values: 11.1 MiB in fp32" in shown.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("known_script")
def test_networks_from_one_home_to_a_cluster_are_one_command() -> None:
    """With 100 Gbit/s nothing is compressed: what is left is computing."""
    shown = run("whatif", "train.py", "--wired", "--mbit", "10,100,1000,10000,100000", "--peers", "2,8")
    rows = table(shown)
    assert len(rows) == 10
    assert rows["10", "2"][0] == "train alone"
    assert rows["100", "8"][0] == "--sync local:2 --codec nf4"
    assert not any(codec in rows["100,000", "8"][0] for codec in ("int", "nf4"))
    assert float(rows["100,000", "8"][2].rstrip("x")) > 7


@pytest.mark.usefixtures("known_script")
def test_it_says_whether_the_network_is_the_bottleneck_and_what_would_help() -> None:
    shown = run("whatif", "train.py", "--wired", "--mbit", "20,1000", "--peers", "2,4")
    (told,) = (line for line in shown.stderr.splitlines() if "bottleneck" in line)
    assert "The network is the bottleneck for this model up to 20 Mbit/s" in told
    assert "Twice the speed of one takes" in told
    assert "with 4 laptops" in told
    assert "with the defaults" in told
    assert "Predicted, not measured" in shown.stderr


@pytest.mark.usefixtures("known_script")
def test_train_alone_is_said_where_it_is_true_and_by_how_much() -> None:
    shown = run("whatif", "train.py", "--mbit", "5,10", "--peers", "2")
    assert [row[0] for row in table(shown).values()] == ["train alone"] * 2
    assert "At 10 Mbit/s and below train alone: 2 laptops do 0.12x of one at best, with --sync local:2" in shown.stderr
    assert "With --quality fast they are at a loss 1." in shown.stderr
    assert "--sync sparseloco:8,ssp:1." in shown.stderr
    assert "1.8 times the speed of one takes" in shown.stderr, "two are never quite twice one"


@pytest.mark.usefixtures("known_script")
def test_a_model_that_computes_long_is_told_that_the_network_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "trace", lambda *_: traced(100_000, 20.0))
    shown = run("whatif", "train.py", "--mbit", "50", "--peers", "2,3")
    assert "The network is not the bottleneck for this model, from 50 Mbit/s on" in shown.stderr
    assert "train alone" not in shown.stdout + shown.stderr
    assert {row[0] for row in table(shown).values()} == {"the defaults"}


@pytest.mark.usefixtures("known_script")
def test_json_has_every_figure_with_its_unit() -> None:
    shown = run("whatif", "train.py", "--mbit", "20", "--peers", "2", "--wired", "--quality", "fast", "--json")
    document = json.loads(shown.stdout)
    assert document["quality"] == "fast"
    assert document["alone_samples_s"] == pytest.approx(51, rel=0.01)
    (found,) = document["cells"]
    assert (found["mbit"], found["peers"]) == (20, 2)
    assert found["default"]["sent_bytes"] == pytest.approx(4 * VALUES, rel=0.01)
    assert found["default"]["sync"] == "bsp"
    assert found["best"]["sync"] == "local:8,ssp:1"
    assert 0.5 < found["best"]["sample_worth"] < 1.0
    assert found["best"]["samples_s"] > 1.9 * document["alone_samples_s"]
    assert found["best"]["against_one"] == pytest.approx(
        found["best"]["samples_s"] * found["best"]["sample_worth"] / document["alone_samples_s"]
    )
    assert found["waits_for"] == "compute"
    assert "bottleneck" in document["verdict"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--mbit", "fast"], "--mbit fast: use numbers from 0.1 to 1e+06 with commas between"),
        (["--mbit", "0"], "--mbit 0: use numbers"),
        (["--peers", "1,2"], "--peers 1,2: use whole numbers from 2 to 64"),
        (["--peers", "2.5"], "--peers 2.5: use whole numbers"),
        (["--mbit", "nan"], "--mbit nan: use numbers"),
        (["--rtt-ms", "-1"], "--rtt-ms -1: use a number from 0 to 10000"),
    ],
)
@pytest.mark.usefixtures("known_script")
def test_what_cannot_be_meant_is_named_before_anything_runs(options: list[str], complaint: str) -> None:
    shown = run("whatif", "train.py", *options)
    assert shown.exit_code == 2
    assert complaint in shown.stderr


@pytest.mark.parametrize(
    ("failed", "next_step"),
    [(True, "try: python train.py, which"), (False, "try: mt.prepare in train.py, and 3 steps or more behind it")],
)
@pytest.mark.usefixtures("known_script")
def test_a_script_that_does_not_step_shows_why(monkeypatch: pytest.MonkeyPatch, failed: bool, next_step: str) -> None:
    """One that has ended well runs by itself already."""

    def fails(*_: object) -> TracedScript:
        raise NotMeasured("train.py ended before its steps were timed:\n  boom", failed=failed)

    monkeypatch.setattr(command, "trace", fails)
    shown = run("whatif", "train.py")
    assert shown.exit_code == 1
    assert "before its steps were timed:\n  boom" in shown.stderr
    assert next_step in shown.stderr


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("command_line", [("whatif", "train.py"), ("whatif", "-m", "shop")])
def test_what_a_script_says_of_itself_is_no_failure(project: Path, command_line: tuple[str, ...]) -> None:
    """A process that does what the traced one does with several optimizers, without torch."""
    text = (
        "import os, pathlib\n"
        "told = pathlib.Path(os.environ['MESHTRAIN_MEASURE']).with_suffix('.why')\n"
        "told.write_text('gives mt.prepare several optimizers: nothing can be chosen for such a script')\n"
    )
    (project / "train.py").write_text(text)
    (project / "shop").mkdir()
    (project / "shop" / "__main__.py").write_text(text)
    shown = run(*command_line)
    assert (shown.exit_code, shown.stdout) == (1, "")
    name, typed = ("train.py", "train.py") if len(command_line) == 2 else ("shop/__main__.py", "-m shop")
    assert f"error: {name} gives mt.prepare several optimizers: nothing can be chosen" in shown.stderr
    assert f"try: meshtrain submit {typed}, which takes --sync bsp --codec fp32 then" in shown.stderr


@pytest.mark.usefixtures("known_script")
@pytest.mark.parametrize("name", ["whatif", "plan"])
def test_a_script_with_process_groups_has_nothing_to_choose(tmp_path: Path, name: str) -> None:
    """It is not run for that: alone it would only say that RANK is not set."""
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    shown = run(name, "train.py")
    assert shown.exit_code == 1
    assert "train.py uses torch.distributed: its sums are exact" in shown.stderr
    assert "try: meshtrain submit train.py" in shown.stderr


@pytest.mark.usefixtures("known_script")
def test_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> TracedScript:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "trace", interrupted)
    shown = run("whatif", "train.py")
    assert shown.exit_code == 130
    assert "interrupted" in shown.stderr


@pytest.mark.usefixtures("known_script")
def test_a_laptop_that_was_busy_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherPrograms, "part", lambda _: 0.6)
    assert (
        "note: other programs took 60% of this laptop's processor"
        in run("whatif", "train.py", "--mbit", "100", "--peers", "2").stderr
    )


def test_others_are_all_that_this_process_and_its_children_have_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([(0.0, 100.0, 5.0), (10.0, 118.0, 9.0)])
    monkeypatch.setattr(OtherPrograms, "_figures", lambda _: next(figures))
    monkeypatch.setattr(other_programs, "os", SimpleNamespace(cpu_count=lambda: 2))
    assert OtherPrograms().part() == pytest.approx((18 - 4) / 20)


# --- prices ---


class FakeBench:
    """Stands for the subprocess; counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.code = 0

    def __call__(self, argv: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        what = argv[argv.index("meshtraind.bench") + 1]
        codecs = [argv[at + 1] for at, word in enumerate(argv) if word == "--codec"]
        self.asked.append([what, *codecs])
        counts = [int(count) for count in argv[argv.index("--values") + 1].split(",")]
        rows = [
            {
                "codec": codec,
                "values": values,
                "encoded_bytes": 1000,
                "encode_s": (segments := max(1, values // 65536)) * 1e-5 + values * 1e-9,
                "add_s": segments * 2e-5 + values * 3e-9,
                "processor_s": 1e-3 + values * (50e-9 if codec == "fp32" else 90e-9),
            }
            for codec in codecs
            for values in counts
        ]
        return subprocess.CompletedProcess(argv, self.code, json.dumps({what: rows}), "error: no numpy\n")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    made = FakeBench()
    monkeypatch.setattr(subprocess, "run", made)
    return made


def test_prices_are_measured_once_for_this_processor_and_these_versions(
    bench: FakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stages = tmp_path / "data", Stages()
    found = processor_prices(["fp32", "topk"], folder, stages)
    fp32, topk = found.codecs["fp32"], found.codecs["topk"]
    assert (fp32.encode_s, fp32.add_s) == pytest.approx((1e-9, 3e-9))
    assert (fp32.encode_segment_s, fp32.add_segment_s) == pytest.approx((1e-5, 2e-5))
    assert fp32.filled == 1
    assert 0 < topk.filled < 1, "of the largest size, what values with heavy tails take"
    assert (fp32.rest_s, topk.rest_s > 0) == (0, True)
    assert found.work.message_s == pytest.approx((1e-3 + 1024 * 50e-9) / 4)
    assert processor_prices(["fp32", "topk"], folder, stages) == found
    processor_prices(["fp32", "int8"], folder, stages)
    asked = [["codecs", "fp32", "topk"], ["rounds", "fp32", "topk"], ["codecs", "int8"], ["rounds", "int8"]]
    assert bench.asked == asked
    processor_prices(["powersgd"], folder, stages)
    assert bench.asked[4:] == [["codecs", "powersgd"]], "its rounds are not measured"
    monkeypatch.setattr(prices_module, "processor_model", lambda: "another one")
    processor_prices(["fp32"], folder, stages)
    assert bench.asked[5:] == [["codecs", "fp32"], ["rounds", "fp32"]]
    (folder / NAME).write_text("{")
    processor_prices(["fp32"], folder, stages)
    assert len(bench.asked) == 9, "a file that is broken is made anew"


def test_prices_that_cannot_be_measured_are_an_error_with_a_next_step(bench: FakeBench, tmp_path: Path) -> None:
    bench.code = 1
    with pytest.raises(CliError, match="timing the codecs failed: error: no numpy") as raised:
        processor_prices(["fp32"], tmp_path / "data", Stages())
    assert raised.value.hint == "meshtrain bench codecs"
    assert not (tmp_path / "data").exists()


# --- the whole of it ---


@pytest.mark.slow
def test_an_example_is_run_for_a_few_steps_and_priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick tests beside this one prove each part; here a real script is ended, and leaves nothing. Two codecs are
    timed as ever, but seldom: how much they cost does not matter here."""
    monkeypatch.setattr(command, "processor_prices", lambda _codecs, *rest: processor_prices(["fp32", "int8"], *rest))
    monkeypatch.setattr(prices_module, "RUNS", 1)
    monkeypatch.setattr(prices_module, "ROUNDS", 3)
    monkeypatch.chdir(tmp_path)
    assert run("init", "--example", "mlp", ".").exit_code == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    shown = run("whatif", "train.py", "--mbit", "10,1000", "--peers", "2", "--json")
    assert shown.exit_code == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert document["step"]["samples"] == 64
    assert document["step"]["steps"] == 20
    assert document["step"]["device"] == "cpu"
    slow, fast = document["cells"]
    assert slow["default"]["against_one"] < fast["default"]["against_one"] < 2
    assert slow["default"]["sent_bytes"] == pytest.approx(4 * 4417, rel=0.1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "data") == before
