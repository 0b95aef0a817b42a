"""P6 and P7 without real jobs: a world's own ranks and store, what people are told, which error comes again, and who
stands still."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtrain.following.log_pieces import ScriptErrors
from meshtraind.learner.script_error import ScriptError
from meshtraind.learner.supervisor import LearnerSupervisor
from meshtraind.process_group import pulse as pulses
from meshtraind.process_group.pulse import Pulse
from meshtraind.process_group.relay import GroupRelay
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session import session as sessions
from meshtraind.session.membership_host import MembershipHost
from meshtraind.session.metrics import MetricsKeeper
from meshtraind.session.session import JobSession
from meshtraind.session.worlds import Worlds
from meshtraind.transport.requests import RequestFailed
from meshwire import limits
from meshwire.frames.header import GROUP_ENDS, Header, Kind
from meshwire.jobs.lifecycle import JobState
from meshwire.jobs.script_log import ERROR_BEGINS, ERROR_ENDS
from meshwire.messages.group import GroupBegin, GroupWorld, MemberLost, SignOfLife, StoreAnswer, StoreAsk, WorldHere
from meshwire.messages.job import Generation, Member
from meshwire.messages.learner import Stop
from tests.daemon.waiting import until
from tests.torch_backend.specs import SPEC

NAMES = ("anna", "bert", "cleo")
SECOND = GroupWorld(number=4, restarts=1, ranks=(2, 1), why="anna was lost")


class End:
    """A link, or a learner's connection."""

    def __init__(self) -> None:
        self.writable = True
        self.closing = False
        self.sent: list[tuple[Header, bytes]] = []
        self.told: list[Any] = []
        self.asked: list[StoreAsk] = []

    def on_writable(self, _callback: Any) -> Any:
        return lambda: None

    def send_chunk(self, header: Header, payload: memoryview | None) -> None:
        self.sent.append((header, bytes(payload or b"")))

    def notify(self, body: Any) -> None:
        self.told.append(body)

    async def request(self, body: StoreAsk, **_options: Any) -> StoreAnswer:
        self.asked.append(body)
        return StoreAnswer(number=1)

    def close(self, reason: str) -> None:
        self.closing = True


def job_of(rank: int, restarts_max: int | None = 2) -> Any:
    members = tuple(Member(device=f"{at:064x}", incarnation=1, name=name) for at, name in enumerate(NAMES))
    spec = SPEC.model_copy(update={"restarts_max": restarts_max})
    return SimpleNamespace(spec=spec, rank=rank, members=members, ending=False)


def test_ranks_of_a_world_are_dense_and_each_learner_knows_those_alone() -> None:
    """P6: bert of anna, bert and cleo, in a world without anna that cleo is first of."""
    link, learner = End(), End()
    relay = GroupRelay(job_of(1), cast(Any, {2: link}), SECOND)
    welcome = relay.attach(cast(Any, learner))
    assert (welcome.rank, [member.name for member in welcome.members]) == (1, ["cleo", "bert"])
    relay.begin(GroupBegin(instance=5))
    header = Header(Kind.RELAYED, 1, round=5, contributors=1 << 0)
    place = relay.announced_by_learner(header)
    assert not isinstance(place, str)
    relay.received_from_learner(header)
    assert [(sent.generation, sent.round) for sent, _ in link.sent] == [(4, 5)]
    assert isinstance(relay.announced_by_learner(Header(Kind.RELAYED, 1, contributors=1 << 2)), str)
    for generation, reaches in ((1, False), (4, True)):
        came = Header(Kind.RELAYED, 1, generation=generation, round=5)
        assert (relay.announced(2, came) is not None) is reaches, "what is of another world belongs nowhere"
    assert relay.announced(0, Header(Kind.RELAYED, 1, generation=4, round=5)) is None
    relay.received(2, Header(Kind.RELAYED, 1, generation=4, round=5))
    assert learner.sent[0][0].contributors == 1 << 0
    relay.link_lost(0, "it is of no world")
    assert not learner.told
    relay.member_lost(2, "the connection broke")
    assert learner.told == [MemberLost(rank=0, reason="the connection broke")]
    assert relay.is_disturbed
    assert relay.loss == "cleo is gone: the connection broke"


def test_a_link_of_the_world_before_is_no_loss_of_this_one() -> None:
    """Its end may be told late, when the device is here again on another link."""
    relay = GroupRelay(job_of(1), cast(Any, {2: End()}), SECOND, used=True)
    relay.link_lost(2, "the connection broke")
    assert relay.loss is None


