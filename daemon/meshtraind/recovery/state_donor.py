"""A member whose learner computes gives its state to one that joins (J1), and keeps it as long as somebody loads it."""

import asyncio
import itertools
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from meshtraind.recovery.state_requests import StateRequests
from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.blobs import BlobError, BlobStore
from meshtraind.storage.checkpoint_store import Checkpoint
from meshtraind.storage.cleanup import STATE
from meshtraind.storage.job_record import Job
from meshtraind.storage.state_transfer import offer, store_state
from meshtraind.transport.connection import RequestFailed
from meshwire.messages.generation import AskState, SavedState
from meshwire.messages.job import Generation

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


@dataclass(frozen=True, eq=False)
class _HeldState:
    owner: str  # of its blobs
    saved: SavedState


class StateDonor:
    """Gives the state of this device's learner to devices that join, as a saved state that they fetch.

    A state that is new enough is given again, as is a checkpoint.

    Args:
        checkpoint: the newest one that this learner has written.
        chain_after: h_k of a complete round; None when it is too long ago.
        tasks: for deleting what nobody loads any more.
    """

    def __init__(
        self,
        job: Job,
        store: BlobStore,
        saving: StateRequests,
        checkpoint: Callable[[], Checkpoint | None],
        chain_after: Callable[[int], bytes | None],
        tasks: TaskSet,
    ) -> None:
        self._job = job
        self._store = store
        self._saving = saving
        self._checkpoint = checkpoint
        self._chain_after = chain_after
        self._tasks = tasks
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._loans: Loans[_HeldState] = Loans()
        self._held: list[_HeldState] = []
        self._newest: _HeldState | None = None
        self._closed = False

    async def state(self, device: str, body: AskState, promised: Generation | None = None) -> SavedState:
        """The base of this learner, after the asked round or a later one, for a device that is to load it.

        Args:
            promised: the newest generation that was; None: that of now.

        Raises RequestFailed, BlobError.
        """
        async with self._lock:
            newest = self._newest
            if newest is None or newest.saved.round < body.after_round:
                newest = self._newest = await self._newer(body.after_round)
            self._loans.give(device, newest, promised or self._job.generation)
            given = newest.saved
            self._give_up()
            return given

    async def _newer(self, after_round: int) -> _HeldState:
        if self._closed:
            raise RequestFailed(f"job {self._job.spec.job} has ended there")
        number = next(self._numbers)
        owner = f"{self._job.spec.job} state {number}"
        try:
            saved = await self._saved(owner, number, after_round)
        except BaseException:
            await self._delete(owner)
            raise
        self._held.append(held := _HeldState(owner, saved))
        return held

    async def _saved(self, owner: str, number: int, after_round: int) -> SavedState:
        checkpoint = self._checkpoint()
        if checkpoint is not None and checkpoint.round >= after_round:
            return await asyncio.to_thread(offer, owner, checkpoint, self._store)
        folder = self._job.folder / STATE / f"saved-{number}"
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        try:
            saved = await self._saving.save(after_round, folder, SAVE_TIMEOUT_S)
            chain = self._chain_after(saved.round)
            if chain is None:
                raise RequestFailed(f"its learner took too long to write the state after round {saved.round}")
            units = await asyncio.to_thread(store_state, owner, folder, saved.units, self._store)
            return SavedState(round=saved.round, chain=chain, units=units)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

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
            self._tasks.spawn(self._delete(held.owner), "delete a state")

    async def _delete(self, owner: str) -> None:
        try:
            await asyncio.to_thread(self._store.release, owner)
        except BlobError as error:
            log.warning("job %s: a state that nobody loads any more stays on the disk: %s", self._job.spec.job, error)

    def newest_round(self) -> int | None:
        """After which the newest state is that can be given without a learner; None: there is none."""
        checkpoint = self._checkpoint()
        rounds = [self._newest.saved.round] if self._newest is not None else []
        return max(rounds + ([checkpoint.round] if checkpoint is not None else []), default=None)

    def forget(self) -> None:
        """The history of before is not kept. Who loads its states goes on."""
        self._newest = None

    async def close(self) -> None:
        """The job has ended here, and its learner: nobody loads anything more."""
        self._closed = True
        async with self._lock:
            self._loans.clear()
            self._newest = None
            held, self._held = self._held, []
            for each in held:
                await self._delete(each.owner)
