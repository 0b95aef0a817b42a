"""A member whose learner computes gives its state to one that joins (J1), and keeps it as long as somebody loads it."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from meshtraind.recovery.state_requests import StateRequests
from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.checkpoint_store import Checkpoint
from meshtraind.storage.job_record import Job
from meshtraind.transport.requests import RequestFailed
from meshwire.messages.generation import AskState, SavedState
from meshwire.messages.job import BlobRef, Generation

log = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 590.0  # a little less than the joiner waits

S = TypeVar("S")


@dataclass
class _Loan(Generic[S]):
    state: S
    computes: bool  # its device's learner, when it was last looked at


class Loans(Generic[S]):
    """Which device loads which state. There are never more states than devices that load.

    A device is through with its state when its learner computes and did not before, when it has another one, or when it
    is in the job no more.
    """

    def __init__(self) -> None:
        self._loans: dict[str, _Loan[S]] = {}

    def give(self, device: str, state: S, generation: Generation | None) -> None:
        """The device loads this state from now on. `generation`: the newest that this member has promised, for it may
        list as computing the process before the one that loads."""
        self._loans[device] = _Loan(state, _computes(device, generation))

    def entered(self, generation: Generation) -> None:
        """A generation was entered: who has loaded computes in it."""
        live = {member.device for member in generation.live.values()}
        for device, loan in list(self._loans.items()):
            computes = _computes(device, generation)
            if device not in live or (computes and not loan.computes):
                del self._loans[device]
            loan.computes = computes

    def has(self, state: S) -> bool:
        """Whether somebody loads it."""
        return any(loan.state is state for loan in self._loans.values())

    def clear(self) -> None:
        """Nobody loads anything more from here."""
        self._loans.clear()

    def __len__(self) -> int:
        """How many states there are."""
        return len({id(loan.state) for loan in self._loans.values()})


def _computes(device: str, generation: Generation | None) -> bool:
    ranks = generation.learning if generation is not None else ()
    return generation is not None and device in {generation.members[rank].device for rank in ranks}


class LentStates(Protocol):
    """Where the states lie that others fetch, by number. `meshtraind.storage.state_transfer.StateFiles` is one."""

    async def begin(self, number: int) -> Path:
        """A new folder, in which the learner writes a state."""

    async def keep(self, number: int, units: Sequence[int]) -> tuple[BlobRef, ...]:
        """Lends what it has written there, until `release`. Raises BlobError."""

    async def offer(self, number: int, checkpoint: Checkpoint) -> SavedState:
        """Lends a checkpoint, until `release`. Raises BlobError."""

    async def discard(self, number: int) -> None:
        """Deletes the folder, and what is left in it."""

    async def release(self, number: int) -> None:
        """Nobody loads it any more. Raises BlobError."""


class ChainedRounds(Protocol):
    """The rounds of one history. `meshtraind.rounds.driver.Rounds` are."""

    def chain_after(self, round_: int) -> bytes | None:
        """h_k of a complete round (G4); None when it is too long ago."""


class SavingLearner(Protocol):
    """This device's learner, and the history in which it computes. `LearnerHandler` is one."""

    @property
    def states(self) -> StateRequests:
        """Asks it for its state."""

    @property
    def rounds(self) -> ChainedRounds | None:
        """None while this member has no history."""


class SavedHere(Protocol):
    """What the learners here have written of the history of now. `Checkpointer` knows."""

    @property
    def newest(self) -> Checkpoint | None:
        """The newest checkpoint."""


@dataclass(frozen=True, eq=False)
class _HeldState:
    """`digests`: of those units that were left out, of whoever it was written for."""

    number: int
    saved: SavedState
    digests: tuple[bytes, ...] = ()

    def suits(self, asked: AskState) -> bool:
        """Whether it is new enough, and what it leaves out is with this asker, too."""
        left_out, count = self.saved.left_out, len(asked.digests)
        equal = all(unit < count and asked.digests[unit] == self.digests[unit] for unit in left_out)
        return self.saved.round >= asked.after_round and equal


