"""When a learner is asked for its state, by whom, and what is written beside it (J1, G5, X1)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
import pytest_asyncio

from meshtraind.recovery import checkpointer as checkpointing
from meshtraind.recovery.checkpointer import ROUNDS_AHEAD, Checkpointer
from meshtraind.recovery.state_donor import Loans, StateDonor
from meshtraind.recovery.state_requests import StateRequests
from meshtraind.rounds.history import Entry
from meshtraind.runtime.tasks import TaskSet, told_elsewhere
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.checkpoint_store import CHECKPOINTS, Checkpoint, CheckpointStore
from meshtraind.storage.cleanup import STATE
from meshtraind.storage.state_transfer import StateFiles
from meshtraind.transport.connection import RequestFailed
from meshwire.checkpoints.manifest import unit_file
from meshwire.message_base import Wire
from meshwire.messages.generation import AskState, DealState, Model
from meshwire.messages.job import BlobRef, JobSpec, Member
from meshwire.messages.learner import LearnerSaved, SampleSpace, Save
from meshwire.messages.link import Software
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.sync_modes.mode import sync_settings
from tests.computing import computing
from tests.daemon.waiting import until

JOB = "1kx3m9q2v7bd"
SOFTWARE = Software(meshtrain="0.1.0", python="3.11.7", torch="2.13.0", system="Linux x86_64")
MEMBERS = tuple(Member(device=f"{rank:064x}", incarnation=1, name=f"n{rank}") for rank in range(3))
SPACE = SampleSpace(total=1000, batch=32, whole_batches=False, drop_last=False)
UNITS = (b"weights", b"options")
MODEL = Model(
    job=JOB,
    rank=0,
    manifest=ModelManifest(
        tensors=(TensorSpec(name="a", shape=(3,), dtype="float32", kind="parameter", aliases=()),), optimizer="SGD"
    ),
    plan=bytes(32),
)


def spec(**changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "job": JOB, "name": "test", "submitter": "0" * 64, "created_at_s": 0.0, "script": "train.py", "args": (),
        "env": (), "files": BlobRef(sha256=bytes(32), size_bytes=1), "data": None, "sync": sync_settings("bsp"),
        "codec": "fp32", "on_nan": "stop", "seed": 7, "bucket_bytes": 1024, "hash_every": 0, "trace": False,
        "checkpoint_every": "20r",
    }  # fmt: skip
    return JobSpec(**(fields | changes))


def deal(round_: int) -> DealState:
    return DealState(epoch=0, position=round_, returned=(), held=(), sizes=((0, 32),))


class FakeRounds:
    """Rounds that are complete, one after the other; each has a deal and a chain of its own."""

    finished = False
    closed = False
    sample_space = SPACE

    def __init__(self) -> None:
        self.round = 0
        self.committed = 0

    @property
    def complete(self) -> int:
        return self.round

    def entry(self) -> Entry:
        return Entry(self.round, bytes([self.round % 256]) * 16, 32 * self.round, deal(self.round))


class Desk:
    """One member's learner and checkpoints."""

    def __init__(self, folder: Path, rank: int = 0, **changes: Any) -> None:
        first = computing(JOB, MEMBERS[0].device, MEMBERS)
        self.job = cast(Any, SimpleNamespace(spec=spec(**changes), rank=rank, folder=folder, generation=first))
        self.told: list[Save] = []
        self.ready = True
        self.saving = StateRequests(self)
        self.failed: list[str] = []
        self.tasks = TaskSet("test", lambda name, error: self.failed.append(f"{name}: {error!r}"))
        self.rounds = FakeRounds()
        self.store = CheckpointStore(folder, JOB, keep=3)
        self.checkpointing = Checkpointer(self.job, self.store, SOFTWARE, self.saving, self.tasks, lambda: MODEL)

    def notify(self, body: Wire) -> None:
        self.told.append(cast(Save, body))

    def complete(self, upto: int, *, committed: bool = True) -> None:
        while self.rounds.round < upto:
            self.rounds.round += 1
            if committed:
                self.rounds.committed = self.rounds.round
            self.checkpointing.round_complete(cast(Any, self.rounds), self.rounds.round)

    async def asked(self, count: int = 1) -> Save:
        async with asyncio.timeout(10):
            while len(self.told) < count:
                await asyncio.sleep(0.005)
        return self.told[count - 1]

    def answer(self, save: Save, round_: int, error: str | None = None) -> None:
        for unit, content in enumerate(UNITS):
            (Path(save.folder) / unit_file(unit)).write_bytes(content)
        self.saving.saved(LearnerSaved(number=save.number, round=round_, units=len(UNITS), error=error))

    def found(self) -> list[int]:
        return [one.round for one in self.store.listed() if isinstance(one, Checkpoint)]

    async def idle(self) -> None:
        """Until nothing is being written."""
        async with asyncio.timeout(10):
            while self.checkpointing._after is not None:
                await asyncio.sleep(0.005)
        assert not self.failed


