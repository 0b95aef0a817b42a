"""The means of a low-rank round: products of the factors that have arrived and of their bases."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.parts.segments import Form
from meshtraind.projection.expansion import Expansion
from meshtraind.projection.orthonormal import BLOCK_VALUES, block_rows, product_into
from meshtraind.projection.powersgd.bases import Bases
from meshwire.layout.powersgd import Factors, Side
from meshwire.model.plan import aligned


class FactorExpansion(Expansion):
    """Arguments as of `Expansion`."""

    def __init__(self, form: Form, number: int, bases: Bases, sent: Values, values: Values) -> None:
        super().__init__(form.layout.plan, sent, values)
        assert isinstance(form.layout.shorter, Factors)
        self._number = number
        self._factors = form.layout.shorter
        self._bases = bases
        most = max((piece.span.columns for pieces in self._factors.pieces for piece in pieces if piece.rank), default=0)
        self._scratch: Values = np.empty(max(most, BLOCK_VALUES), np.float32)

    def _expand(self, bucket: int) -> Iterator[Callable[[], None]]:
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
                product = matrix[block]
                yield partial(product_into, left[:, block], right, product, self._scratch[: product.size])
