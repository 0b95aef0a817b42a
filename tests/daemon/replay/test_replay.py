"""A recorded run decides the same again, input by input; whatever else is in the file is found, at its line."""

import inspect
import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest

from meshtraind.cli import main
from meshtraind.replay import trace_file as tracefile
from meshtraind.replay.replay import DifferenceError, replay, run
from meshtraind.replay.trace_file import TraceFile
from meshtraind.rounds import driver
from meshtraind.rounds.trace import Trace
from meshtraind.rounds.trace_recorder import FORMAT, RoundRecorder, RoundWitness, WitnessedMachine, round_machine
from meshwire.frames.header import Header, Kind
from meshwire.messages.rounds import Bind, Call, Null
from meshwire.rounds.effects import Effect
from meshwire.rounds.inputs import (
    BaseLoaded,
    BucketReady,
    CompleteAnnounced,
    FenceRaised,
    GenerationEntered,
    Input,
    MessageReceived,
    RoundServed,
    StartStep,
)
from meshwire.rounds.learner_state import RoundSettings
from meshwire.rounds.machine import RoundMachine
from meshwire.sync_modes.mode import sync_settings
from tests.bench import trace_picture
from tests.sim.clusterfaults import random_schedule
from tests.sim.clusterfaults import run as run_cluster
from tests.sim.roundcluster import Cluster, Mishap, Timing

MEMBERS = 3
MISHAPS = (
    Mishap(1, 4, "idle", for_s=3.0),
    Mishap(0, 6, "poison", bucket=1),
    Mishap(2, 8, "die", bucket=1, for_s=2.0),
    Mishap(1, 12, "hang", bucket=2, for_s=60.0),
)
SETTINGS = RoundSettings(
    ranks=(0, 1), rank=0, buckets=1, used_bytes=1, integers=0, staleness=1, straggler="carry", rtt_s=0.01
)


def recorded(folder: Path, seed: int, **options: Any) -> Cluster:
    """Runs a cluster in virtual time; member R's trace is folder/R.jsonl."""
    timing = Timing(step_s=(1.0, 1.1, 1.6), jitter=0.2)
    cluster = Cluster(seed, members=MEMBERS, steps=15, timing=timing, mishaps=MISHAPS, **options)
    traces = [Trace(folder / f"{rank}.jsonl") for rank in range(MEMBERS)]
    cluster.machines = [
        round_machine(machine.settings, RoundRecorder(trace))
        for machine, trace in zip(cluster.machines, traces, strict=True)
    ]
    cluster.run()
    for trace in traces:
        trace.close()
    return cluster


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A good trace, with s=2, all mishaps, nulls and calls."""
    folder = tmp_path_factory.mktemp("traces")
    recorded(folder, 1, staleness=2)
    return (folder / "1.jsonl").read_text().splitlines(keepends=True)


def ran(path: Path, **options: Any) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    out, errors = io.StringIO(), io.StringIO()
    code = run(path, **{"as_json": False, **options}, out=out, errors=errors)
    return code, out.getvalue(), errors.getvalue()


def ran_lines(folder: Path, lines: list[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and the JSON object."""
    path = folder / "changed.jsonl"
    path.write_text("".join(lines))
    code, out, _ = ran(path, as_json=True)
    return code, json.loads(out)


# What was recorded


