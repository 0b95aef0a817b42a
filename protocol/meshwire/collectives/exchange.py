"""One bucket's way through a topology program on one rank: where chunks land, and what becomes possible when they have.

Pure bookkeeping over segments; the executor owns the bytes. Each rank keeps one *area* for a round: the encoded vector,
and behind it what else has to land; of a gather, the others' parts alone. This is what all exchanges have in common;
`hops.py` and `direct.py` are the ways there are.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from meshwire.collectives.topology import Op, Program, Step, bucket_shards
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.frames.header import Flags, Header


class Part(Enum):
    """What this rank adds to a bucket."""

    DATA = "data"  # w*g
    POISON = "poison"  # V1, V2
    NOTHING = "nothing"  # R4, R5: it only forwards


Place = tuple[int, int]  # (offset, length) in bytes of an area
WEIGHT_TOLERANCE = 1e-6  # partial sums of weights are rounded in the order of the topology's program


@dataclass(frozen=True, slots=True)
class Work:
    """What to do with a run of segments.

    In this order: add what there is (`add_own`, `incoming`, `parts`), divide by `weight` and, but for a gather, encode
    once (`finish`), decode into the result (`deliver`), send as each of `send_steps`. A poisoned run skips the
    arithmetic.

    A final run (`deliver`) is sent as it is, in one frame: its squared norm (O4) is of just these segments. Whoever
    finishes it computes that once, in float64, over the decoded values; all others pass it on. In a gather all finish.

    Attributes:
        at_once: it is computed now; otherwise when the link can take it.
        length_bytes: of the run as it lies encoded in the area; not known yet of one that is to be encoded in segments
            that vary in length.
        parts: where the run's contributions lie, in the order in which they are summed; None is this rank's own. Where
            sums grow from hop to hop: the sums that came beside the one that `incoming` means.
        senders: of those sums, the `incoming` one first.
        weights: of the contributors, in the order of `parts`, where those meet whole.
    """

    first_segment: int
    segment_count: int
    incoming: bool
    add_own: bool
    finish: bool
    deliver: bool
    at_once: bool
    send_steps: tuple[int, ...]
    contributors: int
    weight: float
    poison: bool
    length_bytes: int
    squared_norm: float = 0.0
    parts: tuple[Place | None, ...] = ()
    senders: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


class Strategy(ABC):
    """What one rank does in one generation, for the rounds that are laid out alike: its program, and where what it
    receives lands.

    Attributes:
        own_kept: the own part is encoded at any s, as soon as it is ready, and kept beside what is on its way.
        projections: vectors that stand for longer ones go so, too.
        shards: by bucket.
        chunks: by bucket and shard: (first segment, segment count) of each frame that carries a piece of it.
        area_bytes: memory of a round: the encoded vector first, but for a gather.
    """

    own_kept: ClassVar[bool] = False
    projections: ClassVar[bool] = True
    area_bytes: int

    def __init__(self, layout: EncodedLayout, program: Program) -> None:
        self.layout = layout
        self.program = program
        self.shards = tuple(
            bucket_shards(each.segment_count, program.shard_count, each.home) for each in layout.plan.buckets
        )
        self.chunks = [
            [layout.chunks(bucket, shard) for shard in of_bucket] for bucket, of_bucket in enumerate(self.shards)
        ]
        self._moved: dict[int, list[int]] = {}  # by step, by bucket: what to add to a place in the vector

    def _lay_out(self, steps: Iterable[int], *, vector: bool = True) -> None:
        """Makes room for a round: the encoded vector, if there is to be one, and behind it a block for each of these
        steps, in which what is received at it lands."""
        self.area_bytes = self.layout.total_bytes if vector else 0
        for step in steps:
            shard = self.program.steps[step].recv_shard
            assert shard is not None
            moved = self._moved[step] = []
            for bucket, of_bucket in enumerate(self.shards):
                run = of_bucket[shard]
                offset, length = self.layout.span(bucket, run.first_segment, run.segment_count)
                moved.append(self.area_bytes - offset)
                self.area_bytes += length

    def place(self, step: int, bucket: int, first_segment: int, segment_count: int) -> Place:
        """Of a run that is received at a step: in its block, or where it lies in the vector."""
        offset, length = self.layout.span(bucket, first_segment, segment_count)
        moved = self._moved.get(step)
        return (offset if moved is None else offset + moved[bucket]), length

    @classmethod
    @abstractmethod
    def area_vectors(cls, program: Program) -> float:
        """What a round's area takes, in encoded vectors, where all shards are equally large."""

    @abstractmethod
    def exchange(self, bucket: int) -> "BucketExchange":
        """Begins the bucket's way through another round."""

    def owned(self, bucket: int) -> frozenset[int]:
        """The segments of a bucket that this rank finishes."""
        runs = [self.shards[bucket][shard] for shard in self.program.owned]
        return frozenset(at for run in runs for at in range(run.first_segment, run.first_segment + run.segment_count))


