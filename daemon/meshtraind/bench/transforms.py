"""Times codecs that turn the whole model's vector into a shorter one, as a member of a job alone would use them.

What they cost follows from the tensors' shapes: here those of ResNet-18 (He et al. 2015), over and over.
"""

import itertools
import math
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshtraind.bench.codec_report import CodecFigures
from meshtraind.contributions.contribution import HopContribution, InTwoPhases, compensation_of
from meshtraind.contributions.error_feedback import feedback_of
from meshtraind.contributions.results import Final, RoundResults
from meshtraind.contributions.segments import RoundForms
from meshtraind.executor.projections import Projections
from meshtraind.executor.reducers import Materials, reducer_for
from meshtraind.executor.round_buffers import RoundMemory
from meshwire.codecs.registry import CodecSpec
from meshwire.collectives.strategy import collective_for
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import Plan, plan_buckets

Values = NDArray[np.float32]

ROUNDS = 2  # half iterations of low rank send one factor and the other in turn
LONG_VECTORS = 5  # gradient, mean, both residuals, and what the worker's was before
STAGES = (64, 128, 256, 512)  # channels
CLASSES = 1000


class OneMember:
    """A job's vector, and what its only member keeps of it."""

    def __init__(self, spec: CodecSpec, values: Values) -> None:
        plan, self.raw = model_of(spec, values)
        self.mean: Values = np.zeros_like(self.raw)
        self._forms = RoundForms(plan, spec)
        feedback = feedback_of(spec, plan.total_values, None)
        compensation = compensation_of(0, spec, plan, None, feedback, None)
        rounds: dict[int, RoundResults] = {}
        self._projections = Projections(self._forms, rounds, 0, 0, 1, compensation.residual)
        materials = Materials(self._forms, self._projections, compensation, 0, feedback, None)
        self._memory = RoundMemory(self._forms, rounds, self._projections, reducer_for(collective_for(spec), materials))
        self._feedback = feedback
        self.encoded_bytes = 0  # of the last round

    def encode(self, number: int) -> HopContribution:
        """The member's part of a round."""
        form = self._forms.of(number)
        part = self._memory.own_part(number, form, 1.0)
        assert isinstance(part, HopContribution)
        for bucket in form.layout.model_buckets:
            part.keep(bucket, self.raw)
        return part

    def add(self, number: int, part: HopContribution) -> None:
        """Adds it to another's of zeros, as at the hop of a ring, and puts what it stands for into `mean`."""
        form = self._forms.of(number)
        round_ = self._memory.add(number, form)
        expansion = self._projections.of[form].expansion(form, number, self.mean)
        self.encoded_bytes = 0
        layout = form.layout
        for bucket in (*layout.followers, *layout.model_buckets):
            segments = form.segments[bucket]
            if bucket in layout.precursors:
                assert isinstance(part, InTwoPhases)
                part.second(bucket)
            for segment in segments:
                encoded = round_.area[segment.offset : segment.offset + segment.length]
                total = expansion.place(segment)
                segment.codec.sum_into(encoded, part.values(segment), total)
                segment.codec.encode_into(total, encoded)
                self.encoded_bytes += segment.length
            run = round_.area[segments[0].offset : segments[-1].offset + segments[-1].length]
            round_.finals.append(Final(bucket, 0, len(segments), (run,), contributors=1, weight=1.0))
            expansion.took(bucket, len(segments), void=False)
            while expansion.expand_one():
                pass

    @property
    def error(self) -> float:
        """The error of the last round: the norm of what is lost, as a part of the gradient's."""
        return float(np.linalg.norm(self.raw - self.mean) / np.linalg.norm(self.raw))

    def settle(self, number: int) -> None:
        """The round is complete, and counts."""
        self._memory.settle(number, void=False, contributed=True)
        if self._feedback is not None:
            self._feedback.settle(number, void=False, contributed=True)
        self._memory.own[number].counted()
        while self._projections.projected.settle_one():
            pass