class StateDonor:
    """Gives the state of this device's learner to devices that join, as a saved state that they fetch.

    A state that is new enough is given again, as is a checkpoint.

    Args:
        tasks: for deleting what nobody loads any more.
    """

    def __init__(
        self, job: Job, states: LentStates, learner: SavingLearner, checkpoints: SavedHere, tasks: TaskSet
    ) -> None:
        self._job = job
        self._states = states
        self._learner = learner
        self._checkpoints = checkpoints
        self._tasks = tasks
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._loans: Loans[_HeldState] = Loans()
        self._held: list[_HeldState] = []
        self._newest: _HeldState | None = None
        self._forgotten = 0  # histories
        self._closed = False

    async def state(self, device: str, body: AskState, promised: Generation | None = None) -> SavedState:
        """The base of this learner, after the asked round or a later one, for a device that is to load it.

        Args:
            promised: the newest generation that was; None: that of now.

        Raises RequestFailed, BlobError.
        """
        async with self._lock:
            newest = self._newest
            if newest is None or not newest.suits(body):
                forgotten = self._forgotten
                newest = await self._newer(body)
                if forgotten == self._forgotten:  # else it is of the history before, which its asker may have still
                    self._newest = newest
            self._loans.give(device, newest, promised or self._job.generation)
            given = newest.saved
            self._give_up()
            return given

    async def _newer(self, asked: AskState) -> _HeldState:
        if self._closed:
            raise RequestFailed(f"job {self._job.spec.job} has ended there")
        number = next(self._numbers)
        try:
            saved = await self._saved(number, asked)
        except BaseException:
            await self._delete(number)
            raise
        self._held.append(held := _HeldState(number, saved, asked.digests))
        return held

    async def _saved(self, number: int, asked: AskState) -> SavedState:
        checkpoint = self._checkpoints.newest
        if checkpoint is not None and checkpoint.round >= asked.after_round:
            return await self._states.offer(number, checkpoint)
        folder = await self._states.begin(number)
        try:
            saved = await self._learner.states.save(asked.after_round, folder, SAVE_TIMEOUT_S, asked.digests)
            rounds = self._learner.rounds
            chain = None if rounds is None else rounds.chain_after(saved.round)
            if chain is None:
                raise RequestFailed(f"its learner took too long to write the state after round {saved.round}")
            written = [unit for unit in range(saved.units) if unit not in {*saved.left_out}]
            lent = await self._states.keep(number, written)
            return SavedState(round=saved.round, chain=chain, units=lent, left_out=saved.left_out)
        finally:
            await self._states.discard(number)

    def entered(self, generation: Generation) -> None:
        """A generation was entered: what was for devices that compute in it, or are gone, is deleted."""
        self._loans.entered(generation)
        self._give_up()

    def _give_up(self) -> None:
        """Deletes what nobody loads."""
        for held in [held for held in self._held if not self._loans.has(held)]:
            self._held.remove(held)
            if self._newest is held:
                self._newest = None
            self._tasks.spawn(self._delete(held.number), "delete a state")

    async def _delete(self, number: int) -> None:
        try:
            await self._states.release(number)
        except BlobError as error:
            log.warning("job %s: a state that nobody loads any more stays on the disk: %s", self._job.spec.job, error)

    @property
    def newest(self) -> SavedState | None:
        """The newest that was given in the history of now, as long as somebody loads it."""
        return None if self._newest is None else self._newest.saved

    def newest_round(self) -> int | None:
        """After which the newest state is that can be given without a learner to whoever asks; None: there is none."""
        checkpoint = self._checkpoints.newest
        rounds = [self._newest.saved.round] if self._newest is not None and not self._newest.saved.left_out else []
        return max(rounds + ([checkpoint.round] if checkpoint is not None else []), default=None)

    def forget(self) -> None:
        """The history of before is not kept. Who loads its states goes on."""
        self._forgotten += 1
        self._newest = None

    async def close(self) -> None:
        """The job has ended here, and its learner: nobody loads anything more."""
        self._closed = True
        async with self._lock:
            self._loans.clear()
            self._newest = None
            held, self._held = self._held, []
            for each in held:
                await self._delete(each.number)
