"""A recorded membership is decided again, effect by effect, and tells who was lost, who proposed what, and why."""

import asyncio
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from meshtraind.replay.command import replay
from meshtraind.replay.membership_replay import MembershipFile
from meshtraind.rounds.trace import Trace
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session import membership_recorder
from meshtraind.session.membership_driver import MembershipDriver
from meshtraind.session.membership_recorder import MembershipRecorder, membership_trace
from meshwire.membership.effects import Effect
from meshwire.membership.inputs import (
    CannotCatchUp,
    FarthestRoundTrip,
    HoldingLost,
    Input,
    LinkDown,
    LinkUp,
    MessageFrom,
    PeerGone,
    RequestMade,
    SettingsAsked,
    SteppedOut,
    TimerDue,
    ViolationSeen,
    WasAway,
)
from meshwire.membership.machine import Membership
from meshwire.membership.record import MembershipStart, input_of, plain
from meshwire.messages.generation import Accuse, AskIn, Holding, Promised, Refused, Standing, Where, Wish
from meshwire.messages.job import Member
from meshwire.sync_modes.settings_changes import SettingsWish
from meshwire.timeouts import Timeouts
from tests.computing import computing
from tests.sim import clusterdaemon
from tests.sim.clusterfaults import random_schedule
from tests.sim.clusterfaults import run as run_cluster
from tests.sim.clusterwitness import Witness

JOB = "j" + "0" * 11
MEMBERS = tuple(
    Member(device=f"{n + 1:064x}", incarnation=n + 10, name=name) for n, name in enumerate(("anna", "bert", "cleo"))
)
ONE, TWO, THREE = (member.device for member in MEMBERS)
FIRST = computing(JOB, ONE, MEMBERS)
TIMEOUTS = Timeouts(5.0, 0.01)
HELD = Standing(generation=0, number=0, complete=4, chains=(b"c" * 16, b"d" * 16), samples=40, linked=())


def start_of(rank: int = 0) -> MembershipStart:
    known = tuple(member.device for member in MEMBERS)
    return MembershipStart(MEMBERS[rank], JOB, TIMEOUTS, 0.0, FIRST, known, 8)


def recorded(path: Path, *inputs: tuple[float, Input]) -> list[str]:
    """Anna's membership, linked to the others from 0 s on; returns the lines of its record."""
    recorder, start = MembershipRecorder(Trace(path)), start_of()
    recorder.began(start)
    machine = start.machine()
    links = [(0.0, LinkUp(member.device, member.incarnation)) for member in MEMBERS[1:]]
    for now_s, input_ in (*links, *inputs):
        recorder.took(input_, now_s, machine.handle(input_, now_s))
    recorder.close()
    return path.read_text().splitlines(keepends=True)


def loss_of_cleo() -> tuple[tuple[float, Input], ...]:
    """And what anna and bert do then."""
    grace_s = TIMEOUTS.relink_grace_s
    both = {"ranks": (0, 1), "learning": (0, 1), "counted": (0, 1)}
    proposed = FIRST.model_copy(update={"number": 2, "parent": FIRST.digest(), "root": 2, **both})
    return (
        (1.0, LinkDown(THREE, "closed")),
        (1.0 + grace_s, TimerDue()),
        (1.1 + grace_s, HELD),
        (1.2 + grace_s, MessageFrom(TWO, Refused(job=JOB, generation=proposed.hash64(), number=2, reason="no"))),
    )


def ran(path: Path, *, as_json: bool = False) -> tuple[int, str, str]:
    out, errors = io.StringIO(), io.StringIO()
    code = replay(path, as_json=as_json, out=out, errors=errors)
    return code, out.getvalue(), errors.getvalue()


def ran_lines(path: Path, lines: list[str]) -> tuple[int, dict[str, Any]]:
    path.write_text("".join(lines))
    code, out, _ = ran(path, as_json=True)
    return code, json.loads(out)


