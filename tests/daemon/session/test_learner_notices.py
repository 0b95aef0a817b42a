"""What a learner says in a wrong order ends its job with a sentence; what it says too late, or lost, blocks nobody."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from meshtraind.job_start.prepared import DescribedModel
from meshtraind.learner.shared_memory import SharedMemory
from meshtraind.rounds.driver import Rounds
from meshtraind.rounds.history import Entry
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session.barriers import Barriers
from meshtraind.session.learner_handler import LearnerHandler
from meshtraind.session.metrics import MetricsKeeper
from meshtraind.session.rounds_factory import RoundsFactory
from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import new_job_id
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.message_base import Wire
from meshwire.messages.job import BarrierReached, BlobRef, JobSpec, Member
from meshwire.messages.learner import (
    BarrierPassed,
    EpochOver,
    LearnerApplied,
    LearnerBack,
    LearnerBarrier,
    LearnerBucket,
    LearnerIdle,
    LearnerReady,
    LearnerSealed,
    LearnerState,
    LearnerStepped,
    LearnerTurn,
    RoundDone,
    SampleSpace,
    Start,
    StateTask,
    TurnNews,
    Waiting,
)
from meshwire.messages.rounds import Bind, Call, Null, Seal
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import plan_buckets
from meshwire.rounds.effects import RoundComplete
from meshwire.rounds.inputs import RoundDecoded
from meshwire.rounds.learner_state import Phase
from meshwire.sync_modes.mode import sync_settings
from tests.computing import begin, computing

MANIFEST = ModelManifest(
    tensors=(
        TensorSpec(name="weight", shape=(300,), dtype="float32", kind="parameter"),
        TensorSpec(name="mean", shape=(3,), dtype="float32", kind="buffer"),
    ),
    optimizer="SGD",
)
PLAN = plan_buckets(MANIFEST, 1024)
JOB = new_job_id(bytes(8))


class Peer:
    """The link to another member, of which nothing comes."""

    def __init__(self) -> None:
        self.writable = True
        self.sent: list[Wire] = []

    def notify(self, body: Wire, **_header: int) -> None:
        self.sent.append(body)

    def send_chunk(self, *_frame: object) -> None:
        pass

    def on_writable(self, _callback: object) -> Any:
        return lambda: None

    def socket_bytes_sent(self) -> tuple[int, str]:
        return 0, "link"

    chunk_payload_bytes_sent = 0
    chunk_bytes_received = 0


class Desk:
    """A daemon's side of one learner: real rounds, of one member or more, and all that was said."""

    def __init__(
        self,
        members: int,
        sync: str,
        visibility: str | None = None,
        entry: Entry | None = None,
        codec: str = "fp32",
        rtt_s: float = 0.001,
    ) -> None:
        settings = sync_settings(sync, visibility=visibility, shares="equal")
        self.told: list[Wire] = []
        self.failed: list[str] = []
        self.memory = SharedMemory()
        layout = MemoryLayout.for_job(PLAN.total_values, settings, parse_codec(codec))
        os.ftruncate(self.memory.descriptor, layout.total_bytes)
        self.memory.map(layout)
        spec = JobSpec(
            job=JOB, name="test", submitter="0" * 64, created_at_s=0.0, script="train.py", args=(), env=(),
            files=BlobRef(sha256=bytes(32), size_bytes=1), data=None, sync=settings, codec=codec, on_nan="stop",
            seed=0, bucket_bytes=1024, hash_every=0, trace=False,
        )  # fmt: skip
        who = tuple(Member(device=f"{rank:064x}", incarnation=1, name=f"n{rank}") for rank in range(members))
        self.generation = computing(JOB, "0" * 64, who)
        self.gone: set[int] = set()
        job = cast(
            Any,
            SimpleNamespace(
                spec=spec,
                rank=0,
                members=who,
                ended=False,
                folder=Path("/none"),
                generation=self.generation,
                counted=self.generation.learning,
                gone=self.gone,
            ),
        )
        self.links = cast(Any, {rank: Peer() for rank in range(1, members)})
        self.barriers = Barriers(job, lambda rank, body: self.links[rank].notify(body))
        self.tasks = TaskSet("test", lambda _name, error: self.failed.append(repr(error)))
        owner = SimpleNamespace(
            who="rank 0 (n0)", fail=self.failed.append, tell_hash=lambda _body: None, tell_report=lambda: None
        )
        metrics = MetricsKeeper(self.links)
        self.link = LearnerHandler(job, self.barriers, metrics, cast(Any, owner), self.tasks)
        fail = lambda reason: self.failed.append(f"rank 0 (n0): {reason}")  # noqa: E731
        self.refused: list[tuple[int, str]] = []
        refuse = lambda rank, reason: self.refused.append((rank, reason))  # noqa: E731
        self.owner = SimpleNamespace(
            notify=self.link.notify, fail=fail, refuse=refuse, round_complete=lambda _rounds, _round: None
        )
        self.maker = RoundsFactory(job, self.links, rtt_s, 30.0)
        self.maker.memory.close()
        self.maker.memory = self.memory
        self.connection = SimpleNamespace(notify=self.told.append, writable=True, close=lambda _reason: None)
        self.link.attach(cast(Any, self.connection))
        beginning = Entry(anew=True) if entry is None else entry
        self.link.rounds = self.maker.first(
            self.owner, DescribedModel(MANIFEST, PLAN, None), self.generation, beginning
        )
        self.link._ready = True
        begin(self.link.rounds, self.generation)

    @property
    def rounds(self) -> Rounds:
        assert self.link.rounds is not None
        return self.link.rounds

    def say(self, *notices: Wire) -> list[Wire]:
        """What the daemon tells the learner at that."""
        self.told.clear()
        for notice in notices:
            self.link.notice(notice)
        return list(self.told)

    def compute(self, step: int, buckets: int = len(PLAN.buckets)) -> list[Wire]:
        """A step from its first bucket to its seal; without the seal if not all `buckets`."""
        notices: list[Wire] = [LearnerBucket(step=step, bucket=bucket, weight=1.0) for bucket in range(buckets)]
        if buckets == len(PLAN.buckets):
            notices.append(LearnerSealed(step=step, used=b"\x01", integers=()))
        return self.say(*notices)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.link.close()
        await self.tasks.close()
        self.memory.close()


