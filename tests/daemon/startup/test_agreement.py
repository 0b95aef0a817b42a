"""G9: what learners agree on before round 1, though members are lost meanwhile, the giver of the start state too."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from meshtraind.startup.agreement import Agreement
from meshtraind.startup.before_round_one import Founding

from meshtraind.runtime.tasks import TaskSet, told_elsewhere
from meshtraind.startup import start_state as startstate
from meshtraind.storage.blobs import BlobStore
from meshtraind.transport.connection import ConnectionEnded, RequestFailed
from meshwire.jobs.lifecycle import new_job_id
from meshwire.message_base import Wire
from meshwire.messages.generation import Enter, Model, StateIndex, StateOffer, StateReady, StateWant
from meshwire.messages.job import BlobRef, Generation, Member, ResumePoint
from meshwire.messages.learner import StateTask
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.rounds.chain import START

JOB = new_job_id(bytes(8))
MEMBERS = tuple(Member(device=letter * 64, incarnation=1, name=letter) for letter in "abc")
EQUAL = (bytes(32), bytes(32))
UNEQUAL = (bytes(32), b"1" * 32)
GIVER = cast(Any, "a link")


def generation(number: int, learning: tuple[int, ...]) -> Generation:
    first = Generation.first(JOB, MEMBERS[0].device, MEMBERS)
    return first.model_copy(update={"number": number, "ranks": learning, "learning": learning})


def entering(number: int, learning: tuple[int, ...], *, founded: bool = False) -> Enter:
    now = generation(number, learning)
    return Enter(
        job=JOB,
        generation=now.hash64(),
        cut=0,
        chain=START,
        source=learning[0],
        complete=(),
        reload=(),
        founded=founded,
    )


class Trio:
    """Three members, whose messages arrive at once, but for those of lost ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tasks = TaskSet("trio", told_elsewhere)
        self.lost: set[int] = set()
        self.jobs = [
            SimpleNamespace(
                spec=SimpleNamespace(job=JOB, resume=None),
                rank=rank,
                members=MEMBERS,
                generation=generation(1, (0, 1, 2)),
                gone=set(),
            )
            for rank in range(3)
        ]
        self.members = [Agreement(cast(Any, self.jobs[rank]), self._sender(rank)) for rank in range(3)]
        self.foundings = [Founding(cast(Any, self.jobs[rank]), self.members[rank]) for rank in range(3)]

    def _sender(self, sender: int) -> Any:
        def send(rank: int, message: Wire) -> None:
            if not self.lost & {sender, rank}:
                assert self.members[rank].news(cast(Any, message)) is None

        return send

    def lose(self, lost: int) -> None:
        """The others fence, and enter a generation without it."""
        self.lost.add(lost)
        left = tuple(rank for rank in range(3) if rank not in self.lost)
        number = 1 + len(self.lost)
        for rank in left:
            self.foundings[rank].fence()
        founded = any(self.foundings[rank].standing().founded for rank in left)
        for rank in left:
            self.jobs[rank].generation = generation(number, left)
            self.foundings[rank].enter(generation(number, left), entering(number, left, founded=founded))
            self.members[rank].entered()

    def models(self, rank: int, plan: int = 0) -> "asyncio.Task[None]":
        own = Model(job=JOB, rank=rank, manifest=MANIFEST, plan=bytes([plan]) * 32)
        return self.tasks.spawn(self.members[rank].agree_on_model(own, ignore), f"model {rank}")

    def states(self, rank: int, units: tuple[bytes, ...] = EQUAL) -> "asyncio.Task[StateTask]":
        store = cast(BlobStore, SimpleNamespace(hold=lambda *_a, **_k: None, blob_path=lambda _sha256: self.folder))
        work = self.members[rank].agree_on_state(units, self.folder / str(rank), {0: GIVER}, store, ignore)
        return self.tasks.spawn(work, f"state {rank}")

    def readies(self, rank: int) -> "asyncio.Task[None]":
        return self.tasks.spawn(self.members[rank].ready(self.folder, cast(Any, None), ignore), f"ready {rank}")


MANIFEST = ModelManifest(
    tensors=(TensorSpec(name="weight", shape=(3,), dtype="float32", kind="parameter"),), optimizer="SGD"
)


