"""Low rank: matrices travel as factors, each on a basis that is known to all when it is made.

Where they lie: `meshwire.encoded_layout.powersgd`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from meshtraind.codecs.base import CodecError, Values
from meshtraind.contributions.contribution import InTwoPhases
from meshtraind.contributions.error_feedback import Residual
from meshtraind.contributions.results import RoundResults
from meshtraind.contributions.segments import Areas, RoundForm, RoundForms, values_in
from meshtraind.projection.base import Projection
from meshtraind.projection.contribution import Inputs, ShorterPart
from meshtraind.projection.expansion import Expansion
from meshtraind.projection.late_rests import LateRests
from meshtraind.projection.orthonormal import (
    BLOCK_VALUES,
    block_rows,
    left_factor,
    product_into,
    right_factor,
    subtract_product,
)
from meshtraind.projection.powersgd.bases import Bases, Matrices
from meshwire.collectives.exchange import Part
from meshwire.encoded_layout.powersgd import Factors, Piece, Side
from meshwire.model.plan import aligned

FACTOR_MAX = 2.0**100  # the product of mean and basis is then finite
REST_VALUES = 64 * 1024  # of a matrix, of which what was sent is taken out at a time


class FactorPart(ShorterPart):
    """What this member adds to a low-rank round: factors of its gradient and of what earlier rounds left out."""

    def __init__(self, inputs: Inputs, bases: Bases) -> None:
        super().__init__(inputs)
        assert isinstance(inputs.form.layout.shorter, Factors)
        self._factors = inputs.form.layout.shorter
        self._bases = bases

    def _take(self, bucket: int, raw: Values) -> None:
        pieces = self._factors.pieces[bucket]
        start, values = self._begin(bucket, raw)
        try:
            bases = self._bases.of(self._number, bucket)
            self._send_all(bucket, bases)
            for piece, basis in zip(pieces, bases, strict=True):
                self._keep_rest(piece, basis, self._matrix(piece, values, start))
            if bucket >= self._factors.plan.parameter_buckets:
                values.fill(0)  # O5: what a float buffer's difference leaves out is in its next one
        except CodecError:
            self._residual.cancel(self._number, start)
            raise

    def _begin(self, bucket: int, raw: Values) -> tuple[int, Values]:
        """Adds the gradient to what was left out. Returns where the bucket begins, and the sum in its place."""
        start, end = self._run(bucket)
        values = self._residual.begin(self._number, start, end - start, self._weight)
        with np.errstate(over="ignore", invalid="ignore"):  # found in the factors
            np.add(values, raw[start:end], out=values)
        return start, values

    def _run(self, bucket: int) -> tuple[int, int]:
        """(start, end) of a bucket in the model's vector."""
        pieces = self._factors.pieces[bucket]
        return pieces[0].span.start, pieces[-1].span.start + pieces[-1].span.count

    def _send_all(self, bucket: int, bases: Matrices) -> None:
        """Encodes what a bucket sends of the sum, and leaves in its place what will be decoded."""
        start, end = self._run(bucket)
        values = self._residual.values[start:end]
        sent = self._factors.plan.buckets[bucket]
        self._sent[sent.start : sent.start + sent.count] = 0.0  # padding, which another side's rounds may have written
        with np.errstate(over="ignore", invalid="ignore"):  # found in the factors
            for piece, basis in zip(self._factors.pieces[bucket], bases, strict=True):
                self._send(piece, basis, self._matrix(piece, values, start))
        self._encode_sent(self._segments[bucket])

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
        self._check(piece, factor)

    @staticmethod
    def _check(piece: Piece, factor: Values) -> None:
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