def stepped(step: int) -> LearnerStepped:
    return LearnerStepped(step=step, samples=1, step_s=0.1, exposed_s=0.0)


def kinds(notices: list[Wire]) -> list[type[Wire]]:
    return [type(notice) for notice in notices]


async def turns() -> None:
    """The loop's, for tasks that wait for nothing."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_throughput_counts_waits_and_not_the_first_step_of_a_process() -> None:
    keeper = MetricsKeeper({})
    for step in range(1, 5):
        keeper.stepped(LearnerStepped(step=step, samples=8, step_s=60.0 if step == 1 else 0.5, exposed_s=0.4))
    assert keeper._snapshot(None).throughput_samples_s == pytest.approx(16)
    assert keeper._snapshot(None).step == 4
    keeper.begin_anew()
    assert keeper._snapshot(None).stage == "starting"
    keeper.stepped(LearnerStepped(step=1, samples=8, step_s=60.0, exposed_s=0.0))
    assert keeper._snapshot(None).throughput_samples_s == pytest.approx(16)
    assert keeper._snapshot(None).stage is None


@pytest.mark.asyncio
async def test_a_turn_of_mixing_is_answered_with_what_is_there() -> None:
    """R9: nothing of the neighbour's, and what was to be shown has left."""
    async with Desk(2, "local:4,gossip=1") as desk:
        assert desk.say(LearnerTurn(round=1, turn=1, shown=True)) == [
            TurnNews(round=1, turn=1, shown=(), awaited=1, sent=True)
        ]
        header = Header(Kind.GOSSIP, 4, generation=desk.generation.hash64(), round=1, step=1, segment_count=1)
        assert "it shows piece 1 of 1 of its weights, of 4 bytes" in str(desk.rounds.chunk_announced(1, header))


@pytest.mark.asyncio
async def test_a_fence_and_a_learners_end_end_its_turn() -> None:
    """G2: it waits for nothing more. The next process begins with the first turn again (J3)."""
    async with Desk(2, "local:4,gossip=1") as desk:
        size_bytes = len(desk.memory.mixed(0))
        first = Header(Kind.GOSSIP, size_bytes, generation=desk.generation.hash64(), round=1, step=1, segment_count=1)
        desk.say(LearnerTurn(round=1, turn=3, shown=True))
        assert desk.rounds.chunk_announced(1, first) is None
        desk.rounds.learner.dead("it was killed")
        assert isinstance(desk.rounds.chunk_announced(1, first), memoryview)
        desk.say(LearnerTurn(round=1, turn=1, shown=True))
        desk.told.clear()
        desk.rounds.crossing.fence()
        assert TurnNews(round=1, turn=1, shown=(), awaited=0, sent=True) in desk.told