def ready_of(rank: int) -> StateReady:
    return StateReady(job=JOB, rank=rank, giver=0)


def ignore(_notice: Wire) -> None:
    pass


@asynccontextmanager
async def trio(folder: Path) -> AsyncIterator[Trio]:
    made = Trio(folder)
    try:
        yield made
    finally:
        await made.tasks.close()


async def soon(*tasks: "asyncio.Task[Any]") -> list[Any]:
    async with asyncio.timeout(5):
        return list(await asyncio.gather(*tasks))


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0.005)  # folders are made in a thread


@pytest.mark.asyncio
async def test_the_model_of_one_that_is_lost_is_not_waited_for(tmp_path: Path) -> None:
    async with trio(tmp_path) as three:
        waiting = [three.models(1), three.models(2)]
        await settled()
        assert not any(task.done() for task in waiting)
        three.lose(0)
        await soon(*waiting)


@pytest.mark.asyncio
async def test_learners_that_cannot_agree_end_the_job(tmp_path: Path) -> None:
    """Another one of the same script would not, either."""
    async with trio(tmp_path) as three:
        waiting = [three.models(0), three.models(1), three.models(2, plan=1)]
        for task in waiting:
            with pytest.raises(RequestFailed, match="plans its buckets differently from rank 0"):
                await soon(task)
        assert all(member.broken for member in three.members)


@pytest.mark.asyncio
async def test_the_next_one_gives_its_state(tmp_path: Path) -> None:
    """The giver is lost before it has told of its start: the lowest rank of those left takes its place."""
    async with trio(tmp_path) as three:
        bert, cleo = three.states(1), three.states(2, UNEQUAL)
        await settled()
        three.lose(0)
        (task,) = await soon(bert)
        assert (task.write, task.units) == (True, (1,)), "cleo begins with another value"
        assert not cleo.done(), "what it wants has not been written yet"


@pytest.mark.asyncio
async def test_a_state_that_not_all_have_is_void_when_its_giver_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bert's learner has been told to keep its state, which was the giver's; cleo has not got it and never will."""

    async def breaks(*_args: object) -> None:
        raise ConnectionEnded("the giver is gone")

    monkeypatch.setattr(startstate, "fetch_blob", breaks)
    async with trio(tmp_path) as three:
        _, bert, cleo = three.states(0), three.states(1), three.states(2, UNEQUAL)
        assert (await soon(bert))[0].units == ()
        ready = three.readies(1)
        await settled()
        three.lose(0)
        await settled()
        assert three.members[1].is_void
        assert not three.members[2].is_void
        assert not cleo.done()
        assert not ready.done()
        three.members[1].learner_lost()  # another one begins, which gives its state
        again = three.states(1)
        assert (await soon(again))[0].units == (1,)


@pytest.mark.asyncio
async def test_what_arrives_whole_from_a_giver_that_is_lost_meanwhile_is_no_start_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its learner would begin with what nobody else has, and wait for the others for half an hour."""
    async with trio(tmp_path) as three:

        async def arrives(*_args: object) -> None:
            three.lose(0)

        monkeypatch.setattr(startstate, "fetch_blob", arrives)
        cleo = three.states(2, UNEQUAL)
        offer = StateOffer(job=JOB, units=((1, BlobRef(sha256=bytes(32), size_bytes=1)),), rank=0)
        three._sender(0)(2, StateIndex(job=JOB, units=EQUAL, rank=0))
        three._sender(0)(2, offer)
        while not three.lost:
            await asyncio.sleep(0.001)
        bert = three.states(1)
        assert (await soon(bert))[0].units == (1,)
        assert not cleo.done(), "it waits for bert's"


@pytest.mark.asyncio
async def test_if_one_has_begun_all_that_are_left_begin(tmp_path: Path) -> None:
    """The giver's word that it is ready reached bert alone. What bert has told in its promise counts for all."""
    async with trio(tmp_path) as three:
        await soon(three.states(0), three.states(1), three.states(2))
        waiting = [three.readies(1), three.readies(2)]
        await settled()
        three._sender(0)(1, ready_of(0))
        await soon(waiting[0])
        assert not waiting[1].done()
        three.lose(0)
        await soon(waiting[1])
        assert not three.members[2].is_void