@pytest_asyncio.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    made = Desk(tmp_path / "job")
    yield made
    await made.tasks.close()
    assert not made.failed


@pytest.mark.asyncio
async def test_the_deal_is_that_after_the_round_which_was_saved(desk: Desk) -> None:
    """X1: the others' rounds go on while the learner computes, and the ledger with them."""
    desk.complete(20 - ROUNDS_AHEAD)
    save = await desk.asked()
    assert save.after_round == 20
    desk.complete(30)
    desk.answer(save, 23)
    await desk.idle()
    manifest = desk.store.listed()[0].manifest  # type: ignore[union-attr]
    assert (manifest.round, manifest.deal, manifest.samples) == (23, deal(23), 23 * 32)
    assert manifest.chain == "17" * 16
    assert manifest.space == SPACE
    assert JobSpec.load(msgpack.unpackb(bytes.fromhex(manifest.spec))) == desk.job.spec
    assert desk.checkpointing.newest is not None
    assert not desk.checkpointing._passed, "nothing is kept when nobody saves"


@pytest.mark.asyncio
async def test_what_a_person_cancels_can_be_gone_on_with(desk: Desk) -> None:
    """Whatever was learned since the last checkpoint; a job of which all is saved is ended at once."""
    desk.complete(5)
    saves = desk.tasks.spawn(desk.checkpointing.before_the_end(cast(Any, desk.rounds)), "save")
    save = await desk.asked()
    assert save.after_round == 5
    desk.complete(7)
    desk.answer(save, 6)
    await asyncio.wait_for(saves, 10)
    manifest = desk.store.listed()[0].manifest  # type: ignore[union-attr]
    assert (manifest.round, manifest.deal) == (6, deal(6))
    desk.rounds.round = 6
    await asyncio.wait_for(desk.checkpointing.before_the_end(cast(Any, desk.rounds)), 10)
    assert len(desk.told) == 1


@pytest.mark.asyncio
async def test_a_checkpoint_that_is_being_written_is_waited_for(desk: Desk) -> None:
    """Else a job that is cancelled meanwhile would go on from the one before."""
    desk.complete(20 - ROUNDS_AHEAD)
    save = await desk.asked()
    ends = desk.tasks.spawn(desk.checkpointing.before_the_end(cast(Any, desk.rounds)), "save")
    desk.complete(21)
    await asyncio.sleep(0.05)
    assert not ends.done()
    desk.answer(save, 20)
    await asyncio.wait_for(ends, 10)
    assert desk.found() == [20]
    assert len(desk.told) == 1


