"""How a hub comes by the job's state (H3): it asks a member whose learner computes, as one that joins does (J1)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from meshtraind.storage.background_pacing import Pacer
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.fetch import Pace
from meshtraind.transport.connection import Emit
from meshtraind.transport.messenger import Messenger
from meshtraind.transport.requests import ConnectionEnded, RequestFailed
from meshwire.message_base import Wire
from meshwire.messages.generation import AskState, SavedState
from meshwire.messages.job import BlobRef
from meshwire.messages.learner import LearnerSaved

STATE_TIMEOUT_S = 600.0  # a donor's learner may be in the middle of a long step or of an evaluation


class HubMembers(Protocol):
    """Whoever knows the other members of the job. `JobSession` does."""

    @property
    def donors(self) -> Sequence[Messenger]:
        """The way to those whose learners compute."""


class FetchedStates(Protocol):
    """Where a state comes to lie that is fetched. `meshtraind.storage.state_transfer.StateFiles` is one."""

    async def fetch(self, units: Mapping[int, BlobRef], donor: Messenger, emit: Emit, pace: Pace) -> None:
        """Gets a state that the donor lends. Raises BlobError, RequestFailed, ConnectionEnded, TimeoutError."""

    async def move(self, units: int, folder: Path) -> None:
        """Puts so many units that were fetched into another folder. Raises BlobError."""


class HubStates:
    """Gets states for the checkpoints of a hub, one after the other; a `StateSource` of the checkpointer.

    It is beside the rounds: nobody waits for it, and its pieces cost the rounds no more than those of one that joins.

    Args:
        job: its id.
    """

    each_slot = True  # it is no member that could take turns, and may be all that is left

    def __init__(self, job: str, members: HubMembers, states: FetchedStates) -> None:
        self._job = job
        self._members = members
        self._states = states
        self._asked: tuple[Messenger, SavedState] | None = None

    async def save(self, after_round: int, folder: Path, timeout_s: float | None = None) -> LearnerSaved:
        """As `StateSource.save`: asks the members in turn, until one has a state to give."""
        why_not = "no member computes"
        for donor in self._members.donors:
            try:
                saved = await donor.request(
                    AskState(job=self._job, after_round=after_round),
                    timeout_s=timeout_s or STATE_TIMEOUT_S,
                    name=f"state of {donor.name}",
                )
            except (RequestFailed, ConnectionEnded, TimeoutError) as error:
                why_not = f"{donor.name}: {error}"
                continue
            if not isinstance(saved, SavedState) or saved.left_out or saved.round < after_round or not saved.units:
                why_not = f"{donor.name} offers no whole state of after round {after_round}"
                continue
            self._asked = donor, saved
            return LearnerSaved(number=0, round=saved.round, units=len(saved.units))
        raise RequestFailed(why_not)

    async def bring(self, chain: bytes, folder: Path) -> None:
        """As `StateSource.bring`: fetches what the last one has offered."""
        assert self._asked is not None, "nothing was asked for"
        donor, saved = self._asked
        if saved.chain != chain:
            raise RequestFailed(f"round {saved.round} of {donor.name} is not that of this hub")
        try:
            await self._states.fetch(saved.by_number, donor, _tell_nobody, Pacer())
            await self._states.move(len(saved.units), folder)
        except (BlobError, ConnectionEnded, TimeoutError, OSError) as error:
            raise RequestFailed(f"the state of {donor.name}: {error}") from error


def _tell_nobody(_progress: Wire) -> None:
    """No learner waits for it."""
