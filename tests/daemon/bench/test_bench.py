"""The benchmark's own arithmetic and checks, and one short run of it all."""

import json
import subprocess
import sys

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from meshtrain.cli.commands.bench import bench
from meshtraind.bench import vectors
from meshtraind.bench.report import Memory, Ratio, Report, Series
from meshtraind.bench.round_work import measure_rounds
from meshtraind.bench.settings import BenchError, Settings, plan_of

MIB = 2**20


def test_the_ratio_pairs_rounds() -> None:
    """Median of the rounds' ratios, not the ratio of medians: a slow moment slows both sides of a pair."""
    ratio = Ratio.of((1.0, 2.0, 10.0), (2.0, 3.0, 10.0))
    assert ratio.rounds == (2.0, 1.5, 1.0)
    assert ratio.median == 1.5
    with pytest.raises(ValueError, match="shorter"):
        Ratio.of((1.0, 2.0), (1.0,))


def test_bus_bandwidth_and_cpu_count_what_a_ring_moves() -> None:
    """2(m-1)/m * N per rank: 80 MB of 120 at m = 3."""
    settings = Settings(peers=3, mb=60)
    assert settings.bus_bytes == pytest.approx(80e6)
    series = Series(seconds=(0.8, 0.9, 1.6), cpu_s=(0.24, 0.48, 0.12))
    assert series.bus_mbit(settings) == pytest.approx(80 * 8 / 0.9)
    assert series.cpu_s_per_gb(settings) == pytest.approx(0.24 / (3 * 0.08))


def test_the_report_holds_every_round() -> None:
    series = Series((0.1, 0.2), (0.1, 0.1))
    memory = Memory(before=50 * MIB, slots=8 * MIB, encoded_round=4 * MIB, encoded_rounds=2, peak=70 * MIB)
    report = Report(Settings(peers=2, mb=4, rounds=2), series, Series((0.2, 0.2), (0.1, 0.1)), memory)
    assert memory.beyond == 4 * MIB
    found = json.loads(json.dumps(report.as_json()))
    assert found["ratios"] == [2.0, 1.0]
    assert (found["ratio_min"], found["ratio_median"], found["ratio_max"]) == (1.0, 1.5, 2.0)
    assert "median 1.50 [1.00 to 2.00]" in report.as_text()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peers": 1}, "--peers 1"),
        ({"mb": 0}, "--mb 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"codec": "zip"}, "fp16"),
        ({"codec": "int8", "topology": "tree"}, "--topology tree is not for --codec int8: use sharded or star"),
    ],
)
def test_settings_that_make_no_comparison_are_refused(changes: dict[str, int | str], named: str) -> None:
    with pytest.raises(BenchError, match=named):
        Settings(**{"peers": 2, "mb": 1, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("mb", [1, 46])
def test_the_vector_is_cut_as_a_model_is(mb: int) -> None:
    settings = Settings(peers=2, mb=mb)
    plan = plan_of(settings.values)
    assert plan.total_values == settings.values
    assert max(bucket.count for bucket in plan.buckets) <= 4 * MIB // 4


def test_a_segment_in_the_wrong_place_is_found() -> None:
    """Bit-equality alone would not see an error that all peers make alike."""
    result = np.empty(300_000, np.float32)
    parts = [np.empty_like(result) for _ in range(2)]
    for rank, part in enumerate(parts):
        vectors.fill(part, rank)
    result[:] = (parts[0] + parts[1]) / np.float32(2)
    assert vectors.wrong_value(result, 2, "fp32") is None
    good = result.copy()
    result[65_536:131_072] = good[131_072:196_608]
    assert "value 65536 of the mean" in str(vectors.wrong_value(result, 2, "fp32"))
    result[:] = good
    result[7] = np.nan
    assert "value 7 of the mean is nan" in str(vectors.wrong_value(result, 2, "bf16"))


@pytest.mark.long
@pytest.mark.parametrize(("peers", "topology"), [(2, None), (3, "star:1")])
def test_a_short_run_of_both_sides(peers: int, topology: str | None) -> None:
    """The command as a user runs it: processes, TLS, checks, figures; nothing is left behind."""
    pytest.importorskip("torch")
    argv = [sys.executable, "-m", "meshtraind.bench", "allreduce", "--peers", str(peers), "--mb", "1", "--rounds", "2"]
    argv += [] if topology is None else ["--topology", topology]
    done = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tls"] is True
    assert len(report["ratios"]) == 2
    assert report["meshtrain"]["bus_mbit"] > 0 < report["gloo"]["bus_mbit"]


def test_the_command_passes_on_what_is_wrong() -> None:
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    argv = [sys.executable, "-m", "meshtraind.bench", "allreduce", "--peers", "99"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "error: --peers 99: choose 2 to 16\n")
    assert CliRunner().invoke(app, ["bench", "allreduce", "--peers", "99"]).exit_code == 1


def test_the_command_passes_the_topology_on(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    started: list[list[str]] = []
    monkeypatch.setattr("meshtrain.cli.commands.bench._run", started.append)
    assert CliRunner().invoke(app, ["bench", "allreduce", "--topology", "star:1"]).exit_code == 0
    assert started[0][started[0].index("--topology") + 1] == "star:1"


def test_rounds_of_two_ranks_in_one_process_are_measured() -> None:
    report = measure_rounds(["fp32", "int8"], [100, 70_000], 1, lambda _: None)
    assert [(each.codec, each.values) for each in report.rounds] == [
        ("fp32", 100),
        ("fp32", 70_000),
        ("int8", 100),
        ("int8", 70_000),
    ]
    assert all(each.processor_s > 0 for each in report.rounds)
    assert report.as_json()["rounds"][3]["values"] == 70_000  # type: ignore[index]
    for codecs, runs, named in ((["fp8"], 1, "fp8"), (["fp32"], 0, "--runs 0")):
        with pytest.raises(BenchError, match=named):
            measure_rounds(codecs, [100], runs, lambda _: None)
