"""topk and dgc: a part of each segment, those with the largest magnitudes; of equal ones those that come first.

What dgc is besides, the worker's momentum, lies in `meshtraind.momentum`.
"""

from meshtraind.codecs.base import Bits
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.selection import largest
from meshtraind.codecs.sparse import SparseCodec
from meshwire.sparsecodecs import kept_in_round


class TopK(SparseCodec):
    """Leaves at most 1 - ratio of the segment's squared norm, besides what the written values lose."""

    def _chosen(self, magnitudes: Bits, number: int, most: int) -> Indices:
        wanted = kept_in_round(self.spec, number, len(magnitudes))
        return largest(magnitudes, min(wanted, most), self._mask)