@pytest.mark.asyncio
async def test_a_cancelled_job_waits_no_longer_for_a_learner_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for one that is not to save, or has nothing to."""
    monkeypatch.setattr(checkpointing, "END_TIMEOUT_S", 0.2)
    for every, rounds, asked in (("20r", 5, 1), ("off", 5, 0), ("20r", 0, 0)):
        desk = Desk(tmp_path, checkpoint_every=every)
        desk.complete(rounds)
        await asyncio.wait_for(desk.checkpointing.before_the_end(cast(Any, desk.rounds)), 10)
        assert len(desk.told) == asked
        assert not desk.found()
        await desk.tasks.close()


@pytest.mark.asyncio
async def test_all_members_save_after_the_same_round(tmp_path: Path) -> None:
    """The two whose turn it is are asked for the same round, before it is complete."""
    desks = [Desk(tmp_path / str(rank), rank) for rank in range(3)]
    for desk in desks:
        desk.complete(20 - ROUNDS_AHEAD)
    await until(lambda: sum(len(desk.told) for desk in desks) >= 2, "two to be asked")
    asked = [[save.after_round for save in desk.told] for desk in desks]
    assert sorted(asked) == [[], [20], [20]]
    for desk in desks:
        await desk.tasks.close()


@pytest.mark.asyncio
async def test_after_some_minutes_the_round_of_now_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the minutes in which the job began; then once."""
    clock = SimpleNamespace(time=lambda: 100.0)
    monkeypatch.setattr(checkpointing, "time", clock)
    desk = Desk(tmp_path, checkpoint_every="5")
    desk.complete(3)
    clock.time = lambda: 301.0
    assert not desk.told
    desk.complete(4)
    save = await desk.asked()
    assert save.after_round == 4
    desk.answer(save, 4)
    await desk.idle()
    desk.complete(9)
    assert desk.found() == [4]
    assert len(desk.told) == 1
    assert desk.checkpointing._after is None


@pytest.mark.asyncio
async def test_a_round_is_named_once_all_hold_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """G5: until then its history may not be the one that is kept."""
    monkeypatch.setattr(checkpointing, "COMMITTED_POLL_S", 0.01)
    desk.complete(20 - ROUNDS_AHEAD)
    save = await desk.asked()
    desk.complete(21, committed=False)
    desk.answer(save, 20)
    await asyncio.sleep(3 * checkpointing.COMMITTED_POLL_S)
    assert not desk.found()
    desk.rounds.committed = 20
    await desk.idle()
    assert desk.found() == [20]


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["left out", "learner lost", "cannot write", "no learner"])
async def test_what_cannot_be_saved_leaves_nothing_and_the_next_one_is(desk: Desk, how: str) -> None:
    desk.ready = how != "no learner"
    desk.complete(20 - ROUNDS_AHEAD)
    if desk.ready:
        save = await desk.asked()
        desk.complete(20, committed=how != "left out")
        if how == "learner lost":
            desk.saving.learner_lost()
        else:
            desk.answer(save, 20, "the disk is full" if how == "cannot write" else None)
        desk.rounds.closed = how == "left out"
    await desk.idle()
    assert not list((desk.job.folder / CHECKPOINTS).iterdir())
    before = len(desk.told)
    desk.ready, desk.rounds.closed = True, False
    desk.complete(60 - ROUNDS_AHEAD)
    save = await desk.asked(before + 1)
    desk.complete(60)
    desk.answer(save, save.after_round)
    await desk.idle()
    assert desk.found() == [save.after_round]


@pytest.mark.asyncio
async def test_nothing_is_saved_when_it_is_off(tmp_path: Path) -> None:
    desk = Desk(tmp_path, checkpoint_every="off")
    desk.complete(300)
    assert desk.checkpointing._after is None
    assert not desk.told


# Members that join


@pytest.mark.asyncio
async def test_several_ask_at_once_and_each_gets_its_own(desk: Desk, tmp_path: Path) -> None:
    first = desk.tasks.spawn(desk.saving.save(5, tmp_path), "a member that asks")
    second = desk.tasks.spawn(desk.saving.save(9, tmp_path), "a member that asks")
    one, other = await desk.asked(1), await desk.asked(2)
    desk.saving.saved(LearnerSaved(number=other.number, round=9, units=1))
    desk.saving.saved(LearnerSaved(number=77, round=1, units=1))
    desk.saving.saved(LearnerSaved(number=one.number, round=6, units=1))
    assert [saved.round for saved in await asyncio.gather(first, second)] == [6, 9]
    with pytest.raises(RequestFailed, match="has not reached a boundary"):
        await desk.saving.save(5, tmp_path, timeout_s=0.01)


