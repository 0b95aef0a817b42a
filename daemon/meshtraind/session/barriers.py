"""Barriers of one job: where a learner waits until every other one is there, and how far all had come (mt.barrier)."""

import asyncio
import time
from collections.abc import Callable

from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import Emit, RequestFailed
from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.job import BarrierReached
from meshwire.messages.learner import Waiting

BARRIER_TIMEOUT_S = 86400.0  # a slow laptop may have many steps left
TICK_S = 1.0  # how often a waiting learner gets a sign of life


class Barriers:
    """The barriers of a job, as one of its members knows them, and the waiting for the rest.

    Attributes:
        passed: the newest barrier that all have passed.

    Args:
        send: sends a message to one other rank.
    """

    def __init__(self, job: Job, send: Callable[[int, Wire], None]) -> None:
        self._of = job
        self._send = send
        self._inside: dict[tuple[int, int], int] = {}  # by number and rank: the newest round contributed to before
        self._reached: BarrierReached | None = None  # the own newest
        self._changed = asyncio.Event()
        self.passed = 0

    def reached(self, message: BarrierReached) -> str | None:
        """Takes another member's word. Returns what is wrong with it, or None."""
        if not 0 < message.number <= self.passed:  # else told again, to those who did not hear it
            if sum(rank == message.rank for _, rank in self._inside) >= limits.BARRIERS_OPEN_MAX:
                return f"rank {message.rank} is in more than {limits.BARRIERS_OPEN_MAX} barriers"
            self._inside[message.number, message.rank] = message.round
            self._note_passed()
        self.wake()
        return None

    def _note_passed(self) -> None:
        """Where no learner of this device computes, the others pass what all of them have entered."""
        counted = self._of.counted
        if not counted or self._of.rank in counted:
            return
        newest = (max((number for number, other in self._inside if other == rank), default=0) for rank in counted)
        passed = min(newest)
        if passed > self.passed:
            self._pass(passed)

    def _pass(self, number: int) -> None:
        self.passed = max(self.passed, number)
        self._inside = {
            key: reached for key, reached in self._inside.items() if key[0] != number and not 0 < key[0] < number
        }

    def wake(self) -> None:
        """Something changed; waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

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
        self._inside[number, rank] = reached
        self._reached = BarrierReached(job=self._of.spec.job, rank=rank, number=number, round=reached)
        self._tell_all(self._reached)

        def missing() -> list[int]:
            away = self._away(number)
            return [rank for rank in away if rank not in self._of.gone] if number == 0 else away

        await self._until(missing, f"to reach barrier {number}" if number else "to finish", emit)
        newest = max((round_ for (at, _), round_ in self._inside.items() if at == number or at > number > 0), default=0)
        self._pass(number)
        return newest

    def is_waited_in(self, number: int) -> bool:
        """Whether somebody else has still to enter this barrier."""
        return any(rank != self._of.rank for rank in self._away(number))

    def _away(self, number: int) -> list[int]:
        """Who computes and has still to enter it; nobody, if it is passed."""
        if 0 < number <= self.passed:
            return []
        return [rank for rank in self._of.counted if not self._has_entered(number, rank)]

    def entered(self) -> None:
        """Says again, in a new generation, what may not have reached everybody, and forgets the barriers of learners
        that compute no more. For a learner that runs through barriers which are passed it says so: whoever has not
        heard that waits for it there."""
        counted, rank = set(self._of.counted), self._of.rank
        self._inside = {key: reached for key, reached in self._inside.items() if key[1] in counted}
        self._note_passed()
        if self._reached is not None:
            self._tell_all(self._reached)
        elif self.passed and rank in counted:
            self._tell_all(BarrierReached(job=self._of.spec.job, rank=rank, number=self.passed, round=0))
        self.wake()

    def learner_lost(self) -> None:
        """Forgets what the own learner has done: the next one enters its barriers itself."""
        self._reached = None
        self._inside = {key: reached for key, reached in self._inside.items() if key[1] != self._of.rank}

    def begin_anew(self, passed: int = 0) -> None:
        """Forgets all of them: no learner is left that was in one, or this member comes in where `passed` is over."""
        self.learner_lost()
        self._inside.clear()
        self.passed = passed

    def in_barrier(self, rank: int) -> bool:
        """Whether the member has entered a barrier that this one has not passed."""
        return any(other == rank for _, other in self._inside)

    def _has_entered(self, number: int, rank: int) -> bool:
        """Whether the member is in this barrier, or in a later one: then it has passed this one. Nobody passes 0."""
        return any(other == rank and (at == number or at > number > 0) for at, other in self._inside)

    def _tell_all(self, message: Wire) -> None:
        assert self._of.generation is not None
        for rank in self._of.generation.ranks:
            if rank != self._of.rank:
                self._send(rank, message)

    @property
    def _ended(self) -> set[int]:
        """The ranks whose scripts do nothing more that others could wait for: they have ended, or are about to."""
        return self._of.gone | {rank for number, rank in self._inside if number == 0}

    async def _until(self, missing: Callable[[], list[int]], what: str, emit: Emit) -> None:
        """Waits until nobody is missing; tells the learner once a second for whom it waits. Raises RequestFailed when
        one of them will never come."""
        deadline_s = time.monotonic() + BARRIER_TIMEOUT_S
        while absent := missing():
            names = ", ".join(f"rank {rank} ({self._of.members[rank].name})" for rank in absent)
            if lost := self._ended.intersection(absent):
                gone = min(lost)
                raise RequestFailed(
                    f"rank {gone} ({self._of.members[gone].name}) ended its script; waiting {what} is in vain"
                )
            if time.monotonic() > deadline_s:
                raise RequestFailed(f"waited {BARRIER_TIMEOUT_S:.0f} s for {names} {what}")
            try:
                async with asyncio.timeout(TICK_S):
                    await self._changed.wait()
            except TimeoutError:
                emit(Waiting(reason=f"waiting for {names} {what}"))