@pytest.mark.asyncio
async def test_who_mixes_in_a_job_that_does_not_breaks_the_rules() -> None:
    async with Desk(2, "local:4") as desk:
        desk.say(LearnerTurn(round=1, turn=1, shown=True))
        assert desk.failed == ["rank 0 (n0): it mixes weights, and its job does not"]
        header = Header(Kind.GOSSIP, 4, generation=desk.generation.hash64(), round=1, step=1, segment_count=1)
        assert desk.rounds.chunk_announced(1, header) == "no weights are mixed in this job"


@pytest.mark.asyncio
@pytest.mark.parametrize("round_", [1, 2], ids=["twice", "not given"])
async def test_only_the_round_that_was_given_is_applied(round_: int) -> None:
    """R1: each once, in order."""
    async with Desk(1, "ssp:2") as desk:
        assert kinds(desk.compute(1)) == [RoundDone]
        assert kinds(desk.say(LearnerApplied(round=1), stepped(1))) == [Start]
        desk.say(LearnerApplied(round=round_))
        assert desk.failed == [f"rank 0 (n0): the learner has applied round {round_}, which it was not given"]


@pytest.mark.asyncio
@pytest.mark.parametrize("step", [1, 2, 3], ids=["twice", "before its seal", "not begun"])
async def test_only_the_step_that_was_begun_ends(step: int) -> None:
    """R1: who said so twice would be told to start the step that runs."""
    async with Desk(1, "ssp:2") as desk:
        desk.compute(1)
        assert kinds(desk.say(LearnerApplied(round=1), stepped(1))) == [Start]
        assert not desk.failed
        desk.say(stepped(step))
        assert desk.failed == [f"rank 0 (n0): the learner has ended step {step}, which was not at its end"]


@pytest.mark.asyncio
async def test_a_new_learner_is_in_no_round_of_the_one_that_died() -> None:
    """J3: both count their steps from 1, and a round names the learner's own step that is in it."""
    async with Desk(2, "ssp:2") as desk:
        desk.compute(1)
        rounds = desk.rounds
        bind = rounds._machine.own_bind(1)
        rounds.learner.dead("its process has ended")
        rounds.learner.loads()
        done = RoundComplete(1, False, "", {0: bind}, {}, used=b"\x01", integers=(), squared_norm=0.0)
        rounds._parts.job_rounds._follow(done)
        assert rounds._parts.job_rounds._schedule._complete[1].step == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("sync", ["bsp", "ssp:2"])
async def test_a_job_that_begins_from_a_checkpoint_counts_on(sync: str) -> None:
    """Rounds, chain and samples go on where they were (G4, X1); a step's own numbers begin anew."""
    async with Desk(1, sync, entry=Entry(complete=7, chain=b"7" * 16, samples=70)) as desk:
        assert desk.told == [Start(step=1, decided=7)]
        (done,) = desk.compute(1)
        assert isinstance(done, RoundDone)
        assert (done.round, done.step, done.start) == (8, 1, 2 if sync == "bsp" else 0)
        assert kinds(desk.say(LearnerApplied(round=8), stepped(1))) == ([] if sync == "bsp" else [Start])
        entry = desk.rounds.entry()
        assert (entry.complete, entry.samples) == (8, 71)
        assert entry.chain != b"7" * 16
        assert desk.rounds.committed == 8
        assert not desk.failed


@pytest.mark.asyncio
async def test_a_learner_that_has_finished_says_nothing_more() -> None:
    """Its process may have been seen to end before its last words were read: nobody waits for it again (R5)."""
    async with Desk(2, "ssp:2") as desk:
        desk.rounds.learner.gone("its script has ended")
        for late in (LearnerBack(), LearnerIdle(reason="idle", finished=False), LearnerBarrier(number=1), stepped(1)):
            assert desk.say(late) == []
        await turns()
        assert not desk.failed
        assert desk.rounds._machine._learner.gone
        assert not desk.links[1].sent, "it is in no barrier"


