"""Every command, by a table that a new one must be in: its help, its normal use, its --json, its likeliest mistake."""

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import meshtraind.bench.__main__ as bench_program
from meshtrain.cli.app import app
from meshtrain.cli.commands import bench as bench_command
from meshtrain.cli.commands import planning as planning_command
from meshtrain.cli.planning.codec_prices import ProcessorPrices
from meshtrain.cli.planning.other_programs import OtherPrograms
from meshtrain.demo.run import DemoResult, PeerResult
from meshtrain.doctor.examination import Examination
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.config import GetConfig, SetConfig
from meshwire.messages.course import GetCourse
from meshwire.messages.envelope import Done, Failure
from meshwire.messages.job import (
    Checkpoints,
    CheckpointSummary,
    Fetch,
    Fetched,
    ListCheckpoints,
    ListOutputs,
    OutputFile,
    Outputs,
)
from meshwire.messages.local import (
    Cancel,
    ChangeSettings,
    DashboardOpened,
    GetJobs,
    GetStatus,
    Leave,
    OpenDashboard,
    Paired,
    PairJoin,
    RemoveResults,
    ResultsRemoved,
    SettingsTaken,
    Shutdown,
    Submit,
    Unpair,
    Unpaired,
    Watch,
    Watched,
)
from meshwire.planning.price import CodecPrice
from meshwire.planning.quality import EVIDENCE
from meshwire.sync_modes.settings_changes import SettingsInForce
from tests.daemon.cli import test_config, test_dashboard_command, test_doctor_screen
from tests.daemon.cli.test_plan import FakeMesh
from tests.daemon.cli.test_report import course_of
from tests.daemon.cli.test_whatif import traced
from tests.daemon.fakedaemon import BERT, JOB, STATUS, Endpoint, accepting, known_jobs, run, summary

pytestmark = pytest.mark.usefixtures("plain_environment", "project")

RUNS = "1ky7000000aa"  # the other job, which has not ended
ENDED_PROCESS = 2**31 - 1  # no process has this number
LOG = b"epoch 1\n"


@dataclass(frozen=True)
class Line:
    """A command line, and what comes of it.

    Attributes:
        typed: behind `meshtrain`.
        shows: of a normal use what stands in stdout, or in stderr where nothing does; of --json keys of the document,
            or of the first one of a list; of a mistake what the error says.
    """

    typed: str
    shows: tuple[str, ...]

    def run(self) -> Any:
        return run(*shlex.split(self.typed))


@dataclass(frozen=True)
class Held:
    """What a command is held to.

    Attributes:
        json: or why there is none.
        json_lines: a document a line, for whoever follows.
    """

    normal: Line
    json: Line | str
    mistake: Line
    json_lines: bool = False


ONE_WORD = "it prints one id or path a line, which is what other programs read, and how it went is its exit code"
UNKNOWN = "no job is called 'x9z' or has an id that begins so"

