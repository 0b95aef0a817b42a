"""Which vector each of a job's rounds sends in the place of the model's, if it does
(`meshwire.encoded_layout.projections`).
"""

from collections.abc import Mapping

from meshtraind.contributions.error_feedback import Residual
from meshtraind.contributions.results import RoundResults
from meshtraind.contributions.segments import RoundForm, RoundForms
from meshtraind.projection.base import AsItIs, Projection
from meshtraind.projection.lgc.projection import LearnedGradients
from meshtraind.projection.powersgd.projection import LowRankProjection

_CLASSES: Mapping[str, type[LowRankProjection] | type[LearnedGradients]] = {
    "powersgd": LowRankProjection,
    "lgc": LearnedGradients,
}


class Projections:
    """One job's.

    Args:
        rounds: by number; complete ones are kept for as long as a projection may read them.
        seed: the job's.
        first: the job's first round, or None where this member came in later: it is asked for nothing that is made of
            a round before it came.
        residual: the worker's; None for a codec without, which has none of these projections either.

    Attributes:
        projected: that of the rounds after the warm-up.
        of: that of the rounds which have a form; a job's first ones may send all values.
    """

    def __init__(
        self,
        forms: RoundForms,
        rounds: Mapping[int, RoundResults],
        seed: int,
        staleness: int,
        first: int | None,
        residual: Residual | None,
    ) -> None:
        as_it_is = AsItIs(staleness)
        self.projected: Projection = as_it_is
        if forms.codec.family.transforms:
            assert residual is not None
            self.projected = _CLASSES[forms.codec.name](forms, rounds, seed, staleness, first, residual)
        self.of: Mapping[RoundForm, Projection] = {
            form: self.projected if form.layout.projected else as_it_is for form in forms
        }