@pytest.mark.asyncio
async def test_the_batch_that_is_shown_is_that_of_all_learners_of_the_device() -> None:
    """R6: samples are dealt in groups, one for each learner."""
    async with Desk(2, "bsp") as desk:
        job = cast(Any, desk.maker)._job
        job.spec = job.spec.model_copy(update={"learners": 3})
        model = DescribedModel(MANIFEST, PLAN, SampleSpace(total=96, batch=8, whole_batches=False, drop_last=False))
        rounds = desk.maker.first(cast(Any, desk.owner), model, desk.generation, Entry(anew=True))
        assert rounds.measures()["batch"] == 24
        rounds.close()


@pytest.mark.asyncio
async def test_one_barrier_at_a_time() -> None:
    async with Desk(2, "ssp:2") as desk:
        desk.say(LearnerBarrier(number=1), LearnerBarrier(number=2))
        assert desk.failed == ["rank 0 (n0): the learner entered barrier 2 while it was in another"]


@pytest.mark.asyncio
@pytest.mark.parametrize("behind", [True, False], ids=["behind", "ahead"])
async def test_a_learner_in_a_barrier_lets_one_that_is_behind_go_on(behind: bool) -> None:
    """R5, R7: a learner that has begun anew, and leaves epochs early, has more steps to go than all others: at s=0 they
    would wait for it in the barrier, and it for them in its round. One that has passed the barrier waits as ever."""
    async with Desk(2, "bsp") as desk:
        desk.say(LearnerBarrier(number=1))
        desk.links[1].sent.clear()
        bind = Bind(round=1, step=1, base=0, weight=1.0, samples=(), hyperparameters=b"", sizes=())
        desk.rounds.message(1, bind, behind=behind)
        assert [body for body in desk.links[1].sent if isinstance(body, Null)] == ([Null(round=1)] if behind else [])
        desk.barriers.reached(BarrierReached(job=JOB, rank=1, number=1))
        await turns()
        assert BarrierPassed(number=1, error=None) in desk.told
        assert desk.rounds._machine.phase is (Phase.BOUNDARY if behind else Phase.COMPUTING)
        assert not desk.failed


@pytest.mark.asyncio
async def test_a_learner_that_enters_a_barrier_lets_one_go_on_that_waits_for_it_already() -> None:
    """R5, R7: the other one has bound its round before. Nothing more would come from it that this one could hear."""
    async with Desk(2, "bsp") as desk:
        desk.rounds.message(1, Bind(round=1, step=1, base=0, weight=1.0), behind=True)
        desk.say(LearnerBarrier(number=1))
        assert Null(round=1) in desk.links[1].sent
        desk.rounds.message(1, Seal(round=1, used=b"\x01", integers=()))
        for bucket in PLAN.buckets:
            desk.rounds.bucket_complete(1, bucket.index, False, 2, 1.0, 0.0)
        desk.barriers.reached(BarrierReached(job=JOB, rank=1, number=1, round=1))
        await turns()
        assert desk.told == [], "the round comes before the barrier ends"
        desk.rounds._performer.handle(RoundDecoded(1))
        assert kinds(desk.told) == [RoundDone]
        assert desk.say(LearnerApplied(round=1))[0] == BarrierPassed(number=1, error=None)
        assert not desk.failed


@pytest.mark.asyncio
@pytest.mark.parametrize("knows", ["by those inside", "from who took it in"])
@pytest.mark.parametrize("bound", ["before", "meanwhile"])
async def test_a_learner_that_runs_through_barriers_misses_no_round_for_them(knows: str, bound: str) -> None:
    """It comes in where the others have passed them, and nothing is waited for there: it goes on with its first step,
    which the others' round waits for."""
    async with Desk(2, "bsp") as desk:
        if knows == "by those inside":
            desk.barriers.reached(BarrierReached(job=JOB, rank=1, number=7))
        else:
            desk.barriers.begin_anew(passed=7)
        bind = Bind(round=1, step=1, base=0, weight=1.0)
        if bound == "before":
            desk.rounds.message(1, bind, behind=True)
        desk.say(LearnerBarrier(number=1))
        if bound == "meanwhile":
            desk.rounds.message(1, bind, behind=True)
        await turns()
        assert desk.told == [BarrierPassed(number=1, error=None)]
        assert desk.rounds._machine.phase is Phase.COMPUTING
        assert Null(round=1) not in desk.links[1].sent
        assert not desk.failed


