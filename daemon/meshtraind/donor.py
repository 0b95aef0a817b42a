"""A member whose learner computes gives its state to one that joins (J1)."""

import asyncio
from collections.abc import Callable

from meshtraind.blobs import BlobStore
from meshtraind.checkpointtransfer import store_state
from meshtraind.cleanup import STATE
from meshtraind.connection import RequestError
from meshtraind.job import Job
from meshwire.messages.generation import AskState, SavedState
from meshwire.messages.learner import LearnerSaved, Save
from meshwire.wiretypes import Wire

SAVE_TIMEOUT_S = 590.0  # a little less than the joiner waits


class Donor:
    """One learner's states on their way to others. A state that is new enough is given again.

    Args:
        notify: sends the learner a notice.
    """

    def __init__(self, job: Job, store: BlobStore, notify: Callable[[Wire], None]) -> None:
        self._job = job
        self._store = store
        self._notify = notify
        self._lock = asyncio.Lock()
        self._number = 0
        self._saved: asyncio.Future[LearnerSaved] | None = None
        self._newest: SavedState | None = None

    async def state(self, body: AskState) -> SavedState:
        """The base of this learner, after the asked round or a later one. Raises RequestError."""
        async with self._lock:
            if self._newest is not None and self._newest.round >= body.after_round:
                return self._newest
            self._number += 1
            folder = self._job.folder / STATE / f"saved-{self._number}"
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            self._saved = asyncio.get_running_loop().create_future()
            self._notify(Save(number=self._number, after_round=body.after_round, folder=str(folder)))
            try:
                saved = await asyncio.wait_for(self._saved, SAVE_TIMEOUT_S)
            except TimeoutError:
                raise RequestError(f"its learner has not reached a boundary in {SAVE_TIMEOUT_S:.0f} s") from None
            finally:
                self._saved = None
            if saved.error is not None:
                raise RequestError(saved.error)
            units = await asyncio.to_thread(store_state, self._job.spec.job, folder, saved.units, self._store)
            self._newest = SavedState(round=saved.round, units=units)
            return self._newest

    def saved(self, body: LearnerSaved) -> None:
        """The learner has written its state, or could not."""
        if self._saved is not None and not self._saved.done() and body.number == self._number:
            self._saved.set_result(body)

    def learner_lost(self) -> None:
        """The learner has ended: what it was asked for will not come."""
        if self._saved is not None and not self._saved.done():
            self._saved.set_exception(RequestError("its learner has ended"))
