"""Which transform a codec needs (`meshwire.layout.projections`)."""

from collections.abc import Mapping

from meshtraind.parts.results import RoundResults
from meshtraind.parts.segments import Forms
from meshtraind.projection.base import Transform
from meshtraind.projection.lgc.projection import LearnedGradients
from meshtraind.projection.powersgd.projection import LowRank

_CLASSES: Mapping[str, type[LowRank] | type[LearnedGradients]] = {"powersgd": LowRank, "lgc": LearnedGradients}


def transform_for(
    forms: Forms, rounds: Mapping[int, RoundResults], seed: int, staleness: int, first: int | None
) -> Transform | None:
    """For one job; None where the model's own vector is sent.

    Args:
        rounds: by number; complete ones are kept for as long as the transform may read them.
        seed: the job's.
        first: the job's first round, or None where this member came in later: it is asked for nothing that is made of
            a round before it came.
    """
    if not forms.codec.family.transforms:
        return None
    return _CLASSES[forms.codec.name](forms, rounds, seed, staleness, first)
