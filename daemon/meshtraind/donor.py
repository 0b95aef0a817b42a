"""A member whose learner computes gives its state to one that joins (J1)."""

import asyncio
from collections.abc import Callable

from meshtraind.blobs import BlobStore
from meshtraind.checkpoints import Checkpoint
from meshtraind.checkpointtransfer import offer, store_state
from meshtraind.cleanup import STATE
from meshtraind.connection import RequestError
from meshtraind.job import Job
from meshtraind.saving import Saving
from meshwire.messages.generation import AskState, SavedState

SAVE_TIMEOUT_S = 590.0  # a little less than the joiner waits


class Donor:
    """One learner's states on their way to others. A state that is new enough is given again, as is a checkpoint.

    Args:
        checkpoint: the newest one that this learner has written.
        chain_after: h_k of a complete round; None when it is too long ago.
    """

    def __init__(
        self,
        job: Job,
        store: BlobStore,
        saving: Saving,
        checkpoint: Callable[[], Checkpoint | None],
        chain_after: Callable[[int], bytes | None],
    ) -> None:
        self._job = job
        self._store = store
        self._saving = saving
        self._checkpoint = checkpoint
        self._chain_after = chain_after
        self._lock = asyncio.Lock()
        self._states = 0
        self._newest: SavedState | None = None

    async def state(self, body: AskState) -> SavedState:
        """The base of this learner, after the asked round or a later one. Raises RequestError, BlobError."""
        async with self._lock:
            if self._newest is None or self._newest.round < body.after_round:
                self._newest = await self._newer(body.after_round)
            return self._newest

    async def _newer(self, after_round: int) -> SavedState:
        checkpoint = self._checkpoint()
        if checkpoint is not None and checkpoint.round >= after_round:
            return await asyncio.to_thread(offer, checkpoint, self._store)
        self._states += 1
        folder = self._job.folder / STATE / f"saved-{self._states}"
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        saved = await self._saving.save(after_round, folder, SAVE_TIMEOUT_S)
        chain = self._chain_after(saved.round)
        if chain is None:
            raise RequestError(f"its learner took too long to write the state after round {saved.round}")
        units = await asyncio.to_thread(store_state, self._job.spec.job, folder, saved.units, self._store)
        return SavedState(round=saved.round, chain=chain, units=units)

    def forget(self) -> None:
        """This learner is lost, and the history that it was in may be, too."""
        self._newest = None
