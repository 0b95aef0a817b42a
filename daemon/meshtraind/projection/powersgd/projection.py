"""Low rank: matrices travel as factors, of which the other one, the basis, is known to all.

Where they lie: `meshwire.layout.powersgd`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from meshtraind.codecs.base import CodecError, Values
from meshtraind.contributions.error_feedback import Residual
from meshtraind.contributions.results import RoundResults
from meshtraind.contributions.segments import Areas, RoundForm, RoundForms
from meshtraind.projection.base import Projection
from meshtraind.projection.contribution import Inputs, ShorterPart
from meshtraind.projection.expansion import Expansion
from meshtraind.projection.orthonormal import (
    BLOCK_VALUES,
    block_rows,
    left_factor,
    product_into,
    right_factor,
    subtract_product,
)
from meshtraind.projection.powersgd.bases import Bases
from meshwire.layout.powersgd import Factors, Piece, Side
from meshwire.model.plan import aligned

FACTOR_MAX = 2.0**100  # the product of mean and basis is then finite


class FactorPart(ShorterPart):
    """What this member adds to a low-rank round: factors of its gradient and of what earlier rounds left out."""

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


class FactorExpansion(Expansion):
    """The means of a low-rank round: products of the factors that have arrived and of their bases.

    Arguments as of `Expansion`.
    """

    def __init__(self, form: RoundForm, number: int, bases: Bases, sent: Values, values: Values) -> None:
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


class LowRankProjection(Projection):
    """PowerSGD: sums one factor of each matrix, on bases that follow from earlier rounds. Arguments as of `Bases`."""

    def __init__(
        self,
        forms: RoundForms,
        rounds: Mapping[int, RoundResults],
        seed: int,
        staleness: int,
        first: int | None,
        residual: Residual,
    ) -> None:
        self._residual = residual
        self._bases = Bases(forms, rounds, seed, staleness, first)
        self._leaving: Values = np.zeros(forms.shorter_values, np.float32)
        self._arriving: Values = np.empty(forms.shorter_values, np.float32)

    def enter(self, place: int | None, learners: int) -> None:
        """Nothing to do: bases follow from results, whoever computes."""

    def part(self, form: RoundForm, areas: Areas, scratch: Values, number: int, weight: float) -> FactorPart:
        return FactorPart(
            Inputs(form, areas.take(), scratch, self._leaving, number, self._residual, weight), self._bases
        )

    def expansion(self, form: RoundForm, number: int, values: Values) -> FactorExpansion:
        return FactorExpansion(form, number, self._bases, self._arriving, values)

    def settled(self, round_: RoundResults, *, contributed: bool) -> None:
        """A basis is made of it when it is first asked for."""

    def forget(self, number: int) -> None:
        self._bases.forget(number)

    @property
    def reaches_back(self) -> int:
        return self._bases.lag
