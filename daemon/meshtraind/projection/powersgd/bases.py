"""The bases of low-rank rounds: which result each is made of, so that all members have the same (C1).

The basis with which round k begins is made of the result of round k - lag alone, never of the generation: a round that
runs again has it again. Where that round has no result (it is void, or was before the job's first round, or in its
warm-up), the basis is drawn from the job's seed, the round and the tensor. The full iteration's second basis is made of
the sums of left factors in round k itself; when that runs again these may be others, and so is it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.contributions.results import RoundResults
from meshtraind.contributions.seeds import segment_seed
from meshtraind.contributions.segments import RoundForms, values_in
from meshtraind.projection.orthonormal import orthonormal
from meshwire.encoded_layout.powersgd import Factors, lag

Matrices = list[Values | None]
"""Of each tensor of a bucket, r rows; None of one that is sent as it is."""


class Bases:
    """The bases of one job's rounds, each made when it is first asked for.

    Args:
        rounds: by number; complete ones are kept for as long as a basis may be made of them.
        seed: the job's.
        first: the job's first round, or None where this member came in later: it is asked for no basis that is made of
            a round before it came.
    """

    def __init__(
        self, forms: RoundForms, rounds: Mapping[int, RoundResults], seed: int, staleness: int, first: int | None
    ) -> None:
        self._forms = forms
        self._rounds = rounds
        self._seed = seed
        self._first = first
        self.lag = lag(staleness)
        self._made: dict[int, dict[int, Matrices]] = {}  # by round and bucket
        self._of_lefts: dict[int, dict[int, Matrices]] = {}  # the same, of the rounds themselves

    def first(self, number: int, bucket: int) -> Matrices:
        """The bases with which a bucket of a round begins, whose source, `lag` rounds before, is complete."""
        made = self._made.setdefault(number, {})
        if bucket not in made:
            made[bucket] = self._make(number, bucket)
        return made[bucket]

    def of(self, number: int, bucket: int) -> Matrices:
        """The bases on which the factors stand that a bucket of the model's sends in a round: of its precursor, whose
        result is here, if it has one."""
        precursor = self._factors(number).precursors.get(bucket)
        if precursor is None:
            return self.first(number, bucket)
        made = self._of_lefts.setdefault(number, {})
        if bucket not in made:
            made[bucket] = self._make_of_lefts(number, bucket, precursor)
        return made[bucket]

    def enter(self) -> None:
        """Begins a generation: what has come in the one before of rounds that are not complete is void."""
        self._of_lefts.clear()

    def forget(self, number: int) -> None:
        """Forgets a round that is needed no more."""
        self._made.pop(number, None)
        self._of_lefts.pop(number, None)

    def factors(self, number: int, bucket: int, values: Values) -> Matrices:
        """The factors that a bucket's values of a round are.

        Args:
            values: of the vector that is sent, the bucket's.
        """
        factors = self._factors(number)
        start = factors.plan.buckets[bucket].start
        return [
            values[piece.sent.start - start :][: piece.sent.count].reshape(piece.rank, -1) if piece.rank else None
            for piece in factors.pieces[bucket]
        ]

    def _make(self, number: int, bucket: int) -> Matrices:
        factors = self._factors(number + 1)  # in half iterations of the other side, as those of round number - lag
        sent = self._result(number - self.lag, bucket)
        made: Matrices = []
        for piece, rows in zip(factors.pieces[bucket], sent, strict=True):
            if not piece.rank:
                made.append(None)
                continue
            if rows is None:
                rows = np.zeros((piece.rank, piece.sent.count // piece.rank), np.float32)
            made.append(orthonormal(rows, segment_seed(self._seed, number, piece.span.start)))
        return made

    def _make_of_lefts(self, number: int, bucket: int, precursor: int) -> Matrices:
        factors = self._factors(number)
        round_ = self._rounds[number]
        sums = values_in(round_.area, round_.form.segments[precursor])
        start = factors.plan.buckets[precursor].start
        lefts = iter(factors.lefts[precursor])
        made: Matrices = []
        for piece in factors.pieces[bucket]:
            if not piece.rank:
                made.append(None)
                continue
            left = next(lefts)
            rows = sums[left.start - start :][: left.count].reshape(piece.rank, -1)
            made.append(orthonormal(rows, segment_seed(self._seed, number, piece.span.start)))
        return made

    def _factors(self, number: int) -> Factors:
        factors = self._forms.of(number).layout.shorter
        assert isinstance(factors, Factors)
        return factors

    def _result(self, number: int, bucket: int) -> Sequence[Values | None]:
        form = self._forms.of(max(number, 1))
        nothing: Sequence[Values | None] = [None] * len(form.layout.plan.buckets[bucket].spans)
        if (self._first is not None and number < self._first) or not form.layout.projected:
            return nothing
        round_ = self._rounds[number]
        if round_.void:
            return nothing
        return self.factors(number, bucket, values_in(round_.area, form.segments[bucket]))