@pytest.mark.asyncio
async def test_a_checkpoint_that_is_new_enough_is_given(desk: Desk, tmp_path: Path) -> None:
    """J1: the learner is not disturbed for what lies on the disk."""
    store = BlobStore(tmp_path / "blobs")
    chains = {22: b"a" * 16, 30: b"b" * 16}
    learner = SimpleNamespace(states=desk.saving, rounds=SimpleNamespace(chain_after=chains.get))
    donor = StateDonor(desk.job, files_of(desk, store), learner, desk.checkpointing, desk.tasks)
    desk.complete(20 - ROUNDS_AHEAD)
    save = await desk.asked()
    desk.complete(20)
    desk.answer(save, 20)
    await desk.idle()
    given = await donor.state(MEMBERS[1].device, AskState(job=JOB, after_round=15))
    assert (given.round, given.chain) == (20, bytes([20]) * 16)
    assert len(desk.told) == 1
    asking = desk.tasks.spawn(donor.state(MEMBERS[1].device, AskState(job=JOB, after_round=21)), "a member that asks")
    desk.answer(await desk.asked(2), 22)
    assert ((await asking).round, (await asking).chain) == (22, b"a" * 16), "its asker has to know on which history"
    assert await donor.state(MEMBERS[1].device, AskState(job=JOB, after_round=22)) == await asking
    donor.forget()
    desk.checkpointing.forget()
    again = desk.tasks.spawn(donor.state(MEMBERS[1].device, AskState(job=JOB, after_round=15)), "a member that asks")
    desk.answer(await desk.asked(3), 30)
    assert (await again).round == 30, "what was saved before may be of a history that was not kept"
    tasks = TaskSet("test", on_error=told_elsewhere)
    late = tasks.spawn(donor.state(MEMBERS[1].device, AskState(job=JOB, after_round=31)), "a member that asks")
    desk.answer(await desk.asked(4), 31)  # of which it is not known any more what the round was
    with pytest.raises(RequestFailed, match="the state after round 31"):
        await late
    await tasks.close()


def files_of(desk: Desk, store: BlobStore) -> StateFiles:
    """Where the states of its job lie."""
    return StateFiles(JOB, desk.job.folder / STATE, store)