@pytest.mark.asyncio
@pytest.mark.parametrize("sync", ["bsp", "ssp:2"])
async def test_a_learner_goes_on_after_a_barrier_that_cannot_be_passed(sync: str) -> None:
    """A script may catch that error: it is told to start again, as after a barrier that was passed."""
    async with Desk(2, sync) as desk:
        desk.gone.add(1)
        desk.say(LearnerBarrier(number=1))
        await turns()
        passed = desk.told[0]
        assert isinstance(passed, BarrierPassed)
        assert passed.error == "rank 1 (n1) ended its script; waiting to reach barrier 1 is in vain"
        assert desk.told[1:] == ([] if sync == "bsp" else [Start(step=1, decided=0)])
        desk.compute(1)
        assert not desk.failed


@pytest.mark.asyncio
async def test_a_step_left_in_its_backward_pass_is_begun_again() -> None:
    """V2: it is void, and the learner, which has not sealed it, waits to be told to start."""
    async with Desk(1, "ssp:2") as desk:
        desk.compute(1, buckets=1)
        told = desk.say(LearnerIdle(reason="no samples", finished=False))
        assert kinds(told) == [RoundDone]
        assert desk.say(LearnerApplied(round=1), LearnerBack()) == [Start(step=1, decided=1)]
        assert not desk.failed


@pytest.mark.asyncio
async def test_a_long_reason_fits_into_the_report() -> None:
    async with Desk(1, "ssp:2") as desk:
        desk.say(LearnerIdle(reason="x" * limits.ERROR_CHARS_MAX, finished=False))
        waiting = desk.rounds.learner.waiting()
        assert waiting is not None
        assert len(waiting) <= limits.ERROR_CHARS_MAX


@pytest.mark.asyncio
async def test_signs_of_life_do_not_pile_up() -> None:
    """A learner that evaluates for a day reads none of them."""
    async with Desk(1, "ssp:2") as desk:
        desk.told.clear()
        desk.link.sign_of_life()
        assert kinds(desk.told) == [Waiting]
        desk.connection.writable = False
        desk.link.sign_of_life()
        assert len(desk.told) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("visibility", ["eager", "fixed"])
async def test_what_is_kept_for_a_learner_in_its_last_barrier_is_bounded(visibility: str) -> None:
    """It applies rounds until all have finished. `fixed` passes over none but learners that are gone (R8)."""
    async with Desk(2, "ssp:2", visibility) as desk:
        desk.say(LearnerBarrier(number=0))
        machine = desk.rounds._machine
        for round_ in range(1, 3):
            desk.rounds.message(1, Bind(round=round_, step=round_, base=0, weight=1.0))
            desk.rounds.message(1, Call(round=round_))
            desk.rounds.message(1, Seal(round=round_, used=b"\x01", integers=()))
        assert machine.decided == 2, "nobody waits for it"
        assert machine._learner.gone == (visibility == "fixed")


@pytest.mark.asyncio
async def test_until_a_learner_is_ready_it_hears_which_epochs_its_script_runs_through_before() -> None:
    """X4: with its state, and again as others go on. Once it is ready its deal tells it."""
    told: list[Wire] = []
    figures = SimpleNamespace(values=(), stage=None, rounds_planned=0)
    learner = LearnerHandler(*cast(Any, (None, None, figures, None, None)))
    rounds = SimpleNamespace(epochs_over=0, learner=SimpleNamespace(waiting=lambda: "samples"))
    task = StateTask(units=(), folder="state", round=7)

    async def state(*_: object) -> StateTask:
        return task

    learner.rounds = cast(Any, rounds)
    learner.requests = cast(Any, SimpleNamespace(state=state, ready=lambda: None))
    learner._connection = cast(Any, SimpleNamespace(writable=True, notify=told.append))
    for over in (0, 3):
        rounds.epochs_over = over
        assert await learner.request(LearnerState(units=()), lambda _event: None) == task
    assert told == [EpochOver(epoch=2, unused=0)]
    rounds.epochs_over = 5
    learner.sign_of_life()
    assert told[1:] == [EpochOver(epoch=4, unused=0), Waiting(reason="samples")]
    await learner.request(LearnerReady(), lambda _event: None)
    learner.sign_of_life()
    assert told[3:] == [Waiting(reason="samples")]
