"""Every segment of a round: its codec, its values in the vector, and its bytes in an area of encoded ones."""

import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Codec, CodecError, Values
from meshwire.codecs.registry import CodecSpec
from meshwire.encoded_layout.by_round import RoundLayouts
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.limits import KIB
from meshwire.model.plan import Plan

MAPPED_BYTES_MIN = 128 * KIB  # what glibc maps before it has adapted


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
    measured: bool  # a gradient's, which counts in squared norms (O4)


Segments = Sequence[Sequence[Segment]]
"""By bucket."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundForm:
    """How the vectors of some of a job's rounds lie encoded.

    Attributes:
        segments: computed once because every chunk of every round asks for them.
    """

    layout: EncodedLayout
    segments: Segments


class RoundForms:
    """The forms of one job's rounds, in their order of time.

    Attributes:
        codec: the job's.
        shared_draws: all members of a round are to draw alike.
    """

    def __init__(self, plan: Plan, codec: CodecSpec) -> None:
        self.codec = codec
        self._layouts = RoundLayouts(plan, codec)
        specs = {
            layout.codec_of(bucket.index, segment)
            for layout in self._layouts.all
            for bucket in layout.plan.buckets
            for segment in range(bucket.segment_count)
        }
        codecs = {spec: codec_named(str(spec)) for spec in specs}
        self._forms = {layout: RoundForm(layout, _segments(layout, codecs)) for layout in self._layouts.all}
        self._only = next(iter(self._forms.values())) if len(self._forms) == 1 else None
        self.shared_draws = any(codec.shared_draws for codec in codecs.values())

    def __iter__(self) -> Iterator[RoundForm]:
        return iter(self._forms.values())

    def of(self, number: int) -> RoundForm:
        """The form of a round. Most jobs have one."""
        return self._only or self._forms[self._layouts.of(number)]

    def ends_with(self, number: int) -> bool:
        """Whether no later round has the form of this one."""
        return self._layouts.ends_with(number)

    @property
    def shorter_values(self) -> int:
        """How many values the longest vector has that is sent in place of the model's; 0 where none is."""
        plans = [form.layout.plan for form in self if form.layout.projected]
        return max((plan.total_values for plan in plans), default=0)

    @property
    def bytes_max(self) -> int:
        """How many bytes the longest encoded vector of any round takes."""
        return self._layouts.bytes_max


def _segments(layout: EncodedLayout, codecs: Mapping[CodecSpec, Codec]) -> Segments:
    segments = [
        [
            Segment(
                codecs[layout.codec_of(bucket.index, segment)].within(layout.plan.borders(bucket.index, segment)),
                *layout.span(bucket.index, segment, 1),
                *bucket.segment_bounds(segment),
                measured=segment < layout.measured_segments(bucket.index),
            )
            for segment in range(bucket.segment_count)
        ]
        for bucket in layout.plan.buckets
    ]
    for segment in chain.from_iterable(segments):
        assert segment.codec.bytes_max(segment.count) == segment.length, "a place is as long as its codec needs"
    return segments


def each_payload(segments: Sequence[Segment], run: memoryview) -> Iterator[tuple[Segment, memoryview]]:
    """The bytes of each segment of a run in which they lie back to back. Raises CodecError if that is not so."""
    at = 0
    for segment in segments:
        length = segment.codec.length_of(run[at:], segment.count)
        yield segment, run[at : at + length]
        at += length
    if at != len(run):
        raise CodecError(f"{segments[0].codec.spec}: {len(run)} bytes for segments that take {at}")


def values_in(area: memoryview, segments: Sequence[Segment]) -> Values:
    """A new array of the values of these segments of a bucket, which lie one behind the other, each in its place of an
    area."""
    first = segments[0].start if segments else 0
    values: Values = np.empty(sum(segment.count for segment in segments), np.float32)
    for segment in segments:
        at = segment.start - first
        payload = area[segment.offset : segment.offset + segment.length]
        segment.codec.decode_into(payload, values[at : at + segment.count])
    return values


def new_area(size_bytes: int) -> memoryview:
    """A zeroed area that goes back to the system when nobody refers to it any more.

    One of some size is a mapping of its own, whatever the allocator would do: glibc moves blocks of up to 32 MiB to its
    heap when it has seen one freed, and there they stay, between small things that live on.
    """
    if size_bytes < MAPPED_BYTES_MIN:
        return np.zeros(size_bytes, np.uint8).data
    if sys.platform == "win32":
        return memoryview(mmap.mmap(-1, size_bytes))
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE))


class Areas:
    """Areas of one size, an encoded vector in each. Those given back are used again: fresh ones cost page faults.

    No more wait to be used again than are in use, and one: a daemon whose learner loads holds many rounds for a while
    (J1), and what they took is to go back to the system then.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free: list[memoryview] = []
        self._lent: set[int] = set()  # by identity

    def take(self) -> memoryview:
        """An area whose content nobody needs. A fresh one is zero: it can be served with a part never written."""
        area = self._free.pop() if self._free else new_area(self.size_bytes)
        self._lent.add(id(area))
        return area

    def give(self, area: memoryview) -> None:
        """Takes an area back that nobody reads or writes any more; one that was retired is let go of."""
        if id(area) in self._lent:
            self._lent.remove(id(area))
            self._free.append(area)
            del self._free[len(self._lent) + 1 :]

    def retire(self) -> None:
        """Has nothing that is lent now used again: a link may still receive into it, or send from it (G8)."""
        self._lent.clear()

    def close(self) -> None:
        """Lets go of the areas that are free."""
        self._free.clear()
        self._lent.clear()
