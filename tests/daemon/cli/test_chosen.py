"""`submit` without settings: what it chooses, says, asks, and keeps; on the mesh that a daemon tells of."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshtrain.cli.planning import job_choice, script_profiles
from meshtrain.cli.planning.codec_prices import ProcessorPrices
from meshtrain.cli.planning.job_choice import FoundChoice, JobChoice, NotChosen, groups_of
from meshtrain.cli.planning.linked_mesh import LinkedMesh
from meshtrain.cli.planning.other_programs import OtherPrograms
from meshtrain.cli.submission.measuring import NothingToChoose, NotMeasured
from meshtrain.cli.ui.errors import CliError
from meshtrain.following.speed import SLOWER_FOR_S, SpeedWatch
from meshwire.collectives.strategy import topology_of
from meshwire.job_figures import prediction_text, rate_text, samples_s, speed_text
from meshwire.messages.job import Fetch, Fetched, Metrics, Prediction, RankReport
from meshwire.messages.local import GetJobs, GetStatus, MeasureLinks, Submit, Watch, Watched
from meshwire.planning.choose import Pinned
from meshwire.planning.price import CodecPrice
from meshwire.planning.quality import EVIDENCE
from meshwire.planning.replan import RATES, SettingsForecast, StepForecast
from meshwire.planning.step_trace import TracedScript
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.settings_changes import SettingsChange
from tests.daemon.cli.test_plan import CARL, FakeMesh, in_a_cell, measured
from tests.daemon.cli.test_whatif import traced
from tests.daemon.fakedaemon import ANNA, BERT, JOB, STATUS, Endpoint, accepting, known_jobs, run, summary

pytestmark = pytest.mark.usefixtures("plain_environment")


class Measured:
    """What stands for the script's process: how often it has run, on what, and what came of it."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.step_s = 0.157
        self.fails: Exception | None = None
        self.writes: Callable[[Path], None] = lambda _: None

    def __call__(self, root: Path, script: str, args: Any, env: Any, data: Path | None, *_: Any) -> TracedScript:
        files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
        self.runs.append({"files": files, "script": script, "args": tuple(args), "env": env, "data": data})
        self.writes(root)
        if self.fails is not None:
            raise self.fails
        return traced(step_s=self.step_s)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Measured:
    made = Measured()
    monkeypatch.setattr(script_profiles, "trace", made)
    return made


