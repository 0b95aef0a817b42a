"""Times what one member of a job computes for a round: its contribution, with all that is kept of it, and its part of
the sums. On the shapes of ResNet-18, in one thread.

The others' parts are copies of its own. Results are decoded into the processor's cache, and not into a learner's slot.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshtraind.bench.transforms import Values, model_of, without_warmup
from meshtraind.contributions.contribution import OwnContribution, compensation_of
from meshtraind.contributions.error_feedback import feedback_of
from meshtraind.contributions.results import RoundResults
from meshtraind.contributions.segments import RoundForms, Segment, each_payload
from meshtraind.executor.projections import Projections
from meshtraind.executor.reducers import Materials, reducer_for
from meshtraind.executor.round_buffers import RoundMemory
from meshwire.codecs.registry import CodecSpec
from meshwire.codecs.spec import Reduction
from meshwire.collectives.exchange import Place, Work
from meshwire.collectives.strategy import collective_for
from meshwire.model.manifest import Momentum

MEMBERS = 4
ROUNDS = 3
MOMENTUM = Momentum(factor=0.9, nesterov=False)  # of codecs that take it over


@dataclass(frozen=True, slots=True)
class RoundCost:
    """CPU time of one member for one round.

    Attributes:
        contribution_s: residual, gradient, choice, encoding and what stays behind, of all values.
        sums_s: of the parts that meet here, and what is made of the sums that come.
    """

    contribution_s: float
    sums_s: float


class JobMember:
    """A member's arithmetic of a round without its network: what a codec costs the daemon is measured on it."""

    def __init__(self, spec: CodecSpec, values: Values) -> None:
        plan, self._raw = model_of(spec, values)
        self._forms = RoundForms(plan, spec)
        momentum = MOMENTUM if spec.momentum else None
        self._feedback = feedback_of(spec, plan.total_values, momentum)
        compensation = compensation_of(0, spec, plan, None, self._feedback, momentum)
        rounds: dict[int, RoundResults] = {}
        projections = Projections(self._forms, rounds, 0, 0, MEMBERS, compensation.residual)
        reducer = reducer_for(
            collective_for(spec), Materials(self._forms, projections, compensation, 0, self._feedback, None)
        )
        self._memory = RoundMemory(self._forms, rounds, projections, reducer)
        self._arithmetic = {form: reducer.arithmetic(form) for form in self._forms}
        self._area = memoryview(bytearray(MEMBERS * self._forms.bytes_max))
        self._gathered = spec.reduction is Reduction.GATHER

    def round(self, number: int) -> RoundCost:
        """Plays a round to its end, frees it, and returns what its parts took."""
        form = self._forms.of(number)
        started_s = time.thread_time()
        own = self._memory.own_part(number, form, 1.0)
        for bucket in range(len(form.segments)):
            own.keep(bucket, self._raw)
        contribution_s = time.thread_time() - started_s
        sums_s = 0.0
        for bucket, segments in enumerate(form.segments):
            for work in self._works(bucket, segments, own):
                started_s = time.thread_time()
                done = self._arithmetic[form].compute(number, bucket, work, self._area, own, None)
                sums_s += time.thread_time() - started_s
                assert not done.poison
        if self._feedback is not None:
            self._feedback.settle(number, void=False, contributed=True)
        self._memory.forget(number)
        return RoundCost(contribution_s, sums_s)

    def _works(self, bucket: int, segments: Sequence[Segment], own: OwnContribution) -> Iterator[Work]:
        """What is to be done of a bucket, with what is needed for it in the area."""
        if self._gathered:
            yield self._sum(bucket, segments, 0, len(segments), own)
            return
        bounds = [len(segments) * shard // MEMBERS for shard in range(MEMBERS + 1)]
        for shard, (first, end) in enumerate(itertools.pairwise(bounds)):
            if first == end:
                continue
            if (shard + bucket) % MEMBERS == 0:
                yield self._sum(bucket, segments, first, end, own)
            else:
                yield self._result(bucket, segments, first, end, own)

    def _sum(self, bucket: int, segments: Sequence[Segment], first: int, end: int, own: OwnContribution) -> Work:
        """A run in which all parts meet here."""
        payload = own.encoded(bucket, first, end - first)
        assert payload is not None
        places: list[Place | None] = [None]
        for other in range(1, MEMBERS):
            offset = other * self._forms.bytes_max + segments[first].offset
            self._area[offset : offset + len(payload)] = payload
            places.append((offset, len(payload)))
        return replace(
            _RUN,
            first_segment=first,
            segment_count=end - first,
            finish=True,
            parts=tuple(places),
            weights=(1.0,) * MEMBERS,
        )

    def _result(self, bucket: int, segments: Sequence[Segment], first: int, end: int, own: OwnContribution) -> Work:
        """A run whose mean has come, from its owner."""
        payload = own.encoded(bucket, first, end - first)
        assert payload is not None
        offset = segments[first].offset
        self._area[offset : offset + len(payload)] = payload
        squared_norm = 0.0
        for segment, each in each_payload(segments[first:end], payload):
            values = np.empty(segment.count, np.float32)
            segment.codec.decode_into(each, values)
            squared_norm += float(np.dot(values, values)) if segment.measured else 0.0
        return replace(
            _RUN,
            first_segment=first,
            segment_count=end - first,
            length_bytes=len(payload),
            squared_norm=squared_norm,
        )


_RUN = Work(
    first_segment=0,
    segment_count=0,
    incoming=False,
    add_own=False,
    finish=False,
    deliver=True,
    at_once=True,
    send_steps=(),
    contributors=(1 << MEMBERS) - 1,
    weight=float(MEMBERS),
    poison=False,
    length_bytes=0,
)


def meet_whole(spec: CodecSpec) -> bool:
    """Whether members' parts do, in a job with this codec: then its rounds can be measured here."""
    return spec.reduction in (Reduction.TWO_SIDED, Reduction.GATHER)


def round_cost(spec: CodecSpec, values: Values) -> RoundCost:
    """The cheapest of ROUNDS rounds, of a codec whose parts meet whole."""
    member = JobMember(without_warmup(spec), values)
    costs = [member.round(number) for number in range(1, ROUNDS + 2)][1:]  # the first fills caches and memory
    return RoundCost(min(each.contribution_s for each in costs), min(each.sums_s for each in costs))
