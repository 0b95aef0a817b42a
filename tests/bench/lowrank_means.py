"""What members' gradients come to by codecs that send a shorter vector, and by PowerSGD as torch's hook has it: in one
process, for `codec_seeds`."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from meshtraind.codecs.base import Terms, Values
from meshtraind.contributions.contribution import HopContribution, InTwoPhases, compensation_of
from meshtraind.contributions.error_feedback import feedback_of
from meshtraind.contributions.results import RoundResults
from meshtraind.contributions.seeds import segment_seed
from meshtraind.contributions.segments import RoundForms
from meshtraind.executor.projections import Projections
from meshtraind.executor.reducers import Materials, reducer_for
from meshtraind.executor.round_buffers import RoundMemory
from meshwire.codecs.registry import CodecSpec, parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import Plan, plan_buckets

Shapes = Sequence[tuple[int, ...]]


class _Member:
    """What one member keeps of a job with s=0."""

    def __init__(self, plan: Plan, spec: CodecSpec) -> None:
        self.forms = RoundForms(plan, spec)
        self.feedback = feedback_of(spec, plan.total_values, None)
        compensation = compensation_of(0, spec, plan, None, self.feedback, None)
        rounds: dict[int, RoundResults] = {}
        self.projections = Projections(self.forms, rounds, 0, 0, 1, compensation.residual)
        materials = Materials(self.forms, self.projections, compensation, 0, self.feedback, None)
        self.memory = RoundMemory(self.forms, rounds, self.projections, reducer_for(collective_for(spec), materials))

    def part(self, number: int, raw: Values) -> HopContribution:
        form = self.forms.of(number)
        part = self.memory.own_part(number, form, 1.0)
        assert isinstance(part, HopContribution)
        for bucket in form.layout.model_buckets:
            part.keep(bucket, raw)
        return part

    def settle(self, number: int) -> None:
        self.memory.settle(number, void=False, contributed=True)
        assert self.feedback is not None
        self.feedback.settle(number, void=False, contributed=True)
        self.memory.own[number].counted()
        while self.projections.projected.settle_one():
            pass
        self.memory.forget(number)


class ProjectedExchange:
    """The mean of what members add, by a codec that sends a shorter vector, with the daemon's parts and residuals."""

    def __init__(self, text: str, shapes: Shapes, members: int) -> None:
        spec = parse_codec(text)
        tensors = tuple(
            TensorSpec(name=f"t{at}", shape=shape, dtype="float32", kind="parameter") for at, shape in enumerate(shapes)
        )
        self._plan = plan_buckets(ModelManifest(tensors=tensors, optimizer="SGD"), codec=spec)
        self._starts = [0, *itertools.accumulate(map(math.prod, shapes))]
        self._members = [_Member(self._plan, spec) for _ in range(members)]
        self._round = 0
        self.sent_bytes = 0  # by all members, each a vector there, and the mean back

    def mean(self, parts: Sequence[Values]) -> Values:
        """What a round of these parts comes to on every member."""
        self._round += 1
        number, lead = self._round, self._members[0]
        own = [member.part(number, self._placed(part)) for member, part in zip(self._members, parts, strict=True)]
        form, layout = lead.forms.of(number), lead.forms.of(number).layout
        rounds = [member.memory.add(number, member.forms.of(number)) for member in self._members]
        made: Values = np.zeros(self._plan.total_values, np.float32)
        expansion = lead.projections.of[form].expansion(form, number, made)
        for bucket in (*layout.followers, *layout.model_buckets):
            for each in own if bucket in layout.precursors else ():
                assert isinstance(each, InTwoPhases)
                each.second(bucket)
            for segment in form.segments[bucket]:
                total = np.sum([each.values(segment) for each in own], 0) / np.float32(len(own))
                for round_ in rounds:
                    place = round_.area[segment.offset : segment.offset + segment.length]
                    segment.codec.encode_into(total, place, Terms(number, segment_seed(0, number, segment.start)))
                segment.codec.decode_into(place, expansion.place(segment))
                self.sent_bytes += segment.length * (len(own) + 1)
            expansion.took(bucket, len(form.segments[bucket]), void=False)
            while expansion.expand_one():
                pass
        for member in self._members:
            member.settle(number)
        return self._flat(made)

    def _placed(self, flat: Values) -> Values:
        vector: Values = np.zeros(self._plan.total_values, np.float32)
        for span in self._plan.spans:
            vector[span.start : span.start + span.count] = flat[self._starts[span.tensor] :][: span.count]
        return vector

    def _flat(self, vector: Values) -> Values:
        flat: Values = np.empty(self._starts[-1], np.float32)
        for span in self._plan.spans:
            flat[self._starts[span.tensor] :][: span.count] = vector[span.start : span.start + span.count]
        return flat


class TorchsPowerSgd:
    """The mean by `powerSGD_hook` of torch 2.13 with warm start and error feedback, step by step."""

    def __init__(self, rank: int, warmup: int, shapes: Shapes, members: int) -> None:
        self._rank = rank
        self._warmup = warmup
        self._shapes = shapes
        self._owed = [[torch.zeros(shape) for shape in shapes] for _ in range(members)]
        self._rights: dict[int, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)
        self._round = 0
        self.sent_bytes = 0

    def mean(self, parts: Sequence[Values]) -> Values:
        """What a round of these parts comes to on every member."""
        self._round += 1
        sizes = [math.prod(shape) for shape in self._shapes]
        pieces = [torch.from_numpy(part).split(sizes) for part in parts]
        made = []
        for at, shape in enumerate(self._shapes):
            of_members = [piece[at].view(shape) for piece in pieces]
            rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
            rank = min(rows, columns, self._rank)
            if self._round <= self._warmup or (rows + columns) * rank * 2 >= rows * columns:
                made.append(torch.stack(of_members).mean(0))
                self._sent(rows * columns)
                continue
            made.append(self._low_rank(at, [each.reshape(rows, columns) for each in of_members], rank).view(shape))
            self._sent((rows + columns) * rank)
        vector: Values = torch.cat([each.reshape(-1) for each in made]).numpy()
        return vector

    def _low_rank(self, at: int, of_members: list[torch.Tensor], rank: int) -> torch.Tensor:
        owed = [of[at].view_as(each) for of, each in zip(self._owed, of_members, strict=True)]
        inputs = [each + rest for each, rest in zip(of_members, owed, strict=True)]
        right = self._rights.get(at)
        if right is None:
            right = torch.randn(inputs[0].shape[1], rank, generator=self._generator)
        right = torch.linalg.qr(right).Q
        left = torch.linalg.qr(torch.stack([each @ right for each in inputs]).sum(0)).Q
        self._rights[at] = right = torch.stack([each.T @ left for each in inputs]).mean(0)
        mean: torch.Tensor = left @ right.T
        for rest, each in zip(owed, inputs, strict=True):
            rest.copy_(each - mean)
        return mean

    def _sent(self, values: int) -> None:
        self.sent_bytes += 4 * values * (len(self._owed) + 1)
