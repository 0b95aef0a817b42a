"""What all members of a job agree on before round 1: model, bucket plan, and the state they start from (J1)."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from meshtraind.blobs import BlobStore
from meshtraind.connection import Connection, RequestError
from meshtraind.fetch import fetch_blob
from meshtraind.job import Job
from meshwire import limits
from meshwire.manifest import first_difference
from meshwire.messages.job import (
    BarrierReached,
    BlobRef,
    Model,
    StateIndex,
    StateOffer,
    StateReady,
    StateWant,
)
from meshwire.messages.learner import StateTask, Waiting
from meshwire.wiretypes import Wire

START_TIMEOUT_S = 1800.0  # a slow laptop may import its libraries and load its data for long
BARRIER_TIMEOUT_S = 86400.0  # a slow laptop may have many steps left; one that is lost ends the job before
TICK_S = 1.0  # how often a waiting learner gets a sign of life

Emit = Callable[[Wire], None]
News = Model | StateIndex | StateWant | StateOffer | StateReady | BarrierReached


class Agreement:
    """One member's view.

    Attributes:
        passed: the newest barrier that all have passed.

    Args:
        send: sends a message to one other rank.
        gone: the ranks whose scripts have ended, so that nobody waits for them.
    """

    def __init__(
        self,
        job: Job,
        send: Callable[[int, Wire], None],
        gone: Callable[[], set[int]],
    ) -> None:
        self._of = job
        self._job = job.spec.job
        self._rank = job.rank
        self._members = job.members
        self._send = send
        self._gone = gone
        self._models: dict[int, Model] = {}
        self._index: StateIndex | None = None
        self._wants: dict[int, tuple[int, ...]] = {}
        self._offer: StateOffer | None = None
        self._ready: set[int] = set()
        self._barriers: dict[tuple[int, int], int] = {}  # by number and rank: the newest round contributed to before
        self._reached: BarrierReached | None = None  # the own newest
        self._changed = asyncio.Event()
        self._exported: tuple[int, ...] = ()
        self.passed = 0

    @property
    def _others(self) -> list[int]:
        """The other members of now."""
        assert self._of.generation is not None
        return [rank for rank in self._of.generation.ranks if rank != self._of.rank]

    @property
    def _computing(self) -> tuple[int, ...]:
        """The members of now whose learners take part."""
        assert self._of.generation is not None
        return self._of.generation.learning

    def news(self, message: News) -> str | None:
        """Takes a message of another member. Returns what is wrong with it, or None."""
        match message:
            case Model():
                self._models[message.rank] = message
            case StateIndex():
                self._index = message
            case StateWant():
                self._wants[message.rank] = message.units
            case StateOffer():
                self._offer = message
            case StateReady():
                self._ready.add(message.rank)
            case BarrierReached(number=number) if 0 < number <= self.passed:
                pass  # told again, to those who did not hear it
            case BarrierReached():
                if sum(rank == message.rank for _, rank in self._barriers) >= limits.BARRIERS_OPEN_MAX:
                    return f"rank {message.rank} is in more than {limits.BARRIERS_OPEN_MAX} barriers"
                self._barriers[message.number, message.rank] = message.round
        self.wake()
        return None

    def wake(self) -> None:
        """Something changed; waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def agree_on_model(self, own: Model, emit: Emit) -> None:
        """Returns when all members have the same model and plan. Raises RequestError naming the first difference."""
        self._models[self._rank] = own
        self._tell_all(own)
        await self._until(lambda: self._missing(self._models), "to prepare the same model", emit)
        for rank in sorted(self._models):
            other = self._models[rank]
            difference = first_difference(self._models[0].manifest, other.manifest)
            if difference is not None:
                raise RequestError(
                    f"the models of rank 0 ({self._members[0].name}) and rank {rank} ({self._members[rank].name}) "
                    f"differ: {difference}"
                )
            if other.plan != self._models[0].plan:
                raise RequestError(
                    f"rank {rank} ({self._members[rank].name}) plans its buckets differently from rank 0: "
                    "install the same version of meshtraind on both"
                )

    async def agree_on_state(
        self, units: tuple[bytes, ...], folder: Path, rank_0: Connection | None, store: BlobStore, emit: Emit
    ) -> StateTask:
        """Compares start states by unit. Returns what the learner has to write (rank 0) or to load (others)."""
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        if self._rank == 0:
            self._tell_all(StateIndex(job=self._job, units=units))
            await self._until(lambda: self._missing(self._wants, self._others), "to compare their start", emit)
            self._exported = tuple(sorted({unit for wanted in self._wants.values() for unit in wanted}))
            if self._exported and self._exported[-1] >= len(units):
                raise RequestError(f"a member asked for unit {self._exported[-1]} of {len(units)}")
            return StateTask(units=self._exported, folder=str(folder), write=True)
        await self._until(lambda: [] if self._index else [0], "to describe its start", emit)
        assert self._index is not None
        if len(self._index.units) != len(units):
            raise RequestError(
                f"rank 0 starts from {len(self._index.units)} units of state, this rank from {len(units)}"
            )
        wanted = tuple(unit for unit, digest in enumerate(self._index.units) if digest != units[unit])
        self._send(0, StateWant(job=self._job, rank=self._rank, units=wanted))
        if wanted:
            await self._until(lambda: [] if self._offer else [0], "to send its start state", emit)
            await self._fetch(wanted, folder, rank_0, store, emit)
        return StateTask(units=wanted, folder=str(folder), write=False)

    async def _fetch(
        self, wanted: tuple[int, ...], folder: Path, rank_0: Connection | None, store: BlobStore, emit: Emit
    ) -> None:
        assert self._offer is not None
        assert rank_0 is not None
        offered = dict(self._offer.units)
        told_s = 0.0
        for unit in wanted:
            if unit not in offered:
                raise RequestError(f"rank 0 did not offer unit {unit} of the start state")
        digests = [offered[unit].sha256 for unit in wanted]
        await asyncio.to_thread(store.hold, self._job, digests, passing=True)
        for count, unit in enumerate(wanted):
            await fetch_blob(rank_0, self._job, offered[unit], store)
            path = folder / f"{unit}.safetensors"
            path.unlink(missing_ok=True)
            path.symlink_to(store.blob_path(offered[unit].sha256))
            if time.monotonic() - told_s > TICK_S:
                told_s = time.monotonic()
                emit(Waiting(reason=f"start state of rank 0: {count + 1} of {len(wanted)} parameters"))

    async def ready(self, folder: Path, store: BlobStore, emit: Emit) -> None:
        """The learner has done its state task. Returns when every member has."""
        if self._rank == 0 and self._exported:
            refs = await asyncio.to_thread(_ingest, self._job, folder, self._exported, store)
            for rank, wanted in self._wants.items():
                if wanted:
                    self._send(rank, StateOffer(job=self._job, units=tuple((unit, refs[unit]) for unit in wanted)))
        self._ready.add(self._rank)
        self._tell_all(StateReady(job=self._job, rank=self._rank))
        await self._until(lambda: [rank for rank in self._computing if rank not in self._ready], "to be ready", emit)

    async def barrier(self, number: int, reached: int, emit: Emit) -> int:
        """Returns when every member's learner has entered this barrier: the newest round that any contributed to.

        Args:
            reached: the last round that this member has contributed to.

        Raises:
            RequestError: a member's script has ended without it. Before the last barrier (0) that is no error.
        """
        if 0 < number <= self.passed:
            return 0  # of a script that was started again: the others have passed it
        rank = self._of.rank
        self._barriers[number, rank] = reached
        self._reached = BarrierReached(job=self._job, rank=rank, number=number, round=reached)
        self._tell_all(self._reached)

        def ended() -> set[int]:
            return self._gone() | {rank for other, rank in self._barriers if other == 0}

        def missing() -> list[int]:
            away = [rank for rank in self._computing if (number, rank) not in self._barriers]
            return [rank for rank in away if rank not in self._gone()] if number == 0 else away

        what = f"to reach barrier {number}" if number else "to finish"
        await self._until(missing, what, emit, BARRIER_TIMEOUT_S, ended if number else self._gone)
        reached_by = [key for key in self._barriers if key[0] == number]
        self.passed = max(self.passed, number)
        return max((self._barriers.pop(key) for key in reached_by), default=0)

    def entered(self) -> None:
        """In a new generation: what was said last may not have reached everybody, and learners that compute no more
        have left their barriers."""
        computing = set(self._computing)
        self._barriers = {key: reached for key, reached in self._barriers.items() if key[1] in computing}
        if self._reached is not None:
            self._tell_all(self._reached)
        self.wake()

    def learner_lost(self) -> None:
        """This member's learner has ended: the next one enters its barriers itself."""
        self._reached = None
        self._barriers = {key: reached for key, reached in self._barriers.items() if key[1] != self._rank}

    def in_barrier(self, rank: int) -> bool:
        """Whether the member has entered a barrier that this one has not passed."""
        return any(other == rank for _, other in self._barriers)

    def _tell_all(self, message: Wire) -> None:
        for other in self._others:
            self._send(other, message)

    def _missing(self, have: dict[int, Model] | dict[int, tuple[int, ...]], of: list[int] | None = None) -> list[int]:
        return [rank for rank in (range(len(self._members)) if of is None else of) if rank not in have]

    async def _until(
        self,
        missing: Callable[[], list[int]],
        what: str,
        emit: Emit,
        timeout_s: float = START_TIMEOUT_S,
        ended: Callable[[], set[int]] | None = None,
    ) -> None:
        """Waits until nobody is missing; tells the learner once a second for whom it waits.

        Args:
            ended: ranks that will never come; else those whose scripts have ended.
        """
        deadline_s = time.monotonic() + timeout_s
        while absent := missing():
            names = ", ".join(f"rank {rank} ({self._of.members[rank].name})" for rank in absent)
            if lost := (ended or self._gone)().intersection(absent):
                gone = min(lost)
                raise RequestError(
                    f"rank {gone} ({self._of.members[gone].name}) ended its script; waiting {what} is in vain"
                )
            if time.monotonic() > deadline_s:
                raise RequestError(f"waited {timeout_s:.0f} s for {names} {what}")
            try:
                await asyncio.wait_for(self._changed.wait(), TICK_S)
            except TimeoutError:
                emit(Waiting(reason=f"waiting for {names} {what}"))


def _ingest(job: str, folder: Path, units: tuple[int, ...], store: BlobStore) -> dict[int, BlobRef]:
    """Stores the units that the learner has written. Blocking."""
    refs = {}
    for unit in units:
        path = folder / f"{unit}.safetensors"
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").digest()
        size_bytes = path.stat().st_size
        store.hold(job, [sha256], passing=True)
        store.ingest(path, sha256, size_bytes)
        path.unlink()
        refs[unit] = BlobRef(sha256=sha256, size_bytes=size_bytes)
    return refs