@pytest.mark.parametrize(
    "mode",
    [
        {"staleness": 0, "straggler": "wait"},
        {"staleness": 1},
        {"staleness": 2, "straggler": "wait"},
        {"staleness": 2, "straggler": "wait", "visibility": "fixed"},
        {"staleness": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(2))
def test_the_same_inputs_have_the_same_effects(tmp_path: Path, seed: int, mode: dict[str, Any]) -> None:
    """The machine is a function of its inputs and `now_s`, all of which are in the trace, exactly."""
    cluster = recorded(tmp_path, seed, **mode)
    for rank, machine in enumerate(cluster.machines):
        with TraceFile(tmp_path / f"{rank}.jsonl") as trace:
            assert trace.settings == machine.settings
            for replayed in replay(trace):
                again = replayed.machine
        assert again.phase is machine.phase
        assert (again.applied, again.complete, again.committed) == (cluster.rounds,) * 3
        assert again.may_start() == machine.may_start()


class TwoWitnesses:
    """The cluster's own, and one that writes."""

    def __init__(self, *witnesses: RoundWitness) -> None:
        self.witnesses = witnesses

    def began(self, machine: RoundMachine, complete: int) -> None:
        for witness in self.witnesses:
            witness.began(machine, complete)

    def took(self, input_: Input, now_s: float, effects: Sequence[Effect]) -> None:
        for witness in self.witnesses:
            witness.took(input_, now_s, effects)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "seeds"),
    [
        (2, range(40, 48)),
        pytest.param(2, range(48, 60), marks=pytest.mark.long),
        pytest.param(0, range(40, 60), marks=pytest.mark.long),
    ],
)
def test_a_run_through_generations_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, seeds: range
) -> None:
    """G2 to G6, J1: what was served, entered and loaded is in the trace, and a machine may begin at a cut."""
    made: list[tuple[Path, Trace, RoundMachine]] = []

    def machine(settings: RoundSettings, witness: RoundWitness, *, complete: int) -> RoundMachine:
        path = tmp_path / f"{len(made)}.jsonl"
        trace = Trace(path)
        both = TwoWitnesses(witness, RoundRecorder(trace))
        made.append((path, trace, round_machine(settings, both, complete=complete)))
        return made[-1][2]

    monkeypatch.setattr(driver, "round_machine", machine)
    sync = sync_settings(f"ssp:{staleness}" if staleness else "bsp", "carry" if staleness else "wait")
    kinds: set[type] = set()
    for seed in seeds:
        schedule = random_schedule(seed, ("kill", "restart", "kill learner", "reset", "partition"), 6)
        setting = replace(schedule.setting, sync=sync, unapplied_max=1 << 30)
        run_cluster(replace(schedule, setting=setting))
        for path, trace, machine_ in made:
            trace.close()
            with TraceFile(path) as file:
                replayed = list(replay(file))
            kinds |= {type(each.input) for each in replayed}
            if replayed:  # else it is that of a rank that had not come in yet
                again = replayed[-1].machine
                assert (again.complete, again.committed) == (machine_.complete, machine_.committed)
                assert (again.applied, again.settings) == (machine_.applied, machine_.settings)
        path, _, first = made[0]
        entered = json.loads(ran(path, as_json=True)[1])["summary"]["entered"]
        assert all(last.endswith(f": ranks {', '.join(map(str, first.settings.ranks))}") for last in entered[-1:])
        made.clear()
    assert kinds >= {FenceRaised, RoundServed, GenerationEntered, BaseLoaded}


def test_the_summary_is_what_happened(tmp_path: Path) -> None:
    cluster = recorded(tmp_path, 1, staleness=2)
    values = json.loads(ran(tmp_path / "1.jsonl", as_json=True)[1])["summary"]
    assert values["rounds"] == values["committed"] == cluster.rounds
    assert values["steps"] == cluster.steps
    assert len(values["void"]) == len(cluster.void_rounds) > 0
    contributors = sum(int(count) * rounds for count, rounds in values["contributors"].items())
    assert contributors / cluster.rounds == cluster.mean_contributors
    for entry in values["ranks"]:
        assert entry["nulled"] == sum(1 for rank, _, _ in cluster.nulls if rank == entry["rank"])
        assert entry["contributed"] == sum(entry["ages"]) == cluster.rounds - entry["nulled"]
        assert len(entry["ages"]) <= 2 + 1, "R0"
    traces = [json.loads(ran(tmp_path / f"{rank}.jsonl", as_json=True)[1])["summary"] for rank in range(MEMBERS)]
    assert sum(trace["calls_sent"] for trace in traces) == cluster.calls > 0
    assert sum(len(trace["cut_offs"]) for trace in traces) == len(cluster.cut_offs) == 1
    code, out, errors = ran(tmp_path / "1.jsonl")
    assert (code, errors) == (0, "")
    assert out.splitlines()[0].startswith("rank 1 of 3, bound s = 2, carry: 15 steps in ")
    assert out.endswith("every decision is the same.\n")


def test_a_wait_names_whom_the_learner_waited_for(tmp_path: Path) -> None:
    """R7: with s=0 the slowest is whom the others wait for."""
    recorded(tmp_path, 1, staleness=0, straggler="wait")
    summary = json.loads(ran(tmp_path / "0.jsonl", as_json=True)[1])["summary"]
    longest = summary["longest_wait"]
    assert "waits for rank 1" in longest["reason"], "rank 1 hangs in its step 12"
    assert 0 < longest["end_s"] - longest["begin_s"] <= summary["waited_s"] < summary["seconds"]


