"""What members' vectors come to in a round of a job, with the daemon's codecs, parts, residuals and momentum, in one
process: links alone are missing."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from meshtraind.codecs.base import CodecError, Terms, Values
from meshtraind.codecs.homomorphic import Homomorphic
from meshtraind.contributions.contribution import (
    HopContribution,
    InTwoPhases,
    OwnContribution,
    WithErrorFeedback,
    compensation_of,
)
from meshtraind.contributions.error_feedback import feedback_of
from meshtraind.contributions.received import MemberPart, mean_into, senders_mean_into
from meshtraind.contributions.results import Final, RoundResults
from meshtraind.contributions.seeds import member_seed, segment_seed
from meshtraind.contributions.segments import RoundForm, RoundForms, Segment
from meshtraind.contributions.sketch import SketchPart
from meshtraind.contributions.terms import RunTerms
from meshtraind.executor.projections import Projections
from meshtraind.executor.reducers import Materials, reducer_for
from meshtraind.executor.round_buffers import RoundMemory
from meshwire.codecs.registry import CodecSpec, parse_codec
from meshwire.collectives.exchange import Part
from meshwire.collectives.strategy import collective_for
from meshwire.model.manifest import ModelManifest, Momentum, TensorSpec
from meshwire.model.plan import Plan, plan_buckets

Shapes = Sequence[tuple[int, ...]]
SEED = 7  # of the job


class _Member:
    """What one member's daemon keeps of a job with s=0."""

    def __init__(self, plan: Plan, spec: CodecSpec, rank: int, members: int, momentum: Momentum | None) -> None:
        self.forms = RoundForms(plan, spec)
        self.feedback = feedback_of(spec, plan.total_values, momentum)
        shared = self.forms.shared_draws
        seed = member_seed(SEED, rank, owner=False, shared=shared)
        self.owner_seed = member_seed(SEED, rank, owner=True, shared=shared)
        compensation = compensation_of(seed, spec, plan, None, self.feedback, momentum)
        rounds: dict[int, RoundResults] = {}
        self.projections = Projections(self.forms, rounds, SEED, 0, 1, compensation.residual)
        self.projections.projected.enter(rank, members)
        materials = Materials(self.forms, self.projections, compensation, self.owner_seed, self.feedback, None)
        self.memory = RoundMemory(self.forms, rounds, self.projections, reducer_for(collective_for(spec), materials))
        self.memory.form({}, members)

    def part(self, number: int, raw: Values) -> OwnContribution:
        form = self.forms.of(number)
        part = self.memory.own_part(number, form, 1.0)
        for bucket in form.layout.model_buckets:
            _check(part.keep(bucket, raw))
        self.memory.add(number, form)
        return part

    def settle(self, number: int) -> None:
        self.memory.settle(number, void=False, contributed=True)
        if self.feedback is not None:
            self.feedback.settle(number, void=False, contributed=True)
        self.memory.own[number].counted()
        while self.projections.projected.settle_one():
            pass
        self.memory.forget(number)


def _check(part: Part) -> None:
    if part is Part.POISON:
        raise CodecError("what a member adds is not finite (V1)")


