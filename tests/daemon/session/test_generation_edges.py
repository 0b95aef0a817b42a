"""What must not end a job, nor hold it up: learners, links and devices that are lost at awkward moments (G2, J1)."""

import asyncio
import gc
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from meshtraind.job_start.beginning import JobBeginning
from meshtraind.jobs import admission
from meshtraind.jobs.admission import Admission
from meshtraind.jobs.routing import JobRouter
from meshtraind.learner import supervisor as learnerlife
from meshtraind.learner.environment import ScriptPlace
from meshtraind.learner.shared_memory import SharedMemoryError
from meshtraind.learner.supervisor import LearnerSupervisor
from meshtraind.owner.live_settings import LiveSettings
from meshtraind.recovery import join_requests as joining
from meshtraind.recovery.join_requests import JoinRequests
from meshtraind.rounds.catchup import Beginning, FalseRoundError, answer_catch_up, fetch_beginning, fetch_rounds
from meshtraind.rounds.history import Entry
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session import history_source
from meshtraind.session import membership_driver as generations_module
from meshtraind.session.barriers import Barriers
from meshtraind.session.history_source import HistorySource
from meshtraind.session.membership_driver import MembershipDriver
from meshtraind.session.membership_host import MembershipHost
from meshtraind.session.rounds_factory import RoundsFactory
from meshtraind.storage.job_record import EntryMode, Job
from meshtraind.transport.connection import ConnectionEnded, RequestFailed
from meshtraind.trust.learner_tokens import LearnerTokens
from meshwire.codecs.registry import parse_codec
from meshwire.jobs.lifecycle import JobEvent, JobState
from meshwire.membership.effects import CatchUpFrom, Effect, EnterGeneration, Fence, HistoryLeft
from meshwire.membership.inputs import CannotCatchUp, CaughtUpToCut, Input, PeerGone, ViolationSeen, WasAway
from meshwire.memory_layout import footprint
from meshwire.message_base import Wire
from meshwire.messages.generation import (
    AskModel,
    AskState,
    CatchUp,
    CaughtUp,
    Enter,
    FetchRound,
    Holding,
    Model,
    PathStep,
    SavedState,
    ServedRound,
    Standing,
    Where,
)
from meshwire.messages.job import BarrierReached, BaseHash, BlobRef, Fetched, Generation, GivenUp
from meshwire.messages.learner import BarrierPassed, LearnerBarrier, LearnerState, StateTask
from meshwire.messages.rounds import Bind, Call, Seal
from meshwire.model.plan import plan_buckets
from meshwire.sync_modes.mode import sync_settings
from tests.daemon.roundhost import executor_of
from tests.daemon.session.test_learner_notices import JOB, MANIFEST, PLAN, Desk, Peer, turns
from tests.daemon.session.test_session_edges import job_of
from tests.daemon.waiting import until

# Learners that are replaced


@pytest.mark.asyncio
async def test_a_device_that_is_left_out_hears_its_learner_no_more() -> None:
    """Its process is killed while it sends buckets; what is still to be read of it ended the job everywhere."""
    async with Desk(2, "ssp:2") as desk:
        closed: list[str] = []
        desk.connection.close = closed.append
        desk.link.let_go("this device was left out")
        assert closed
        assert not desk.link.is_over(cast(Any, desk.connection)), "its notices are refused"
        assert not desk.link.ready
        desk.link.attach(cast(Any, desk.connection))  # of the next process


@pytest.mark.asyncio
@pytest.mark.parametrize("ends", ["by an error", "by the others"])
async def test_a_learner_that_is_lost_in_a_barrier_leaves_nothing_behind_in_it(ends: str) -> None:
    """Whatever the others do then, it concerns the next process only when that has entered the barrier itself."""
    async with Desk(2, "ssp:2") as desk:
        desk.say(LearnerBarrier(number=1))
        await turns()
        desk.rounds.learner.dead("its process has ended")
        desk.link.begin_anew(desk.rounds, cast(Any, None))
        desk.links[1].sent.clear()
        if ends == "by an error":
            desk.gone.add(1)
        desk.barriers.reached(BarrierReached(job=JOB, rank=1, number=1))
        desk.barriers.entered()
        await turns()
        assert not desk.failed
        assert not desk.rounds._parts.job_rounds.in_barrier
        assert not desk.barriers.in_barrier(0)
        assert not desk.links[1].sent, "the others are not told that it is in the barrier"


@pytest.mark.asyncio
async def test_a_lost_learner_is_in_no_barrier_of_others() -> None:
    """They wait for the next one: it will enter it."""
    job = cast(Any, job_of("ab", 0))
    barriers = Barriers(job, lambda _rank, _message: None)
    barriers.reached(BarrierReached(job=JOB, rank=1, number=1))
    both = job.generation
    job.generation, job.counted = both.model_copy(update={"learning": (0,)}), (0,)
    barriers.entered()
    job.generation, job.counted = both.model_copy(update={"number": 3}), (0, 1)
    barriers.entered()
    tasks = TaskSet("test")
    waiting = tasks.spawn(barriers.barrier(1, 0, lambda _event: None), "barrier")
    await turns()
    assert not waiting.done()
    barriers.reached(BarrierReached(job=JOB, rank=1, number=1))
    assert await asyncio.wait_for(waiting, 10) == 0


def reached(rank: int, number: int, round_: int = 0) -> BarrierReached:
    return BarrierReached(job=JOB, rank=rank, number=number, round=round_)


def test_a_device_whose_learner_loads_follows_the_barriers_of_the_others() -> None:
    """However many there are: else it would take them to wait in one that they have passed, and their epochs for over;
    and after 64 of them it refused them all (G10)."""
    job = cast(Any, job_of("abc", 0))
    barriers = Barriers(job, lambda _rank, _message: None)
    job.counted = (1, 2)
    for number in range(1, 201):
        assert barriers.reached(reached(1, number)) is None
        assert barriers.in_barrier(1), "it waits for rank 2"
        assert barriers.passed == number - 1
        assert barriers.reached(reached(2, number)) is None
        assert barriers.passed == number
        assert not barriers.in_barrier(1)
    barriers.reached(reached(1, 201))
    job.counted = (1,)
    barriers.entered()
    assert barriers.passed == 201, "rank 2 computes no more"
    job.counted = (0, 1)
    barriers.reached(reached(1, 202))
    assert barriers.passed == 201, "the own learner takes part, and rank 1 waits for it"
    job.counted = ()
    barriers.entered()
    assert barriers.passed == 201