TABLE = {
    "up": Held(
        Line("up", ("anna (abababab) is already up",)),
        "what it has started, `status --json` tells",
        Line("up --patience 0.1", ("'--patience'", "0.5")),
    ),
    "down": Held(
        Line("down", ("anna is down",)), "nothing is left that could be told of", Line("down anna", ("(anna)",))
    ),
    "config": Held(
        Line("config", ("nice", "How far training yields")),
        Line("config --json", ("path", "entries")),
        Line("config nise 15", ("no setting is called nise; there are: nice",)),
    ),
    "status": Held(
        Line("status", ("anna (abababab) is up for 2 h", "1 linked of 2 paired")),
        Line("status --json", ("device", "name", "warnings")),
        Line("status --data-dir nowhere", ("no daemon runs",)),
    ),
    "peers": Held(
        Line("peers", ("bert", "linked")),
        Line("peers --json", ("device", "name", "state")),
        Line("peers bert", ("(bert)",)),
    ),
    "pair": Held(
        Line("pair 483-917", ("paired with bert (cdcdcdcd)",)),
        Line("pair 483-917 --json", ("device", "name")),
        Line("pair 48391", ("is not a pairing code; a code has six digits",)),
    ),
    "unpair": Held(
        Line("unpair bert", ("removed bert (cdcdcdcd)",)),
        Line("unpair bert --json", ("removed", "stay", "others")),
        Line("unpair carl", ("is called 'carl': see `meshtrain peers`",)),
    ),
    "doctor": Held(
        Line("doctor", ("nothing wrong was found",)),
        Line("doctor --json", ("daemon_running", "findings", "looked_at")),
        Line("doctor --at nowhere", ("--at nowhere: its IPv4 address is wanted",)),
    ),
    "init": Held(
        Line("init --example mlp disc", ("disc/train.py",)), ONE_WORD, Line("init --example mlp", ("not overwritten",))
    ),
    "submit": Held(
        Line("submit -d train.py --epochs 3", (JOB,)),
        Line("submit -d --json train.py", ("job", "members", "notes")),
        Line("submit trian.py", ("trian.py does not exist",)),
    ),
    "plan": Held(
        Line("plan train.py", ("WAITS FOR", "alone")),
        Line("plan --json train.py", ("devices", "options", "command")),
        Line("plan trian.py", ("trian.py does not exist",)),
    ),
    "whatif": Held(
        Line("whatif train.py --mbit 100 --peers 2", ("MBIT/S",)),
        Line("whatif train.py --mbit 100 --peers 2 --json", ("step", "verdict")),
        Line("whatif trian.py", ("trian.py does not exist",)),
    ),
    "jobs": Held(
        Line("jobs", (JOB, RUNS, "running", "succeeded")),
        Line("jobs --json", ("job", "state", "members")),
        Line("jobs --all", ("--all",)),
    ),
    "top": Held(
        Line(f"top {RUNS}", (f"{RUNS} train running",)),
        Line(f"top --json {RUNS}", ("job", "ranks")),
        Line("top x9z", (UNKNOWN,)),
        json_lines=True,
    ),
    "metrics": Held(
        Line("metrics", ("meshtrain_peers_linked",)),
        Line("metrics --json", ("status", "peers", "jobs")),
        Line("metrics -o nowhere/meshtrain.prom", ("nowhere/meshtrain.prom cannot be written",)),
    ),
    "dashboard": Held(
        Line("dashboard --no-open", (test_dashboard_command.URL,)),
        Line("dashboard --json", ("url", "expires_s")),
        Line("dashboard --port 8080", ("--port",)),
    ),
    "logs": Held(
        Line(f"logs {JOB}", ("[0 anna] epoch 1", "[1 bert] epoch 1")),
        "what scripts write is text: --raw is every byte of it",
        Line("logs x9z", (UNKNOWN,)),
    ),
    "report": Held(
        Line(f"report {JOB}", (f"report-{JOB}.html",)),
        Line(f"report --json {JOB}", ("summary", "points", "presence")),
        Line("report x9z", (UNKNOWN,)),
    ),
    "checkpoints": Held(
        Line(f"checkpoints {JOB}", ("ROUND", "300", "ok")),
        Line(f"checkpoints --json {JOB}", ("checkpoints", "unasked")),
        Line("checkpoints x9z", (UNKNOWN,)),
    ),
    "cancel": Held(Line(f"cancel {RUNS}", (RUNS,)), ONE_WORD, Line("cancel", ("Missing argument 'JOB",))),
    "rm": Held(Line(f"rm --yes {JOB}", (JOB,)), ONE_WORD, Line(f"rm --yes {RUNS}", ("has not ended: it is running",))),
    "change": Held(
        Line(f"change {RUNS} --codec int8", ("from round 7 on gradients travel in int8, not fp32",)),
        Line(f"change {RUNS} --period 16 --json", ("job", "before", "first", "codec", "period")),
        Line(f"change {RUNS}", ("say what is to change",)),
    ),
    "leave": Held(Line(f"leave {RUNS}", (RUNS,)), ONE_WORD, Line("leave x9z", (UNKNOWN,))),
    "get": Held(
        Line(f"get {JOB}", (f"{JOB}/rank0/model.pt",)),
        Line(f"get --json {JOB}", ("job", "folder", "files", "missing")),
        Line(f"get {JOB} model.py", ("has no result 'model.py'; there are rank0/model.pt",)),
    ),
    "demo": Held(
        Line("demo", ("loss", "speed", "The same on two laptops")),
        Line("demo --json", ("peers", "loss_last", "by_peer")),
        Line("demo --codec zip", ("there is no codec 'zip'",)),
    ),
    "bench allreduce": Held(
        Line("bench allreduce --peers 2", ("0.99 of gloo",)),
        Line("bench allreduce --json", ("ratio",)),
        Line("bench allreduce --codec zip", ("there is no codec 'zip'; there are fp32",)),
    ),
    "bench codecs": Held(
        Line("bench codecs --values 1000 --codec fp16 --runs 1", ("fp16",)),
        Line("bench codecs --values 1000 --codec fp16 --runs 1 --json", ("codecs", "runs")),
        Line("bench codecs --values lots", ("--values lots: give numbers",)),
    ),
    "codecs": Held(
        Line("codecs", ("fp16", "BITS/VALUE")),
        Line("codecs --json", ("name", "bits_per_value", "example")),
        Line("codecs int8", ("(int8)",)),
    ),
    "topology": Held(
        Line("topology ring --peers 3", ("ring, 3 devices", "STEP")),
        Line("topology ring --json", ("topology", "steps", "members")),
        Line("topology rings", ("rings: there is no such topology; there are ring",)),
    ),
    "version": Held(
        Line("version", ("meshtrain ", "wire version")),
        Line("version --json", ("meshtrain", "wire_version", "python")),
        Line("version submit", ("(submit)",)),
    ),
}
HELPED_BY_ITS_OWN_WORDS = {  # the error names what to do, and nothing is added
    *("config", "unpair", "get", "bench allreduce", "bench codecs", "topology")
}


