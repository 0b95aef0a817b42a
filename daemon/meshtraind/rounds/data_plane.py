"""What moves, adds and keeps the bytes of rounds, as far as the rounds' decisions need it: the other half of a job.

The daemon's is `meshtraind.executor.executor.Executor`. Another one can stand in its place, as that of the simulator.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from meshtraind.transport.round_link import RoundLink
from meshwire.collectives.exchange import Part
from meshwire.frames.header import Header
from meshwire.messages.job import Generation
from meshwire.sync_modes.settings_changes import SettingsChange

if TYPE_CHECKING:  # numpy, which nothing here needs
    from meshtraind.contributions.results import EncodedRound
    from meshtraind.executor.host import BindsOfRounds, RoundHost
    from meshtraind.projection.base import LearnerHelp


class RawSlots(Protocol):
    """Where the learner puts what its steps have computed. `SharedMemory` is one."""

    def raw(self, step: int) -> memoryview:
        """The slot of one step of the learner."""

    def mixed(self, slot: int) -> memoryview:
        """Where weights are mixed within a period (R9). 0: what the learner shows; from 1: what its neighbours do."""


class DataPlane(Protocol):
    """The exchange of all rounds of one history. What becomes of it, a `RoundHost` hears."""

    def round_bytes(self, members: int) -> int:
        """Memory that a round takes here until it is forgotten, in a job of so many members."""

    @property
    def encoder(self) -> "LearnerHelp | None":
        """What the learner learns for the codec; None for one that learns nothing."""

    # What this member adds

    def contribute(self, number: int, bucket: int, part: Part, weight: float, raw: memoryview | None) -> None:
        """Fixes this member's part of a bucket, once in each generation. `raw`: for DATA, the learner's slot."""

    def contribute_nothing(self, number: int) -> None:
        """R4, R5: this member forwards every bucket of the round."""

    # What arrives

    def chunk_announced(self, sender: int, header: Header) -> memoryview | str | None:
        """The place of an incoming chunk, or what is wrong with it; None if it is of another generation, or fenced."""

    def chunk_received(self, header: Header) -> None:
        """An announced chunk is in its place."""

    def decided(self) -> None:
        """A member has bound a round, or nulled it: chunks that waited for that are taken."""

    def lacks(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Of whom this member has still to receive something of a round: (rank, bucket, how many steps' receipts that
        rank needs before it can send it)."""

    def receipts(self, number: int) -> int:
        """How many steps of a round are over here."""

    # What becomes of rounds

    def settle(self, number: int, *, void: bool, contributed: bool) -> None:
        """V1, C1: a round is complete, and counts or is void: it will not run again."""

    def open_result(self, number: int) -> None:
        """Gives the result slot to this round, which is to be decoded there."""

    def forget(self, number: int) -> None:
        """Frees a round that every member holds (G5) and this learner needs no more."""

    def close(self) -> None:
        """Lets go of links and memory."""

    # From one generation to the next

    def take_changes(self, changes: Sequence[SettingsChange]) -> None:
        """In a fence: what the history has changed, that this member enters or catches up with (C3)."""

    def fence(self) -> None:
        """From now on nothing of the generation is sent, lands or completes (G2). Own parts are kept."""

    def encoded(self, number: int) -> "EncodedRound":
        """A complete round, to serve it; valid until it is forgotten. Raises KeyError when it is not held."""

    def place_for(self, number: int, size_bytes: int, contributors: int) -> memoryview:
        """Where the bytes of a round belong that others hold completely. Raises CodecError when they cannot be so
        many."""

    def take_served(self, number: int, poisoned: bytes | None, contributors: int, weights: Sequence[float]) -> None:
        """The bytes lie in `place_for(number)`; None for `poisoned`: the round is void, and nobody needs any. `weights`
        are the contributors', in the order of ranks. Raises CodecError when the bytes are not such a round's."""

    def enter(
        self,
        generation: int,
        ranks: tuple[int, ...],
        links: Mapping[int, RoundLink],
        cut: int,
        *,
        learning: tuple[int, ...],
    ) -> None:
        """Takes what the members of a generation send from now on; what is above the cut begins anew (G6). Nothing is
        sent before `resume`."""

    def resume(self) -> None:
        """All members have entered: sending begins."""


class DataPlaneFactory(Protocol):
    """Whoever knows the memory and the links on which a data plane stands."""

    def make(
        self, rank: int, generation: Generation, first: int | None, host: "RoundHost", binds: "BindsOfRounds"
    ) -> DataPlane:
        """In this generation, beginning with the round `first`; None: where this member comes in later."""
