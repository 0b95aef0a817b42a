"""Two executors over a TCP connection: all that lies between a learner's slot and the kernel, and back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from meshtraind.contributions.segments import RoundForms
from meshtraind.executor.executor import Executor
from meshtraind.executor.host import ExchangeMembers, ExchangeMemory, ExchangeSettings
from meshtraind.transport.connection import Connection
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.exchange import Part
from meshwire.frames.header import HEADER_BYTES, Flags, Header
from meshwire.model.manifest import ModelManifest, Momentum, TensorSpec
from meshwire.model.plan import Plan, plan_buckets
from tests.daemon.connectionpair import Recorder, pair
from tests.daemon.roundhost import Told
from tests.daemon.waiting import until

Values = NDArray[np.float32]


def manifest_of(shapes: Sequence[tuple[int, ...]], buffers: int = 0) -> ModelManifest:
    """Parameters of these shapes, and a float buffer if it is to have values."""
    tensors = [
        TensorSpec(name=f"tensor{index}", shape=shape, dtype="float32", kind="parameter")
        for index, shape in enumerate(shapes)
    ]
    if buffers:
        tensors.append(TensorSpec(name="mean", shape=(buffers,), dtype="float32", kind="buffer"))
    return ModelManifest(tensors=tuple(tensors), optimizer="SGD")


@dataclass
class End(Recorder):
    """What arrives at one of them."""

    executor: Executor | None = None
    landing: dict[Header, memoryview] = field(default_factory=dict)
    frames: list[tuple[Header, bytes]] = field(default_factory=list)
    other: int = 0
    damage: Callable[[memoryview], None] | None = None  # of payloads on their way here

    def chunk_announced(self, _conn: Connection, header: Header) -> memoryview | str | None:
        assert self.executor is not None
        place = self.executor.chunk_announced(self.other, header)
        if isinstance(place, memoryview):
            self.landing[header] = place
        return place

    def chunk_received(self, _conn: Connection, header: Header) -> None:
        assert self.executor is not None
        place = self.landing.pop(header, memoryview(b""))
        if self.damage is not None and place:
            self.damage(place)
        self.frames.append((header, bytes(place)))
        self.executor.chunk_received(header)


class Members:
    """Ranks 0 and 1, with s=0, all rounds contributed to by both.

    Attributes:
        broken: what executors said of payloads.
    """

    def __init__(self, plan: Plan, codec: str, ends: Sequence[End], connections: Sequence[Connection]) -> None:
        spec = parse_codec(codec)
        self.plan, self.forms, self.ends, self.connections = plan, RoundForms(plan, spec), ends, connections
        self.complete, self.broken = 0, list[str]()
        self._results = [np.full(plan.total_values, np.nan, np.float32) for _ in ends]
        self._done: list[dict[int, bool]] = [{}, {}]  # of this round, by rank and bucket: is it poisoned
        self._decoded: list[int] = [0, 0]
        self.executors = [
            Executor(
                ExchangeSettings(
                    plan=plan,
                    codec=codec,
                    momentum=Momentum(factor=0.5, nesterov=False) if spec.momentum else None,
                    job=1,
                    seed=7,
                    staleness=0,
                ),
                rank,
                ExchangeMembers(generation=2, ranks=(0, 1), links={1 - rank: connections[rank]}, learning=(0, 1)),
                first=1,
                memory=ExchangeMemory(self._results[rank]),
                host=Told(
                    on_bucket=partial(self._bucket_done, rank),
                    on_result=partial(self._decoded.__setitem__, rank),
                    on_broken=lambda _rank, text: self.broken.append(text),
                    newest=lambda: self.complete,
                ),
            )
            for rank in (0, 1)
        ]
        for rank, end in enumerate(ends):
            end.executor, end.other = self.executors[rank], 1 - rank

    async def round(self, gradients: Sequence[Values], weight: float = 1.0) -> Values | None:
        """The mean, which both have to the bit; None if the round is void.

        Args:
            gradients: of each, times the weight.
            weight: of each.
        """
        await self.exchange(gradients, weight)
        assert not self.broken
        mean, other = await self.finish(0), self._results[1]
        assert self._done[0] == self._done[1]
        assert mean is None or mean.tobytes() == other.tobytes()
        return mean

    async def finish(self, rank: int) -> Values | None:
        """The mean as this one has it, of the round that was exchanged; None if it is void there."""
        number = self.complete + 1
        self.complete = number
        void = [any(done.values()) for done in self._done]
        for other, executor in enumerate(self.executors):
            executor.settle(number, void=void[other], contributed=True)
        await until(lambda: self._decoded == [number, number])
        for executor in self.executors:
            executor.forget(number)
        return None if void[rank] else self._results[rank].copy()

    async def exchange(self, gradients: Sequence[Values], weight: float = 1.0) -> None:
        """The next round, until both have all buckets, or one refuses what the other has sent."""
        number = self.complete + 1
        self._done = [{}, {}]
        for executor, gradient in zip(self.executors, gradients, strict=True):
            slot = gradient.copy()
            executor.open_result(number)
            for bucket in self.plan.buckets:
                executor.contribute(number, bucket.index, Part.DATA, weight, slot)
        await until(lambda: bool(self.broken) or all(len(done) == len(self.plan.buckets) for done in self._done))

    def _bucket_done(self, rank: int, _round: int, bucket: int, poisoned: bool, *_: float) -> None:
        self._done[rank][bucket] = poisoned

    def frame_bytes(self, header: Header, payload: bytes) -> int:
        """What the size formulas say of a frame: of fixed segments alone, of others by their own bytes."""
        form = self.forms.of(header.round)
        at = 0
        for index in range(header.first_segment, header.first_segment + header.segment_count):
            segment, borders = form.segments[header.bucket][index], form.layout.plan.borders(header.bucket, index)
            most = segment.codec.spec.segment_bytes_max(segment.count, borders)
            length = segment.codec.length_of(memoryview(payload)[at:], segment.count)
            assert length == most if segment.codec.spec.fixed else 0 < length <= most
            at += length
        return HEADER_BYTES + (0 if header.flags & Flags.POISON else at)

    def residual(self, rank: int) -> Values:
        """The worker's, of after all that is complete."""
        while self.executors[rank]._projections.projected.settle_one():
            pass
        feedback = self.executors[rank]._feedback
        assert feedback is not None
        return feedback.worker.values


@asynccontextmanager
async def members(codec: str, manifest: ModelManifest) -> AsyncIterator[Members]:
    """Linked over TCP, and closed in the end."""
    plan = plan_buckets(manifest, 1 << 16, codec=parse_codec(codec))
    async with pair(False, End) as (client, first, server, second):
        assert isinstance(first, End)
        assert isinstance(second, End)
        made = Members(plan, codec, (first, second), (client, server))
        try:
            yield made
        finally:
            for executor in made.executors:
                executor.close()
            await asyncio.sleep(0)


def placed(plan: Plan, values: Values) -> Values:
    """`values` with zeros in the padding between tensors."""
    out = np.zeros_like(values)
    for span in plan.spans:
        run = slice(span.start, span.start + span.count)
        out[run] = values[run]
    return out
