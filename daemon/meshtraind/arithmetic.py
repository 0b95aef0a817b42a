"""Sums, means and squared norms of one run of segments: what is computed when a chunk has arrived or is to leave."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshtraind.codecs.base import Codec, CodecError, Values
from meshtraind.ownpart import OwnPart
from meshtraind.resultslot import ResultSlot
from meshtraind.segments import Segment
from meshwire.exchange import Work


class Arithmetic:
    """Scratch memory for one run at a time; use it from one thread.

    Args:
        segments: by bucket.
        segment_values: of the longest segment.
        norm_buckets: buckets before this one hold parameters' gradients and count in squared norms (O4).
    """

    def __init__(
        self, codec: Codec, segments: Sequence[Sequence[Segment]], segment_values: int, norm_buckets: int
    ) -> None:
        self._codec = codec
        self._segments = segments
        self._norm_buckets = norm_buckets
        self._sum: Values = np.empty(segment_values, np.float32)
        self._wide = np.empty(segment_values, np.float64)

    def compute(self, bucket: int, work: Work, area: memoryview, own: OwnPart | None, slot: ResultSlot | None) -> Work:
        """Does what `work` says of a run, all but the sending.

        Args:
            area: the round's.
            own: of this member; looked at if `work.add_own`.
            slot: where final values are decoded to; None: they are not, now.

        Returns the work with its squared norm, if it is finished here, or poisoned, if a sum turned out not to be
        finite (V1). Raises CodecError when the payload that has arrived was broken.
        """
        if work.poison or not (work.add_own or work.incoming):
            return work
        codec = self._codec
        opened = slot if work.deliver else None
        measured = work.finish and bucket < self._norm_buckets
        squared_norm = 0.0
        end = work.first_segment + work.segment_count
        for segment in self._segments[bucket][work.first_segment : end]:
            encoded = area[segment.offset : segment.offset + segment.length]
            total = self._sum[: segment.count]
            if work.add_own or work.finish:
                if work.add_own:
                    assert own is not None
                    if work.incoming:
                        codec.sum_into(encoded, own.values(segment), total)
                    else:
                        total = own.values(segment)
                else:
                    codec.decode_into(encoded, total)
                if work.finish:
                    with np.errstate(over="ignore", invalid="ignore"):  # found when it is encoded
                        total = np.divide(total, np.float32(work.weight), out=self._sum[: segment.count])
                try:
                    codec.encode_into(total, encoded)
                except CodecError:
                    if work.incoming:
                        codec.decode_into(encoded, self._sum[: segment.count])  # raises if the payload was broken
                    return replace(work, poison=True)  # finite parts can have a sum that is not
            if opened is not None or measured:
                values = opened.place(segment) if opened is not None else self._sum[: segment.count]
                codec.decode_into(encoded, values)
                if measured:
                    squared_norm += self._squared_norm(values)
        return replace(work, squared_norm=squared_norm) if measured else work

    def _squared_norm(self, values: Values) -> float:
        """In float64: fp32 would lose digits over so many, and overflow."""
        wide = self._wide[: len(values)]
        np.copyto(wide, values)
        return float(np.dot(wide, wide))