def test_the_last_barrier_is_passed_by_nobody() -> None:
    """Who is in it has ended its script, for a device whose learner loads as for any other."""
    job = cast(Any, job_of("abc", 0))
    barriers = Barriers(job, lambda _rank, _message: None)
    job.counted = (1, 2)
    for rank in (1, 2):
        barriers.reached(reached(rank, 1))
        barriers.reached(reached(rank, 0))
    assert barriers.passed == 1
    assert all(barriers.in_barrier(rank) for rank in (1, 2))
    assert barriers.is_waited_in(2), "nobody is in it"
    assert not barriers.is_waited_in(0)
    barriers.begin_anew()
    barriers.reached(reached(1, 5))
    barriers.reached(reached(2, 0))
    assert barriers.is_waited_in(0), "rank 1 goes on"


@pytest.mark.asyncio
async def test_who_is_in_a_later_barrier_has_passed_the_one_before() -> None:
    """Its word on that one was said in a generation that the device was not in; in a new one the newest is repeated."""
    job = cast(Any, job_of("abc", 0))
    barriers = Barriers(job, lambda _rank, _message: None)
    barriers.begin_anew(passed=3)
    barriers.reached(reached(1, 6, 60))
    barriers.reached(reached(2, 4, 40))
    assert not barriers.is_waited_in(4)
    assert await asyncio.wait_for(barriers.barrier(4, 0, lambda _event: None), 10) == 60
    assert barriers.is_waited_in(5)
    assert not barriers.in_barrier(2)
    barriers.reached(reached(2, 5, 50))
    barriers.reached(reached(2, 6, 60))
    assert await asyncio.wait_for(barriers.barrier(6, 0, lambda _event: None), 10) == 60
    assert not any(barriers.in_barrier(rank) for rank in (0, 1, 2)), "nor in the one before, which was not entered here"
    tasks = TaskSet("test")
    waiting = tasks.spawn(barriers.barrier(7, 65, lambda _event: None), "barrier")
    await turns()
    for rank in (1, 2):
        barriers.reached(reached(rank, 7, 70))
    assert await asyncio.wait_for(waiting, 10) == 70, "so far its learner is to come before it goes on"


@pytest.mark.asyncio
async def test_nobody_waits_for_a_learner_in_a_barrier_that_it_will_not_enter() -> None:
    """Rank 1 waits in barrier 7, which rank 0 takes for passed, before whose generation all were there: rank 1 has not
    heard that. So it hears in the new one that rank 0 is beyond it."""
    here, there = cast(Any, job_of("ab", 0)), cast(Any, job_of("ab", 1))
    waits = Barriers(there, lambda _rank, _message: None)
    runs_through = Barriers(here, lambda _rank, message: cast(None, waits.reached(cast(Any, message))))
    runs_through.begin_anew(passed=7)
    tasks = TaskSet("test")
    waiting = tasks.spawn(waits.barrier(7, 0, lambda _event: None), "barrier")
    await turns()
    here.counted = (1,)
    runs_through.entered()
    await turns()
    assert not waiting.done(), "its learner takes no part yet"
    here.counted = (0, 1)
    runs_through.entered()
    assert await asyncio.wait_for(waiting, 10) == 0


@pytest.mark.asyncio
async def test_a_script_that_comes_back_passes_the_barriers_before_its_model() -> None:
    """It calls mt.barrier() before mt.prepare, as at the start of the job; the others are beyond that barrier."""
    async with Desk(2, "ssp:2") as desk:
        desk.barriers.passed = 1
        desk.rounds.learner.dead("its process has ended")
        desk.link.begin_anew(desk.rounds, cast(Any, None))
        desk.link.attach(cast(Any, desk.connection))
        told = desk.say(LearnerBarrier(number=1))
        assert told == []
        await turns()
        assert desk.told == [BarrierPassed(number=1, error=None)]
        assert not desk.rounds._parts.job_rounds.in_barrier


# What is kept for learners that are to come


def round_of_others(desk: Desk, round_: int) -> None:
    """Rank 1 alone contributes; the exchange is not looked at: the round's results are said to be there."""
    machine = desk.rounds._machine
    desk.rounds.message(1, Bind(round=round_, step=round_, base=round_ - 1, weight=1.0))
    desk.rounds.message(1, Seal(round=round_, used=b"\x01", integers=()))
    desk.rounds.message(1, Call(round=round_))
    assert machine.decided >= round_, f"round {round_} waits for a learner that is not there: {machine.may_null()[1]}"
    for bucket in PLAN.buckets:
        desk.rounds.bucket_complete(round_, bucket.index, False, 2, 1.0, 0.0)
    assert desk.rounds.complete == round_
    desk.rounds.peer_complete(1, round_)


@pytest.mark.asyncio
async def test_nothing_is_kept_and_nobody_waits_until_a_process_begins_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """J1: it may import and read data for minutes, or never come; then it loads what is complete by that time."""
    monkeypatch.setattr(footprint, "UNAPPLIED_BYTES_MAX", 0)  # as with a large model: 2(s+1) rounds are kept
    async with Desk(2, "ssp:1") as desk:
        desk.rounds.learner.dead("its process has ended")
        for round_ in range(1, 31):
            round_of_others(desk, round_)
        assert not executor_of(desk.rounds)._memory.rounds
        assert desk.rounds.learner.loads() == 30
        assert not desk.rounds.hold_others_up
        for round_ in range(31, 35):
            round_of_others(desk, round_)
        assert sorted(executor_of(desk.rounds)._memory.rounds) == [31, 32, 33, 34], "kept for the base that it loads"
        assert desk.rounds._machine.may_null()[1].endswith("rounds up to 34 can be kept for it")
        assert desk.rounds.hold_others_up, "so whatever it fetches, it fetches at once"
        chains = [desk.rounds.chain_after(round_) for round_ in range(36)]
        assert len(set(chains)) == 36
        assert chains[34:] == [desk.rounds.entry().chain, None]
        desk.rounds.learner.loaded(32)
        assert sorted(executor_of(desk.rounds)._memory.rounds) == [33, 34]
        assert not desk.failed


@pytest.mark.asyncio
async def test_who_asks_for_another_state_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """J1: the state that was asked for first will not come; what was kept for it is let go."""
    monkeypatch.setattr(footprint, "UNAPPLIED_BYTES_MAX", 0)
    async with Desk(2, "ssp:1") as desk:
        desk.rounds.learner.dead("its process has ended")
        assert desk.rounds.learner.loads() == 0
        for round_ in range(1, 5):
            round_of_others(desk, round_)
        assert desk.rounds.hold_others_up
        assert desk.rounds.learner.loads_anew() == 4
        assert not desk.rounds.hold_others_up
        assert not executor_of(desk.rounds)._memory.rounds
        round_of_others(desk, 5)
        desk.rounds.learner.loaded(4)
        assert not desk.failed