def transform_figures(spec: CodecSpec, values: Values, runs: int) -> CodecFigures:
    """Means over ROUNDS rounds after the warm-up; the error is that of the first."""
    steady = without_warmup(spec)
    memory_bytes = _memory_bytes(steady, values)
    encode_s, add_s, encoded_bytes, error = [], [], 0, 0.0
    for _ in range(runs):
        member = OneMember(steady, values)
        spent_s = np.zeros(2)
        encoded_bytes = 0
        for number in range(1, ROUNDS + 1):
            started_s = time.thread_time()
            part = member.encode(number)
            encoded_s = time.thread_time()
            member.add(number, part)
            spent_s += encoded_s - started_s, time.thread_time() - encoded_s
            member.settle(number)
            encoded_bytes += member.encoded_bytes
            if number == 1:
                error = member.error
        encode_s.append(float(spent_s[0]) / ROUNDS)
        add_s.append(float(spent_s[1]) / ROUNDS)
    return CodecFigures(
        codec=str(spec),
        values=len(values),
        encoded_bytes=encoded_bytes // ROUNDS,
        encode_s=min(encode_s),
        add_s=min(add_s),
        error=error,
        memory_bytes=memory_bytes,
    )


def model_of(spec: CodecSpec, values: Values) -> tuple[Plan, Values]:
    """The plan of a ResNet-18 with so many values, and its vector with these in it."""
    shapes = resnet_shapes(len(values))
    tensors = tuple(
        TensorSpec(name=f"t{index}", shape=shape, dtype="float32", kind="parameter")
        for index, shape in enumerate(shapes)
    )
    plan = plan_buckets(ModelManifest(tensors=tensors, optimizer="SGD"), codec=spec)
    raw: Values = np.zeros(plan.total_values, np.float32)
    starts = [0, *itertools.accumulate(map(math.prod, shapes))]
    for span in plan.spans:
        first = starts[span.tensor]
        raw[span.start : span.start + span.count] = values[first : first + span.count]
    return plan, raw


def resnet_shapes(count: int) -> list[tuple[int, ...]]:
    """So many values in all; what is left of the last tensor is a vector."""
    shapes: list[tuple[int, ...]] = []
    left = count
    for shape in itertools.cycle(RESNET18):
        if math.prod(shape) >= left:
            return [*shapes, shape if math.prod(shape) == left else (left,)]
        shapes.append(shape)
        left -= math.prod(shape)
    raise AssertionError("a cycle has no end")


def _resnet18() -> Iterator[tuple[int, ...]]:
    """The tensors of a ResNet-18 as torchvision has them: each convolution, and weight and bias of the normalisation
    behind it."""

    def convolution(channels_in: int, channels: int, side: int) -> Iterator[tuple[int, ...]]:
        yield channels, channels_in, side, side
        yield from ((channels,), (channels,))

    yield from convolution(3, STAGES[0], 7)
    channels_in = STAGES[0]
    for channels in STAGES:
        yield from convolution(channels_in, channels, 3)
        yield from convolution(channels, channels, 3)
        if channels != channels_in:
            yield from convolution(channels_in, channels, 1)
        yield from convolution(channels, channels, 3)
        yield from convolution(channels, channels, 3)
        channels_in = channels
    yield from ((CLASSES, channels_in), (CLASSES,))


RESNET18 = tuple(_resnet18())


def without_warmup(spec: CodecSpec) -> CodecSpec:
    """As it is behind the rounds that a job begins with."""
    values = zip(spec.family.parameters, spec.values, strict=True)
    first = ("warmup", "train")
    return replace(spec, values=tuple(0.0 if parameter.name in first else value for parameter, value in values))


def _memory_bytes(spec: CodecSpec, values: Values) -> int:
    """The memory of everything but vectors as long as the model's."""
    OneMember(spec, values[:1])  # imports are no memory of its own
    tracemalloc.start()
    try:
        member = OneMember(spec, values)
        member.add(1, member.encode(1))
        return tracemalloc.get_traced_memory()[1] - LONG_VECTORS * member.raw.nbytes
    finally:
        tracemalloc.stop()
