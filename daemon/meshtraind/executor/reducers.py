"""How this daemon makes its part of a round and sums it with those of others: one object for each kind of reduction
and way of buckets.

It is chosen once a job, and is the daemon's half of `meshwire.collectives.strategy.Collective`. A new kind is a class
here, an arithmetic and, if none of those there are will do, a contribution.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.contributions.contribution import Compensation, OwnContribution, Retained, WithErrorFeedback
from meshtraind.contributions.error_feedback import Feedback
from meshtraind.contributions.segments import Areas, RoundForm, RoundForms
from meshtraind.contributions.sketch import Shares, SketchPart
from meshtraind.executor.gather import AllToAllArithmetic, GatherArithmetic
from meshtraind.executor.projections import Projections
from meshtraind.executor.ring_and_sharded import Arithmetic, HopArithmetic, ShardedArithmetic
from meshtraind.executor.sketch import SketchArithmetic
from meshwire.codecs.spec import Reduction
from meshwire.collectives.direct import AllToAllStrategy, GatherStrategy, ShardedStrategy
from meshwire.collectives.exchange import Strategy
from meshwire.collectives.hops import HopStrategy
from meshwire.collectives.strategy import Collective
from meshwire.encoded_layout.budget import Budget


@dataclass(frozen=True, slots=True)
class Materials:
    """What reducers are made of.

    Attributes:
        compensation: what own parts are encoded with, but for plain sums.
        owner_seed: of what this member encodes as the owner of shards, or where sums come by.
        feedback: what encodings left out; None where nothing is.
        budget: of bytes; None without one.
    """

    forms: RoundForms
    projections: Projections
    compensation: Compensation
    owner_seed: int
    feedback: Feedback | None
    budget: Budget | None


class Reducer(ABC):
    """How the parts of one job's rounds are made and summed, through all generations of the job."""

    def __init__(self, materials: Materials) -> None:
        self._of = materials

    @abstractmethod
    def contribution(self, form: RoundForm, areas: Areas, number: int, weight: float, members: int) -> OwnContribution:
        """For what this member adds to a round.

        Args:
            areas: where it is kept, if it is.
            weight: of this member in the round.
            members: of the generation in which its encoding begins.
        """

    @abstractmethod
    def arithmetic(self, form: RoundForm) -> Arithmetic:
        """For the rounds of this form."""

    def _scratch(self) -> Values:
        """For the values of one segment."""
        return np.empty(max(form.layout.plan.segment_values for form in self._of.forms), np.float32)


class LinearReducer(Reducer):
    """Sums grow from hop to hop, of the model's vector or of a shorter one."""

    def __init__(self, materials: Materials) -> None:
        super().__init__(materials)
        self._segment = self._scratch()

    def contribution(self, form: RoundForm, areas: Areas, number: int, weight: float, members: int) -> OwnContribution:
        return self._of.projections.of[form].part(form, areas, self._segment, number, weight)

    def arithmetic(self, form: RoundForm) -> Arithmetic:
        built_on = self._of.projections.of[form].reads_results
        values = form.layout.plan.segment_values
        return HopArithmetic(form.segments, values, self._of.owner_seed, built_on=built_on)


class SketchReducer(Reducer):
    """Sums grow from hop to hop, of segments as they are encoded."""

    def __init__(self, materials: Materials) -> None:
        super().__init__(materials)
        self._segment = self._scratch()
        self._shares = Shares()

    def contribution(self, form: RoundForm, areas: Areas, number: int, weight: float, members: int) -> OwnContribution:
        compensation = self._of.compensation
        return SketchPart(
            form.segments, areas.take(), self._segment, number, compensation, self._shares, weight, members
        )

    def arithmetic(self, form: RoundForm) -> Arithmetic:
        return SketchArithmetic(form.segments, form.layout.plan.segment_values, self._of.owner_seed)


class OwnerReducer(Reducer):
    """Parts meet whole at the owner of each shard, who encodes their mean."""

    def contribution(self, form: RoundForm, areas: Areas, number: int, weight: float, members: int) -> OwnContribution:
        return WithErrorFeedback(form.segments, areas.take(), number, self._of.compensation, weight, members)

    def arithmetic(self, form: RoundForm) -> Arithmetic:
        values = form.layout.plan.segment_values
        return ShardedArithmetic(form.segments, values, self._of.owner_seed, self._of.feedback, self._of.budget)


class AllToAllReducer(Reducer):
    """Parts meet whole at everybody, and each encodes their mean for itself. So what a member adds of its own is what
    it has sent to the others, to the bit."""

    def __init__(self, materials: Materials) -> None:
        super().__init__(materials)
        self._segment = self._scratch()

    def contribution(self, form: RoundForm, areas: Areas, number: int, weight: float, members: int) -> OwnContribution:
        return Retained(form.segments, areas.take(), self._segment)

    def arithmetic(self, form: RoundForm) -> Arithmetic:
        return AllToAllArithmetic(form.segments, form.layout.plan.segment_values, self._of.owner_seed, None, None)


class GatherReducer(OwnerReducer):
    """Parts meet whole at everybody, and each adds them up for itself."""

    def arithmetic(self, form: RoundForm) -> Arithmetic:
        return GatherArithmetic(form.segments, form.layout.plan.segment_values)


_REDUCERS: Mapping[tuple[Reduction, type[Strategy]], type[Reducer]] = MappingProxyType(
    {
        (Reduction.LINEAR, HopStrategy): LinearReducer,
        (Reduction.LINEAR, AllToAllStrategy): AllToAllReducer,
        (Reduction.SKETCH, HopStrategy): SketchReducer,
        (Reduction.TWO_SIDED, ShardedStrategy): OwnerReducer,
        (Reduction.GATHER, GatherStrategy): GatherReducer,
    }
)


def reducer_for(collective: Collective, materials: Materials) -> Reducer:
    """For a job's codec, and the way that its buckets go."""
    return _REDUCERS[collective.reduction, collective.way](materials)