@pytest.mark.asyncio
async def test_a_peer_that_only_forwards_keeps_nothing_of_the_rounds() -> None:
    """A hub does so for months, a laptop whose script cannot run for as long as the others train."""
    async with Desk(2, "ssp:1", codec="topk:0.1") as desk:
        desk.rounds.learner.dead("its process has ended")
        told: list[int] = []
        # What asyncio notes of slow turns in its debug mode is more on a busy machine.
        folders = ("*/meshtraind/*", "*/meshwire/*")
        ours = [tracemalloc.Filter(True, folder, all_frames=True) for folder in folders]
        tracemalloc.start(8)  # libraries allocate for us
        try:
            for upto in (300, 400):  # before, there are not as many chains of the newest rounds as ever
                for round_ in range(desk.rounds.complete + 1, upto + 1):
                    round_of_others(desk, round_)
                    desk.links[1].sent.clear()
                    await asyncio.sleep(0)  # timers that were cancelled are let go of in the loop's turn
                gc.collect()
                held = tracemalloc.take_snapshot().filter_traces(ours)
                told.append(sum(trace.size for trace in held.traces))
        finally:
            tracemalloc.stop()
        assert told[1] - told[0] < 50_000, f"{(told[1] - told[0]) / 100:.0f} bytes a round"
        assert desk.rounds.learner.loads() == 400, "who comes loads what is complete by then"


@pytest.mark.asyncio
@pytest.mark.parametrize(("codec", "lag"), [("fp32", 0), ("powersgd:1,half,warmup=0", 3)])
async def test_a_state_is_asked_for_of_after_a_round_that_what_follows_is_built_on(codec: str, lag: int) -> None:
    """J1: who comes in holds no result of before its cut. But who was there all the time holds whatever is needed: its
    learner, started again shortly before the end, must not wait for the state of a round that never comes."""
    async with Desk(2, "ssp:1", codec=codec) as desk:
        desk.rounds.learner.dead("its process has ended")
        for round_ in range(1, 11):
            round_of_others(desk, round_)
        assert desk.rounds.learner.loads() == 10
        plan = plan_buckets(MANIFEST, 1024, parse_codec(codec)).digest()
        model = Model(job=JOB, rank=1, manifest=MANIFEST, plan=plan)
        cut = Beginning(model, None, Entry(complete=30, chain=chain_of(30)), barrier=0)
        desk.maker.new_memory()
        rounds = desk.maker.loading(desk.owner, desk.generation, cut)
        assert rounds.learner.loads() == 30 + lag
        rounds.close()
        back = replace(cut, entry=replace(cut.entry, anew=True))
        desk.maker.new_memory()
        rounds = desk.maker.loading(desk.owner, desk.generation, back)
        assert rounds.learner.loads() == 30, "J3: where all go back, a codec begins as at the start of the job"
        rounds.close()
        desk.maker.memory.close()


class Offers:
    """A member that gives its state, or the link to which is lost at first."""

    name = "bert"
    closing = False

    def __init__(self, *answers: Wire | Exception) -> None:
        self.answers = list(answers)

    async def request(self, _asked: Wire, **_options: object) -> Wire:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def chain_of(round_: int) -> bytes:
    """As all that go on know it."""
    return round_.to_bytes(16, "little")


def state_of(round_: int, chain: bytes | None = None) -> SavedState:
    return SavedState(round=round_, chain=chain or chain_of(round_), units=(UNIT,))


async def nothing_saved(_asked: AskState) -> SavedState:
    """What a device answers whose learner has left nothing."""
    raise RequestFailed("its learner holds no state now")


async def ask_state(
    monkeypatch: pytest.MonkeyPatch,
    *donors: Offers,
    others: tuple[Offers, ...] = (),
    own: Callable[[AskState], Awaitable[SavedState]] = nothing_saved,
    kept: int | None = None,
    holds_up: bool = False,
) -> StateTask:
    """By a device whose rounds go on, one in each millisecond; or it `holds_up` the others, and would ask anew."""
    learner = SimpleNamespace(loads=lambda: 7, loads_anew=lambda: 8)
    rounds = SimpleNamespace(complete=7, learner=learner, chain_after=chain_of, hold_others_up=holds_up)

    async def done(*_args: object) -> None:
        pass

    async def go_on() -> None:
        while True:
            await asyncio.sleep(0.001)
            rounds.complete += 1
            asker.round_complete(rounds.complete)

    monkeypatch.setattr(joining, "POLL_S", 0.001)
    host = SimpleNamespace(computing=donors, others=others, own_state=own, carried_bytes=0, giver=None)
    files = SimpleNamespace(folder=Path("none"), fetch=done, lay_out=done)
    asker = JoinRequests(JOB, cast(Any, rounds), cast(Any, host), cast(Any, files), kept)
    tasks = TaskSet("test")
    tasks.spawn(go_on(), "rounds")
    try:
        return await asker.state(LearnerState(units=(bytes(32),)), lambda _event: None)
    finally:
        await tasks.close()


UNIT = BlobRef(sha256=bytes(32), size_bytes=1)


@pytest.mark.asyncio
async def test_the_base_in_memory_is_taken_over_before_anybody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """J3: it costs nobody anything."""
    task = await ask_state(monkeypatch, Offers(), kept=6)
    assert (task.kept, task.round, task.units) == (True, 6, (0,))


@pytest.mark.asyncio
async def test_where_nobody_computes_what_lies_on_a_disk_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """J3: this device's own, or what another has, as soon as it has it."""

    async def own(asked: AskState) -> SavedState:
        return state_of(asked.after_round)

    assert (await ask_state(monkeypatch, own=own)).round == 7
    other = Offers(RequestFailed("its learner holds no state now"), state_of(8))
    assert (await ask_state(monkeypatch, others=(other,))).round == 8

    async def of_another_history(_asked: AskState) -> SavedState:
        return state_of(7, b"another".ljust(16))

    assert (await ask_state(monkeypatch, own=of_another_history, others=(Offers(state_of(9)),))).round == 9


@pytest.mark.asyncio
async def test_a_member_that_computes_and_has_no_state_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """J3: its learner was killed, and the next one is on its way."""
    refused = [RequestFailed("its learner has ended")] * 3
    assert (await ask_state(monkeypatch, Offers(*refused, state_of(9)))).round == 9


