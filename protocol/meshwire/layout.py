"""Where the encoded segments of a round lie in memory (C1)."""

from collections.abc import Iterator

from meshwire import limits
from meshwire.codec import CodecSpec
from meshwire.plan import Plan
from meshwire.topology import Shard


class EncodedLayout:
    """Byte positions of every segment's encoding inside the area.

    Where segments vary in length, every run of them has the place that it could take at most; its segments lie back to
    back at the beginning of that.

    Attributes:
        fixed: each segment takes exactly the place that it has.
        chunk_segments: how many full segments one frame carries.
    """

    def __init__(self, plan: Plan, codec: CodecSpec) -> None:
        self.reduction = codec.reduction
        self.fixed = codec.fixed
        self._full_bytes = codec.segment_bytes_max(plan.segment_values)
        self._segment_counts = [bucket.segment_count for bucket in plan.buckets]
        self._last_bytes = [
            codec.segment_bytes_max(bucket.segment_bounds(bucket.segment_count - 1)[1]) for bucket in plan.buckets
        ]
        self._bucket_offsets: list[int] = []
        offset = 0
        for bucket in plan.buckets:
            self._bucket_offsets.append(offset)
            offset += self._run_bytes(bucket.index, 0, bucket.segment_count)
        self.total_bytes = offset
        # About CHUNK_BYTES, for segment headers must not halve it.
        self.chunk_segments = max(1, (limits.CHUNK_BYTES + self._full_bytes // 8) // self._full_bytes)

    def span(self, bucket: int, first_segment: int, segment_count: int) -> tuple[int, int]:
        """(offset, length) in bytes of a run of segments."""
        offset = self._bucket_offsets[bucket] + first_segment * self._full_bytes
        return offset, self._run_bytes(bucket, first_segment, segment_count)

    def chunks(self, shard: Shard) -> Iterator[tuple[int, int]]:
        """(first segment, segment count) of each frame that carries a piece of it."""
        end = shard.first_segment + shard.segment_count
        for first in range(shard.first_segment, end, self.chunk_segments):
            yield first, min(self.chunk_segments, end - first)

    def _run_bytes(self, bucket: int, first_segment: int, segment_count: int) -> int:
        if not segment_count:
            return 0
        if first_segment + segment_count < self._segment_counts[bucket]:
            return segment_count * self._full_bytes
        return (segment_count - 1) * self._full_bytes + self._last_bytes[bucket]