def test_what_a_link_does_not_take_is_counted_of_that_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RELAY_QUEUE_BYTES_MAX", 100)
    link = End()
    link.writable = False
    relay = GroupRelay(job_of(1), cast(Any, {2: link}), SECOND)
    relay.attach(cast(Any, End()))
    taken = []
    for _ in range(3):
        header = Header(Kind.RELAYED, 60, round=5, contributors=1 << 0)
        taken.append(not isinstance(relay.announced_by_learner(header), str))
        if taken[-1]:
            relay.received_from_learner(header)
    assert taken == [True, True, False]


def test_who_leaves_after_the_script_here_does_so_for_its_sake() -> None:
    """Else the one whose error it is would take itself for a victim: the others may be gone sooner than its process."""
    learner = End()
    relay = GroupRelay(job_of(1), cast(Any, {2: End()}), SECOND)
    relay.attach(cast(Any, learner))
    relay.begin(GroupBegin(instance=5))
    relay.learner_lost(cast(Any, learner))
    ends = Header(Kind.RELAYED, 1, generation=4, round=5, step=GROUP_ENDS)
    assert relay.announced(2, ends) is not None
    relay.received(2, ends)
    assert not relay.is_disturbed


def test_who_has_left_may_be_why_another_script_ends() -> None:
    relay = GroupRelay(job_of(1), cast(Any, {2: End()}), SECOND)
    relay.attach(cast(Any, End()))
    for instance, disturbed in ((5, True), (6, False)):
        relay.begin(GroupBegin(instance=instance))
        assert not relay.is_disturbed
        ends = Header(Kind.RELAYED, 1, generation=4, round=5, step=GROUP_ENDS)
        assert relay.announced(2, ends) is not None
        relay.received(2, ends)
        assert relay.is_disturbed is disturbed, "an instance of before says nothing of this one"


@pytest.mark.asyncio
async def test_the_store_is_on_the_first_of_the_world_and_of_no_other_world() -> None:
    """P3, P6: the daemon that kept it may be the one that is lost."""
    link = End()
    asked = StoreAsk(job=SPEC.job, op="add", keys=("a",), amount=1)
    await GroupRelay(job_of(1), cast(Any, {0: End(), 2: link}), SECOND).ask_store(asked)
    assert [each.world for each in link.asked] == [4]
    first = GroupRelay(job_of(2), cast(Any, {}), SECOND)
    assert (await first.asked_by_member(link.asked[0])).number == 1
    with pytest.raises(RequestFailed, match="that world of the job has ended"):
        await first.asked_by_member(asked)


def test_what_people_are_told_and_when_restarts_are_used_up() -> None:
    job, learner = job_of(1), End()
    worlds = Worlds(job, {})
    members = job.members
    worlds.found(Generation.first(SPEC.job, members[0].device, members))
    assert worlds.world == GroupWorld(number=1, restarts=0, ranks=(0, 1, 2))
    worlds.group.attach(cast(Any, learner))
    worlds.start()
    assert worlds.enter(worlds.world) is None, "it goes on"
    assert not worlds.is_between
    said = worlds.enter(SECOND)
    assert said == "anna was lost: restarting on cleo and bert, 1 of 2"
    assert learner.told == [Stop(reason=said)]
    assert learner.closing
    assert worlds.is_between, "the old process is let into no new group"
    assert worlds.group.used
    place = worlds.start()
    assert (place.rank, place.members, place.restarts, place.restarts_max, place.said) == (1, 2, 1, 2, said)
    came = SECOND.model_copy(update={"number": 5, "ranks": (2, 1, 0), "why": "anna has come"})
    assert worlds.enter(came) == "anna has come: restarting on cleo, bert and anna"
    worlds.broken = "bert: x"
    assert worlds.here(done=False) == WorldHere(world=came, broken="bert: x")
    twice = GroupWorld(number=6, restarts=2, ranks=(2, 1, 0), why="bert: x")
    assert worlds.enter(twice) == "bert: x: restarting on cleo, bert and anna, 2 of 2"
    assert worlds.used_up
    assert not worlds.is_over
    assert worlds.enter(GroupWorld(number=7, restarts=3, ranks=(2,), why="bert was lost")) == (
        "bert was lost, and --restart 2 is used up"
    )
    assert worlds.is_over


def test_jobs_that_restart_nothing_have_one_group() -> None:
    job = job_of(1, None)
    worlds = Worlds(job, {})
    group = worlds.group
    worlds.found(Generation.first(SPEC.job, job.members[0].device, job.members))
    assert worlds.group is group
    assert worlds.here(done=True) is None
    assert not worlds.used_up
    assert (worlds.start().rank, worlds.start().members) == (1, 3)