class Lender:
    """A member that gives its learner's state, one file for each round, and all that lies on its disk for that."""

    def __init__(self, desk: Desk, folder: Path) -> None:
        self.desk = desk
        self.store = BlobStore(folder / "blobs")
        chain = lambda round_: bytes([round_ % 256]) * 16  # noqa: E731
        learner = SimpleNamespace(states=desk.saving, rounds=SimpleNamespace(chain_after=chain))
        nothing_saved = SimpleNamespace(newest=None)
        self.donor = StateDonor(desk.job, files_of(desk, self.store), learner, nothing_saved, desk.tasks)
        self.enter((0,))

    def enter(self, learning: tuple[int, ...], ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        """Into a generation of these, of which these compute."""
        job = self.desk.job
        changes = {"number": job.generation.number + 1, "ranks": ranks, "learning": learning}
        job.generation = job.generation.model_copy(update=changes)
        self.donor.entered(job.generation)

    async def gives(self, rank: int, round_: int) -> int:
        """To a member, after this round or a later one; which it is."""
        asked = AskState(job=JOB, after_round=round_)
        count = len(self.desk.told)
        asking = self.desk.tasks.spawn(self.donor.state(MEMBERS[rank].device, asked), "a member that asks")
        while not asking.done():
            await asyncio.sleep(0.001)
            if len(self.desk.told) > count:
                save, count = self.desk.told[count], count + 1
                (Path(save.folder) / unit_file(0)).write_bytes(round_.to_bytes(4, "big"))
                self.desk.saving.saved(LearnerSaved(number=save.number, round=round_, units=1))
        return asking.result().round

    async def lies_here(self) -> list[int]:
        """Of which rounds, when all deleting is done."""
        async with asyncio.timeout(10):
            while self.desk.tasks._tasks:
                await asyncio.sleep(0.001)
        files = [path for path in self.store.path.rglob("*") if path.is_file()]
        assert not list((self.desk.job.folder / STATE).iterdir())
        return sorted(int.from_bytes(path.read_bytes(), "big") for path in files)


@pytest.mark.asyncio
async def test_a_state_lies_on_the_disk_for_as_long_as_somebody_loads_it(desk: Desk, tmp_path: Path) -> None:
    """One whole state for each joiner stayed until the job ended, which may be in a month."""
    lender = Lender(desk, tmp_path)
    for round_ in range(10, 60, 10):
        assert await lender.gives(1, round_) == round_
        assert await lender.lies_here() == [round_]
        lender.enter((0,))
        assert await lender.lies_here() == [round_], "another member was lost: this one still loads"
        lender.enter((0, 1))
        assert await lender.lies_here() == []
        lender.enter((0,))
    assert await lender.gives(1, 60) == 60
    assert await lender.gives(2, 55) == 60, "what is there is given again"
    assert await lender.gives(2, 70) == 70
    assert await lender.lies_here() == [60, 70]
    assert await lender.gives(1, 80) == 80
    assert await lender.lies_here() == [70, 80]
    lender.enter((0,), ranks=(0, 2))
    assert await lender.lies_here() == [70]
    lender.donor.forget()
    assert await lender.lies_here() == [70], "its own learner is lost: who loads goes on"
    assert await lender.gives(1, 90) == 90
    await lender.donor.close()
    assert await lender.lies_here() == []
    with pytest.raises(RequestFailed, match="has ended there"):
        await lender.donor.state(MEMBERS[1].device, AskState(job=JOB, after_round=1))
    assert not desk.failed


@pytest.mark.asyncio
async def test_a_state_whose_history_is_left_while_it_is_stored_is_given_to_nobody_else(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G4, J3: this device would promise to have a state that no other can use."""
    lender = Lender(desk, tmp_path)
    keep = StateFiles.keep

    async def left_meanwhile(self: StateFiles, number: int, units: Sequence[int]) -> tuple[BlobRef, ...]:
        lender.donor.forget()
        return await keep(self, number, units)

    monkeypatch.setattr(StateFiles, "keep", left_meanwhile)
    assert await lender.gives(1, 10) == 10
    assert lender.donor.newest_round() is None
    assert await lender.lies_here() == [10], "who asked may be of that history still"
    monkeypatch.setattr(StateFiles, "keep", keep)
    assert await lender.gives(2, 5) == 5
    assert lender.donor.newest_round() == 5


@pytest.mark.asyncio
async def test_a_state_that_could_not_be_written_leaves_nothing(desk: Desk, tmp_path: Path) -> None:
    """A learner is killed in the middle of it, or its disk is full."""
    lender = Lender(desk, tmp_path)
    tasks = TaskSet("test", on_error=told_elsewhere)
    asking = tasks.spawn(lender.donor.state(MEMBERS[1].device, AskState(job=JOB, after_round=5)), "a member that asks")
    save = await desk.asked()
    (Path(save.folder) / unit_file(0)).write_bytes(b"half of it")
    desk.saving.learner_lost()
    with pytest.raises(RequestFailed, match="its learner has ended"):
        await asking
    assert await lender.lies_here() == []
    await tasks.close()


def test_who_is_still_listed_as_computing_when_it_asks_loads_until_it_has_rested() -> None:
    """X3: a learner that was killed loads again, and a generation may be entered whose proposer had not heard of it."""
    first = computing(JOB, MEMBERS[0].device, MEMBERS)
    loans: Loans[object] = Loans()
    state = object()
    loans.give(MEMBERS[1].device, state, first)
    for learning, lent in (((0, 1), True), ((0,), True), ((0, 1), False)):
        loans.entered(first.model_copy(update={"learning": learning}))
        assert loans.has(state) is lent, learning


def test_who_is_promised_to_compute_when_its_next_process_asks_loads_until_it_has_rested() -> None:
    """X3: the process before it was ready and has died; that generation is entered all the same."""
    first = computing(JOB, MEMBERS[0].device, MEMBERS)
    loading = first.model_copy(update={"learning": (0,), "counted": (0,)})
    loans: Loans[object] = Loans()
    state = object()
    loans.entered(loading)
    loans.give(MEMBERS[1].device, state, first)  # promised, and not entered yet
    for learning, lent in (((0, 1), True), ((0,), True), ((0, 1), False)):
        loans.entered(first.model_copy(update={"learning": learning}))
        assert loans.has(state) is lent, learning
