"""The means of a low-rank round, from the factors that have arrived to the vector that the learner reads."""

from collections import deque

import numpy as np

from meshtraind.bases import Bases
from meshtraind.codecs.base import Values
from meshtraind.factors import BLOCK_VALUES, block_rows, product_into
from meshtraind.segments import Segment
from meshwire.lowrank import Factors, Side
from meshwire.plan import aligned


class Expansion:
    """Of one round, once every round before it is complete.

    Args:
        sent: for the values of the vector that is sent.
        values: the result slot.
    """

    def __init__(self, number: int, factors: Factors, bases: Bases, sent: Values, values: Values) -> None:
        self._number = number
        self._factors = factors
        self._bases = bases
        self._sent = sent
        self._values = values
        self._left = [bucket.segment_count for bucket in factors.plan.buckets]
        self._void: set[int] = set()
        self._blocks: deque[tuple[Values, Values, Values]] = deque()  # left, right, where their product belongs
        most = max((piece.span.columns for pieces in factors.pieces for piece in pieces if piece.rank), default=0)
        self._scratch: Values = np.empty(max(most, BLOCK_VALUES), np.float32)

    def place(self, segment: Segment) -> Values:
        """Where a segment of the round is to be decoded."""
        return self._sent[segment.start : segment.start + segment.count]

    def took(self, bucket: int, segment_count: int, *, void: bool) -> None:
        """So many more segments of a bucket lie in their places, or are void."""
        self._left[bucket] -= segment_count
        if void:
            self._void.add(bucket)
        if not self._left[bucket] and bucket not in self._void:
            self._begin(bucket)

    def expand_one(self) -> bool:
        """Does a little. Returns False if there was nothing to do."""
        if not self._blocks:
            return False
        left, right, out = self._blocks.popleft()
        product_into(left, right, out, self._scratch[: out.size])
        return True

    @property
    def finished(self) -> bool:
        """All that has arrived lies in the result slot."""
        return not self._blocks

    def _begin(self, bucket: int) -> None:
        plan_bucket = self._factors.plan.buckets[bucket]
        sent = self._sent[plan_bucket.start : plan_bucket.start + plan_bucket.count]
        factors, bases = self._bases.factors(self._number, bucket, sent), self._bases.of(self._number, bucket)
        for piece, factor, basis in zip(self._factors.pieces[bucket], factors, bases, strict=True):
            end = piece.span.start + piece.span.count
            out = self._values[piece.span.start : end]
            self._values[end : piece.span.start + aligned(piece.span.count)] = 0.0  # padding
            if factor is None or basis is None:
                np.copyto(out, self._sent[piece.sent.start : piece.sent.start + piece.sent.count])
                continue
            left, right = (factor, basis) if self._factors.side is Side.LEFT else (basis, factor)
            matrix = out.reshape(piece.span.rows, -1)
            rows = block_rows(piece.span.columns)
            for first in range(0, len(matrix), rows):
                block = slice(first, first + rows)
                self._blocks.append((left[:, block], right, matrix[block]))
