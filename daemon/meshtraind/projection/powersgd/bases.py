"""The bases of low-rank rounds: which earlier result each is made of, so that all members have the same (C1).

The basis of round k is made of the result of round k - lag alone, never of the generation: a round that runs again has
it again. Where that round has no result (it is void, or was before the job's first round, or in its warm-up), the basis
is drawn from the job's seed, the round and the tensor.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.contributions.results import RoundResults
from meshtraind.contributions.seeds import segment_seed
from meshtraind.contributions.segments import RoundForms, values_in
from meshtraind.projection.orthonormal import orthonormal
from meshwire.layout.powersgd import Factors, lag

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

    def of(self, number: int, bucket: int) -> Matrices:
        """The bases for a bucket of a round whose source, `lag` rounds before, is complete."""
        made = self._made.setdefault(number, {})
        if bucket not in made:
            made[bucket] = self._make(number, bucket)
        return made[bucket]

    def forget(self, number: int) -> None:
        """Forgets a round that is needed no more."""
        self._made.pop(number, None)

    def factors(self, number: int, bucket: int, values: Values) -> Matrices:
        """The factors that a bucket's values of a round are.

        Args:
            values: of the vector that is sent, the bucket's.
        """
        factors = self._forms.of(number).layout.shorter
        assert isinstance(factors, Factors)
        start = factors.plan.buckets[bucket].start
        return [
            values[piece.sent.start - start :][: piece.sent.count].reshape(piece.rank, -1) if piece.rank else None
            for piece in factors.pieces[bucket]
        ]

    def _make(self, number: int, bucket: int) -> Matrices:
        factors = self._forms.of(number + 1).layout.shorter
        assert isinstance(factors, Factors)  # of the other side, as those of round number - lag
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

    def _result(self, number: int, bucket: int) -> Sequence[Values | None]:
        form = self._forms.of(max(number, 1))
        nothing: Sequence[Values | None] = [None] * len(form.layout.plan.buckets[bucket].spans)
        if (self._first is not None and number < self._first) or not form.layout.projected:
            return nothing
        round_ = self._rounds[number]
        if round_.void:
            return nothing
        return self.factors(number, bucket, values_in(round_.area, form.segments[bucket]))