class Chatty(WitnessedMachine):
    """Repeats every member's counter before each message, as frames do, and notes its deadlines."""

    def __init__(self, settings: RoundSettings, trace: Trace) -> None:
        super().__init__(settings, RoundRecorder(trace))
        self.deadlines: list[float | None] = []
        self.heard = dict.fromkeys(settings.ranks, 0)

    def handle(self, input_: Input, now_s: float) -> list[Effect]:
        match input_:
            case CompleteAnnounced(rank, complete):
                self.heard[rank] = complete
            case MessageReceived():
                for other in self.heard:
                    if other != self.settings.rank:
                        repeated = CompleteAnnounced(other, self.heard[other])
                        assert super().handle(repeated, now_s) == [], "repeats move nothing"
        effects = super().handle(input_, now_s)
        if isinstance(input_, MessageReceived):
            self.deadlines.append(self.deadline())
        return effects


def test_repeated_counters_are_not_written_and_not_missed(tmp_path: Path) -> None:
    """G5: every frame carries the counter. Time alone moves nothing that the replay would not see."""
    cluster = Cluster(
        1, members=2, staleness=1, steps=8, timing=Timing(step_s=(1.0, 1.4), jitter=0.2, delay_s=(0.0, 0.0))
    )
    trace = Trace(tmp_path / "0.jsonl")
    chatty = Chatty(cluster.machines[0].settings, trace)
    cluster.machines[0] = chatty
    cluster.run()
    trace.close()
    with TraceFile(tmp_path / "0.jsonl") as file:
        replayed = [(type(each.input), each.machine.deadline()) for each in replay(file)]
    assert [deadline_s for kind, deadline_s in replayed if kind is MessageReceived] == chatty.deadlines
    assert sum(kind is CompleteAnnounced for kind, _ in replayed) <= cluster.rounds


def test_every_input_of_the_machine_is_told_to_handle() -> None:
    """A new one is recorded too: what changes the machine has no other way in. What only answers is named here."""
    methods = {name for name, _ in inspect.getmembers(RoundMachine, inspect.isfunction) if not name.startswith("_")}
    assert methods == {"handle", "may_start", "may_null", "waiting", "deadline", "bound", "own_bind", "is_news"}


def test_without_a_trace_it_is_the_bare_machine() -> None:
    assert type(round_machine(SETTINGS, None)) is RoundMachine


def test_lines_of_others_are_passed_over(tmp_path: Path, lines: list[str]) -> None:
    trace = Trace(tmp_path / "chunks.jsonl")
    trace.chunk(Header(kind=Kind.CHUNK, payload_bytes=8, round=1, bucket=2))
    trace.close()
    chunk = (tmp_path / "chunks.jsonl").read_text()
    assert json.loads(chunk)["bucket"] == 2
    inputs = [index for index, line in enumerate(lines) if json.loads(line)["what"] == "input"]
    mixed = [*lines[: inputs[7]], chunk, *lines[inputs[7] :], chunk]
    assert ran_lines(tmp_path, mixed)[0] == 0


# What has been changed


def altered(line: str, change: Callable[[dict[str, Any]], object]) -> str:
    entry = json.loads(line)
    change(entry)
    return json.dumps(entry) + "\n"


def index_of(lines: list[str], what: str, nth: int = 3) -> int:
    return [index for index, line in enumerate(lines) if json.loads(line)["what"] == what][nth]


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("RoundComplete", lambda entry: entry.update(void=True)),
        ("RoundComplete", lambda entry: entry["binds"].popitem()),
        ("RoundComplete", lambda entry: entry["binds"].update({"0": {}})),
        ("Broadcast", lambda entry: entry["message"].update(round=entry["message"]["round"] + 1)),
        ("Broadcast", lambda entry: entry["message"].update(type="Call")),
        ("Contribute", lambda entry: entry.update(bucket=True)),
        ("Committed", lambda entry: entry.update(what="RoundForgotten")),
        ("may_start", lambda entry: entry.update(may=not entry["may"])),
        ("may_null", lambda entry: entry.update(reason=entry["reason"] + " ")),
    ],
)
def test_a_changed_decision_is_found_at_its_line(
    tmp_path: Path, lines: list[str], what: str, change: Callable[[dict[str, Any]], object]
) -> None:
    index = index_of(lines, what)
    code, result = ran_lines(tmp_path, [*lines[:index], altered(lines[index], change), *lines[index + 1 :]])
    assert (code, result["error"]) == (1, None)
    difference = result["difference"]
    assert difference["line"] == index + 1
    assert difference["recorded"] != difference["replayed"]
    assert json.loads(lines[difference["input_line"] - 1])["what"] == "input"


