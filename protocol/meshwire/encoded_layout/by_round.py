"""How the vector of each round is laid out: a function of the job's codec, what travels when, and the round's number.

So all members agree on it without a word, whenever they came in, and a round that runs again keeps it (C1).
"""

from itertools import chain

from meshwire.codecs.registry import FP16, CodecSpec
from meshwire.encoded_layout.encoded import EncodedLayout, LayoutPhase
from meshwire.encoded_layout.projections import TRANSFORMS
from meshwire.model.plan import Plan
from meshwire.model.plans_by_round import RoundPlans


class RoundLayouts:
    """One job's. All of them allow the same reduction, so that the members send each other all rounds in one way.

    Args:
        plan: of a round in which all values travel.

    Attributes:
        all: each of them once.
    """

    def __init__(self, plan: Plan, codec: CodecSpec) -> None:
        self._codec = codec
        self._transform = TRANSFORMS[codec.name] if codec.family.transforms else None
        self._plans = RoundPlans(plan)
        assert self._transform is None or plan.travel is None, "T1: refused when it was prepared"
        self._steady = [self._steady_of(each) for each in self._plans.all]
        self._phases = [
            (*_warmup_of(each, codec), *steady) for each, steady in zip(self._plans.all, self._steady, strict=True)
        ]
        of_plans = chain.from_iterable(self._phases)
        self.all: tuple[EncodedLayout, ...] = tuple(layout for phase in of_plans for layout in phase.layouts)

    def _steady_of(self, plan: Plan) -> tuple[LayoutPhase, ...]:
        if self._transform is None:
            return (LayoutPhase((EncodedLayout(plan, self._codec),)),)
        return self._transform.phases(plan, self._codec)

    def of(self, number: int) -> EncodedLayout:
        """That of a round, numbered from 1."""
        for phase in self._phases[self._plans.index(number)]:
            if phase.until is None or number <= phase.until:
                return phase.layouts[number % len(phase.layouts)]
        raise AssertionError("the last phase has no end")

    def ends_with(self, number: int) -> bool:
        """No later round is laid out as this one."""
        phases = self._phases[self._plans.index(number)]
        return self._plans.ends_with(number) or any(number == phase.until for phase in phases)

    @property
    def bytes_max(self) -> int:
        """The longest encoded vector of any round."""
        return max(layout.total_bytes for layout in self.all)

    def transform_bytes(self, staleness: int) -> int:
        """What a daemon keeps to turn vectors into shorter ones, beside rounds and residuals. 0 for other codecs."""
        return 0 if self._transform is None else self._transform.kept_bytes(self._steady[0], self._codec, staleness)


def _warmup_of(plan: Plan, codec: CodecSpec) -> tuple[LayoutPhase, ...]:
    return (LayoutPhase((EncodedLayout(plan, codec, FP16),), codec.warmup),) if codec.warmup else ()