@pytest.mark.asyncio
async def test_nobody_begins_between_its_promise_and_the_next_generation(tmp_path: Path) -> None:
    """It has said that it has not begun: the others may take another start state."""
    async with trio(tmp_path) as three:
        await soon(three.states(0), three.states(1), three.states(2))
        waiting = [three.readies(1), three.readies(2)]
        await settled()
        for rank in (1, 2):
            three.foundings[rank].fence()
            assert not three.foundings[rank].standing().founded
            three._sender(0)(rank, ready_of(0))
        await settled()
        assert not any(task.done() for task in waiting)
        three.lose(0)
        await settled()
        assert not any(task.done() for task in waiting)
        assert all(three.members[rank].is_void for rank in (1, 2))


@pytest.mark.asyncio
async def test_nobody_begins_while_a_member_is_about_to_be_counted_or_to_leave(tmp_path: Path) -> None:
    """Where all prepare anew they are counted one after the other: the first one would begin alone."""
    async with trio(tmp_path) as three:
        for rank in range(3):
            both = generation(2, (0, 1)).model_copy(update={"learning": (0,)})
            three.jobs[rank].generation = both
            three.members[rank].entered()
        await soon(three.states(0))
        (waiting,) = (three.readies(0),)
        await settled()
        assert not waiting.done()
        for rank in (0, 1):
            three.jobs[rank].generation = generation(3, (0, 1))
            three.members[rank].entered()
        await soon(three.states(1))
        await soon(waiting, three.readies(1))


@pytest.mark.asyncio
async def test_what_a_broken_link_has_lost_is_told_again(tmp_path: Path) -> None:
    """The same members in a new generation (G6): nobody waits for a message that will not come."""
    async with trio(tmp_path) as three:
        three.lost = {0}
        waiting = [three.models(rank) for rank in range(3)]
        await settled()
        assert not any(task.done() for task in waiting)
        three.lost = set()
        for member in three.members:
            member.entered()
        await soon(*waiting)


@pytest.mark.asyncio
async def test_what_one_asks_another_than_the_giver_is_refused(tmp_path: Path) -> None:
    async with trio(tmp_path) as three:
        wrong = three.members[1].news(StateWant(job=JOB, rank=2, units=(), giver=0))
        assert wrong == "rank 2 asks rank 1 for the state of rank 0"


def test_rounds_that_are_made_late_go_through_what_they_have_missed(tmp_path: Path) -> None:
    """The deal of samples follows each generation that went on (X3): when a learner has prepared must not matter."""
    founding, calls = Trio(tmp_path).foundings[0], [[], []]  # type: ignore[var-annotated]

    def crossing(seen: list[object]) -> Any:
        return SimpleNamespace(
            crossing=SimpleNamespace(
                fence=lambda: seen.append("fence"),
                enter=lambda now, _enter: seen.append(("enter", now.number)),
                resume=lambda now: seen.append(("resume", now.number)),
            )
        )

    early, late = calls
    founding.made(crossing(early))
    founding.fence()
    founding.enter(generation(2, (0, 1)), entering(2, (0, 1)))
    founding.fence()
    founding.enter(generation(3, (0,)), entering(3, (0,)))
    founding.resume(generation(3, (0,)))
    founding.dropped()
    founding.made(crossing(late))
    assert late == early == ["fence", ("enter", 2), "fence", ("enter", 3), ("resume", 3)]
    founding.dropped()
    standing = founding.standing()
    assert (standing.counted, standing.learning, standing.complete, standing.chains) == (3, (0,), 0, (START,))


def test_all_know_where_a_resumed_job_begins(tmp_path: Path) -> None:
    """Also those whose learners have not prepared: else their history would not be that of the others (G4)."""
    three = Trio(tmp_path)
    point = ResumePoint(job=JOB, round=7, files=BlobRef(sha256=b"f" * 32, size_bytes=1))
    three.jobs[0].spec.resume = point
    standing = Founding(cast(Any, three.jobs[0]), three.members[0]).standing()
    assert (standing.complete, standing.chains) == (7, (b"f" * 16,))