def test_a_changed_input_is_found_where_it_shows(tmp_path: Path, lines: list[str]) -> None:
    """The smallest other weight: floats are recorded exactly."""
    weights = [
        index
        for index, line in enumerate(lines)
        if (entry := json.loads(line))["what"] == "input"
        and entry["name"] == "BucketReady"
        and json.loads(lines[index + 1])["what"] == "Broadcast"
    ]
    index = weights[2]
    changed = altered(lines[index], lambda entry: entry["fields"].update(weight=entry["fields"]["weight"] + 1e-9))
    code, result = ran_lines(tmp_path, [*lines[:index], changed, *lines[index + 1 :]])
    assert code == 1
    assert (result["difference"]["input_line"], result["difference"]["line"]) == (index + 1, index + 2)


def test_an_effect_too_few_or_too_many_is_found(tmp_path: Path, lines: list[str]) -> None:
    index = index_of(lines, "RoundComplete")
    start = max(at for at in range(index) if json.loads(lines[at])["what"] == "input")
    count = json.loads(lines[start])["lines"]
    follows = lines[start + 1 : start + 1 + count]
    for recount, kept in ((count - 1, follows[:-1]), (count + 1, [*follows, follows[-1]])):
        head = altered(lines[start], lambda entry, recount=recount: entry.update(lines=recount))  # type: ignore[misc]
        code, result = ran_lines(tmp_path, [*lines[:start], head, *kept, *lines[start + 1 + count :]])
        assert code == 1
        assert result["difference"]["input_line"] == start + 1
        assert "nothing" in (result["difference"]["recorded"], result["difference"]["replayed"])


def test_a_difference_is_shown_to_a_person(tmp_path: Path, lines: list[str]) -> None:
    index = index_of(lines, "RoundComplete")
    path = tmp_path / "changed.jsonl"
    lines = [*lines[:index], altered(lines[index], lambda entry: entry.update(void=True)), *lines[index + 1 :]]
    path.write_text("".join(lines))
    code, out, errors = ran(path)
    assert (code, errors) == (1, "")
    assert f"DIFFERENT at line {index + 1} (the input is line " in out
    assert '"void": true' in out
    assert '"void": false' in out


# What is no trace


def test_a_trace_that_breaks_off_is_replayed_to_there(tmp_path: Path, lines: list[str]) -> None:
    """A daemon that was killed, a full disk, a job that still runs."""
    text = "".join(lines)
    path = tmp_path / "cut.jsonl"
    random = Random(1)
    for _ in range(20):
        cut = random.randrange(len(lines[0]) + 1, len(text) - 1)
        path.write_text(text[:cut])
        code, out, errors = ran(path)
        if code == 2:
            last = text.count("\n", 0, cut) + 1
            assert errors.startswith(f"meshtraind: error: {path}: line {last}: the trace breaks off ")
        else:
            assert (code, errors) == (0, ""), "cut exactly between two inputs"
        whole_inputs = sum('"what":"input"' in line for line in lines[: text.count("\n", 0, cut)]) - (code == 2)
        assert out.startswith("rank 1 of 3") or whole_inputs <= 0


def test_a_cut_between_an_input_and_its_effects_is_no_difference(tmp_path: Path, lines: list[str]) -> None:
    code, result = ran_lines(tmp_path, lines[: index_of(lines, "RoundComplete")])
    assert (code, result["difference"]) == (2, None)
    assert "breaks off" in result["error"]


def start_step(**changes: object) -> str:
    fields = {"step": 1, "local_steps": 1}
    line = {"t_s": 0.0, "what": "input", "name": "StartStep", "now_s": 0.0, "fields": fields, "lines": 0}
    return json.dumps(line | changes)


