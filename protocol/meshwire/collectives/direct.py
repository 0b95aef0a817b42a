"""What the ways have in common in which members' parts meet whole: kept apart, and summed in the order of ranks (C2).

So a sum does not depend on the order of arrival. Parts are cut into frames in one way only, so runs of different
members match.
"""

from collections.abc import Sequence

from meshwire.collectives.exchange import BucketExchange, Part, Place, Work
from meshwire.collectives.topology import Op, Program, Step
from meshwire.frames.header import Flags, Header
from meshwire.layout.encoded import EncodedLayout
from meshwire.model.plan import Shard


class PartsLayout:
    """Where the others' parts of what this rank finishes lie: one block for each step at which one is received.

    Args:
        shards: by bucket.
        start: in bytes of the area, of the first block.
    """

    def __init__(
        self, layout: EncodedLayout, program: Program, shards: Sequence[tuple[Shard, ...]], start: int
    ) -> None:
        self._layout = layout
        (owned,) = program.owned
        self._starts: list[int] = []  # by bucket: what to add to a place in the vector to come into the first block
        self._block_bytes = 0
        for bucket, of_bucket in enumerate(shards):
            own = of_bucket[owned]
            offset, length = layout.span(bucket, own.first_segment, own.segment_count)
            self._starts.append(start + self._block_bytes - offset)
            self._block_bytes += length
        self.area_bytes = start + (len(program.ranks) - 1) * self._block_bytes

    def place(self, step: int, bucket: int, first_segment: int, segment_count: int) -> Place:
        """Of a run that is received at a step that brings a part."""
        offset, length = self._layout.span(bucket, first_segment, segment_count)
        return offset + self._starts[bucket] + step * self._block_bytes, length


class PartsExchange(BucketExchange):
    """The state of one bucket in one round. The steps that bring parts are the program's first ones."""

    def __init__(
        self, bucket: int, program: Program, shards: tuple[Shard, ...], layout: EncodedLayout, parts: PartsLayout
    ) -> None:
        super().__init__(bucket, program, shards, layout)
        self._parts = parts
        (self._owned,) = program.owned
        # By first segment of each run that is summed here: what others have sent of it.
        runs = layout.chunks(bucket, shards[self._owned])
        self._received: dict[int, dict[int, Header]] = {first: {} for first, _ in runs}
        self._final_steps = tuple(
            index for index, step in enumerate(program.steps) if step.op is Op.COPY and step.send_shard is not None
        )

    def _wrong(self, step: Step, header: Header, left: int) -> str | None:
        cut = min(left, self._layout.chunk_segments(self._bucket))
        if header.segment_count != cut:
            return f"{header.segment_count} segments in a chunk that all cut at {cut}"
        assert step.recv_from is not None
        if step.op is not Op.COPY and header.contributors & ~(1 << step.recv_from):
            return f"contributors {header.contributors:#x} in the part of rank {step.recv_from} alone"
        return None

    def _place(self, header: Header) -> Place:
        if self._program.steps[header.step].op is Op.COPY:
            return super()._place(header)
        return self._parts.place(header.step, self._bucket, header.first_segment, header.segment_count)

    def _part_landed(self, header: Header) -> Work | None:
        received = self._received[header.first_segment]
        sender = self._program.steps[header.step].recv_from
        assert sender is not None
        received[sender] = header
        return self._summed(header.first_segment, header.segment_count) if self._all_there(received) else None

    def _all_there(self, received: dict[int, Header]) -> bool:
        return self._part is not None and len(received) == len(self._program.ranks) - 1

    def _sent(self, steps: tuple[int, ...], first_segment: int, segment_count: int) -> Work:
        """The own part of a run, as it is."""
        adds = self._part is not Part.NOTHING
        return Work(
            first_segment=first_segment,
            segment_count=segment_count,
            incoming=False,
            add_own=adds,
            finish=False,
            deliver=False,
            at_once=False,
            send_steps=steps,
            contributors=self._rank_bit if adds else 0,
            weight=self._own_weight,
            poison=self._part is Part.POISON,
            length_bytes=0,
        )

    def _summed(self, first_segment: int, segment_count: int) -> Work:
        """All parts of a run are there."""
        received = self._received.pop(first_segment)
        contributors, weight, poison = 0, 0.0, False
        parts: list[Place | None] = []
        weights: list[float] = []
        for rank in self._program.ranks:
            header = received.get(rank)
            if header is None:
                contributes = self._part is not Part.NOTHING
                weight += self._own_weight
                poison |= self._part is Part.POISON
            else:
                contributes = header.contributors != 0
                weight += header.weight
                poison |= bool(header.flags & Flags.POISON)
            if contributes:
                contributors |= 1 << rank
                weights.append(self._own_weight if header is None else header.weight)
                parts.append(
                    None
                    if header is None
                    else (
                        self._parts.place(header.step, self._bucket, first_segment, segment_count)[0],
                        header.payload_bytes,
                    )
                )
        return Work(
            first_segment=first_segment,
            segment_count=segment_count,
            incoming=any(part is not None for part in parts),
            add_own=self._part is not Part.NOTHING,
            finish=True,
            deliver=True,
            at_once=True,
            send_steps=self._final_steps,
            contributors=contributors,
            weight=weight,
            poison=poison,
            length_bytes=0,
            parts=tuple(parts),
            weights=tuple(weights),
        )
