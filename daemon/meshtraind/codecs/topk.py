"""topk and dgc: a part of each segment, those with the largest magnitudes; of equal ones those that come first.

With `chunk=` the largest of each run of so many neighbours (SparseLoCo: 64 of each 4096). That keeps a tensor of small
values from waiting behind one of large values that lies in the same segment.

What dgc is besides, the worker's momentum, lies in `meshtraind.contributions.momentum`.
"""

import numpy as np

from meshtraind.codecs.base import Bits
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.selection import largest, largest_of_each
from meshtraind.codecs.sparse import SparseCodec
from meshwire.codecs.sparsifiers import competing, kept_in_round


class TopK(SparseCodec):
    """Leaves at most 1 - ratio of the segment's squared norm, besides what the written values lose."""

    def _chosen(self, magnitudes: Bits, number: int, most: int) -> Indices:
        found = [np.empty(0, np.intp)]
        for start, length, runs in competing(self.spec, len(magnitudes)):
            rows = magnitudes[start : start + runs * length].reshape(runs, length)
            found.append(largest_of_each(rows, kept_in_round(self.spec, number, length), self._mask) + start)
        indices = np.concatenate(found)
        return indices if len(indices) <= most else largest(magnitudes, most, self._mask)
