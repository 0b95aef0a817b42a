"""What an executor is given: the job as far as it decides the bytes, the members of a generation, and who listens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from meshtraind.codecs.base import Values
from meshtraind.contributions.error_feedback import Residual
from meshtraind.transport.round_link import RoundLink
from meshwire.frames.header import Header
from meshwire.model.manifest import Momentum
from meshwire.model.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """What of a job decides how its rounds are encoded, exchanged and summed; the same on all members.

    Attributes:
        codec, topology: as typed; without topology, the codec's usual one.
        momentum: that the codec takes over from the optimizer.
        job: number for the frame headers.
        seed: the job's, for codecs that draw.
        staleness: the bound s.
    """

    plan: Plan
    codec: str
    topology: str | None = None
    momentum: Momentum | None = None
    job: int
    seed: int
    staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeMembers:
    """Who exchanges rounds in one generation.

    Attributes:
        generation: its hash, for the frame headers.
        ranks: of its members, sorted.
        links: the way to each other member, by rank.
        learning: those whose learners compute.
    """

    generation: int
    ranks: tuple[int, ...]
    links: Mapping[int, RoundLink]
    learning: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExchangeMemory:
    """What an executor shares with others of the same history, each of which has its own rounds (C3).

    Attributes:
        result: slot for the means, as long as the plan's vector.
        owed: what this member has left out as a worker; None: nobody else keeps it.
    """

    result: Values
    owed: Residual | None = None


class RoundHost(Protocol):
    """Hears what becomes of rounds. Nothing of the executor may be called from within, but `contribute`, `open_result`,
    `forget` and `close`."""

    @property
    def complete(self) -> int:
        """The newest round that this daemon holds completely (G5)."""

    def bucket_complete(
        self, round_: int, bucket: int, poisoned: bool, contributors: int, weight: float, squared_norm: float
    ) -> None:
        """A bucket's result is complete here, decoded or not; after a change of generation once more if the round runs
        again."""

    def result_decoded(self, round_: int) -> None:
        """All of a round lies in the result slot; poison changes nothing there."""

    def chunk_broken(self, rank: int | None, text: str) -> None:
        """What is wrong with a payload or with what was said of it, and who has sent it; None where nobody is known to
        be to blame."""


class BindsOfRounds(Protocol):
    """Who is bound to a round."""

    def bound(self, round_: int, bitmap: int) -> tuple[int, float] | None:
        """Which of the ranks in a bitmap are bound to a round, with which summed weight; None while one of them has not
        decided (R2). A chunk waits until then: whoever passes it on answers for it."""


class ChunkTrace(Protocol):
    """Notes what is sent."""

    def chunk(self, header: Header) -> None:
        """This chunk leaves."""