@pytest.fixture
def mesh(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeMesh:
    """Anna is linked with bert, at 1000 Mbit/s, and has a script whose steps are known: 2.9 million values, 0.157 s."""
    for name in ("plain_environment", "project", "script"):
        request.getfixturevalue(name)
    monkeypatch.delenv("MESHTRAIN_NO_PLAN")
    fixed = {tried.codec: CodecPrice(0.5e-9, 0.5e-9) for tried in EVIDENCE}
    monkeypatch.setattr(job_choice, "processor_prices", lambda *_: ProcessorPrices(fixed))
    monkeypatch.setattr(OtherPrograms, "part", lambda _: 0.0)
    endpoint.answers[Submit] = accepting({})
    return FakeMesh(endpoint)


def answering(monkeypatch: pytest.MonkeyPatch, yes: bool) -> list[str]:
    """A person at a terminal."""
    asked: list[str] = []

    def confirm(text: str, *, default: bool, err: bool) -> bool:
        assert default, "as plan recommends"
        assert err, "stdout is data"
        asked.append(text)
        return yes

    monkeypatch.setattr("meshtrain.cli.commands.submit.at_terminal", lambda: True)
    monkeypatch.setattr("meshtrain.cli.planning.job_choice.typer.confirm", confirm)
    return asked


def submitted(endpoint: Endpoint, *args: str) -> tuple[Submit, str]:
    shown = run("submit", "-d", *args, "train.py")
    assert shown.exit_code == 0, shown.stderr
    body: Submit = endpoint.of_type(Submit)[-1]
    return body, shown.stderr


def who(body: Submit) -> tuple[Any, ...]:
    return body.on, body.peers, body.peers_max


def how(body: Submit) -> tuple[Any, ...]:
    return body.sync, body.codec, body.topology


@pytest.mark.usefixtures("mesh")
def test_together_where_that_is_faster_and_it_is_said_first(endpoint: Endpoint) -> None:
    body, said = submitted(endpoint)
    assert who(body) == ((), None, None)
    lines = said.splitlines()
    (at,) = (at for at, line in enumerate(lines) if line.startswith("chosen: anna, bert together train 1."))
    assert "as fast as one laptop alone (" in lines[at]
    assert lines[at + 1].startswith("otherwise: --peers 1 trains alone; --sync, --codec and --topology are taken")
    assert at < lines.index("sending files to bert"), "before anything is sent"


def test_alone_without_a_terminal_where_that_is_faster(endpoint: Endpoint, mesh: FakeMesh) -> None:
    mesh.mbit = {BERT: 5.0}
    body, said = submitted(endpoint, "--quality", "exact")
    assert who(body) == ((), 1, None)
    assert how(body) == ("bsp", None, None)
    assert "chosen: Train alone: one laptop is " in said
    assert re.search(r" With --quality fast they are at a loss 1\.\d+x as soon: --sync \S+", said), (
        "a person has to know what was left out"
    )
    assert "otherwise: python train.py trains here without a job, " in said
    assert "; --peers 2, or --on with names, trains together; " in said


@pytest.mark.parametrize("yes", [True, False])
def test_at_a_terminal_alone_is_asked_first(
    endpoint: Endpoint, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, yes: bool
) -> None:
    mesh.mbit = {BERT: 5.0}
    asked = answering(monkeypatch, yes)
    body, _ = submitted(endpoint, "--quality", "exact")
    assert who(body) == (((), 1, None) if yes else ((), None, None))
    assert how(body) == (("bsp", None, None) if yes else ("bsp", body.codec, body.topology))
    assert yes or body.codec in ("fp16", "bf16"), "together as best they can"
    (question,) = asked
    assert question.startswith("Train alone? (n: together with bert, --codec ")


def test_nobody_is_asked_about_what_is_faster_nor_with_json_nor_in_a_dry_run(
    endpoint: Endpoint, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, True)
    submitted(endpoint)
    mesh.mbit = {BERT: 1.0}
    mesh.known = {}
    submitted(endpoint, "--json")
    monkeypatch.setattr("meshtrain.cli.commands.submit.measure", lambda *_, **_o: (_ for _ in ()).throw(UNMEASURED))
    body, _ = submitted(endpoint, "--dry-run")
    assert body.peers == 1, "what it shows is what would run"
    assert asked == []


UNMEASURED = NotMeasured("not in this test", failed=False)


def test_what_is_typed_stays_and_the_rest_is_chosen(endpoint: Endpoint, mesh: FakeMesh) -> None:
    mesh.mbit = {BERT: 50.0}
    chosen, _ = submitted(endpoint, "--quality", "fast", "--peers", "2")
    assert how(chosen) != ("bsp", None, None), "on this link something is gained"
    body, said = submitted(endpoint, "--codec", "fp16")
    assert body.codec == "fp16"
    body, said = submitted(endpoint, "--sync", "local:8")
    assert (body.sync, body.codec) == ("local:8", "int8"), "its bytes are fewer, and it was measured so"
    assert "with --sync local:8 --codec int8" in said
    body, _ = submitted(endpoint, "--topology", "tree", "--peers", "2")
    assert body.topology == "tree"
    assert body.sync == "bsp"


def test_who_has_which_rank_is_said_where_rounds_go_by_the_laptop_on_a_cable(
    endpoint: Endpoint, mesh: FakeMesh
) -> None:
    """A daemon orders those whom it takes by itself; so whoever orders them otherwise is offered no such topology."""
    mesh.mbit = {BERT: 1000.0, CARL: 1000.0}
    mesh.known = {BERT: in_a_cell(200.0, peer_wired=False), CARL: in_a_cell(200.0, peer_wired=True)}
    body, _ = submitted(endpoint)
    assert (who(body), body.topology) == (((ANNA, BERT, CARL), None, None), "star:2")
    body, _ = submitted(endpoint, "--peers", "3")
    assert (who(body), body.topology) == (((ANNA, BERT, CARL), None, None), "star:2")
    for typed in (["--on", "carl,anna,bert"], ["--peers", "3:4"]):
        body, _ = submitted(endpoint, *typed)
        assert not topology_of(body.topology or "ring").named


def test_a_laptop_that_only_slows_down_stays_at_home_unless_it_is_named(endpoint: Endpoint, mesh: FakeMesh) -> None:
    mesh.mbit = {BERT: 1000.0, CARL: 1.0}
    body, said = submitted(endpoint)
    assert who(body) == ((ANNA, BERT), None, None)
    assert "; all 3 would do " in said
    body, said = submitted(endpoint, "--peers", "3")
    assert who(body) == ((), 3, None)
    assert "chosen: anna, bert, carl together train 0." in said
    assert "This laptop alone is no slower: --peers 3 was typed." in said
    assert "otherwise: without --peers 3 it is chosen who trains" in said
    body, _ = submitted(endpoint, "--on", "carl,anna")
    assert who(body) == (("carl", "anna"), None, None), "in the order of ranks that was typed"
    body, _ = submitted(endpoint, "--peers", "2")
    assert who(body) == ((ANNA, BERT), None, None), "which two, is chosen"
    body, _ = submitted(endpoint, "--peers", "2:8")
    assert who(body) == ((), 2, 8)


@pytest.mark.parametrize(
    "options",
    [
        ["--no-plan"],
        ["--peers", "1"],
        ["--on", "bert"],
        ["--sync", "bsp", "--codec", "fp16", "--topology", "ring"],
        ["--topology", "star:1"],
        ["--masks", "0.8"],
        ["--sync", "ssp:2", "--own", "0"],
        ["--independent"],
    ],
)
@pytest.mark.usefixtures("mesh")
def test_nothing_is_measured_where_nothing_is_left_to_choose(
    endpoint: Endpoint, script: Measured, options: list[str]
) -> None:
    _, said = submitted(endpoint, *options)
    assert "chosen" not in said
    assert script.runs == []
    assert {type(body) for body in endpoint.asked} == {Submit}
    wrong = run("submit", *options, "--quality", "safe", "train.py")
    assert wrong.exit_code == 2
    assert "--quality is for what is chosen" in wrong.stderr


@pytest.mark.usefixtures("mesh")
def test_the_variable_stands_for_no_plan_and_quality_is_stronger(
    endpoint: Endpoint, script: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHTRAIN_NO_PLAN", "1")
    submitted(endpoint)
    assert script.runs == []
    submitted(endpoint, "--quality", "exact")
    assert len(script.runs) == 1


def test_without_others_it_trains_alone_as_ever_and_says_nothing(
    endpoint: Endpoint, mesh: FakeMesh, script: Measured
) -> None:
    mesh.mbit = {}
    body, said = submitted(endpoint)
    assert (who(body), how(body)) == (((), None, None), ("bsp", None, None))
    assert "chosen" not in said
    assert script.runs == []


def test_daemons_on_one_machine_are_not_compared_unless_that_is_asked_for(
    endpoint: Endpoint, mesh: FakeMesh, script: Measured
) -> None:
    mesh.addresses = {BERT: "127.0.0.1:29611"}
    body, said = submitted(endpoint)
    assert (who(body), how(body)) == (((), None, None), ("bsp", None, None))
    assert "note: nothing was chosen: bert: on this very machine" in said
    assert "note: taken instead: --sync bsp --codec fp32, on all linked laptops" in said
    assert (script.runs, endpoint.of_type(MeasureLinks)) == ([], []), "it costs nothing"
    _, said = submitted(endpoint, "--quality", "safe")
    assert "chosen: " in said


@pytest.mark.usefixtures("mesh")
def test_what_cannot_be_measured_is_said_and_the_defaults_are_taken(endpoint: Endpoint, script: Measured) -> None:
    script.fails = NotMeasured("train.py ended with exit code 1:\n  Traceback\n  ImportError: no wandb", failed=True)
    body, said = submitted(endpoint, "--codec", "int8")
    assert (who(body), how(body)) == (((), None, None), ("bsp", "int8", None))
    assert "note: nothing was chosen: train.py ended with exit code 1: ImportError: no wandb\n" in said
    assert "note: taken instead: --sync bsp --codec int8, on all linked laptops\n" in said
    script.fails = CliError("train.py has not taken 3 steps in 60 s", "smaller batches")
    _, said = submitted(endpoint, "--peers", "2")
    assert "note: nothing was chosen: train.py has not taken 3 steps in 60 s\n" in said
    assert "note: taken instead: --sync bsp --codec fp32\n" in said
    script.fails = OSError(28, "No space left on device")
    _, said = submitted(endpoint)
    assert "note: nothing was chosen: [Errno 28] No space left on device\n" in said
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"jobs_running": 1})
    _, said = submitted(endpoint)
    assert "note: nothing was chosen: a job runs on this device" in said


