"""This device's learner is asked to write its state: for a member that joins (`state_donor.py`), or as a checkpoint."""

import asyncio
from pathlib import Path
from typing import Protocol

from meshtraind.transport.connection import RequestFailed
from meshwire.message_base import Wire
from meshwire.messages.learner import LearnerSaved, Save


class StateKeeper(Protocol):
    """A learner, as far as its state is concerned."""

    @property
    def ready(self) -> bool:
        """Whether there is a learner that can be asked: it holds a state, and has not been lost."""

    def notify(self, body: Wire) -> None:
        """Sends the learner a notice, if it is there."""


class StateRequests:
    """Asks the learners of one job, one after the other, for their states. Several may be asked for at once."""

    each_slot = False  # members save in turns

    def __init__(self, learner: StateKeeper) -> None:
        self._learner = learner
        self._number = 0
        self._asked: dict[int, asyncio.Future[LearnerSaved]] = {}

    async def save(
        self, after_round: int, folder: Path, timeout_s: float | None = None, digests: tuple[bytes, ...] = ()
    ) -> LearnerSaved:
        """The base, after this round or a later one, lies in `folder`, one file for each unit (J1).

        Args:
            timeout_s: None: as long as the learner lives.
            digests: of the units of whoever is to load them; what is equal there is left out.

        Raises:
            RequestFailed: it cannot write it, has ended, or reaches no boundary in time.
        """
        if not self._learner.ready:
            raise RequestFailed("its learner holds no state now")
        self._number += 1
        number = self._number
        self._asked[number] = asyncio.get_running_loop().create_future()
        self._learner.notify(Save(number=number, after_round=after_round, folder=str(folder), digests=digests))
        try:
            async with asyncio.timeout(timeout_s):
                saved = await self._asked[number]
        except TimeoutError:
            raise RequestFailed(f"its learner has not reached a boundary in {timeout_s:.0f} s") from None
        finally:
            del self._asked[number]
        if saved.error is not None:
            raise RequestFailed(saved.error)
        return saved

    async def bring(self, chain: bytes, folder: Path) -> None:
        """Nothing is to be done: the learner's files lie there when it has answered."""

    def saved(self, body: LearnerSaved) -> None:
        """The learner has written its state, or could not."""
        asked = self._asked.get(body.number)
        if asked is not None and not asked.done():
            asked.set_result(body)

    def learner_lost(self) -> None:
        """The learner has ended: what it was asked for will not come."""
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(RequestFailed("its learner has ended"))