def receive(message: object) -> str:
    return start_step(name="MessageReceived", fields={"rank": 1, "message": message})


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a line of a trace"),
        ('{"what": "input"}', "not a line of a trace"),
        ("[" * 100_000, "not JSON"),
        ('{"t_s": ' + "9" * 5000 + "}", "not JSON"),
        ("\udcff\udc80", "not JSON"),
        ("x" * 5000, "longer than 4000 characters"),
        (start_step(name="__init__"), "'__init__', which the round machine does not have"),
        (start_step(name=["StartStep"]), "which the round machine does not have"),
        (start_step(lines=-1), "how many lines"),
        (start_step(lines=True), "how many lines"),
        (start_step(lines=10**18), "line 3: the trace breaks off"),
        (start_step(fields=None), "StartStep: its fields are local_steps, step, and no others"),
        (start_step(fields={}), "StartStep: its fields are local_steps, step"),
        (start_step(now_s=None), "StartStep: an input that does not say when it came"),
        (start_step(fields={"step": "x", "local_steps": 1}), "StartStep: "),
        (start_step(fields={"step": 1, "more": 1}), "its fields are local_steps, step, and no others"),
        (receive({"type": "Bind", "round": 1}), "Field required"),
        (receive({"type": "os", "round": 1}), "there is no message 'os'"),
        (receive({"type": "Wire"}), "message"),
        (receive({"hex": "zz"}), "non-hexadecimal"),
        (receive({"type": "Null", "round": -1}), "round: "),
    ],
)
def test_garbage_is_refused_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str, said: str, lines: list[str]
) -> None:
    limit = 200_000 if second.startswith("[[") or "9999" in second else 4000
    monkeypatch.setattr(tracefile, "LINE_CHARS_MAX", limit)
    path = tmp_path / "garbage.jsonl"
    path.write_text(lines[0] + second + "\n", encoding="ascii", errors="surrogateescape")
    code, _, errors = ran(path)
    assert code == 2
    assert errors.startswith(f"meshtraind: error: {path}: line ")
    assert ("line 3: " if "line 3" in said else "line 2: ") in errors
    assert said in errors
    assert errors.count("\n") == 1
    assert errors.isascii()