def test_an_error_that_comes_again_right_away_burns_no_restarts() -> None:
    life = LearnerSupervisor(cast(Any, None), cast(Any, None), 1)
    same = ScriptError("ValueError", "ValueError: no", "train.py, line 7", "", hopeless=False)
    other = ScriptError("ValueError", "ValueError: no", "train.py, line 9", "", hopeless=False)
    life._began_s = time.monotonic()
    for error, code, again in (
        (same, 1, False),
        (other, 1, False),
        (other, 1, True),
        (None, -9, False),
        (other, 1, False),
    ):
        life.error = error
        assert life.fails_again(code) is again
    life._began_s = time.monotonic() - 3600.0
    assert not life.fails_again(1), "it had come far"
    life.error = ScriptError("ImportError", "", "", "", hopeless=True)
    assert life.fails_again(1)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started: until then it may wait for its disk, of which nothing is told."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


class Learner:
    """A connection of which somebody says when the last byte has come."""

    def __init__(self, pid: int) -> None:
        self.attached = SimpleNamespace(pid=pid)
        self.last_received_s = 1.0
        self.writable = True
        self.told: list[Any] = []

    def notify(self, body: Any) -> None:
        self.told.append(body)


def test_who_is_silent_and_uses_no_processor_time_stands_still(sleeper: subprocess.Popen[bytes]) -> None:
    """P7: within a patience of beats, and not sooner."""
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)  # it has stopped
    pulse, learner = Pulse(2.0), Learner(sleeper.pid)
    beats = round(2.0 / pulse.beat_s)
    seen = [pulse.beat(cast(Any, learner)) for _ in range(beats + 2)]
    assert seen.index(True) in (beats, beats + 1)
    assert learner.told == [SignOfLife()] * len(seen)
    assert pulse.beat_s * 2 <= 0.5, "it is noticed within patience and a second"


def test_who_answers_or_computes_or_waits_for_its_disk_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s: list[float | None] = [0.0]
    monkeypatch.setattr(pulses, "busy_s", lambda _pid: used_s[0])
    for what in ("answers", "computes", "disk", "nothing", "left"):
        pulse, learner = Pulse(1.0), Learner(1)
        still = False
        for _ in range(40):
            learner.last_received_s += what == "answers"
            used_s[0] = None if what == "disk" else (used_s[0] or 0.0) + (0.01 if what == "computes" else 0.0)
            still |= pulse.beat(None if what == "left" else cast(Any, learner))
        assert still is (what == "nothing"), what


def test_processor_time_of_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert pulses.busy_s(sleeper.pid) is not None
    sleeper.kill()
    sleeper.wait()
    assert pulses.busy_s(sleeper.pid) is None


