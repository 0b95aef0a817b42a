"""One bucket's way through a topology program on one rank: where chunks land, and what becomes possible when they have.

Pure bookkeeping over segments; the executor owns the bytes. Each rank keeps one *area*: the encoded vector of a
round. A shard lands there once in the reduce half, is added to, and leaves from the same place; it lands there once
more, final, in the copy half. That is safe without a second area: a shard's final bytes come back to a rank only after
its successor has received what that rank sent of it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from meshwire.codec import CodecSpec
from meshwire.header import Flags, Header
from meshwire.plan import Plan
from meshwire.topology import Op, Program, Shard


class Part(Enum):
    """What this rank adds to a bucket."""

    DATA = "data"  # w*g from the raw slot
    POISON = "poison"  # V1, V2
    NOTHING = "nothing"  # R4, R5: it only forwards


@dataclass(frozen=True, slots=True)
class Work:
    """What to do with a run of segments that lie in the area, or begin here.

    In this order: add the own part (`add_own`; over nothing when not `incoming`), divide by `weight` and encode once
    (`finish`), decode into the result (`deliver`), send as `send_step`. A poisoned run skips the arithmetic.

    A final run (`deliver`) is sent as it is, in one frame: its squared norm (O4) is of just these segments. Whoever
    finishes it computes that once, in float64, over the decoded values; all others pass it on.
    """

    first_segment: int
    segment_count: int
    incoming: bool
    add_own: bool
    finish: bool
    deliver: bool
    send_step: int | None
    contributors: int
    weight: float
    poison: bool
    squared_norm: float = 0.0


class EncodedLayout:
    """Byte positions of every segment's encoding inside the area."""

    def __init__(self, plan: Plan, codec: CodecSpec) -> None:
        self._full_bytes = codec.segment_bytes_max(plan.segment_values)
        self._segment_counts = [bucket.segment_count for bucket in plan.buckets]
        self._last_bytes = [
            codec.segment_bytes_max(bucket.segment_bounds(bucket.segment_count - 1)[1]) for bucket in plan.buckets
        ]
        self._bucket_offsets: list[int] = []
        offset = 0
        for bucket in plan.buckets:
            self._bucket_offsets.append(offset)
            offset += self._run_bytes(bucket.index, 0, bucket.segment_count)
        self.total_bytes = offset

    def span(self, bucket: int, first_segment: int, segment_count: int) -> tuple[int, int]:
        """(offset, length) in bytes of a run of segments."""
        offset = self._bucket_offsets[bucket] + first_segment * self._full_bytes
        return offset, self._run_bytes(bucket, first_segment, segment_count)

    def segments_per_chunk(self, chunk_bytes: int) -> int:
        """How many full segments one frame carries: about `chunk_bytes`, for segment headers must not halve it."""
        return max(1, (chunk_bytes + self._full_bytes // 8) // self._full_bytes)

    def _run_bytes(self, bucket: int, first_segment: int, segment_count: int) -> int:
        if not segment_count:
            return 0
        if first_segment + segment_count < self._segment_counts[bucket]:
            return segment_count * self._full_bytes
        return (segment_count - 1) * self._full_bytes + self._last_bytes[bucket]


class BucketExchange:
    """The state of one bucket in one round."""

    def __init__(self, bucket: int, program: Program, shards: tuple[Shard, ...], layout: EncodedLayout) -> None:
        self._bucket = bucket
        self._program = program
        self._shards = shards
        self._layout = layout
        self._rank_bit = 1 << program.rank
        self._part: Part | None = None
        self._own_weight = 0.0
        steps = program.steps
        self._announced = [0] * len(steps)  # segments whose headers were accepted, by step
        self._landed: list[list[Header]] = [[] for _ in steps]  # reduce chunks that wait for the own part
        self._step_weight: list[tuple[int, float] | None] = [None] * len(steps)
        self._undelivered_segments = sum(shard.segment_count for shard in shards)
        self._squared_norms: list[float] = []  # by final run
        self.contributors = 0  # as the owners' frames name them
        self.weight = 0.0
        self.poisoned = False

    @property
    def complete(self) -> bool:
        """Every segment's result is in the area."""
        return not self._undelivered_segments

    @property
    def squared_norm(self) -> float:
        """O4: of the bucket's final values. Rounded once, so it does not depend on the order of arrival."""
        return math.fsum(self._squared_norms)

    def contribute(self, part: Part, weight: float) -> Iterator[Work]:
        """Fixes what this rank adds, once. Yields the work that this makes possible."""
        assert self._part is None
        assert (weight > 0) == (part is not Part.NOTHING)
        self._part = part
        self._own_weight = weight
        return self._after_contribute()

    def _after_contribute(self) -> Iterator[Work]:
        part = self._part
        for shard in self._program.initial_shards():
            run = self._shards[shard]
            if run.segment_count:
                yield self._work(shard, None, run.first_segment, run.segment_count, 0, 0.0, poison=part is Part.POISON)
        for headers in self._landed:
            for header in headers:
                yield self._arrived(header)
            headers.clear()

    def announce(self, sender: int, header: Header) -> tuple[int, int] | str:
        """Checks an incoming chunk against the program. Returns (offset, length) of its place, or what is wrong."""
        step_index = header.step
        if step_index >= len(self._program.steps):
            return f"program step {step_index} of {len(self._program.steps)}"
        step = self._program.steps[step_index]
        if step.recv_from != sender or step.recv_shard is None:
            return f"rank {sender} has nothing to send at program step {step_index}"
        run = self._shards[step.recv_shard]
        expected = run.first_segment + self._announced[step_index]
        left = run.segment_count - self._announced[step_index]
        if header.first_segment != expected or not 1 <= header.segment_count <= left:
            return (
                f"segments {header.first_segment}+{header.segment_count} of bucket {self._bucket} at step "
                f"{step_index}; expected to begin at {expected}, at most {left}"
            )
        if header.contributors & ~self._program.bitmap:
            return f"contributors {header.contributors:#x} name a rank outside the generation's {self._program.ranks}"
        if (header.weight > 0) != (header.contributors != 0):
            return f"weight {header.weight} does not suit contributors {header.contributors:#x}"
        if step.op is Op.REDUCE and header.contributors & self._rank_bit:
            return "a sum that already holds this rank's part came back to be reduced"
        claimed = (header.contributors, header.weight)
        if self._step_weight[step_index] not in (None, claimed):
            return f"contributors changed within step {step_index} of bucket {self._bucket}"
        offset, length = self._layout.span(self._bucket, header.first_segment, header.segment_count)
        empty = header.flags & Flags.POISON or not header.contributors
        if header.payload_bytes != (0 if empty else length):
            return f"payload of {header.payload_bytes} bytes where {0 if empty else length} were due"
        if header.squared_norm and (empty or step.op is not Op.COPY):
            return f"squared norm {header.squared_norm} of what is not final, poison or empty (O4)"
        self._step_weight[step_index] = claimed
        self._announced[step_index] += header.segment_count
        return offset, header.payload_bytes

    def landed(self, header: Header) -> Work | None:
        """An announced chunk's payload is in its place. Returns the work that this makes possible, if any yet."""
        step = self._program.steps[header.step]
        if step.op is Op.REDUCE and self._part is None:
            self._landed[header.step].append(header)
            return None
        return self._arrived(header)

    def _arrived(self, header: Header) -> Work:
        step = self._program.steps[header.step]
        assert step.recv_shard is not None
        own_poison = step.op is Op.REDUCE and self._part is Part.POISON
        return self._work(
            step.recv_shard,
            header.step,
            header.first_segment,
            header.segment_count,
            header.contributors,
            header.weight,
            poison=own_poison or bool(header.flags & Flags.POISON),
            squared_norm=header.squared_norm,
        )

    def _work(
        self,
        shard: int,
        step_index: int | None,
        first_segment: int,
        segment_count: int,
        contributors: int,
        weight: float,
        *,
        poison: bool,
        squared_norm: float = 0.0,
    ) -> Work:
        copying = step_index is not None and self._program.steps[step_index].op is Op.COPY
        adds = not copying and self._part is not Part.NOTHING
        finish = not copying and self._program.finishes(shard)
        if adds:
            contributors |= self._rank_bit
            weight += self._own_weight
        return Work(
            first_segment=first_segment,
            segment_count=segment_count,
            incoming=step_index is not None and bool(contributors & ~self._rank_bit if adds else contributors),
            add_own=adds,
            finish=finish,
            deliver=finish or copying,
            send_step=self._program.next_send(shard, step_index),
            contributors=contributors,
            weight=weight,
            poison=poison,
            squared_norm=squared_norm,
        )

    def delivered(self, work: Work) -> bool:
        """Reports that final segments are in the result. Returns whether the bucket is complete with them."""
        self._undelivered_segments -= work.segment_count
        self.poisoned |= work.poison
        self.contributors = work.contributors
        self.weight = work.weight
        self._squared_norms.append(work.squared_norm)
        return self.complete