class SimulatedRounds:
    """The mean of what members add, round by round; all have the same number of samples, and the first owns all shards.

    Args:
        text: the codec as typed. Its budget of bytes, if it has one, is not kept to.
        shapes: of the tensors, in the model's order.
        momentum: that the codec takes over from the optimizer, if it does.

    Attributes:
        plan: of the vector.
        gathered: what a member sends goes to all others as it is.
        sent_bytes: by all members until now, each a vector there, and the mean back where it is not gathered.
    """

    def __init__(self, text: str, shapes: Shapes, members: int, momentum: Momentum | None = None) -> None:
        spec = parse_codec(text)
        tensors = tuple(
            TensorSpec(name=f"tensor{at}", shape=shape, dtype="float32", kind="parameter")
            for at, shape in enumerate(shapes)
        )
        self.plan = plan_buckets(ModelManifest(tensors=tensors, optimizer="SGD"), codec=spec)
        self._starts = [0, *itertools.accumulate(map(math.prod, shapes))]
        self._members = [_Member(self.plan, spec, rank, members, momentum) for rank in range(members)]
        self._scratch = memoryview(bytearray(self._members[0].forms.bytes_max))
        self._number = 0
        self.gathered = spec.reduction.gathered
        self.sent_bytes = 0

    def mean(self, parts: Sequence[Values]) -> Values:
        """What a round of these parts comes to on every member. Raises CodecError when something is not finite."""
        self._number += 1
        number, lead = self._number, self._members[0]
        own = [member.part(number, self.placed(part)) for member, part in zip(self._members, parts, strict=True)]
        form = lead.forms.of(number)
        made: Values = np.zeros(self.plan.total_values, np.float32)
        if isinstance(own[0], SketchPart):
            for bucket in form.layout.model_buckets:
                self._sum_sketches(form, bucket, own, made)
        elif isinstance(own[0], WithErrorFeedback):
            for bucket in form.layout.model_buckets:
                self._meet(form, bucket, own, made)
        else:
            self._pass_round(form, own, made)
        for member in self._members:
            member.settle(number)
        return self.flat(made)

    def _pass_round(self, form: RoundForm, own: Sequence[OwnContribution], made: Values) -> None:
        """Sums that grow from hop to hop, of the model's vector or a shorter one."""
        number, layout = self._number, form.layout
        rounds = [member.memory.rounds[number] for member in self._members]
        expansion = self._members[0].projections.of[form].expansion(form, number, made)
        for bucket in (*layout.followers, *layout.model_buckets):
            for each in own if bucket in layout.precursors else ():
                assert isinstance(each, InTwoPhases)
                _check(each.second(bucket))
            for segment in form.segments[bucket]:
                total, terms = self._summed(segment, own)
                for round_ in rounds:
                    place = round_.area[segment.offset : segment.offset + segment.length]
                    segment.codec.encode_into(total, place, terms)
                segment.codec.decode_into(place, expansion.place(segment))
                self.sent_bytes += segment.length * (len(own) + 1)
            for round_ in rounds:
                final = Final(bucket, 0, len(form.segments[bucket]), (), (1 << len(own)) - 1, float(len(own)))
                round_.finals.append(final)
            expansion.took(bucket, len(form.segments[bucket]), void=False)
            while expansion.expand_one():
                pass

    def _summed(self, segment: Segment, own: Sequence[OwnContribution]) -> tuple[Values, Terms]:
        terms = Terms(self._number, segment_seed(SEED, self._number, segment.start))
        total: Values = np.zeros(segment.count, np.float32)
        for hop, each in enumerate(own):
            assert isinstance(each, HopContribution)
            if hop and not segment.codec.identity:
                place = self._scratch[: segment.length]
                segment.codec.encode_into(total, place, terms)
                segment.codec.decode_into(place, total)
            total += each.values(segment)
        total /= np.float32(len(own))
        return total, terms

    def _meet(self, form: RoundForm, bucket: int, own: Sequence[OwnContribution], made: Values) -> None:
        """Parts that meet whole at an owner, or at everybody."""
        segments = form.segments[bucket]
        payloads = [each.encoded(bucket, 0, len(segments)) for each in own]
        runs = [payload for payload in payloads if payload is not None]
        self.sent_bytes += sum(map(len, runs))
        parts = [MemberPart(rank, segments, run) for rank, run in enumerate(runs)]
        lead, weight = self._members[0], float(len(own))
        first = segments[0].start
        owed = None
        if lead.feedback is not None and segments[0].codec.error_feedback and not self.gathered:
            count = segments[-1].start + segments[-1].count - first
            owed = lead.feedback.finish(self._number, (first, count), first, count, weight, 1.0)
        terms = RunTerms(lead.owner_seed, self._number, None)
        for index, segment in enumerate(segments):
            out = made[segment.start : segment.start + segment.count]
            if segment.codec.spec.of_senders:
                senders_mean_into(parts, index, [1.0] * len(own), out)
            else:
                mean_into(parts, index, weight, out)
            if self.gathered:
                continue
            place = self._scratch[: segment.length]
            if owed is None:
                length = segment.codec.encode_into(out, place, terms.of(segment))
            else:
                rest = owed[segment.start - first :][: segment.count]
                rest += out
                length = segment.codec.encode_rest_into(rest, place, terms.of(segment))
            segment.codec.decode_into(place[:length], out)
            self.sent_bytes += length

    def _sum_sketches(self, form: RoundForm, bucket: int, own: Sequence[OwnContribution], made: Values) -> None:
        """Segments that are added as they are encoded."""
        for index, segment in enumerate(form.segments[bucket]):
            codec, total = segment.codec, self._scratch[: segment.length]
            assert isinstance(codec, Homomorphic)
            for hop, each in enumerate(own):
                assert isinstance(each, SketchPart)
                if hop:
                    codec.add_encoded(each.payload(segment), total, segment.count)
                else:
                    total[:] = each.payload(segment)
            out = made[segment.start : segment.start + segment.count]
            found = codec.recover_into(total, out)
            out /= np.float32(len(own))
            for member, each in zip(self._members, own, strict=True):
                assert isinstance(each, SketchPart)
                each.found(member.forms.of(self._number).segments[bucket][index], found)
            self.sent_bytes += segment.length * (len(own) + 1)

    def placed(self, flat: Values) -> Values:
        """The vector of a round, of all tensors one after the other."""
        vector: Values = np.zeros(self.plan.total_values, np.float32)
        for span in self.plan.spans:
            vector[span.start : span.start + span.count] = flat[self._starts[span.tensor] :][: span.count]
        return vector

    def flat(self, vector: Values) -> Values:
        """The other way round."""
        flat: Values = np.empty(self._starts[-1], np.float32)
        for span in self.plan.spans:
            flat[self._starts[span.tensor] :][: span.count] = vector[span.start : span.start + span.count]
        return flat