@pytest.mark.usefixtures("mesh")
def test_of_several_optimizers_nothing_is_chosen_and_the_job_begins(endpoint: Endpoint, script: Measured) -> None:
    script.fails = NothingToChoose("train.py gives mt.prepare several optimizers: nothing can be chosen for it")
    body, said = submitted(endpoint)
    assert (who(body), how(body)) == (((), None, None), ("bsp", None, None))
    assert "note: nothing was chosen: train.py gives mt.prepare several optimizers: nothing can be chosen" in said
    assert "note: taken instead: --sync bsp --codec fp32, on all linked laptops\n" in said
    assert "error" not in said.lower()


def test_who_is_named_and_not_known_is_left_to_the_daemon(endpoint: Endpoint, mesh: FakeMesh) -> None:
    mesh.mbit = {BERT: 1000.0, CARL: 1000.0}
    for options in (["--on", "anna,dora"], ["--on", "bert,carl"], ["--peers", "4"]):
        body, said = submitted(endpoint, *options)
        assert "note: nothing was chosen: " in said
        assert how(body) == ("bsp", None, None)
    assert who(body) == ((), 4, None)


def test_laptops_that_differ_get_batches_that_suit_them_unless_equal_ones_are_typed(
    endpoint: Endpoint, mesh: FakeMesh
) -> None:
    mesh.speeds = {BERT: 0.6}
    body, said = submitted(endpoint)
    assert sync_settings(body.sync, shares=body.shares).shares == "speed"
    assert "note: In this laptop's speed, by a short calculation: bert 0.60.\n" in said
    assert "; slower ones get smaller batches" in said
    assert body.prediction is not None
    speeds = dict(body.prediction.speeds)
    assert list(speeds) == [ANNA, BERT]
    assert speeds[BERT] == pytest.approx(0.6 * speeds[ANNA], rel=0.05), "batches begin so (X4a)"
    body, said = submitted(endpoint, "--shares", "equal")
    assert body.shares == "equal"
    assert "slower ones" not in said
    mesh.speeds = {BERT: 0.9}
    mesh.known = {}
    body, said = submitted(endpoint)
    assert body.shares is None
    assert "slower ones" not in said


