"""topk: a fixed part of each segment, those with the largest magnitudes; of equal ones those that come first."""

from meshtraind.codecs.base import Bits
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.selection import largest
from meshtraind.codecs.sparse import SparseCodec
from meshwire.sparsecodecs import kept_values


class TopK(SparseCodec):
    """Leaves at most 1 - ratio of the segment's squared norm, besides what the written values lose."""

    def _chosen(self, magnitudes: Bits, number: int, most: int) -> Indices:
        wanted = kept_values(self.spec.ramp("ratio").at(number), len(magnitudes))
        return largest(magnitudes, min(wanted, most), self._mask)
