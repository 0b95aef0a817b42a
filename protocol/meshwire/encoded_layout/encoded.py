"""Where the encoded segments of a round lie in memory (C1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Protocol

from meshwire import limits
from meshwire.codecs.registry import CodecSpec, buffer_codec, cast_codec, whole_codec
from meshwire.model.plan import Bucket, Plan, Shard


class Shorter(Protocol):
    """A vector that is sent in the place of the model's."""

    @property
    def plan(self) -> Plan:
        """Of what is sent. It has the buckets of the model's, in the same order, and behind them precursors."""

    @property
    def precursors(self) -> Mapping[int, int]:
        """By bucket of the model's: the one whose sums everybody needs before it knows what it adds to it. Buckets
        without one are not in it."""

    def measured_segments(self, bucket: int) -> int:
        """How many segments of a bucket count in squared norms (O4): the first ones."""


class EncodedLayout:
    """Byte positions of every segment's encoding inside the area.

    Where segments vary in length, every run of them has the place that it could take at most; its segments lie back to
    back at the beginning of that.

    Args:
        plan: of what is encoded.
        codec: the job's.
        parameters: that of the parameters' buckets, where it is not the job's.
        shorter: what of the model's vector `plan` is, where another one is sent
            (`meshwire.encoded_layout.projections`).

    Attributes:
        projected: another vector than the model's is sent.
        precursors: as of `Shorter`; none where the model's vector is sent.
        followers: the other way round: by precursor, the bucket that waits for it.
        codecs: by bucket; those of tensors that it is not for, and of float buffers (O5), have another than the job's.
        told: of what is said in a bucket behind its values, where another vector than the model's is sent: a cast.
        fixed: each segment takes exactly the place that it has.
        gathered: a round is kept as all its contributors' vectors, and not as the mean's.
        served_in_place: a round's bytes are an encoded vector as it lies here, and not back to back.
    """

    def __init__(
        self, plan: Plan, codec: CodecSpec, parameters: CodecSpec | None = None, shorter: Shorter | None = None
    ) -> None:
        self.plan = plan
        self.shorter = shorter
        self.projected = shorter is not None
        self.precursors: Mapping[int, int] = shorter.precursors if shorter is not None else {}
        self.followers = {precursor: bucket for bucket, precursor in self.precursors.items()}
        self.reduction = codec.reduction
        self.codecs = tuple(_codec_of(bucket, plan, codec, parameters or codec) for bucket in plan.buckets)
        self.told = cast_codec(codec)
        self.fixed = all(each.fixed for each in self.codecs)
        self.gathered = codec.reduction.gathered
        self.served_in_place = self.fixed and not self.gathered
        self._places: list[_Places] = []
        offset = 0
        for bucket, each in zip(plan.buckets, self.codecs, strict=True):
            places = _Places(plan, bucket, each, self._told_from(bucket.index), self.told, offset)
            offset = places.starts[-1]
            self._places.append(places)
        self.total_bytes = offset

    @property
    def model_buckets(self) -> range:
        """The buckets that the model's vector has, too."""
        return range(len(self.plan.buckets) - len(self.precursors))

    def measured_segments(self, bucket: int) -> int:
        """How many segments of a bucket count in squared norms (O4): the first ones."""
        if self.shorter is not None:
            return self.shorter.measured_segments(bucket)
        return self.plan.buckets[bucket].segment_count if bucket < self.plan.parameter_buckets else 0

    def codec_of(self, bucket: int, segment: int) -> CodecSpec:
        """Of one segment of a bucket."""
        return self.codecs[bucket] if segment < self._told_from(bucket) else self.told

    def _told_from(self, bucket: int) -> int:
        if self.shorter is not None and bucket < self.plan.coded_buckets:
            return self.shorter.measured_segments(bucket)
        return self.plan.buckets[bucket].segment_count

    def span(self, bucket: int, first_segment: int, segment_count: int) -> tuple[int, int]:
        """(offset, length) in bytes of a run of segments."""
        starts = self._places[bucket].starts
        return starts[first_segment], starts[first_segment + segment_count] - starts[first_segment]

    def chunk_segments(self, bucket: int) -> int:
        """How many segments one frame carries, if there are so many."""
        return self._places[bucket].chunk_segments

    def chunks(self, bucket: int, shard: Shard) -> list[tuple[int, int]]:
        """(first segment, segment count) of each frame that carries a piece of it."""
        end, most = shard.first_segment + shard.segment_count, self._places[bucket].chunk_segments
        return [(first, min(most, end - first)) for first in range(shard.first_segment, end, most)]


@dataclass(frozen=True, slots=True)
class LayoutPhase:
    """Rounds of a job that follow each other.

    Attributes:
        layouts: which they have in turn: round k the one at k modulo how many there are.
        until: the last one; None: the job's.
    """

    layouts: tuple[EncodedLayout, ...]
    until: int | None = None


def _codec_of(bucket: Bucket, plan: Plan, codec: CodecSpec, parameters: CodecSpec) -> CodecSpec:
    if bucket.index < plan.coded_buckets:
        return parameters
    return whole_codec(codec) if bucket.index < plan.parameter_buckets else buffer_codec(codec)


class _Places:
    """One bucket's, from `offset` on.

    Args:
        told_from: the first of the segments that have the codec `told`.

    Attributes:
        starts: of its segments; behind them where the last one ends.
        chunk_segments: that one frame carries.
    """

    def __init__(
        self, plan: Plan, bucket: Bucket, codec: CodecSpec, told_from: int, told: CodecSpec, offset: int
    ) -> None:
        size_bytes, told_bytes = cache(codec.segment_bytes_max), cache(told.segment_bytes_max)  # most are alike
        by_tensor = codec.family.blocks is not None
        lengths = (
            size_bytes(bucket.segment_bounds(segment)[1], plan.borders(bucket.index, segment) if by_tensor else ())
            if segment < told_from
            else told_bytes(bucket.segment_bounds(segment)[1])
            for segment in range(bucket.segment_count)
        )
        self.starts = tuple(accumulate(lengths, initial=offset))
        # About CHUNK_BYTES, for segment headers must not halve it.
        full_bytes = size_bytes(bucket.segment_values)
        if told_from < bucket.segment_count:
            full_bytes = max(full_bytes, told_bytes(bucket.segment_values))
        self.chunk_segments = max(1, (limits.CHUNK_BYTES + full_bytes // 8) // full_bytes)
