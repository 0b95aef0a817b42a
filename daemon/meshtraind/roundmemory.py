"""What is kept of rounds: vectors on their way, complete ones until every member holds them (G5), own parts.

A fence (G2) voids what is on its way. A link that was in the middle of a chunk then goes on writing where it was told
to, and what it was given to send may leave still: so no area from before a fence is used again after it (G8). Own parts
and complete rounds stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshtraind.codecs.base import Codec, Values
from meshtraind.ownpart import InSlot, OwnPart, Retained
from meshtraind.resultslot import Final
from meshtraind.segments import Areas
from meshwire.exchange import BucketExchange
from meshwire.plan import Plan


@dataclass(frozen=True, slots=True)
class EncodedRound:
    """A complete round's bytes.

    Attributes:
        poisoned: bitmap over the buckets, lowest bit of the first byte first: these have no result, for they are
            poison (V1) or nobody's.
    """

    area: memoryview
    poisoned: bytes


@dataclass(slots=True)
class Round:
    """The results of one round."""

    number: int
    area: memoryview  # the encoded vector
    exchanges: Sequence[BucketExchange]  # by bucket; none where a member that holds the round serves it
    finals: list[Final] = field(default_factory=list)  # what of it is final in the area

    def encoded(self, bucket_count: int) -> EncodedRound:
        """All of it is final."""
        bitmap = 0
        for final in self.finals:
            bitmap |= final.void << final.bucket
        return EncodedRound(self.area.toreadonly(), bitmap.to_bytes(-(-bucket_count // 8), "little"))


class RoundMemory:
    """One job's.

    Args:
        area_bytes: size of an encoded vector.
        staleness: the bound s; it decides where own parts are kept.

    Attributes:
        rounds: by number.
        own: what this member adds, by round.
    """

    def __init__(self, plan: Plan, codec: Codec, area_bytes: int, staleness: int) -> None:
        self._plan = plan
        self._codec = codec
        self._staleness = staleness
        self._areas = Areas(area_bytes)
        self._scratch: Values = np.empty(plan.segment_values, np.float32)
        self.rounds: dict[int, Round] = {}
        self.own: dict[int, OwnPart] = {}

    def add(self, number: int, exchanges: Sequence[BucketExchange]) -> Round:
        """Memory for a round that has none."""
        round_ = self.rounds[number] = Round(number, self._areas.take(), exchanges)
        return round_

    def own_part(self, number: int) -> OwnPart:
        """For what is to be kept of this member's part."""
        own = self.own.get(number)
        if own is None:
            own = Retained(self._codec, self._areas.take(), self._scratch) if self._staleness else InSlot(self._codec)
            self.own[number] = own
        return own

    def fence(self, complete: int) -> None:
        """What there is of rounds after `complete` is void but for own parts."""
        self._areas.retire()
        for number in [number for number in self.rounds if number > complete]:
            del self.rounds[number]

    def served(self, number: int, poisoned: bytes, run_segments: int) -> Round:
        """All of a round without exchanges has come from a member that holds it.

        Args:
            poisoned: as in EncodedRound.
            run_segments: how many segments are decoded at a time.
        """
        round_ = self.rounds[number]
        assert not round_.exchanges
        bitmap = int.from_bytes(poisoned, "little")
        round_.finals = [
            Final(
                bucket.index, first, min(run_segments, bucket.segment_count - first), bool(bitmap >> bucket.index & 1)
            )
            for bucket in self._plan.buckets
            for first in range(0, bucket.segment_count, run_segments)
        ]
        return round_

    def forget(self, number: int) -> None:
        """All of a round is needed no more."""
        if (round_ := self.rounds.pop(number, None)) is not None:
            self._areas.give(round_.area)
        if (own := self.own.pop(number, None)) is not None and own.area is not None:
            self._areas.give(own.area)

    def close(self) -> None:
        """Lets go of everything."""
        self.rounds.clear()
        self.own.clear()
        self._areas.close()
