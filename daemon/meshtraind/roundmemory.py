"""What is kept of rounds: vectors on their way, complete ones until every member holds them (G5), own parts.

A fence (G2) voids what is on its way. A link that was in the middle of a chunk then goes on writing where it was told
to, and what it was given to send may leave still: so no area from before a fence is used again after it (G8). Own parts
and complete rounds stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshtraind.codecs.base import CodecError, Values
from meshtraind.ownpart import Compensated, Compensation, InSlot, OwnPart, Retained
from meshtraind.resultslot import Final
from meshtraind.segments import Areas, Segment
from meshwire.codec import Reduction
from meshwire.exchange import Exchange
from meshwire.layout import EncodedLayout
from meshwire.topology import Shard


@dataclass(frozen=True, slots=True)
class EncodedRound:
    """A complete round's bytes.

    Attributes:
        area: the encoded vector; of segments that vary in length, those that have a result, back to back.
        poisoned: bitmap over the buckets, lowest bit of the first byte first: these have no result, for they are
            poison (V1) or nobody's.
    """

    area: memoryview
    poisoned: bytes


@dataclass(slots=True)
class Round:
    """The results of one round."""

    number: int
    area: memoryview  # the encoded vector first
    exchanges: Sequence[Exchange]  # by bucket; none where a member that holds the round serves it
    finals: list[Final] = field(default_factory=list)  # what of it is final in the area
    packed: memoryview | None = None  # its bytes as they are served, once somebody has asked for them


class RoundMemory:
    """One job's.

    Args:
        segments: by bucket.
        staleness: the bound s; it decides where own parts are kept.
        compensation: what own parts are encoded with, but on the ring.

    Attributes:
        rounds: by number.
        own: what this member adds, by round.
    """

    def __init__(
        self,
        layout: EncodedLayout,
        segments: Sequence[Sequence[Segment]],
        staleness: int,
        compensation: Compensation,
    ) -> None:
        self._layout = layout
        self._segments = segments
        self._staleness = staleness
        self._compensation = compensation
        self._areas = Areas(layout.total_bytes)
        self._own_areas = Areas(layout.total_bytes)
        self._scratch: Values = np.empty(max(segment.count for bucket in segments for segment in bucket), np.float32)
        self.rounds: dict[int, Round] = {}
        self.own: dict[int, OwnPart] = {}

    def form(self, area_bytes: int) -> None:
        """From now on rounds take areas of this size, which begin with the encoded vector."""
        if area_bytes != self._areas.size_bytes:
            self._areas = Areas(area_bytes)

    def add(self, number: int, exchanges: Sequence[Exchange]) -> Round:
        """Memory for a round that has none."""
        round_ = self.rounds[number] = Round(number, self._areas.take(), exchanges)
        return round_

    def own_part(self, number: int) -> OwnPart:
        """For what is to be kept of this member's part."""
        own = self.own.get(number)
        if own is None:
            own = self.own[number] = self._new_part(number)
        return own

    def _new_part(self, number: int) -> OwnPart:
        if self._layout.reduction is not Reduction.LINEAR:
            area = self._own_areas.take()
            return Compensated(self._segments, area, number, self._compensation)
        if self._staleness:
            return Retained(self._segments, self._own_areas.take(), self._scratch)
        return InSlot(self._segments)

    def fence(self, complete: int) -> None:
        """What there is of rounds after `complete` is void but for own parts."""
        self._areas.retire()
        self._own_areas.retire()
        for number in [number for number in self.rounds if number > complete]:
            del self.rounds[number]

    def encoded(self, number: int) -> EncodedRound:
        """A complete round as it is served. Raises KeyError when it is not held."""
        round_ = self.rounds[number]
        bitmap = 0
        for final in round_.finals:
            bitmap |= final.void << final.bucket
        if round_.packed is None:
            round_.packed = self._packed(round_)
        return EncodedRound(round_.packed, bitmap.to_bytes(-(-len(self._segments) // 8), "little"))

    def _packed(self, round_: Round) -> memoryview:
        if self._layout.fixed:
            return round_.area[: self._layout.total_bytes].toreadonly()
        finals = sorted(final for final in round_.finals if not final.void)  # by bucket and first segment
        return memoryview(b"".join(round_.area[final.offset : final.offset + final.length_bytes] for final in finals))

    def place_for(self, number: int, size_bytes: int) -> memoryview:
        """Where a round's bytes belong that others hold completely. Raises CodecError when they cannot be so many."""
        most = self._layout.total_bytes
        if size_bytes > most or (self._layout.fixed and size_bytes != most):
            raise CodecError(f"round {number} has {size_bytes} bytes at the source and {most} here")
        if not self._layout.fixed:
            self.rounds[number] = Round(number, np.empty(size_bytes, np.uint8).data, ())
        elif number not in self.rounds:
            self.add(number, ())
        return self.rounds[number].area[:size_bytes]

    def served(self, number: int, poisoned: bytes | None) -> Round:
        """All of a round without exchanges has come from a member that holds it.

        Args:
            poisoned: as in EncodedRound; None for a void round, which has no bytes.

        Raises CodecError when the bytes are not such a round's.
        """
        if poisoned is None:
            self.place_for(number, self._layout.total_bytes if self._layout.fixed else 0)
        round_ = self.rounds[number]
        assert not round_.exchanges
        bitmap = int.from_bytes(poisoned, "little") if poisoned is not None else (1 << len(self._segments)) - 1
        round_.finals = []
        at = 0
        for bucket, segments in enumerate(self._segments):
            void = bool(bitmap >> bucket & 1)
            for first, count in self._layout.chunks(bucket, Shard(0, len(segments))):
                offset, length = self._layout.span(bucket, first, count)
                if not self._layout.fixed:
                    offset, length = at, 0 if void else self._length(segments[first : first + count], round_.area[at:])
                    at += length
                round_.finals.append(Final(bucket, first, count, void, offset, length))
        if not self._layout.fixed and at != len(round_.area):
            raise CodecError(f"round {number} has {len(round_.area)} bytes, and its segments take {at}")
        return round_

    def _length(self, segments: Sequence[Segment], run: memoryview) -> int:
        at = 0
        for segment in segments:
            at += segment.codec.length_of(run[at:], segment.count)
        return at

    def forget(self, number: int) -> None:
        """All of a round is needed no more."""
        if (round_ := self.rounds.pop(number, None)) is not None:
            self._areas.give(round_.area)
        if (own := self.own.pop(number, None)) is not None and own.area is not None:
            self._own_areas.give(own.area)

    def close(self) -> None:
        """Lets go of everything."""
        self.rounds.clear()
        self.own.clear()
        self._areas.close()
        self._own_areas.close()