def header(**changes: object) -> str:
    settings: dict[str, object] = {
        "ranks": [0, 1],
        "rank": 0,
        "buckets": 1,
        "used_bytes": 1,
        "integers": 0,
        "staleness": 1,
        "fewer": [],
    }
    settings |= {"straggler": "carry", "rtt_s": 0.01, "visibility": "eager", "unapplied_max": 100, "ends_early": False}
    settings |= {"overlaps": False, "fewer_every": 0}
    return json.dumps({"t_s": 0.0, "what": "trace", "format": FORMAT, "settings": settings | changes, "complete": 0})


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("", "line 1: not the first line of a trace"),
        (start_step(), "line 1: not the first line of a trace"),
        ('{"t_s": 0, "what": "trace"}', "line 1: a trace of format None; this meshtraind reads 5"),
        ('{"t_s": 0, "what": "trace", "format": 1}', "line 1: a trace of format 1; this meshtraind reads 5"),
        ('{"t_s": 0, "what": "trace", "format": 5}', "of another version"),
        (header(colour="red"), "of another version"),
        (header(ranks=[]), "line 1: settings: "),
        (header(ranks="many"), "line 1: settings: "),
        (header(straggler="shout"), "line 1: settings: "),
        (header(used_bytes=10**12), "do not fit"),
        (header(used_bytes=-1), "do not fit"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, first: str, said: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(first + "\n" if first else "")
    code, out, errors = ran(path)
    assert (code, out) == (2, "")
    assert said in errors
    path.write_text(header() + "\n")
    assert ran(path)[0] == 0, "the header that the cases change is a good one"


def test_what_breaks_the_machine_is_a_difference(tmp_path: Path) -> None:
    """A forged rank: the machine has never met one, links have no such member."""
    path = tmp_path / "forged.jsonl"
    fields = {"rank": 63, "complete": 0}
    path.write_text(header() + "\n" + start_step(name="CompleteAnnounced", fields=fields) + "\n")
    with TraceFile(path) as trace, pytest.raises(DifferenceError) as caught:
        list(replay(trace))
    assert (caught.value.line, caught.value.replayed.split(":")[0]) == (2, "KeyError")


def test_flipped_bytes_are_answered_with_an_exit_code(tmp_path: Path, lines: list[str]) -> None:
    text = "".join(lines[:400])
    path = tmp_path / "flipped.jsonl"
    codes = set()
    for seed in range(60):
        random = Random(seed)
        flipped = bytearray(text, "ascii")
        for _ in range(1 + seed % 3):
            flipped[random.randrange(len(flipped))] = random.randrange(256)
        path.write_bytes(flipped)
        codes.add(ran(path)[0])
    assert {1, 2} <= codes <= {0, 1, 2}


@pytest.mark.parametrize("depth", [300, 600, 900, 980, 1000, 5000])
def test_deep_nesting_is_answered_with_an_exit_code(tmp_path: Path, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    path = tmp_path / "deep.jsonl"
    for line in (
        start_step().replace('"step": 1', f'"step": {nested}'),
        start_step(lines=1) + "\n" + f'{{"t_s": 0.0, "what": "Call", "deep": {nested}}}',
    ):
        path.write_text(header() + "\n" + line + "\n")
        assert ran(path)[0] in (1, 2)


# The command and the disk


def test_the_command(tmp_path: Path, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines))
    assert main(["replay", str(path)]) == 0
    assert "every decision is the same" in capsys.readouterr().out
    assert main(["replay", "--json", str(path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["inputs"] == sum('"what":"input"' in line for line in lines)
    assert main(["replay", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    assert "DATA/jobs/ID/trace.jsonl" in capsys.readouterr().out


def test_a_full_disk_ends_the_trace_and_not_the_job(caplog: pytest.LogCaptureFixture) -> None:
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("this system has no /dev/full")
    with caplog.at_level(logging.WARNING):
        trace = Trace(path)
        machine = round_machine(SETTINGS, RoundRecorder(trace))
        machine.handle(StartStep(1), 0.0)
        for at in range(2000):
            machine.handle(MessageReceived(1, Null(round=7)), float(at))  # wrong, hence an effect each
        trace.close()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the trace /dev/full ends here, the job goes on"
    ]
    assert machine.handle(BucketReady(1, 0, weight=1.0), 3000.0)


def test_a_trace_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trace = Trace(tmp_path / "no folder" / "trace.jsonl")
        round_machine(SETTINGS, RoundRecorder(trace)).handle(StartStep(1), 0.0)
        trace.close()
    assert str(tmp_path / "no folder" / "trace.jsonl") in caplog.text


def test_a_value_that_no_trace_can_hold_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(tmp_path / "trace.jsonl")
    trace.write("first", good=1.0)
    trace.write("second", bad={1, 2})
    trace.write("third")
    trace.close()
    assert "cannot hold {1, 2}" in caplog.text
    assert [json.loads(line)["what"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()] == ["first"]


def test_an_input_that_breaks_the_machine_is_in_the_trace(tmp_path: Path) -> None:
    """It is the one to look at."""
    trace = Trace(tmp_path / "trace.jsonl")
    machine = round_machine(SETTINGS, RoundRecorder(trace))
    with pytest.raises(KeyError):
        machine.handle(MessageReceived(63, Bind(round=1, step=1, base=0, weight=1.0)), 0.0)
    trace.close()
    code, _, _ = ran(tmp_path / "trace.jsonl")
    assert code == 1
    assert '"rank":63' in (tmp_path / "trace.jsonl").read_text()


def test_messages_have_a_form_each(tmp_path: Path) -> None:
    """Null and Call hold the same fields."""
    trace = Trace(tmp_path / "trace.jsonl")
    machine = round_machine(SETTINGS, RoundRecorder(trace))
    for message in (Null(round=1), Call(round=1)):
        machine.handle(MessageReceived(1, message), 0.0)
    trace.close()
    with TraceFile(tmp_path / "trace.jsonl") as file:
        told = [each.input for each in file.inputs()]
    assert told == [MessageReceived(1, Null(round=1)), MessageReceived(1, Call(round=1))]


# The picture


def test_a_picture_shows_every_rank(tmp_path: Path) -> None:
    recorded(tmp_path, 1, staleness=2)
    lanes = trace_picture.read([tmp_path / f"{rank}.jsonl" for rank in (2, 0, 1)])
    svg = trace_picture.Picture(lanes, ["anna", "bert", "<old>"], 0.0, 30.0).svg()
    assert len(svg) <= trace_picture.SVG_BYTES_MAX
    texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text")]
    assert {"anna", "bert", "<old>", "rounds", "idle"} <= set(texts)
    nulls = sum(len(lane.nulls) for lane in lanes)
    assert 0 < svg.count('class="mark"') - 1 <= nulls, "the legend has one"
    with pytest.raises(ValueError, match="show less with --seconds"):
        trace_picture.Picture(lanes * 20, ["x"] * 3, 0.0, 30.0).svg()


def test_a_picture_needs_every_rank(tmp_path: Path) -> None:
    recorded(tmp_path, 1, staleness=2)
    with pytest.raises(ValueError, match="one trace for each of the job's 3 members"):
        trace_picture.read([tmp_path / "0.jsonl", tmp_path / "2.jsonl"])