def test_the_memberships_of_a_cluster_are_decided_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1 to G7: through losses, returns and partitions the same inputs have the same effects."""
    made: list[tuple[Path, clusterdaemon.Daemon]] = []

    class Recorded(Witness):
        """Looks, and writes it down."""

        def __init__(self, daemon: clusterdaemon.Daemon) -> None:
            super().__init__(daemon)
            made.append((tmp_path / f"{len(made)}.jsonl", daemon))
            self._recorder = MembershipRecorder(Trace(made[-1][0]))

        def began(self, start: MembershipStart) -> None:
            self._recorder.began(start)

        def took(self, input_: Input, now_s: float, effects: Sequence[Effect]) -> None:
            self._recorder.took(input_, now_s, effects)
            super().took(input_, now_s, effects)

        def close(self) -> None:
            self._recorder.close()

    monkeypatch.setattr(clusterdaemon, "Witness", Recorded)
    inputs: Counter[str] = Counter()
    for seed in (1, 5):
        run_cluster(random_schedule(seed))
    for path, daemon in made:
        live = daemon.machine
        with path.open(encoding="ascii") as file:
            record = MembershipFile(file)
            again = record.start.machine()
            for decided in record.decide_again():
                inputs[type(decided.input).__name__] += 1
                again = decided.machine
        assert (again.phase, again.generation, again.promised) == (live.phase, live.generation, live.promised)
        assert (again.waiting(), again.deadline()) == (live.waiting(), live.deadline())
    assert {*inputs} >= {"LinkUp", "LinkDown", "MessageFrom", "RequestMade", "Standing", "CaughtUpToCut", "TimerDue"}
    assert ran(made[0][0])[0] == 0


def test_the_story_says_who_was_lost_and_why_a_generation_was_proposed(tmp_path: Path) -> None:
    """G2, G7."""
    path = tmp_path / "membership.jsonl"
    recorded(path, *loss_of_cleo())
    code, out, errors = ran(path)
    assert (code, errors) == (0, "")
    told = [line.strip() for line in out.splitlines()]
    assert told[0].endswith(f"anna begins in job {JOB} in generation 1 of anna, bert, cleo")
    assert [line for line in told if "lost its link to cleo: closed" in line]
    assert [line for line in told if "proposes generation 2 of anna, bert: no link to cleo (closed)" in line]
    assert told[-1] == f"{2 + len(loss_of_cleo())} inputs decided again: every effect is the same."
    story = json.loads(ran(path, as_json=True)[1])["story"]
    assert len(story) == len(told) - 2
    assert all(line.split("  ", 1)[1] == told_["text"] for line, told_ in zip(told, story, strict=False))


def test_every_input_is_written_and_read(tmp_path: Path) -> None:
    """None is left out of a record: what a membership can be told is what a replay can."""
    where = Where(job=JOB, generation=FIRST, ancestors=(1, 2**64 - 1), samples=9)
    seen: list[Input] = [
        LinkUp(TWO, 2**62),
        LinkDown(TWO, "clos\u00e9d"),
        PeerGone(TWO, 7),
        *(MessageFrom(TWO, Wish(job=JOB, kind=kind)) for kind in ("learn", "rest", "leave", "anew")),
        MessageFrom(TWO, where),
        MessageFrom(TWO, Promised(job=JOB, generation=3, standing=HELD)),
        MessageFrom(TWO, AskIn(job=JOB, member=MEMBERS[1], linked=(ONE,))),
        MessageFrom(TWO, Accuse(job=JOB, device=THREE, reason="NaN", violations=1)),
        ViolationSeen(TWO, "NaN"),
        WasAway(),
        RequestMade("learn"),
        SettingsAsked(SettingsWish(codec="int8")),
        SteppedOut("it has nothing"),
        Holding(base=True, saved=(3, b"e" * 16)),
        HoldingLost(),
        FarthestRoundTrip(0.25),
        CannotCatchUp("it is gone"),
        HELD,
        TimerDue(),
    ]
    for input_ in seen:
        assert input_of(json.loads(json.dumps(plain(input_)))) == input_
    assert {kind.__name__ for kind in get_args(Input)} - {type(one).__name__ for one in seen} == {
        *("CaughtUpToCut", "RoundsCounted")
    }
    path = tmp_path / "membership.jsonl"
    recorded(path, *((1.0 + number, input_) for number, input_ in enumerate(seen)))
    assert ran(path)[0] == 0


def test_another_decision_is_found_at_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record holds what the machine of then did; where the one of today differs first is shown."""
    path = tmp_path / "membership.jsonl"
    lines = recorded(path, *loss_of_cleo())
    changed = [line.replace(f'"now_s":{1.0 + TIMEOUTS.relink_grace_s}', '"now_s":1.0') for line in lines]
    code, found = ran_lines(path, changed)
    assert code == 1
    assert found["difference"]["line"] == 5, "before its time it proposes nothing"
    assert found["difference"]["replayed"] == "nothing"
    path.write_text("".join(lines))
    monkeypatch.setattr(Membership, "_propose", lambda self, generation, now_s: self._proposer.begin(generation, now_s))
    code, out, _ = ran(path)
    assert code == 1
    assert "DIFFERENT at line 5" in out
    assert "replayed: nothing" in out or "Waiting" in out


