"""This member's part of a round whose segments are added encoded, and how much of their room it takes.

The members' values meet in cells that have room for so many places. How far supports overlap nobody knows before, and
everybody sees afterwards: how many places a sum has stands in its bytes. So each member fills a share of the room, by
segment: at first the m-th part, so that all fit in even if no place is sent by two, and then more or less of it, to
where the places of all take up FILL of the room.
"""

import numpy as np

from meshtraind.codecs.base import CodecError, Terms, Values
from meshtraind.codecs.homomorphic import Homomorphic, Recovered
from meshtraind.contributions.contribution import Compensation, Retained
from meshtraind.contributions.error_feedback import Residual
from meshtraind.contributions.seeds import segment_seed
from meshtraind.contributions.segments import Segment, Segments

FILL = 0.95
GROWTH_MAX = 1.25  # in a round
SHRINKAGE_MAX = 0.5
SHRINKAGE_MIN = 0.9  # after a round in which values were not found, if it was by chance


class Shares:
    """How much of each segment's room one member fills. Nobody else needs to know: it changes no layout, and who is new
    begins as all did."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}  # by the segment's start

    def of(self, segment: Segment, members: int) -> float:
        """The share of the segment's room."""
        return self._shares.get(segment.start, 1 / members)

    def learn(self, segment: Segment, room: int, share: float, found: Recovered) -> None:
        """Grows or shrinks a share, by what has become of a round in which this member has filled `share`.

        As long as the sum has too many places the share shrinks, down to a single value; then all members' fit in.
        """
        factor = min(FILL * room / max(found.places, 1), GROWTH_MAX)
        if not found.whole:
            factor = min(factor, SHRINKAGE_MIN)
        self._shares[segment.start] = min(max(share * max(factor, SHRINKAGE_MAX), 1 / room), 1.0)


class SketchPart(Retained):
    """A part that is encoded at once at any s, for what it leaves out enters the next one.

    Multiples of STEP are only what is sent: the codec rounds, and leaves the rest. So the residual may be brought to
    another weight as any other, and sums stay exact.

    Args:
        area: where it is kept.
        scratch: for the values of one segment; shared by all rounds.
        number: of the round.
        weight: of the part.
        members: of the generation in which its encoding begins.
    """

    def __init__(
        self,
        segments: Segments,
        area: memoryview,
        scratch: Values,
        number: int,
        compensation: Compensation,
        shares: Shares,
        weight: float,
        members: int,
    ) -> None:
        super().__init__(segments, area, scratch)
        assert compensation.residual is not None
        self._number = number
        self._seed = compensation.seed
        self._residual: Residual = compensation.residual
        self._shares = shares
        self._weight = weight
        self._members = members
        self._filled: dict[int, dict[Segment, float]] = {}  # by bucket
        self._found: dict[Segment, Recovered] = {}

    def payload(self, segment: Segment) -> memoryview:
        """The bytes of a segment."""
        return self.area[segment.offset : segment.offset + segment.length]

    def found(self, segment: Segment, found: Recovered) -> None:
        """Notes what was found in the sum. When a round runs again, what its last run has found counts."""
        self._found[segment] = found

    def counted(self) -> None:
        """Owes again what nobody has found in the sum: it goes with a later round, in other cells."""
        for bucket, filled in self._filled.items():
            start = self._segments[bucket][0].start
            for segment, share in filled.items():
                assert isinstance(segment.codec, Homomorphic)
                found = self._found[segment]
                self._shares.learn(segment, segment.codec.room(segment.count), share, found)
                if not found.whole:
                    self._residual.add(start, segment.start, self.values(segment), self._weight)

    def _take(self, bucket: int, raw: Values) -> None:
        segments = self._segments[bucket]
        if not isinstance(segments[0].codec, Homomorphic):
            super()._take(bucket, raw)
            return
        start, end = segments[0].start, segments[-1].start + segments[-1].count
        self._residual.lay_out((start, end - start))
        values = self._residual.begin(self._number, start, end - start, self._weight)
        filled: dict[Segment, float] = {}
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # found when it is encoded
                np.add(values, raw[start:end], out=values)
            for segment in segments:
                filled[segment] = self._send(segment, values[segment.start - start :][: segment.count])
        except CodecError:
            self._residual.cancel(self._number, start)
            raise
        self._filled[bucket] = filled

    def _send(self, segment: Segment, values: Values) -> float:
        """Returns the share of the segment's room that it may fill."""
        assert isinstance(segment.codec, Homomorphic)
        share = self._shares.of(segment, self._members)
        values_max = max(1, int(share * segment.codec.room(segment.count)))
        terms = Terms(self._number, segment_seed(self._seed, self._number, segment.start), values_max=values_max)
        segment.codec.encode_rest_into(values, self.payload(segment), terms)
        return share