@pytest.mark.asyncio
async def test_a_link_that_breaks_while_a_state_is_loaded_costs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lost links, and the device would have forwarded for the rest of the job."""
    lost = [ConnectionEnded("the connection broke")] * 5
    task = await ask_state(monkeypatch, Offers(*lost, state_of(9)))
    assert task.round == 9


@pytest.mark.asyncio
async def test_who_holds_the_others_up_asks_for_a_state_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """J1: its donor was lost, and no further round can be kept for it; with s=0 the next donor is in the middle of a
    step, which waits for this device, and could never give its state. Where nobody computes no round waits, and an old
    state may be the only one."""
    lost = ConnectionEnded("the connection broke")
    assert (await ask_state(monkeypatch, Offers(lost, state_of(8)), holds_up=True)).round == 8
    with pytest.raises(RequestFailed, match="the state after round 7, not after 8"):
        await ask_state(monkeypatch, Offers(lost, state_of(7)), holds_up=True)
    assert (await ask_state(monkeypatch, others=(Offers(state_of(7)),), holds_up=True)).round == 7


@pytest.mark.asyncio
@pytest.mark.parametrize("slow", [False, True])
async def test_who_comes_to_hold_the_others_up_asks_once_more(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    """J1: a request came late, in the middle of a step whose round waits for this device: with s=0 its learner gives a
    state when that is over. A donor that is slow to write is given twice the time, and then again."""
    monkeypatch.setattr(joining, "HELD_UP_S", 0.02)
    monkeypatch.setattr(joining, "POLL_S", 0.005)
    rounds = SimpleNamespace(complete=12, chain_after=chain_of, hold_others_up=True)
    asked: list[int] = []

    def loads_anew() -> int:
        rounds.hold_others_up = slow  # a state that is as long on its way as rounds can be kept
        return 14

    class Donor(Offers):
        async def request(self, _asked: Wire, **_options: object) -> Wire:
            assert isinstance(_asked, AskState)
            asked.append(_asked.after_round)
            slow_s, began_s = 0.06 * slow, asyncio.get_running_loop().time()
            rounds.hold_others_up = rounds.hold_others_up or slow or len(asked) == 1
            while _asked.after_round == 12 or asyncio.get_running_loop().time() < began_s + slow_s:
                await asyncio.sleep(0.005)
            rounds.complete = 14
            return state_of(14)

    rounds.learner = SimpleNamespace(loads=lambda: 12, loads_anew=loads_anew)
    rounds.hold_others_up = False
    host = SimpleNamespace(computing=(Donor(),), others=(), own_state=nothing_saved, carried_bytes=0, giver=None)

    async def done(*_args: object) -> None:
        pass

    files = SimpleNamespace(folder=Path("none"), fetch=done, lay_out=done)
    asker = JoinRequests(JOB, cast(Any, rounds), cast(Any, host), cast(Any, files), None)
    async with asyncio.timeout(10):
        task = await asker.state(LearnerState(units=(bytes(32),)), lambda _event: None)
    assert task.round == 14
    assert asked[:2] == [12, 14]
    assert len(asked) <= 4


@pytest.mark.asyncio
async def test_a_state_of_too_early_a_round_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds after it are not kept here: it ended the job as an error of the exchange."""
    with pytest.raises(RequestFailed, match="bert: it offers the state after round 6, not after 7"):
        await ask_state(monkeypatch, Offers(state_of(6)))


@pytest.mark.asyncio
async def test_a_state_of_another_history_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """G4: its donor had completed round 12 with members that are lost; those that go on have another round 12."""
    task = await ask_state(monkeypatch, Offers(state_of(12, chain=b"another round 12"), state_of(14)))
    assert task.round == 14


