"""What this member adds to a low-rank round: factors of its gradient and of what earlier rounds left out."""

import numpy as np

from meshtraind.codecs.base import CodecError, Values
from meshtraind.projection.contribution import Inputs, ShorterPart
from meshtraind.projection.orthonormal import left_factor, right_factor, subtract_product
from meshtraind.projection.powersgd.bases import Bases
from meshwire.layout.powersgd import Factors, Piece, Side

FACTOR_MAX = 2.0**100  # the product of mean and basis is then finite


class FactorPart(ShorterPart):
    """See `ShorterPart`."""

    def __init__(self, inputs: Inputs, bases: Bases) -> None:
        super().__init__(inputs)
        assert isinstance(inputs.form.layout.shorter, Factors)
        self._factors = inputs.form.layout.shorter
        self._bases = bases

    def _take(self, bucket: int, raw: Values) -> None:
        pieces = self._factors.pieces[bucket]
        bases = self._bases.of(self._number, bucket)
        start, end = pieces[0].span.start, pieces[-1].span.start + pieces[-1].span.count
        sent = self._factors.plan.buckets[bucket]
        self._sent[sent.start : sent.start + sent.count] = 0.0  # padding, which another side's rounds may have written
        values = self._residual.begin(self._number, start, end - start, self._weight)
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # found in the factors
                np.add(values, raw[start:end], out=values)
                for piece, basis in zip(pieces, bases, strict=True):
                    self._send(piece, basis, self._matrix(piece, values, start))
            self._encode_sent(self._segments[bucket])
            for piece, basis in zip(pieces, bases, strict=True):
                self._keep_rest(piece, basis, self._matrix(piece, values, start))
            if bucket >= self._factors.plan.parameter_buckets:
                values.fill(0)  # O5: what a float buffer's difference leaves out is in its next one
        except CodecError:
            self._residual.cancel(self._number, start)
            raise

    def _matrix(self, piece: Piece, values: Values, start: int) -> Values:
        first = piece.span.start - start
        return values[first : first + piece.span.count].reshape(piece.span.rows, -1)

    def _of_sent(self, piece: Piece) -> Values:
        values = self._sent[piece.sent.start : piece.sent.start + piece.sent.count]
        return values.reshape(piece.rank or piece.sent.rows, -1)

    def _send(self, piece: Piece, basis: Values | None, matrix: Values) -> None:
        factor = self._of_sent(piece)
        if basis is None:
            np.copyto(factor, matrix)
            return
        if self._factors.side is Side.LEFT:
            left_factor(matrix, basis, out=factor)
        else:
            right_factor(matrix, basis, out=factor)
        if not np.abs(factor).max(initial=0) <= FACTOR_MAX:
            raise CodecError(f"a factor of {piece.span.name} is not a number, or beyond {FACTOR_MAX:g}")

    def _keep_rest(self, piece: Piece, basis: Values | None, matrix: Values) -> None:
        factor = self._of_sent(piece)
        if basis is None:
            np.subtract(matrix, factor, out=matrix)
        elif self._factors.side is Side.LEFT:
            subtract_product(matrix, factor, basis)
        else:
            subtract_product(matrix, basis, factor)
