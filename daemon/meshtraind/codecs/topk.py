"""topk: a fixed part of each segment, those with the largest magnitudes; of equal ones those that come first."""

from meshtraind.codecs.base import Bits
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.selection import largest
from meshtraind.codecs.sparse import SparseCodec
from meshwire.sparsecodecs import most_kept


class TopK(SparseCodec):
    """Leaves at most 1 - ratio of the segment's squared norm, besides what the written values lose."""

    def _chosen(self, magnitudes: Bits) -> Indices:
        return largest(magnitudes, most_kept(self.spec, len(magnitudes)), self._mask)