class BucketExchange(ABC):
    """The state of one bucket in one round."""

    def __init__(self, bucket: int, strategy: Strategy) -> None:
        program, shards = strategy.program, strategy.shards[bucket]
        self._bucket = bucket
        self._strategy = strategy
        self._program = program
        self._shards = shards
        self._chunks = strategy.chunks[bucket]
        self._layout = strategy.layout
        self._rank_bit = 1 << program.rank
        self._part: Part | None = None
        self._own_weight = 0.0
        self._announced = [0] * len(program.steps)  # segments whose headers were accepted, by step
        self._received_at = [0] * len(program.steps)  # and whose payloads are here
        self._step_weight: list[tuple[int, float] | None] = [None] * len(program.steps)
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

    def contribute(self, part: Part, weight: float) -> list[Work]:
        """Fixes what this rank adds, once. Returns the work that this makes possible, in its order."""
        assert self._part is None
        assert (weight > 0) == (part is not Part.NOTHING)
        self._part = part
        self._own_weight = weight
        return self._contributed()

    def announce(self, sender: int, header: Header) -> Place | str:
        """Checks an incoming chunk against the program. Returns its place in the area, or what is wrong with it."""
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
        if (wrong := self._wrong(step, header, left)) is not None:
            return wrong
        claimed = (header.contributors, header.weight)
        if self._step_weight[step_index] not in (None, claimed):
            return f"contributors changed within step {step_index} of bucket {self._bucket}"
        offset, most = self._place(header)
        empty = header.flags & Flags.POISON or not header.contributors
        due = range(1) if empty else range(most if self._layout.fixed else 1, most + 1)
        if header.payload_bytes not in due:
            wanted = f"{due[0]}" if len(due) == 1 else f"{due[0]} to {due[-1]}"
            return f"payload of {header.payload_bytes} bytes where {wanted} were due"
        if header.squared_norm and (empty or step.op is not Op.COPY):
            return f"squared norm {header.squared_norm} of what is not final, poison or empty (O4)"
        self._step_weight[step_index] = claimed
        self._announced[step_index] += header.segment_count
        return offset, header.payload_bytes

    def step(self, header: Header) -> Step:
        """At which an announced chunk was received."""
        return self._program.steps[header.step]

    def unlike(self, header: Header, bound: tuple[int, float]) -> str | None:
        """R2: what is wrong with an announced chunk, if those whose parts can be in it are bound to these contributors
        with this summed weight. Poison replaces all that a sum had gathered. One member's weight is no sum, and exact:
        who told each receiver a slightly different one would make their means differ (C2)."""
        contributors, weight = bound
        if header.flags & Flags.POISON:
            return None
        if header.contributors != contributors:
            return f"its sum shows the contributors {header.contributors:#x}, the binds name {contributors:#x} (R2)"
        is_sum = contributors.bit_count() > 1
        if not math.isclose(header.weight, weight, rel_tol=WEIGHT_TOLERANCE if is_sum else 0.0):
            return f"its sum shows the weight {header.weight}, the binds add up to {weight} (R2)"
        return None

    def lacks(self) -> list[int]:
        """The steps at which this rank has still to receive something, in their order."""
        return [
            index
            for index, step in enumerate(self._program.steps)
            if step.recv_shard is not None and self._received_at[index] < self._shards[step.recv_shard].segment_count
        ]

    def arrived(self, header: Header) -> None:
        """An announced chunk's payload is here."""
        self._received_at[header.step] += header.segment_count

    def _final(self, header: Header, length_bytes: int, send_steps: tuple[int, ...]) -> Work:
        """What to do with a run whose result has come: deliver it, and pass it on.

        Args:
            length_bytes: as it lies in the area.
        """
        return Work(
            first_segment=header.first_segment,
            segment_count=header.segment_count,
            incoming=header.contributors != 0,
            add_own=False,
            finish=False,
            deliver=True,
            at_once=True,
            send_steps=send_steps,
            contributors=header.contributors,
            weight=header.weight,
            poison=bool(header.flags & Flags.POISON),
            length_bytes=length_bytes,
            squared_norm=header.squared_norm,
        )

    def delivered(self, work: Work) -> bool:
        """Reports that final segments are in the result. Returns whether the bucket is complete with them."""
        self._undelivered_segments -= work.segment_count
        self.poisoned |= work.poison
        self.contributors = work.contributors
        self.weight = work.weight
        self._squared_norms.append(work.squared_norm)
        return self.complete

    @abstractmethod
    def landed(self, header: Header) -> Work | None:
        """An announced chunk's payload is in its place. Returns the work that this makes possible, if any yet."""

    @abstractmethod
    def _contributed(self) -> list[Work]:
        """What the own part makes possible."""

    @abstractmethod
    def _wrong(self, step: Step, header: Header, left: int) -> str | None:
        """What is wrong with a chunk in this way of exchanging; `left`: segments that the step still lacks."""

    def _place(self, header: Header) -> Place:
        """Where an incoming chunk belongs, and how long it can be."""
        return self._strategy.place(header.step, self._bucket, header.first_segment, header.segment_count)
