"""The results of one round as they lie in this daemon's memory, run by run, and how a complete round is served.

Everything that reads a round's final bytes meets here: the executor that receives them, the result slot that decodes
them, and the projections that make later rounds of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshtraind.contributions.segments import RoundForm
from meshwire.collectives.exchange import BucketExchange


class Final(NamedTuple):
    """A run of segments whose result is known."""

    bucket: int
    first_segment: int
    segment_count: int
    payloads: tuple[memoryview, ...]  # its bytes; of a gather, each contributor's, in the order of ranks
    contributors: int
    weight: float
    weights: tuple[float, ...] = ()  # of a gather, each contributor's, in the order of ranks

    @property
    def void(self) -> bool:
        """Whether it has no values: poison (V1), or nobody's."""
        return not self.payloads


@dataclass(slots=True)
class RoundResults:
    """What is here of one round: the memory in which its chunks land, and what of it is final."""

    number: int
    form: RoundForm
    area: memoryview  # the encoded vector first, but for a gather
    exchanges: Sequence[BucketExchange] = ()  # by bucket; none where a member that holds the round serves it
    finals: list[Final] = field(default_factory=list)  # what of it is final in the area
    void: bool = True  # until it is complete, and counts


@dataclass(frozen=True, slots=True)
class EncodedRound:
    """A complete round as it is served: where its bytes lie, for a gather keeps as many vectors as it has contributors.

    Attributes:
        payloads: in the order in which they are served. The encoded vector; of segments that vary in length, those that
            have a result; of a gather, run by run, what each contributor has sent of it, in the order of ranks.
        poisoned: bitmap over the buckets, lowest bit of the first byte first: these have no result, for they are
            poison (V1) or nobody's.
    """

    payloads: tuple[memoryview, ...]
    poisoned: bytes

    @property
    def size_bytes(self) -> int:
        """How many bytes all payloads take, back to back."""
        return sum(map(len, self.payloads))

    def read(self, offset_bytes: int, max_bytes: int) -> bytes:
        """A piece of the payloads; shorter, or empty, where they end."""
        pieces = []
        end_bytes = offset_bytes + max_bytes
        at = 0
        for payload in self.payloads:
            if at >= end_bytes:
                break
            if at + len(payload) > offset_bytes:
                pieces.append(payload[max(0, offset_bytes - at) : end_bytes - at])
            at += len(payload)
        return b"".join(pieces)