class Desk:
    """The session of bert's part in a job that restarts its scripts, as far as the end of a script concerns it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sessions, "GROUP_LAST_WORDS_S", 0.01)
        self.session = session = JobSession.__new__(JobSession)
        self.job = session.job = job_of(1)
        self.job.state = JobState.RUNNING
        self.learner = End()
        self.wishes = 0
        self.begun = 0
        self.failed: list[str] = []
        session._node = cast(Any, SimpleNamespace(name="bert", patience_s=0.01))
        session._learners = LearnerSupervisor(session._node, session.job, 1)
        session._metrics = MetricsKeeper({})
        session._tasks = TaskSet("job x", session._task_failed)
        session._why_ended = None
        session.worlds = Worlds(session.job, {0: End(), 2: End()})  # type: ignore[dict-item]
        session.worlds.found(Generation.first(SPEC.job, self.job.members[0].device, self.job.members))
        session.learner = cast(Any, SimpleNamespace(rounds=None, requests=None))
        session.passage = cast(Any, SimpleNamespace(want_world=self.wish, rounds=None))
        session.tell_report = lambda: None  # type: ignore[method-assign]
        session.fail = self.fail  # type: ignore[method-assign]
        session.begin_learner = self.begin  # type: ignore[method-assign]
        self.job.tell_restart = lambda _said: None
        self.run()

    def fail(self, reason: str) -> None:
        self.failed.append(reason)

    def wish(self) -> None:
        self.wishes += 1

    def begin(self) -> None:
        self.begun += 1

    def run(self) -> None:
        """A script runs that has made its group."""
        self.session.worlds.start()
        self.session.group.attach(cast(Any, self.learner))
        self.session.group.begin(GroupBegin(instance=5))

    def cleo_leaves(self) -> None:
        number = self.session.worlds.world.number if self.session.worlds.world is not None else 0
        ends = Header(Kind.RELAYED, 1, generation=number, round=5, step=GROUP_ENDS)
        assert self.session.group.announced(2, ends) is not None
        self.session.group.received(2, ends)

    def script_ends(self, code: int = -9) -> None:
        self.session.group.learner_lost(cast(Any, self.learner))
        assert not self.session._goes_on_after(code), "the next world starts the next one"


@pytest.mark.asyncio
async def test_a_script_that_fails_by_itself_wants_the_next_world_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    desk.script_ends()
    assert desk.wishes == 1
    here = desk.session.worlds.here(done=False)
    assert here is not None
    assert here.broken == "bert: the script was killed by signal 9 (SIGKILL); Linux does that when memory runs out"
    desk.session.world_begins()
    assert (desk.wishes, desk.begun) == (2, 0), "a generation came that was promised before"
    desk.session.world_entered(SECOND)
    desk.session.world_begins()
    desk.session.world_begins()
    assert desk.begun == 1
    assert not desk.failed


@pytest.mark.asyncio
async def test_a_script_that_ends_behind_another_one_waits_for_that_ones_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which mostly brings the next world; where that script has left in good order nobody does."""
    desk = Desk(monkeypatch)
    desk.cleo_leaves()
    desk.script_ends(code=1)
    assert not desk.wishes
    await until(lambda: desk.wishes)
    assert not desk.failed
    other = Desk(monkeypatch)
    other.cleo_leaves()
    other.script_ends(code=1)
    other.session.world_entered(SECOND)
    other.session.world_begins()
    await other.session._tasks.close()
    assert not other.wishes
    await desk.session._tasks.close()


@pytest.mark.asyncio
async def test_the_end_of_a_world_that_has_ended_breaks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have agreed on the next one, and this script's group was closed for that."""
    desk = Desk(monkeypatch)
    desk.session.world_entered(SECOND)
    assert not desk.session._goes_on_after(1)
    assert not desk.wishes
    assert desk.session.worlds.broken is None
    assert desk.session._metrics.exit_code is None


@pytest.mark.asyncio
async def test_a_script_that_prepares_all_the_same_ends_the_job() -> None:
    """P6: its text did not show it."""
    host = MembershipHost.__new__(MembershipHost)
    failed: list[str] = []
    host._job = job_of(1)
    host._node = cast(Any, SimpleNamespace(member=SimpleNamespace(name="bert")))
    host._keeper = cast(Any, SimpleNamespace(fail=failed.append))
    with pytest.raises(RequestFailed, match="--restart is for scripts without it"):
        await host.first_rounds(cast(Any, None))
    assert failed[0].startswith("rank 1 (bert): the script uses mt.prepare, and --restart is for scripts without it")


@pytest.mark.asyncio
@pytest.mark.parametrize("disturbed", [False, True])
async def test_a_failure_too_many_ends_the_job(monkeypatch: pytest.MonkeyPatch, disturbed: bool) -> None:
    """P4: by the first reason, which is that of whoever has left first."""
    desk = Desk(monkeypatch)
    desk.session.world_entered(SECOND.model_copy(update={"restarts": 2}))
    desk.run()
    if disturbed:
        desk.cleo_leaves()
    desk.script_ends()
    assert len(desk.failed) == (not disturbed)
    await until(lambda: desk.failed)
    assert desk.failed[0].startswith("rank 1 (bert): the script was killed by signal 9")
    desk.session.world_entered(SECOND.model_copy(update={"number": 9, "restarts": 3, "why": "cleo was lost"}))
    assert desk.failed[1] == "cleo was lost, and --restart 2 is used up"
    assert desk.session._metrics.exit_code == -9
    await desk.session._tasks.close()


def test_what_follows_an_error_in_the_log_is_shown() -> None:
    """torch puts the rank in front of each line of an error; behind that the next world's script has its say."""
    error = ["Traceback: no", "ValueError"]
    for prefix in ("", "[rank0]: "):
        log = [
            "before",
            f"{prefix}{ERROR_BEGINS}",
            *(prefix + line for line in error),
            f"{prefix}{ERROR_ENDS}",
            "behind",
        ]
        assert ScriptErrors().left_out(log) == ["before", "behind"]
    assert ScriptErrors().left_out([f"50 %{ERROR_BEGINS}", ERROR_ENDS]) == ["50 %"]
