"""Which vector each of a job's rounds sends in the place of the model's, if it does (`meshwire.layout.projections`)."""

from collections.abc import Mapping

from meshtraind.contributions.error_feedback import Residual
from meshtraind.contributions.results import RoundResults
from meshtraind.contributions.segments import RoundForm, RoundForms
from meshtraind.projection.base import AsItIs, LearnerHelp, Projection
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
        self._of = {form: self.projected if form.layout.projected else as_it_is for form in forms}

    def of(self, form: RoundForm) -> Projection:
        """That of the rounds which have this form; a job's first ones may send all values."""
        return self._of[form]

    def enter(self, place: int | None, learners: int) -> None:
        """A generation begins (`Projection.enter`)."""
        self.projected.enter(place, learners)

    def settle_one(self) -> bool:
        """Does a little for rounds that are settled. Returns False if there was nothing to do."""
        return self.projected.settle_one()

    @property
    def encoder(self) -> LearnerHelp | None:
        """What the learner learns for the codec; None for one without an autoencoder."""
        return self.projected.encoder
