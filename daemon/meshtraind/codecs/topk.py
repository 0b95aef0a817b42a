"""topk and dgc: a part of each segment, those with the largest magnitudes; of equal ones those that come first.

With `chunk=` the largest of each run of so many neighbours (SparseLoCo: 64 of each 4096). That keeps a tensor of small
values from waiting behind one of large values that lies in the same segment.

What dgc is besides, the worker's momentum, lies in `meshtraind.contributions.momentum`.
"""

from typing import NamedTuple

import numpy as np

from meshtraind.codecs.base import Bits
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.selection import largest, largest_of_each
from meshtraind.codecs.sparse import SparseCodec
from meshwire.codecs.registry import CodecSpec
from meshwire.codecs.sparsifiers import competing, kept_in_round


class _Run(NamedTuple):
    """Rows of a segment, one behind the other, of each of which so many values are sent."""

    start: int
    rows: int
    length: int
    wanted: int


class TopK(SparseCodec):
    """Leaves at most 1 - ratio of the segment's squared norm, besides what the written values lose."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._round = 0
        self._runs: dict[int, list[_Run]] = {}  # of this round's segments, by count

    def _chosen(self, magnitudes: Bits, number: int, most: int) -> Indices:
        if number != self._round:
            self._round, self._runs = number, {}
        runs = self._runs.get(len(magnitudes))
        if runs is None:
            runs = self._runs[len(magnitudes)] = self._runs_of(len(magnitudes))
        found = [np.empty(0, np.intp)]
        for start, number_of_rows, length, wanted in runs:
            rows = magnitudes[start : start + number_of_rows * length].reshape(number_of_rows, length)
            found.append(largest_of_each(rows, wanted, self._mask) + start)
        indices = np.concatenate(found)
        return indices if len(indices) <= most else largest(magnitudes, most, self._mask)

    def _runs_of(self, count: int) -> list[_Run]:
        return [
            _Run(start, rows, length, kept_in_round(self.spec, self._round, length))
            for start, length, rows in competing(self.spec, count)
        ]