@pytest.mark.parametrize(
    ("line", "old", "new", "said"),
    [
        (0, '"format":1', '"format":99', "format 99"),
        (0, '"members_max":8', '"members_max":0', "0"),
        (0, f'"job":"{JOB}"', '"job":"k00000000000"', "of another job"),
        (0, '"known"', '"unknown"', "another version"),
        (1, '"type":"LinkUp"', '"type":"LinkSideways"', "does not have"),
        (1, '"type":"LinkUp"', '"type":"Enter"', "does not have"),
        (1, '"incarnation"', '"incarnations"', "other fields"),
        (1, '"incarnation":11', '"incarnation":"x"', "LinkUp"),
        (1, '"now_s":0.0', '"now_s":"soon"', "with its time"),
        (1, '"what":"input"', '"what":"output"', "with its time"),
        (5, '"complete":4', '"complete":-4', "complete"),
        (1, "{", "[" * 20000 + "{", "not JSON"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path: Path, line: int, old: str, new: str, said: str) -> None:
    path = tmp_path / "membership.jsonl"
    lines = recorded(path, *loss_of_cleo())
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    code, found = ran_lines(path, lines)
    assert code == 2
    assert f"line {line + 1}:" in found["error"]
    assert said in found["error"]


def test_a_record_that_breaks_off_says_where(tmp_path: Path) -> None:
    path = tmp_path / "membership.jsonl"
    lines = recorded(path, *loss_of_cleo())
    code, found = ran_lines(path, [*lines[:3], lines[3][:20]])
    assert code == 2
    assert found["error"] == "line 4: the record breaks off in this line"
    assert ran(tmp_path / "none")[0] == 2


@pytest.mark.asyncio
async def test_a_job_with_a_trace_records_its_membership(tmp_path: Path) -> None:
    """`submit --trace`: the driver's machine writes, and a daemon that comes back leaves what was written before."""
    links = {
        member.device: SimpleNamespace(hello=SimpleNamespace(incarnation=member.incarnation)) for member in MEMBERS
    }
    node = SimpleNamespace(member=MEMBERS[0], device=ONE, patience_s=5.0, links=links)
    spec = SimpleNamespace(job=JOB, trace=True, partition_wait=None, peers_max=None, restarts_max=None, engine="mesh")
    job = SimpleNamespace(spec=spec, generation=FIRST, members=MEMBERS, folder=tmp_path, wait=lambda _reason: None)
    for name in ("membership.jsonl", "membership-2.jsonl"):
        tasks, recorder = TaskSet("test"), MembershipRecorder(membership_trace(tmp_path))
        host = cast(Any, SimpleNamespace())
        shell = MembershipDriver(cast(Any, node), cast(Any, job), {}, host, 0.01, tasks, recorder)
        shell.start()
        shell.link_lost(THREE, "closed")
        await asyncio.sleep(0)
        shell.close()
        await tasks.close()
        code, out, _ = ran(tmp_path / name)
        assert code == 0
        assert "has lost its link to cleo" in out
    assert len(list(tmp_path.iterdir())) == 2


def test_a_daemon_that_is_started_often_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_recorder, "FILES_MAX", 3)
    for _ in range(5):
        membership_trace(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("membership-2.jsonl", "membership-3.jsonl", "membership.jsonl")
    ]
