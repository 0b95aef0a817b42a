"""Every segment of a round: its codec, its values in the vector, and its bytes in an area of encoded ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshtraind.codecs.base import Codec, CodecError
from meshwire.layout import EncodedLayout
from meshwire.plan import Plan


@dataclass(frozen=True, slots=True)
class Segment:
    """One codec unit (C1): bytes [offset, offset + length) of an area, values [start, start + count) of the vector.

    Where segments vary in length, that is the place it has if it begins a run, and takes at most.
    """

    codec: Codec

    offset: int
    length: int
    start: int
    count: int


def segments_by_bucket(plan: Plan, layout: EncodedLayout, codecs: Sequence[Codec]) -> list[list[Segment]]:
    """Every segment of every bucket, computed once because every chunk of every round asks for them.

    Args:
        codecs: by bucket.
    """
    return [
        [
            Segment(codecs[bucket.index], *layout.span(bucket.index, segment, 1), *bucket.segment_bounds(segment))
            for segment in range(bucket.segment_count)
        ]
        for bucket in plan.buckets
    ]


def each_payload(segments: Sequence[Segment], run: memoryview) -> Iterator[tuple[Segment, memoryview]]:
    """The bytes of each segment of a run in which they lie back to back. Raises CodecError if that is not so."""
    at = 0
    for segment in segments:
        length = segment.codec.length_of(run[at:], segment.count)
        yield segment, run[at : at + length]
        at += length
    if at != len(run):
        raise CodecError(f"{segments[0].codec.spec}: {len(run)} bytes for segments that take {at}")


class Areas:
    """Areas of one size, an encoded vector in each. Those given back are used again: fresh ones cost page faults."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free: list[memoryview] = []
        self._lent: set[int] = set()  # by identity

    def take(self) -> memoryview:
        """An area with nothing of interest in it. A fresh one is zero: it can be served with a part never written."""
        area = self._free.pop() if self._free else np.zeros(self.size_bytes, np.uint8).data
        self._lent.add(id(area))
        return area

    def give(self, area: memoryview) -> None:
        """Takes an area back that nobody reads or writes any more; one that was retired is let go of."""
        if id(area) in self._lent:
            self._lent.remove(id(area))
            self._free.append(area)

    def retire(self) -> None:
        """Nothing that is lent now will be used again: a link may still receive into it, or send from it (G8)."""
        self._lent.clear()

    def close(self) -> None:
        """Lets go of the free ones."""
        self._free.clear()
        self._lent.clear()
