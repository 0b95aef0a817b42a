"""What all members of a job agree on before round 1: model, bucket plan, and the state they start from (J1, G9).

That state is the giver's: of those whose learners compute, the lowest rank. A member that is lost meanwhile is not
waited for, and if it was the giver, the next one is.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from meshtraind.startup.start_state import GiverLink, clear, fetch_units, ingest
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import Connection, Emit, RequestFailed
from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.job import BarrierReached
from meshwire.messages.learner import StateTask, Waiting
from meshwire.messages.startup import Model, StateIndex, StateOffer, StateReady, StateWant
from meshwire.model.manifest import first_difference

START_TIMEOUT_S = 1800.0  # a slow laptop may import its libraries and load its data for long
BARRIER_TIMEOUT_S = 86400.0  # a slow laptop may have many steps left
TICK_S = 1.0  # how often a waiting learner gets a sign of life

News = Model | StateIndex | StateWant | StateOffer | StateReady | BarrierReached


class Agreement:
    """What the members of a job have agreed on so far, as one of them knows it, and the waiting for the rest.

    Attributes:
        founded: all that compute are known to have the same start state: round 1 begins.
        broken: they cannot agree, and no other learner of the same script would.
        passed: the newest barrier that all have passed.

    Args:
        send: sends a message to one other rank.
    """

    def __init__(self, job: Job, send: Callable[[int, Wire], None]) -> None:
        self._of = job
        self._job = job.spec.job
        self._members = job.members
        self._send = send
        self._models: dict[int, Model] = {}
        self._indexes: dict[int, StateIndex] = {}  # by giver
        self._wants: dict[int, tuple[int, ...]] = {}  # of the own state
        self._offers: dict[int, StateOffer] = {}  # by giver
        self._ready: dict[int, int] = {}  # by rank: whose state it starts from
        self._said: list[tuple[int | None, Wire]] = []  # to one rank or all, until round 1: links may lose it
        self._starts_from: int | None = None  # the giver of the own learner's state
        self._fenced = False
        self._barriers: dict[tuple[int, int], int] = {}  # by number and rank: the newest round contributed to before
        self._reached: BarrierReached | None = None  # the own newest
        self._changed = asyncio.Event()
        self._exported: tuple[int, ...] = ()
        self._entered: deque[int] = deque(maxlen=limits.ANCESTORS_MAX)  # generations before round 1, by hash
        self._past: frozenset[int] = frozenset()  # those of before all began anew
        self.founded = False
        self.broken = False
        self.passed = 0
        self._note_generation()

    @property
    def _rank(self) -> int:
        return self._of.rank

    @property
    def _others(self) -> list[int]:
        """The other members of the generation of now."""
        assert self._of.generation is not None
        return [rank for rank in self._of.generation.ranks if rank != self._of.rank]

    @property
    def _computing(self) -> tuple[int, ...]:
        """The members of the generation of now whose learners take part."""
        assert self._of.generation is not None
        return self._of.generation.learning

    @property
    def _giver(self) -> int:
        """The member whose state all start from; rank 0 stands for a checkpoint, which all have."""
        return 0 if self._of.spec.resume is not None else min(self._computing, default=self._rank)

    def news(self, message: News, generation: int = 0) -> str | None:
        """Takes a message of another member. Returns what is wrong with it, or None.

        Args:
            generation: by its hash, in which it was sent; 0: nobody knows.
        """
        if generation in self._past and not isinstance(message, BarrierReached):
            return None  # of a learner that is dead; what still counts is said again in each generation
        match message:
            case Model():
                self._models[message.rank] = message
            case StateIndex():
                self._indexes[message.rank] = message
            case StateWant(giver=giver) if giver == self._rank:
                self._wants[message.rank] = message.units
            case StateWant():
                return f"rank {message.rank} asks rank {self._rank} for the state of rank {message.giver}"
            case StateOffer():
                self._offers[message.rank] = message
            case StateReady():
                self._ready[message.rank] = message.giver
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

    # Before round 1

    async def agree_on_model(self, own: Model, emit: Emit) -> None:
        """Returns when all members have the same model and plan. Raises RequestFailed naming the first difference."""
        with self._ending_all():
            self._models[self._rank] = own
            self._say(None, own)
            await self._until(lambda: self._missing(self._models), "to prepare the same model", emit)
            first = min(self._computing, default=self._rank)
            for rank in self._computing:
                self._compare(first, rank)

    def _compare(self, first: int, rank: int) -> None:
        one, other = self._models[first], self._models[rank]
        difference = first_difference(one.manifest, other.manifest)
        if difference is not None:
            raise RequestFailed(
                f"the models of rank {first} ({self._members[first].name}) and rank {rank} "
                f"({self._members[rank].name}) differ: {difference}"
            )
        if other.plan != one.plan:
            raise RequestFailed(
                f"rank {rank} ({self._members[rank].name}) plans its buckets differently from rank {first}: "
                "install the same version of meshtraind on both"
            )

    async def agree_on_state(
        self,
        units: tuple[bytes, ...],
        folder: Path,
        links: Mapping[int, Connection],
        store: BlobStore,
        emit: Emit,
    ) -> StateTask:
        """Compares start states by unit. Returns what the learner has to write (the giver) or to load (the others).

        Args:
            links: to each other member, by rank; live.
        """
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        with self._ending_all():
            while (giver := self._giver) != self._rank:
                task = await self._take(giver, units, folder, links, store, emit)
                if task is not None:
                    self._starts_from = giver
                    return task
            self._starts_from = self._rank
            return await self._give(units, folder, emit)

    async def _give(self, units: tuple[bytes, ...], folder: Path, emit: Emit) -> StateTask:
        self._say(None, StateIndex(job=self._job, units=units, rank=self._rank))
        self._wants[self._rank] = ()
        await self._until(lambda: self._missing(self._wants), "to compare their start", emit)
        self._exported = tuple(sorted({unit for wanted in self._wants.values() for unit in wanted}))
        if unknown := set(self._exported) - set(range(len(units))):
            raise RequestFailed(f"a member asked for unit {min(unknown)} of {len(units)}")
        await asyncio.to_thread(clear, folder, self._exported)
        return StateTask(units=self._exported, folder=str(folder), write=True)

    async def _take(
        self,
        giver: int,
        units: tuple[bytes, ...],
        folder: Path,
        links: Mapping[int, Connection],
        store: BlobStore,
        emit: Emit,
    ) -> StateTask | None:
        """What this learner is to load of the giver's state; None where another member has become the giver."""
        await self._until(lambda: self._not_from(giver, self._indexes), "to describe its start", emit)
        if self._giver != giver:
            return None
        index = self._indexes[giver]
        if len(index.units) != len(units):
            raise RequestFailed(
                f"rank {giver} starts from {len(index.units)} units of state, this rank from {len(units)}"
            )
        wanted = tuple(unit for unit, digest in enumerate(index.units) if digest != units[unit])
        self._say(giver, StateWant(job=self._job, rank=self._rank, units=wanted, giver=giver))
        if wanted:
            await self._until(lambda: self._not_from(giver, self._offers), "to send its start state", emit)
            if self._giver != giver:
                return None
            offered = dict(self._offers[giver].units)
            source = GiverLink(giver, links, still=lambda: self._giver == giver)
            if not await fetch_units(self._job, wanted, offered, source, folder, store, emit):
                return None
        return StateTask(units=wanted, folder=str(folder), write=False)

    def _not_from(self, giver: int, told: Mapping[int, object]) -> list[int]:
        """The giver, as a list, as long as it is the one and has not told; else nobody."""
        return [] if giver in told or self._giver != giver else [giver]

    async def ready(self, folder: Path, store: BlobStore, emit: Emit) -> None:
        """Tells the others that the own learner has done its state task. Returns when every member's has."""
        if self._exported:
            refs = await asyncio.to_thread(ingest, self._job, folder, self._exported, store)
            for rank, wanted in self._wants.items():
                if wanted:
                    units = tuple((unit, refs[unit]) for unit in wanted)
                    self._say(rank, StateOffer(job=self._job, units=units, rank=self._rank))
        starts_from = self._giver if self._starts_from is None else self._starts_from
        self._ready[self._rank] = starts_from
        self._say(None, StateReady(job=self._job, rank=self._rank, giver=starts_from))
        with self._ending_all():
            await self._until(self._unready, "to be ready", emit)

    def _unready(self) -> list[int]:
        """The ranks that are waited for, also those that are about to leave the generation, or to be counted in it.
        Nobody finds all ready after its promise: the promise says whether it has (G9)."""
        if not self.founded:
            assert self._of.generation is not None
            away = [rank for rank in self._of.generation.ranks if self._ready.get(rank) != self._giver]
            if away or self._fenced:
                return away or [self._rank]
            self.found()
        return []

    def found(self) -> None:
        """Round 1 may begin: all that compute are ready."""
        self.founded = True
        self._said.clear()
        self.wake()

    def fence(self) -> None:
        """Finds nobody ready until the next generation: this member has promised one (G2, fence)."""
        self._fenced = True

    @property
    def is_void(self) -> bool:
        """Whether the own learner starts from the state of a giver that was lost before all had it."""
        return not self.founded and self._starts_from is not None and self._starts_from != self._giver

    def begin_anew(self) -> None:
        """Forgets all that was agreed on: nobody's learner is left, and all prepare anew. What members have said in the
        generations up to now counts no more, and may still be on its way."""
        self.learner_lost()
        self._past = frozenset(self._entered)
        for told in (self._models, self._indexes, self._wants, self._offers, self._ready, self._barriers):
            told.clear()
        self.founded = self.broken = False
        self.passed = 0

    def _note_generation(self) -> None:
        if self._of.generation is not None:
            self._entered.append(self._of.generation.hash64())

    def _say(self, to: int | None, message: Wire) -> None:
        self._said.append((to, message))
        self._say_again(to, message)

    def _say_again(self, to: int | None, message: Wire) -> None:
        for rank in self._others if to is None else [to]:
            self._send(rank, message)

    @contextmanager
    def _ending_all(self) -> Iterator[None]:
        try:
            yield
        except RequestFailed:
            self.broken = True
            raise

    # Barriers

    async def barrier(self, number: int, reached: int, emit: Emit) -> int:
        """Waits until every member's learner has entered this barrier. Returns the newest round that any contributed
        to.

        Args:
            reached: the last round that this member has contributed to.

        Raises:
            RequestFailed: a member's script has ended without it. Before the last barrier (0) that is no error.
        """
        if 0 < number <= self.passed:
            return 0  # of a script that was started again: the others have passed it
        rank = self._of.rank
        self._barriers[number, rank] = reached
        self._reached = BarrierReached(job=self._job, rank=rank, number=number, round=reached)
        self._tell_all(self._reached)

        def missing() -> list[int]:
            away = [rank for rank in self._computing if (number, rank) not in self._barriers]
            return [rank for rank in away if rank not in self._of.gone] if number == 0 else away

        what = f"to reach barrier {number}" if number else "to finish"
        await self._until(missing, what, emit, BARRIER_TIMEOUT_S)
        reached_by = [key for key in self._barriers if key[0] == number]
        self.passed = max(self.passed, number)
        return max((self._barriers.pop(key) for key in reached_by), default=0)

    def entered(self) -> None:
        """Says again, in a new generation, what may not have reached everybody, and forgets the barriers of learners
        that compute no more."""
        self._fenced = False
        self._note_generation()
        for to, message in self._said:
            self._say_again(to, message)
        computing = set(self._computing)
        self._barriers = {key: reached for key, reached in self._barriers.items() if key[1] in computing}
        if self._reached is not None:
            self._tell_all(self._reached)
        self.wake()

    def learner_lost(self) -> None:
        """Forgets what the own learner has done: the next one prepares, and enters its barriers, itself."""
        self._said.clear()
        self._starts_from = None
        self._exported = ()
        self._reached = None
        self._barriers = {key: reached for key, reached in self._barriers.items() if key[1] != self._rank}

    def in_barrier(self, rank: int) -> bool:
        """Whether the member has entered a barrier that this one has not passed."""
        return any(other == rank for _, other in self._barriers)

    def _tell_all(self, message: Wire) -> None:
        for other in self._others:
            self._send(other, message)

    @property
    def _ended(self) -> set[int]:
        """The ranks whose scripts do nothing more that others could wait for: they have ended, or are about to."""
        return self._of.gone | {rank for number, rank in self._barriers if number == 0}

    def _missing(self, have: Mapping[int, object]) -> list[int]:
        return [rank for rank in self._computing if rank not in have]

    async def _until(
        self,
        missing: Callable[[], list[int]],
        what: str,
        emit: Emit,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Waits until nobody is missing; tells the learner once a second for whom it waits. Raises RequestFailed when
        one of them will never come."""
        deadline_s = time.monotonic() + timeout_s
        while absent := missing():
            names = ", ".join(f"rank {rank} ({self._of.members[rank].name})" for rank in absent)
            if lost := self._ended.intersection(absent):
                gone = min(lost)
                raise RequestFailed(
                    f"rank {gone} ({self._of.members[gone].name}) ended its script; waiting {what} is in vain"
                )
            if time.monotonic() > deadline_s:
                raise RequestFailed(f"waited {timeout_s:.0f} s for {names} {what}")
            try:
                async with asyncio.timeout(TICK_S):
                    await self._changed.wait()
            except TimeoutError:
                emit(Waiting(reason=f"waiting for {names} {what}"))