class FactorPairPart(FactorPart, InTwoPhases):
    """What this member adds to a round of the full iteration: left factors, and when all have their sums, right ones.

    What is left out follows from these sums, which are others if the round runs again. So the residual holds the whole
    sum of gradient and residual until the round counts; then what the right factors say is taken out of it.

    Args:
        late: takes what is to be taken out.
    """

    def __init__(self, inputs: Inputs, bases: Bases, late: LateRests) -> None:
        super().__init__(inputs, bases)
        self._late = late

    def _take(self, bucket: int, raw: Values) -> None:
        precursor = self._factors.precursors.get(bucket)
        if precursor is None:
            super()._take(bucket, raw)
            return
        self._late.catch_up(bucket)
        start, values = self._begin(bucket, raw)
        sent = self._factors.plan.buckets[precursor]
        self._sent[sent.start : sent.start + sent.count] = 0.0
        bases = self._bases.first(self._number, bucket)
        lefts = iter(self._factors.lefts[precursor])
        try:
            for piece, basis in zip(self._factors.pieces[bucket], bases, strict=True):
                if basis is not None:
                    left = next(lefts)
                    factor = self._sent[left.start : left.start + left.count].reshape(left.rows, -1)
                    with np.errstate(over="ignore", invalid="ignore"):
                        left_factor(self._matrix(piece, values, start), basis, out=factor)
                    self._check(piece, factor)
            self._encode_sent(self._segments[precursor])
        except CodecError:
            self._residual.cancel(self._number, start)
            raise

    def second(self, bucket: int) -> Part:
        try:
            self._send_all(bucket, self._bases.of(self._number, bucket))
        except CodecError:
            return Part.POISON
        return Part.DATA

    def encoded(self, bucket: int, first_segment: int, segment_count: int) -> memoryview | None:
        """None of right factors: when the round runs again they are written again, and a link may still send (G8)."""
        of_rights = bucket in self._factors.precursors
        return None if of_rights else super().encoded(bucket, first_segment, segment_count)

    def counted(self) -> None:
        for bucket in self._factors.precursors:
            bases = self._bases.of(self._number, bucket)
            start = self._factors.plan.buckets[bucket].start
            sent = values_in(self.area, self._segments[bucket])
            for piece, basis in zip(self._factors.pieces[bucket], bases, strict=True):
                factor = sent[piece.sent.start - start :][: piece.sent.count].reshape(piece.sent.rows, -1)
                rows = max(1, REST_VALUES // max(1, piece.span.columns))
                for first in range(0, piece.span.rows, rows):
                    run = slice(first, first + rows)
                    self._late.put(bucket, partial(self._leave, piece, basis, factor, run))

    def _leave(self, piece: Piece, basis: Values | None, factor: Values, rows: slice) -> None:
        values = self._residual.values[piece.span.start : piece.span.start + piece.span.count]
        matrix = values.reshape(piece.span.rows, -1)[rows]
        if basis is None:
            np.subtract(matrix, factor[rows], out=matrix)
        else:
            subtract_product(matrix, basis[:, rows], factor)


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
        if bucket >= len(self._factors.pieces):
            return  # a precursor, which says what the factors of its follower stand on
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
        self._pairs = forms.codec.two_phases
        assert not (self._pairs and staleness), "refused when the job was submitted"
        self._late = LateRests()
        self._leaving: Values = np.zeros(forms.shorter_values, np.float32)
        self._arriving: Values = np.empty(forms.shorter_values, np.float32)

    def enter(self, place: int | None, learners: int) -> None:
        """What follows from the sums of rounds under way is void. All other bases follow from results, whoever
        computes."""
        self._bases.enter()

    def part(self, form: RoundForm, areas: Areas, scratch: Values, number: int, weight: float) -> FactorPart:
        inputs = Inputs(form, areas.take(), scratch, self._leaving, number, self._residual, weight)
        return FactorPairPart(inputs, self._bases, self._late) if self._pairs else FactorPart(inputs, self._bases)

    def expansion(self, form: RoundForm, number: int, values: Values) -> FactorExpansion:
        return FactorExpansion(form, number, self._bases, self._arriving, values)

    def settled(self, round_: RoundResults, *, contributed: bool) -> None:
        """A basis is made of it when it is first asked for."""

    def settle_one(self) -> bool:
        return self._late.do_one()

    def forget(self, number: int) -> None:
        self._bases.forget(number)

    @property
    def reaches_back(self) -> int:
        return self._bases.lag