@pytest.mark.asyncio
async def test_a_state_of_a_round_that_nobody_else_holds_yet_is_loaded_only_if_others_will(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G4: a donor that is lost meanwhile may have been the only one to hold it; then another one is asked."""
    lost = Offers(state_of(10**9), ConnectionEnded("the connection broke"), ConnectionEnded("the connection broke"))
    lost.closing = True
    task = await ask_state(monkeypatch, lost, Offers(state_of(30)))
    assert task.round == 30


# Processes that are started and ended at once


class SlowProcess:
    """A learner's process that takes its time to start."""

    alive: ClassVar[set["SlowProcess"]] = set()
    started: ClassVar[int] = 0

    def __init__(self, *_args: object) -> None:
        self._ended = asyncio.Event()

    @property
    def running(self) -> bool:
        return self in self.alive

    async def start(self, _environment: object, _niceness: int, _said: str) -> None:
        await asyncio.sleep(0.01)
        SlowProcess.started += 1
        self.alive.add(self)

    async def wait(self) -> int:
        assert self in self.alive or self._ended.is_set(), "it has not started"
        await self._ended.wait()
        return -9

    def error(self) -> None:
        """It was killed."""

    async def stop(self, *, now: bool) -> None:
        self.alive.discard(self)
        self._ended.set()


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LearnerSupervisor:
    monkeypatch.setattr(learnerlife, "LearnerProcess", SlowProcess)
    monkeypatch.setattr(learnerlife, "learner_environment", lambda *_args, **_options: {})
    monkeypatch.setattr(SlowProcess, "alive", set())
    monkeypatch.setattr(SlowProcess, "started", 0)
    spec = SimpleNamespace(job=JOB, script="train.py", args=(), requirements=(), engine="mesh", learners=1)
    job = SimpleNamespace(folder=tmp_path, rank=0, spec=spec, members=(1, 2))
    node = SimpleNamespace(
        entrance=SimpleNamespace(address="", learners=LearnerTokens()),
        data_dir=tmp_path,
        settings=LiveSettings(tmp_path),
    )
    return LearnerSupervisor(cast(Any, node), cast(Any, job), 1)


@pytest.mark.asyncio
async def test_a_learner_is_let_in_while_it_runs_and_by_its_own_token_only(life: LearnerSupervisor) -> None:
    tokens = life._node.entrance.learners
    assert await life.start(life.run, cast(Any, None), ScriptPlace(0, 2))
    first = life._token
    assert tokens.job_of(first) == life._job.spec.job
    life.run += 1
    await life.kill()
    assert await life.start(life.run, cast(Any, None), ScriptPlace(0, 2))
    assert tokens.job_of(first) is None, "of a process that was replaced"
    assert tokens.job_of(life._token) == life._job.spec.job
    await life.stop(now=True)
    assert tokens.job_of(life._token) is None
    assert not tokens._jobs


@pytest.mark.asyncio
async def test_a_process_that_its_daemon_ends_has_not_failed(life: LearnerSupervisor) -> None:
    """J3: but one that has ended by an error stays the last one when the next is to be started."""
    life.failed = True
    await life.kill()
    assert life.failed, "none has run since"
    assert await life.start(life.run, cast(Any, None), ScriptPlace(0, 2))
    await life.kill()
    assert not life.failed
    life.failed = True
    await life.kill()
    assert life.failed
    await life.stop(now=True)


async def begin(life: LearnerSupervisor) -> None:
    """As a session does whenever this device is taken in."""
    life.run += 1
    run = life.run
    await life.kill()
    if await life.start(run, cast(Any, None), ScriptPlace(0, 2)):
        await life.wait()


@pytest.mark.asyncio
async def test_a_device_that_is_left_out_and_taken_in_quickly_runs_one_learner(life: LearnerSupervisor) -> None:
    """Also when a process is still being started: it would have gone on for ever, beside the next one."""
    tasks = TaskSet("test")
    over: list[asyncio.Task[None]] = []
    for pause_s in (0.0, 0.005, 0.012, 0.0, 0.02):
        over.append(tasks.spawn(begin(life), "begin"))
        await asyncio.sleep(pause_s)
        life.run += 1  # left out
        over.append(tasks.spawn(life.kill(), "end"))
        await asyncio.sleep(pause_s / 2)
    await asyncio.wait_for(asyncio.gather(*over), 10)
    assert not SlowProcess.alive, "none runs that nobody wants"
    last = tasks.spawn(begin(life), "begin")
    await until(lambda: SlowProcess.alive)
    assert len(SlowProcess.alive) == 1
    await life.stop(now=True)
    await last
    assert not SlowProcess.alive
    before = SlowProcess.started
    await begin(life)
    assert SlowProcess.started == before, "the job has ended"
    await tasks.close()


# Links


@pytest.mark.asyncio
async def test_a_link_to_another_incarnation_is_no_link_to_the_member() -> None:
    """G1: a daemon that was started again has nothing of what the member held, and would take chunks for garbage."""
    connection = object()
    hello = SimpleNamespace(incarnation=2)
    links: dict[str, Any] = {}
    shell, _, tasks = generations(SimpleNamespace(), links)
    other = cast(Any, shell._job).members[1]
    links[other.device] = SimpleNamespace(hello=hello, connection=connection)
    shell._use_links()
    assert not shell._links
    hello.incarnation = other.incarnation
    shell._use_links()
    assert shell._links == {1: connection}
    hello.incarnation = 2
    shell._use_links()
    assert not shell._links, "the one of before is let go of"
    await tasks.close()


# Catching up


class Machine:
    """Notes how a catch-up ended."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.gone_ones: list[tuple[str, int]] = []
        self.away_s: list[float] = []
        self.promised: Generation | None = None

    def handle(self, input_: Input, now_s: float) -> list[Effect]:
        match input_:
            case CaughtUpToCut():
                self.answers.append("caught up")
            case CannotCatchUp(reason):
                self.answers.append(reason)
            case PeerGone(device, incarnation):
                self.gone_ones.append((device, incarnation))
            case WasAway():
                self.away_s.append(now_s)
            case ViolationSeen(device, reason):
                self.answers.append(f"refuses {device}: {reason}")
        return []

    def deadline(self) -> None:
        return None


def generations(host: object, links: dict[str, Any]) -> tuple[MembershipDriver[Any], Machine, TaskSet]:
    tasks, job = TaskSet("test"), cast(Any, job_of("ab", 0))
    node = SimpleNamespace(member=job.members[0], device=job.members[0].device, patience_s=5.0, links=links)
    shell = MembershipDriver(cast(Any, node), job, {}, cast(Any, host), 0.01, tasks)
    machine = Machine()
    shell._machine = cast(Any, machine)
    return shell, machine, tasks


def catch_up(*, reload: bool) -> CatchUpFrom:
    generation = job_of("ab", 0).generation
    assert generation is not None
    enter = Enter(
        job=JOB, generation=generation.hash64(), cut=5, chain=bytes(16), source=1, complete=((0, 4), (1, 5)), reload=()
    )
    return CatchUpFrom(1, "b", generation, enter, reload)


@pytest.mark.asyncio
async def test_a_source_that_answers_late_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others wait for this member: it would have stood still until they gave it up, after 24 patience."""
    outcomes: list[Exception | None] = [TimeoutError("no answer"), TimeoutError("no answer"), None]

    async def fetch(*_args: object) -> None:
        if (error := outcomes.pop(0)) is not None:
            raise error

    monkeypatch.setattr(generations_module, "fetch_rounds", fetch)
    link = SimpleNamespace(connection=None)
    shell, machine, tasks = generations(SimpleNamespace(rounds=object()), {"b": link})
    shell._perform([catch_up(reload=False)])
    await turns()
    assert machine.answers == ["caught up"]
    await tasks.close()


@pytest.mark.asyncio
async def test_who_is_gone_is_told_to_the_jobs_that_go_on() -> None:
    """G1: of which device, in which incarnation; and that this machine was away itself (G4)."""
    shell, machine, tasks = generations(SimpleNamespace(rounds=None), {})
    running, ended = (SimpleNamespace(job=SimpleNamespace(ended=over)) for over in (False, True))
    running.passage = passage = cast(Any, object.__new__(MembershipHost))
    passage.generations = shell
    beginning = SimpleNamespace(job=running.job)
    beginning.passage = early = cast(Any, object.__new__(MembershipHost))
    router = SimpleNamespace(registry=SimpleNamespace(sessions=(running, ended, beginning)))
    early.generations = None
    JobRouter.peer_gone(cast(Any, router), "b" * 64, 7)
    JobRouter.was_away(cast(Any, router))
    assert (machine.gone_ones, len(machine.away_s)) == ([("b" * 64, 7)], 1)
    shell.close()
    JobRouter.peer_gone(cast(Any, router), "b" * 64, 7)
    JobRouter.was_away(cast(Any, router))
    assert (len(machine.gone_ones), len(machine.away_s)) == (1, 1), "nobody goes on here"
    await tasks.close()


@pytest.mark.asyncio
async def test_a_source_that_serves_no_round_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """G10: this member keeps its history; who asked in anew would be told to load the whole model, from it perhaps."""

    async def fetch(*_args: object) -> None:
        raise FalseRoundError("fp32: a value is infinite or not a number")

    monkeypatch.setattr(generations_module, "fetch_rounds", fetch)
    shell, machine, tasks = generations(SimpleNamespace(rounds=object()), {"b": SimpleNamespace(connection=None)})
    shell._perform([catch_up(reload=False)])
    await turns()
    assert machine.answers == ["refuses b: fp32: a value is infinite or not a number"]
    await tasks.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(("chosen", "meant_s"), [(None, 30.0), (90.0, 90.0), ("never", float("inf"))])
async def test_a_part_waits_as_long_as_its_job_says(chosen: Any, meant_s: float) -> None:
    """G7: `submit --partition-wait`."""
    job = cast(Any, job_of("ab", 0))
    job.spec.partition_wait = chosen
    node = SimpleNamespace(member=job.members[0], patience_s=5.0, links={})
    shell = MembershipDriver(cast(Any, node), job, {}, cast(Any, SimpleNamespace(rounds=None)), 0.01, TaskSet("test"))
    assert shell._machine._state.timeouts.provisional_s == meant_s


@pytest.mark.asyncio
async def test_a_source_that_is_gone_costs_no_history() -> None:
    """Another generation follows, with another source; who says that it cannot catch up would load the whole model."""
    shell, machine, tasks = generations(SimpleNamespace(rounds=object()), {})
    shell._perform([catch_up(reload=False)])
    await turns()
    assert machine.answers == []
    await tasks.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("right", [True, False])
async def test_rounds_of_another_history_do_not_make_a_member_enter(right: bool) -> None:
    """G4: each served round brings its chain hash with it, and only the last one can be compared with the cut's."""
    chain = chain_of(5)
    taken: list[int] = []
    rounds = SimpleNamespace(complete=4)

    def take(served: ServedRound) -> None:
        rounds.complete = served.round
        taken.append(served.round)

    standing = SimpleNamespace(chains=(chain if right else chain_of(6),))
    rounds.crossing = SimpleNamespace(take_served=take, standing=lambda: standing, take_changes=lambda _: None)
    served = ServedRound(
        round=5, void=True, reason="no member contributed", binds=(), poisons=(), used=b"", integers=(),
        squared_norm=0.0, chain=standing.chains[0], poisoned=b"", size_bytes=0,
    )  # fmt: skip
    source = Offers(CaughtUp(rounds=(served,)))
    cut = catch_up(reload=False).enter.model_copy(update={"chain": chain})
    fetching = fetch_rounds(cast(Any, rounds), cast(Any, source), JOB, cut)
    if right:
        await fetching
    else:
        with pytest.raises(RequestFailed, match="the rounds up to 5 are not those that the others hold"):
            await fetching
    assert taken == [5]


@pytest.mark.asyncio
async def test_rounds_that_are_lacking_are_on_their_way_together() -> None:
    """All others stand still meanwhile: one after the other each would cost them a round trip."""
    rounds = SimpleNamespace(complete=2)
    asked: list[int] = []
    at_once: list[int] = []

    def take(served: ServedRound) -> None:
        at_once.append(len(asked))
        rounds.complete = served.round

    class Source:
        async def request(self, body: Wire, **_options: object) -> Wire:
            if isinstance(body, CatchUp):
                return CaughtUp(rounds=tuple(served(round_) for round_ in (3, 4, 5)))
            assert isinstance(body, FetchRound)
            asked.append(body.round)
            await turns()
            return Fetched(data=bytes(4), total_bytes=4, end=True)

    def served(round_: int) -> ServedRound:
        return ServedRound(
            round=round_, void=False, reason="", binds=(), poisons=(), used=b"", integers=(), squared_norm=0.0,
            chain=chain_of(round_), poisoned=b"", size_bytes=4,
        )  # fmt: skip

    standing = SimpleNamespace(chains=(chain_of(5),))
    rounds.crossing = SimpleNamespace(
        take_served=take,
        standing=lambda: standing,
        place_for=lambda _served: memoryview(bytearray(4)),
        take_changes=lambda _: None,
    )
    cut = catch_up(reload=False).enter.model_copy(update={"chain": chain_of(5)})
    await fetch_rounds(cast(Any, rounds), cast(Any, Source()), JOB, cut)
    assert (rounds.complete, asked, at_once) == (5, [3, 4, 5], [3, 3, 3])


@pytest.mark.asyncio
async def test_who_is_left_out_stops_catching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What still came would have gone into rounds that are closed, or begun a generation that is over."""
    goes_on = asyncio.Event()

    async def fetch(*_args: object) -> object:
        await goes_on.wait()
        return object()

    monkeypatch.setattr(generations_module, "fetch_beginning", fetch)
    begun: list[object] = []
    host = SimpleNamespace(rounds=None, begin_loading=lambda *args: begun.append(args), left_out=lambda _reason: None)
    shell, machine, tasks = generations(host, {"b": SimpleNamespace(connection=None)})
    shell._perform([catch_up(reload=True)])
    await turns()
    shell._perform([HistoryLeft("the others went on")])
    goes_on.set()
    await turns()
    assert not begun
    assert not machine.answers
    await tasks.close()


@pytest.mark.asyncio
async def test_who_promises_another_generation_stops_catching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """G2, G5: what it had asked for would come after its promise, and tell the machine of a cut that is over."""
    goes_on = asyncio.Event()

    async def fetch(*_args: object) -> None:
        await goes_on.wait()

    monkeypatch.setattr(generations_module, "fetch_rounds", fetch)
    standing = Standing(generation=None, number=0, complete=0, chains=(), samples=0, linked=())
    crossing = SimpleNamespace(fence=lambda: None, standing=lambda: standing)
    host = SimpleNamespace(rounds=object(), crossing=crossing, holding=Holding, world=lambda: None)
    shell, machine, tasks = generations(host, {"b": SimpleNamespace(connection=None)})
    effect = catch_up(reload=False)
    shell._perform([effect])
    await turns()
    shell._perform([Fence(effect.generation)])
    goes_on.set()
    await turns()
    assert not machine.answers
    await tasks.close()


@pytest.mark.asyncio
async def test_hashes_of_rounds_that_do_not_count_are_forgotten() -> None:
    """O9: above the cut of a generation, and of a history that is dropped, a number is another round's later, and
    whoever names that one would be found to differ."""
    rounds = SimpleNamespace(complete=5, history_samples=0)
    crossing = SimpleNamespace(enter=lambda *_: None)
    shell, _, tasks = generations(SimpleNamespace(rounds=rounds, crossing=crossing, entered=lambda _: None), {})
    job = cast(Any, shell._job)
    job.take = lambda _generation, _awaited: None
    job.take_changes = lambda _codecs: None
    for round_ in (4, 5, 6):
        for rank in (0, 1):
            assert not job.hashes.add(BaseHash(job=JOB, rank=rank, round=round_, sha256=bytes(32)))

    def odd(round_: int) -> set[int]:
        found: set[int] = job.hashes.add(BaseHash(job=JOB, rank=0, round=round_, sha256=bytes([1]) * 32))
        return found

    entered = catch_up(reload=False)
    shell._perform([EnterGeneration(entered.generation, entered.enter)])
    assert odd(5) == {0}
    assert not odd(6)
    passage = cast(Any, object.__new__(MembershipHost))
    passage._job, passage._learner = job, SimpleNamespace(rounds=None)
    passage._maker = SimpleNamespace(memory=SimpleNamespace(close=lambda: None))
    passage._drop_rounds()
    assert not odd(4)
    await tasks.close()


def where(generation: Generation, *ancestors: Generation) -> Where:
    return Where(job=JOB, generation=generation, ancestors=tuple(one.hash64() for one in ancestors), samples=9000)


@pytest.mark.asyncio
async def test_who_was_asleep_gives_nothing_up() -> None:
    """The others went on from the history that it has, or from all but rounds of which they made others."""
    told: list[GivenUp] = []
    host = SimpleNamespace(rounds=SimpleNamespace(complete=102, history_samples=816), left_out=lambda _reason: None)
    shell, _, tasks = generations(host, {})
    cast(Any, shell._job).take_given_up = told.extend
    first = shell._job.generation
    assert first is not None
    other = first.model_copy(update={"number": 2, "ranks": (1,), "learning": (1,)})
    shell._perform([HistoryLeft("generation 2 went on without this device", where(other, first))])
    assert told == []
    await tasks.close()


@pytest.mark.asyncio
async def test_a_device_without_memory_for_the_job_does_not_end_it() -> None:
    """It cannot take part, and says so; the others go on."""
    passage = cast(Any, object.__new__(MembershipHost))
    passage._node = SimpleNamespace(member=SimpleNamespace(name="anna"))
    passage._drop_rounds = lambda: None
    passage._job = SimpleNamespace(take=lambda _generation: None)
    passage._donor = passage._checkpointing = SimpleNamespace(forget=lambda **_: None)

    def no_memory(_layout: object) -> None:
        raise SharedMemoryError("no 8 bytes of shared memory")

    plan = plan_buckets(MANIFEST, 1024, parse_codec("fp32")).digest()
    spec = SimpleNamespace(codec="fp32", bucket_bytes=1024, sync=sync_settings("bsp"))
    passage._maker = maker = RoundsFactory(cast(Any, SimpleNamespace(spec=spec)), {}, 0.001, 30.0)
    maker.new_memory = lambda: None  # type: ignore[method-assign]
    maker.memory.close()
    maker.memory = cast(Any, SimpleNamespace(make=no_memory))
    beginning = Beginning(Model(job=JOB, rank=1, manifest=MANIFEST, plan=plan), None, Entry(), barrier=0)
    with pytest.raises(RequestFailed, match="anna cannot take part: no 8 bytes of shared memory"):
        passage.begin_loading(SimpleNamespace(number=2), beginning)


@pytest.mark.asyncio
async def test_the_deal_of_another_cut_is_not_given() -> None:
    """A member that begins at one cut with the deal of samples of a later one would take rounds for wrong (X1)."""
    passage = cast(Any, object.__new__(MembershipHost))
    crossing = SimpleNamespace(deal=None, samples=3)
    rounds = SimpleNamespace(sample_space=None, crossing=crossing)
    passage._learner = SimpleNamespace(rounds=rounds)
    passage._barriers = SimpleNamespace(passed=2)
    passage._source = HistorySource("anna", JOB, passage)
    passage.generations, machine, tasks = generations(passage, {})
    generation = cast(Any, job_of("ab", 0)).generation
    machine.promised = generation
    assert (await passage.asked("b", CatchUp(job=JOB, generation=generation.hash64(), complete=None))).seen == 3
    machine.promised = generation.model_copy(update={"number": 2})
    with pytest.raises(RequestFailed, match="anna has promised another generation meanwhile"):
        await passage.asked("b", CatchUp(job=JOB, generation=generation.hash64(), complete=None))
    await tasks.close()


# Returning


@pytest.mark.asyncio
@pytest.mark.parametrize("ends", [False, True], ids=["the link comes back", "the job ends"])
async def test_a_link_that_breaks_on_the_way_back_costs_no_results(
    ends: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The device was in the job before: its outputs and checkpoints lie in the job's folder."""
    tried: list[object] = []

    class BrokenIntake:
        def __init__(self, *args: object, **_options: object) -> None:
            tried.append(args)

        async def run(self) -> None:
            if len(tried) < 3 or ends:
                raise ConnectionEnded("the connection broke")

    monkeypatch.setattr(admission, "Intake", BrokenIntake)
    monkeypatch.setattr(admission, "RETURN_RETRY_S", 0.001)
    results = tmp_path / "out" / "0" / "model.pt"
    results.parent.mkdir(parents=True)
    results.touch()
    members = job_of("ab", 0).members
    spec = SimpleNamespace(
        job=JOB, submitter=members[1].device, name="x", script="s", args=(), sync=sync_settings("bsp"), codec="fp32",
        topology="ring",
        seed=0, created_at_s=0.0, requirements=(),
    )  # fmt: skip
    history = SimpleNamespace(put=lambda _record: None)
    job = Job(cast(Any, spec), members, 0, tmp_path, cast(Any, history), EntryMode.REJOIN)
    job.advance(JobEvent.ACCEPT)
    links = {members[1].device: SimpleNamespace(connection=Peer())}
    node = SimpleNamespace(device=members[0].device, member=members[0], links=links)
    node.blobs = SimpleNamespace(release=lambda _job: None, trim=lambda: None)
    node.job_folder = lambda _job: tmp_path
    node.data_dir = tmp_path
    tasks = TaskSet("test")
    returning = Admission(cast(Any, node), cast(Any, None), tasks, {})
    fetching = tasks.spawn(returning._take_in(job, members[1].device), "files")
    if ends:
        while len(tried) < 2:
            await asyncio.sleep(0.001)
        job.advance(JobEvent.CANCEL, "a person has ended it")
    await asyncio.wait_for(fetching, 10)
    assert job.state is (JobState.CANCELLED if ends else JobState.READY)
    assert results.exists()


# J3: no learner is left


def back_to(round_: int, device: str) -> CatchUpFrom:
    effect = catch_up(reload=True)
    enter = effect.enter.model_copy(update={"way": "back", "cut": round_, "chain": chain_of(round_)})
    return replace(effect, enter=enter, device=device)


@pytest.mark.asyncio
@pytest.mark.parametrize("own", [True, False])
async def test_who_goes_back_says_what_is_given_up(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """J3: to its own checkpoint, without asking anybody, or to that of another."""
    begun: list[int] = []
    gone_through = (PathStep(generation=1, cut=0, samples=0),)
    saved = SimpleNamespace(entry=Entry(complete=5, samples=50), path=gone_through)

    async def fetched(*_: object, **__: object) -> SimpleNamespace:
        return saved

    monkeypatch.setattr(generations_module, "fetch_beginning", fetched)
    host = SimpleNamespace(
        rounds=SimpleNamespace(complete=9, history_samples=90),
        saved_beginning=lambda _enter: saved,
        samples_at_beginning=lambda _enter: None,
        begin_loading=lambda _generation, beginning: begun.append(beginning.entry.complete),
    )
    shell, machine, tasks = generations(host, {"b": SimpleNamespace(connection=None)})
    told: list[GivenUp] = []
    shell._job = cast(Any, SimpleNamespace(spec=shell._job.spec, take_given_up=told.extend))
    shell._perform([back_to(5, shell._node.device if own else "b")])
    await turns()
    assert (begun, machine.answers) == ([5], ["caught up"])
    (lost,) = told
    assert (lost.first, lost.last, lost.samples, lost.made_by == lost.kept) == (6, 9, 40, True)
    assert (shell.path == gone_through) != own, "who takes a history over is told what it has gone through"
    await tasks.close()


@pytest.mark.asyncio
async def test_with_the_beginning_comes_what_its_history_has_gone_through() -> None:
    """Else who came in later could not say which rounds are given up."""
    gone_through = (PathStep(generation=1, cut=0, samples=0), PathStep(generation=7, cut=3, samples=24))
    rounds = SimpleNamespace(sample_space=None, crossing=SimpleNamespace(deal=None, samples=40))
    asked = CatchUp(job=JOB, generation=9, complete=None, cut=5)
    reply = answer_catch_up(cast(Any, rounds), asked, 2, gone_through)
    model = cast(Any, Model).model_construct()

    class Source:
        async def request(self, body: Wire, **_: object) -> Wire:
            return model if isinstance(body, AskModel) else reply

    beginning = await fetch_beginning(cast(Any, Source()), JOB, catch_up(reload=True).enter)
    assert (beginning.path, beginning.entry.samples) == (gone_through, 40)


@pytest.mark.asyncio
async def test_a_checkpoint_that_is_gone_is_no_way_back() -> None:
    """J3: it asks in, and the others look for something else."""

    def gone(_enter: Enter) -> None:
        raise RequestFailed("the checkpoint after round 5 is gone")

    host = SimpleNamespace(
        rounds=SimpleNamespace(complete=9, history_samples=90),
        samples_at_beginning=lambda _enter: None,
        saved_beginning=gone,
    )
    shell, machine, tasks = generations(host, {})
    shell._perform([back_to(5, shell._node.device)])
    await turns()
    assert machine.answers == ["the checkpoint after round 5 is gone"]
    await tasks.close()


@pytest.mark.asyncio
async def test_who_asks_before_the_source_has_gone_back_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """J3: the deal of samples of a later round would be another one."""
    passage = cast(Any, object.__new__(MembershipHost))
    rounds = SimpleNamespace(sample_space=None, crossing=SimpleNamespace(deal=None, samples=3), complete=9)
    passage._learner = SimpleNamespace(rounds=rounds)
    passage._barriers = SimpleNamespace(passed=2)
    passage._source = HistorySource("anna", JOB, passage)
    passage.generations, machine, tasks = generations(passage, {})
    generation = machine.promised = cast(Any, job_of("ab", 0)).generation
    asked = CatchUp(job=JOB, generation=generation.hash64(), complete=None, cut=5)
    asyncio.get_running_loop().call_later(0.03, setattr, rounds, "complete", 5)
    assert (await passage.asked("b", asked)).seen == 3
    assert rounds.complete == 5
    monkeypatch.setattr(history_source, "GO_BACK_TIMEOUT_S", 0.0)
    rounds.complete = 9
    with pytest.raises(RequestFailed, match="anna is at round 9, not 5"):
        await passage.asked("b", asked)
    await tasks.close()


class Bereaved:
    """A passage whose learner has ended, and what it then does."""

    def __init__(self, kept: int | None, *, comes: bool = True, complete: int = 8) -> None:
        self.done: list[str] = []
        self.passage = passage = cast(Any, object.__new__(MembershipHost))
        learner = SimpleNamespace(could_hold=lambda round_: 6 <= round_ <= complete, dead=self._dead)
        self.rounds = SimpleNamespace(learner=learner, hold_others_up=False)
        passage._learner = SimpleNamespace(
            rounds=self.rounds, requests=None, was_ready=True, begin_anew=self._begin_anew
        )
        passage._begun = True
        passage._checkpointing = SimpleNamespace(round_complete=lambda *_: None)
        passage._job = SimpleNamespace(
            folder=Path("none"),
            spec=SimpleNamespace(job=JOB, resume=None, restarts_max=None, engine="mesh"),
            begins=True,
        )
        passage.beginning = JobBeginning(cast(Any, passage._job))
        passage._maker = SimpleNamespace(manifest=MANIFEST, memory=SimpleNamespace(kept=self))
        passage._place = SimpleNamespace(states=None)
        passage._keeper = SimpleNamespace(learner_comes=comes, learner_failed=False)
        passage.generations = SimpleNamespace(
            wish=self.done.append,
            look_again=lambda: self.done.append("look again"),
            end_parting=lambda: False,
            close=lambda: None,
        )
        self.kept, self.trusted = kept, True

    def round(self) -> int | None:
        return self.kept if self.trusted else None

    def clear(self) -> None:
        self.done.append("clear")
        self.kept = None

    def _dead(self, _reason: str, holds: int | None = None) -> None:
        self.done.append(f"dead with {holds}")

    def _begin_anew(self, _rounds: object, joining: JoinRequests) -> None:
        self.passage._learner.requests = joining


def test_the_base_in_memory_waits_for_the_next_learner() -> None:
    """J3: what it holds is known before the others hear that it computes no more, for they decide by that."""
    bereaved = Bereaved(7)
    assert bereaved.passage.learner_died(failed=False)
    assert bereaved.done == ["dead with 7", "rest", "look again"]
    assert bereaved.passage._learner.requests.kept


@pytest.mark.parametrize(
    ("kept", "comes"),
    [(None, True), (5, True), (9, True), (7, False)],
    ids=["none", "too old", "unknown", "no learner"],
)
def test_memory_that_nobody_can_use_is_given_back(kept: int | None, comes: bool) -> None:
    """J3, M1."""
    bereaved = Bereaved(kept, comes=comes)
    bereaved.passage.learner_died(failed=False)
    assert bereaved.done == ["dead with None", "clear", "rest", "look again"]


def test_a_base_that_could_not_be_taken_over_is_not_tried_again() -> None:
    """J3: the process failed before it was ready; one that was killed tries again."""
    bereaved = Bereaved(7)
    bereaved.passage.learner_died(failed=False)
    bereaved.passage._learner.was_ready = False
    bereaved.passage.learner_died(failed=False)
    assert bereaved.passage._learner.requests.kept
    bereaved.passage.learner_died(failed=True)
    assert not bereaved.passage._learner.requests.kept


@pytest.mark.parametrize("asked", [False, True], ids=["before it has asked", "when it takes it over"])
def test_a_base_that_is_found_to_differ_is_not_taken_over(asked: bool) -> None:
    """O9, J3: the learner was killed, and what it had told of its base is compared only then. Where the next process
    takes it over already it is ended, and what it leaves is not trusted."""
    bereaved = Bereaved(7)
    bereaved.passage.learner_died(failed=False)
    joining_ = bereaved.passage._learner.requests
    joining_._told_kept = asked
    bereaved.done.clear()
    bereaved.passage.distrust_memory()
    assert joining_.kept is asked
    assert bereaved.done == ([] if asked else ["clear", "dead with None", "look again"])
    bereaved.passage.learner_died(failed=False)
    assert not bereaved.passage._learner.requests.kept


def test_nobody_waits_for_who_could_find_its_base_in_memory() -> None:
    """J3, R5: when no more rounds can be kept for it, it loads the others' state like any other."""
    bereaved = Bereaved(7)
    bereaved.passage.learner_died(failed=False)
    joining_ = bereaved.passage._learner.requests
    bereaved.passage.round_complete(bereaved.rounds, 9)
    assert joining_.kept
    bereaved.rounds.hold_others_up = True
    bereaved.done.clear()
    bereaved.passage.round_complete(bereaved.rounds, 10)
    assert not joining_.kept
    assert bereaved.done == ["clear", "dead with None"]