def commands(of: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that help lists, by the words that it is typed with."""
    group: Any = typer.main.get_command(app) if of is None else of
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield " ".join((*words, name)), command


COMMANDS = dict(commands())


class InThisProcess:
    """Runs what `meshtrain bench` starts, where its output is seen."""

    def __init__(self, command: list[str]) -> None:
        assert command[1:3] == ["-m", "meshtraind.bench"]
        self._code = bench_program.main(command[3:])

    def __enter__(self) -> "InThisProcess":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> int:
        return self._code


DEMO = DemoResult(
    peers=3, rounds=20, loss_first=4.5, loss_last=2.5, unigram_entropy=3.3, samples=960, seconds=12.0, bytes_sent=10**7,
    bytes_dense_fp32=2 * 10**7, overlap=0.8, replicas_equal=True, payload_bytes_max=10**6, hashes_compared=2,
    parameters=10**6, counted_by="kernel", by_peer=(PeerResult("anna", 20, 0.1, 0, 0.0),), losses=(4.5, 2.5),
)  # fmt: skip


async def compared(*_: object) -> Any:
    return SimpleNamespace(as_json=lambda: {"ratio": 0.99}, as_text=lambda: "0.99 of gloo")


@pytest.fixture
def world(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    """Anna's daemon, which knows bert, a job that has ended and one that runs; what takes long is over at once."""
    ended = summary(created_at_s=1_790_000_900.0)
    running = summary(JobState.RUNNING, job=RUNS, ended_at_s=None)
    FakeMesh(endpoint)
    checkpoint = CheckpointSummary(round=300, rank=1, created_at_s=1e9, size_bytes=3 << 20, wrong=None)
    output = OutputFile(rank=0, path="model.pt", size_bytes=len(LOG))
    unknown = Failure(error="no device, paired or waiting, is called 'carl': see `meshtrain peers`")
    bert = Paired(device=BERT, name="bert")
    endpoint.answers |= {
        GetStatus: STATUS.model_copy(update={"pid": ENDED_PROCESS}),
        GetJobs: known_jobs(ended, running),
        GetConfig: test_config.shown(),
        SetConfig: Failure(error="no setting is called nise; there are: nice, rests"),
        GetCourse: course_of(ended),
        Shutdown: Done(),
        PairJoin: bert,
        Unpair: lambda body, _: unknown if body.peer == "carl" else Unpaired(removed=(bert,)),
        Submit: accepting({}),
        Watch: Watched(summary=summary(job=RUNS)),
        OpenDashboard: DashboardOpened(url=test_dashboard_command.URL, expires_s=60.0),
        Fetch: lambda body, _: Fetched(
            data=LOG[body.offset_bytes : body.offset_bytes + body.max_bytes], total_bytes=len(LOG), end=True
        ),
        ListOutputs: Outputs(files=(output,)),
        ListCheckpoints: Checkpoints(checkpoints=(checkpoint,)),
        Cancel: Done(),
        Leave: Done(),
        RemoveResults: ResultsRemoved(size_bytes=4096),
        ChangeSettings: SettingsTaken(
            first=7,
            now=SettingsInForce(codec="int8", period=16),
            before=SettingsInForce(codec="fp32", period=8),
        ),
    }
    fixed = {tried.codec: CodecPrice(0.5e-9, 0.5e-9) for tried in EVIDENCE}
    monkeypatch.setattr(planning_command, "trace", lambda *_: traced())
    monkeypatch.setattr(planning_command, "processor_prices", lambda *_: ProcessorPrices(fixed))
    monkeypatch.setattr(OtherPrograms, "part", lambda _: 0.0)
    monkeypatch.setattr(Examination, "run", lambda _: test_doctor_screen.WELL)
    monkeypatch.setattr("meshtrain.demo.run.run_demo", lambda *_: DEMO)
    monkeypatch.setattr(bench_command, "subprocess", SimpleNamespace(Popen=InThisProcess))
    monkeypatch.setattr(bench_program, "compare", compared)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", os.environ.get("OPENBLAS_NUM_THREADS", "1"))  # which the benchmark sets
    return endpoint


def test_every_command_is_in_the_table() -> None:
    assert set(COMMANDS) - set(TABLE) == set(), "a new one belongs into it"
    assert set(TABLE) - set(COMMANDS) == set(), "these are gone"


def test_every_other_name_is_that_of_a_command_in_the_table() -> None:
    listed = {one.callback for one in app.registered_commands if not one.hidden}
    aliases = {one.name: one.callback for one in app.registered_commands if one.hidden}
    assert set(aliases) == {"ps", "ls", "stop"}
    assert set(aliases.values()) <= listed


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_can_be_typed(name: str) -> None:
    shown = run(*name.split(), "--help")
    assert shown.exit_code == 0
    examples = [line.strip() for line in shown.stdout.partition("Examples:")[2].splitlines() if line.strip()]
    assert examples
    for example in examples:
        words = shlex.split(example.partition("meshtrain ")[2], comments=True)
        assert words[: len(name.split())] == name.split(), example
        COMMANDS[name].make_context(name, words[len(name.split()) :])  # raises what is wrong with it


@pytest.mark.parametrize("name", COMMANDS)
def test_data_can_be_had_as_json_or_it_is_said_why_not(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert ("--json" in options) == isinstance(TABLE[name].json, Line), TABLE[name].json


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", COMMANDS)
def test_normal_use(name: str) -> None:
    line = TABLE[name].normal
    shown = line.run()
    assert shown.exit_code == 0, shown.stderr
    assert "error: " not in shown.stderr
    for said in line.shows:
        assert said in (shown.stdout or shown.stderr), said


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", [name for name, held in TABLE.items() if isinstance(held.json, Line)])
def test_json_is_all_of_stdout(name: str) -> None:
    line = TABLE[name].json
    assert isinstance(line, Line)
    shown = line.run()
    assert shown.exit_code == 0, shown.stderr
    texts = shown.stdout.splitlines() if TABLE[name].json_lines else [shown.stdout]
    assert texts
    for text in texts:
        document = json.loads(text, parse_constant=pytest.fail)
        first = document[0] if isinstance(document, list) else document
        assert set(line.shows) <= set(first), first


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_likeliest_mistake_is_one_error_with_a_way_on(name: str) -> None:
    line = TABLE[name].mistake
    shown = line.run()
    assert shown.exit_code in (1, 2), shown.output
    assert shown.stdout == "", "data is what somebody goes on with"
    lines = shown.stderr.splitlines()
    assert [text for text in lines if text.startswith("error: ")] == lines[:1], shown.stderr
    for said in line.shows:
        assert said in shown.stderr, said
    hints = [text for text in lines if text.startswith("try: ")]
    assert len(hints) == (name not in HELPED_BY_ITS_OWN_WORDS), shown.stderr


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_is_not_there_is_told_as_every_error_is(name: str) -> None:
    shown = run(*name.split(), "--xyz")
    assert (shown.exit_code, shown.stdout) == (2, "")
    error, hint = shown.stderr.splitlines()
    assert error.startswith("error: No such option: --xyz")
    assert hint == f"try: meshtrain {name} --help"


def test_a_command_that_is_not_there_is_told_so_too() -> None:
    shown = run("statsu")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr == "error: No such command 'statsu'. Did you mean 'status'?\ntry: meshtrain --help\n"
    half = run("bench")
    assert half.exit_code == 2
    assert half.stderr.startswith("Usage: meshtrain bench"), "who has typed half of it sees what there is"


def test_rm_asks_first_where_somebody_can_answer(world: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no other copy."""
    nobody = run("rm", JOB)
    assert nobody.exit_code == 1
    assert f"try: meshtrain rm --yes {JOB}" in nobody.stderr
    asked: list[str] = []
    answers = iter((False, True))

    def confirm(text: str, *, err: bool) -> bool:
        assert err, "stdout is data"
        asked.append(text)
        return next(answers)

    monkeypatch.setattr("meshtrain.cli.commands.jobs.at_terminal", lambda: True)
    monkeypatch.setattr("meshtrain.cli.commands.jobs.typer.confirm", confirm)
    no = run("rm", "train")
    assert (no.exit_code, no.stdout, world.of_type(RemoveResults)) == (1, "", [])
    assert "has not ended" in no.stderr, "the one of that name that runs"
    no = run("rm", JOB)
    assert (no.exit_code, no.stdout, world.of_type(RemoveResults)) == (1, "", [])
    yes = run("rm", JOB)
    assert (yes.exit_code, yes.stdout) == (0, f"{JOB}\n")
    assert "4.0 KiB deleted on this device; what lies on bert stays" in yes.stderr
    assert [body.job for body in world.of_type(RemoveResults)] == [JOB]
    assert f"results, logs and checkpoints of job {JOB} (train), it succeeded" in asked[0]


def test_what_get_fetched_and_what_is_missing_as_json(world: Endpoint, project: Path) -> None:
    files = (OutputFile(rank=0, path="model.pt", size_bytes=len(LOG)),)
    world.answers[ListOutputs] = Outputs(files=files, unreached=((1, "bert is not linked now"),))
    shown = run("get", "--json", JOB)
    assert shown.exit_code == 4, "as without it"
    document = json.loads(shown.stdout)
    assert document["files"] == [{"rank": 0, "path": f"{JOB}/rank0/model.pt", "size_bytes": len(LOG), "here": True}]
    assert document["missing"] == [{"rank": 1, "device": "bert", "why": "bert is not linked now"}]
    assert (project / JOB / "rank0" / "model.pt").read_bytes() == LOG
