"""What this member adds to a round, from the learner's words "bucket ready" until the round is forgotten (M1).

It outlives generations: a round that runs again is given the very bytes that it was given before (G6, C1).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from meshtraind.codecs.base import Codec, CodecError, Values
from meshtraind.segments import Segment
from meshwire.exchange import Part


class OwnPart(ABC):
    """The w*g of one round."""

    area: memoryview | None = None
    """Memory of the daemon's that it takes."""

    def __init__(self) -> None:
        self._kept: dict[int, Part] = {}

    def keep(self, bucket: int, segments: Sequence[Segment], raw: Values | None) -> Part:
        """Takes a bucket that has become ready in the raw slot, once; later calls do not look at `raw`.

        Returns DATA, or POISON when a value was found that is not finite (V1).
        """
        part = self._kept.get(bucket)
        if part is None:
            assert raw is not None
            try:
                self._take(segments, raw)
                part = Part.DATA
            except CodecError:
                part = Part.POISON
            self._kept[bucket] = part
        return part

    @abstractmethod
    def _take(self, segments: Sequence[Segment], raw: Values) -> None:
        """Raises CodecError when a value is found that is not finite."""

    @abstractmethod
    def values(self, segment: Segment) -> Values:
        """What is added to the sum; valid until the next call."""

    @abstractmethod
    def encoded(self, offset: int, length: int) -> memoryview | None:
        """The bytes of a run of segments as they can be sent, if encoding them is done, or changes nothing.

        They stay as they are until every member holds the round.
        """


class InSlot(OwnPart):
    """s=0: the learner writes the slot again only after the round is complete, and so after its successor on the ring
    has received what was sent from here. Nothing is copied, and what only enters a sum is never rounded."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self._identity = codec.identity
        self._raw: Values

    def _take(self, segments: Sequence[Segment], raw: Values) -> None:
        self._raw = raw

    def values(self, segment: Segment) -> Values:
        return self._raw[segment.start : segment.start + segment.count]

    def encoded(self, offset: int, length: int) -> memoryview | None:
        # Where encoding changes nothing an area is laid out as the vector. The learner has looked for NaN (V1).
        return self._raw.data.cast("B")[offset : offset + length] if self._identity else None


class Retained(OwnPart):
    """s>0: encoded at once, for the learner writes the slot again while the round is on its way.

    Args:
        area: where it is kept.
        scratch: for the values of one segment; shared by all rounds.
    """

    area: memoryview

    def __init__(self, codec: Codec, area: memoryview, scratch: Values) -> None:
        super().__init__()
        self._codec = codec
        self.area = area
        self._scratch = scratch

    def _take(self, segments: Sequence[Segment], raw: Values) -> None:
        for segment in segments:
            values = raw[segment.start : segment.start + segment.count]
            self._codec.encode_into(values, self.encoded(segment.offset, segment.length))

    def values(self, segment: Segment) -> Values:
        payload = self.encoded(segment.offset, segment.length)
        if self._codec.identity:
            return np.frombuffer(payload, np.float32)
        values = self._scratch[: segment.count]
        self._codec.decode_into(payload, values)
        return values

    def encoded(self, offset: int, length: int) -> memoryview:
        return self.area[offset : offset + length]