def test_what_is_chosen_for_laptops_that_differ_goes_together(endpoint: Endpoint, mesh: FakeMesh) -> None:
    """R9: in periods that end early a slower one takes fewer local steps, and batches by speed are refused."""
    mesh.mbit, mesh.speeds = dict.fromkeys(mesh.mbit, 20.0), {BERT: 0.6}
    body, said = submitted(endpoint, "--quality", "fast", "--peers", "2")
    assert body.sync.endswith(",ssp:1")
    sync_settings(body.sync, body.straggler, body.visibility, body.own, body.shares)
    assert "; slower ones take fewer local steps for a round" in said


def test_alone_is_on_the_laptop_that_is_fastest_alone(
    endpoint: Endpoint, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh.mbit, mesh.speeds = {BERT: 2.0, CARL: 2.0}, {BERT: 1.1, CARL: 3.0}
    body, said = submitted(endpoint, "--quality", "exact")
    assert who(body) == ((CARL,), None, None)
    assert "chosen: Train alone on carl, which is faster: one laptop is " in said
    asked = answering(monkeypatch, True)
    submitted(endpoint, "--quality", "exact")
    assert asked[0].startswith("Train alone on carl? (n: together with ")


# --- the profile ---


@pytest.mark.usefixtures("mesh")
def test_a_script_is_measured_once_as_long_as_what_decides_is_the_same(
    endpoint: Endpoint, script: Measured, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(*options: str) -> int:
        submitted(endpoint, *options)
        return len(script.runs)

    assert runs() == 1
    assert runs("--codec", "fp16") == 1
    assert runs("-e", "A=b") == 2
    (project / "train.py").write_text("print('ho')\n")
    assert runs() == 3
    (project / "sets [1]" / "a.bin").write_bytes(bytes(101))
    assert runs("--data", "sets [1]") == 4
    shown = run("submit", "-d", "--data", "sets [1]", "train.py", "--lr", "1")
    assert (shown.exit_code, len(script.runs)) == (0, 5)
    monkeypatch.setattr(script_profiles, "processor_model", lambda: "another one")
    assert runs() == 6
    monkeypatch.setattr(script_profiles, "_version", lambda _: "99")
    assert runs() == 7
    assert runs() == 7
    (file, *_) = (endpoint.data_dir / "profiles").glob("*.json")
    assert len(list(file.parent.iterdir())) == 7
    for each in file.parent.iterdir():
        each.write_text("{")
    assert runs() == 8, "a broken one is made anew"


@pytest.mark.usefixtures("mesh")
def test_what_was_measured_beside_others_is_used_and_not_kept(
    endpoint: Endpoint, script: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OtherPrograms, "part", lambda _: 0.5)
    for count in (1, 2):
        _, said = submitted(endpoint)
        assert "note: note" not in said
        assert "note: other programs took 50% of this laptop's processor meanwhile" in said
        assert len(script.runs) == count


@pytest.mark.usefixtures("mesh")
def test_profiles_do_not_grow_without_bound(
    endpoint: Endpoint, script: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_profiles, "KEPT_MAX", 2)
    for value in "abc":
        submitted(endpoint, "-e", f"A={value}")
    assert len(list((endpoint.data_dir / "profiles").iterdir())) == 2
    submitted(endpoint, "-e", "A=c")
    assert len(script.runs) == 3, "the newest ones"


@pytest.mark.usefixtures("mesh")
def test_the_script_runs_on_a_copy_of_what_is_shipped(endpoint: Endpoint, script: Measured, project: Path) -> None:
    """What it writes beside itself is not the user's, and what stays here is not there either."""

    def writes(root: Path) -> None:
        (root / "train.py").write_text("overwritten")
        assert (root / "sets [1]" / "a.bin").read_bytes() == bytes(100), "where it looks for its data"

    script.writes = writes
    submitted(endpoint, "--data", "sets [1]", "-e", "A=b=c")
    assert (project / "train.py").read_text() == "print('hi')\n"
    (seen,) = script.runs
    assert [file for file in seen["files"] if not file.startswith("sets")] == [".gitignore", "train.py"]
    assert seen["env"] == {"A": "b=c"}
    assert seen["data"] == project / "sets [1]"


# --- pure ---


def test_names_and_ids_mean_who_they_mean_on_the_command_line() -> None:
    link = measured(10.0)
    there = LinkedMesh((ANNA, "anna"), ((peer(BERT, "bert"), link), (peer(CARL, "abba"), link)), True, ())
    mesh = object()

    def group(*on: str) -> Any:
        return groups_of(mesh, there, JobChoice(Pinned(), on=on))  # type: ignore[arg-type]

    assert group("anna", BERT[:6]) == [(0,)]
    assert group("abba", "anna", "bert") == [(1, 0)]
    for on in (("anna",), ("bert", "abba"), ("anna", "dora")):
        with pytest.raises(NotChosen):
            group(*on)


def peer(device: str, name: str) -> Any:
    return type("Peer", (), {"device": device, "name": name})()


def test_the_defaults_are_named_as_they_are_typed() -> None:
    assert JobChoice(Pinned()).text() == "--sync bsp --codec fp32"
    assert JobChoice(Pinned(topology="tree")).text() == "--sync bsp --codec fp32 --topology tree"
    assert JobChoice(Pinned(sync="sparseloco:8")).text().startswith("--sync sparseloco:8 --codec topk:")
    assert FoundChoice(None, None, JobChoice(Pinned(), on=("a", "b")), "", ()).who_typed() == "--on"  # type: ignore[arg-type]
    assert FoundChoice(None, None, JobChoice(Pinned(), peers=2, peers_max=8), "", ()).who_typed() == "--peers 2:8"  # type: ignore[arg-type]


# --- prediction beside measurement ---


def report(rank: int, throughput_samples_s: float, samples_per_s: float = 0.0) -> RankReport:
    metrics = Metrics(throughput_samples_s=throughput_samples_s, samples_per_s=samples_per_s)
    return RankReport(job=JOB, rank=rank, state="running", metrics=metrics)


def test_what_was_predicted_stands_beside_what_is_measured() -> None:
    ranks = (report(0, 40.0), report(1, 20.0))
    job = summary(ranks=ranks, learning=(0, 1), prediction=Prediction(samples_s=80.0, alone_samples_s=50.0))
    assert samples_s(job) == pytest.approx(60)
    assert prediction_text(job) == "predicted 80 samples/s, measured 60: 75% of it, 1.20x one laptop alone"
    assert samples_s(summary(ranks=ranks, learning=(0, 1, 2))) is None, "one has not told"
    assert samples_s(summary(ranks=(report(0, 0.0),))) is None, "samples are not dealt"
    assert prediction_text(summary(ranks=ranks)) is None


def test_the_speed_is_said_beside_one_laptop_alone() -> None:
    """By what was predicted for that, else by the fastest while it computes."""
    ranks = (report(0, 40.0, 44.0), report(1, 20.0, 50.0))
    job = summary(ranks=ranks, learning=(0, 1))
    assert speed_text(job) == "60 samples/s, 1.2x one laptop"
    predicted = summary(ranks=ranks, learning=(0, 1), prediction=Prediction(samples_s=80.0, alone_samples_s=30.0))
    assert speed_text(predicted) == "60 samples/s, 2x one laptop"
    assert [rate_text(rate) for rate in (1612.4, 100.0, 99.96, 0.0512)] == ["1,612", "100", "100", "0.0512"]
    assert speed_text(summary(ranks=ranks[:1], learning=(0,))) == "40 samples/s"
    assert speed_text(summary(ranks=(report(0, 40.0, 44.0), report(1, 0.0)), learning=(0, 1))) is None


def test_the_prediction_goes_with_the_job_and_is_told_in_the_end(endpoint: Endpoint, mesh: FakeMesh) -> None:
    body, said = submitted(endpoint)
    assert body.prediction is not None
    assert body.prediction.alone_samples_s == pytest.approx(51, rel=0.01)
    assert f"({body.prediction.samples_s:.3g} samples/s, 51 alone)" in said
    body, _ = submitted(endpoint, "--no-plan")
    assert body.prediction is None
    mesh.mbit, mesh.known = {BERT: 1.0}, {}
    body, _ = submitted(endpoint, "--quality", "exact")
    assert body.prediction is None, "what was timed was no job"
    prediction = Prediction(samples_s=51.0, alone_samples_s=50.0)
    done = summary(ranks=(report(0, 50.0),), learning=(0,), prediction=prediction)
    endpoint.answers |= {
        Watch: Watched(summary=done),
        GetJobs: known_jobs(done),
        Fetch: Fetched(data=b"", total_bytes=0, end=True),
    }
    mesh.mbit, mesh.known = {BERT: 1000.0}, {}
    shown = run("submit", "train.py")
    assert "predicted 51 samples/s, measured 50: 98% of it, 1.00x one laptop alone" in shown.stderr


def test_a_job_that_stays_slower_than_predicted_is_told_of_once_for_each_codec() -> None:
    """18.3: prediction stands beside measurement; a moment of less is nothing."""
    slow, fast = (
        summary(
            ranks=(report(0, throughput_samples_s=rate),),
            learning=(0,),
            codec="fp32",
            prediction=Prediction(samples_s=80.0, alone_samples_s=50.0),
        )
        for rate in (30.0, 70.0)
    )
    watch = SpeedWatch()
    assert watch.look(slow, 0.0) is None
    assert watch.look(fast, SLOWER_FOR_S) is None
    assert watch.look(slow, SLOWER_FOR_S + 1) is None
    told = watch.look(slow, 2 * SLOWER_FOR_S + 1)
    assert told is not None
    assert "38% of what was predicted" in told
    assert "sends less than fp32" in told
    assert watch.look(slow, 9 * SLOWER_FOR_S) is None
    changed = slow.model_copy(update={"changes": (SettingsChange(first=9, codec="int8"),)})
    assert watch.look(changed, 9 * SLOWER_FOR_S) is None
    assert "sends less than int8" in (watch.look(changed, 10 * SLOWER_FOR_S) or "")
    curves = tuple(SettingsForecast(codec=codec, period=0, step_s=(1.0,) * len(RATES)) for codec in ("fp32", "int8"))
    by_itself = Prediction(samples_s=80.0, alone_samples_s=50.0, step=StepForecast(compute_s=1.0, each=curves))
    watch = SpeedWatch()
    for now_s in (0.0, SLOWER_FOR_S):
        told = watch.look(slow.model_copy(update={"prediction": by_itself}), now_s)
    assert "by itself" in (told or "")
    gone_over = slow.model_copy(
        update={"prediction": by_itself, "changes": (SettingsChange(first=9, codec="int8", by="plan"),)}
    )
    assert watch.look(gone_over, 2 * SLOWER_FOR_S) is None
    assert "also with int8" in (watch.look(gone_over, 3 * SLOWER_FOR_S) or "")
