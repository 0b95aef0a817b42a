"""One bucket's way where members' parts meet whole: kept apart until all of a run are there, and summed in the order of
ranks (C2). So a sum does not depend on the order of arrival. Parts are cut into frames in one way only, so runs of
different members match.

- sharded: encoded to its shard's owner, and once more from it. The owner keeps the parts of all members apart, behind
  the vector in its area. A final shard is cut into frames as a part is.
- all-to-all: every part goes from its member to each other one, who each sum all parts, divide once by the weight, and
  encode the mean for themselves: linear codecs, which draw nothing and owe nothing, find the same bytes.
- gather: the same, but nothing is encoded anew, so there is no vector of encoded means: what is kept of a round are the
  parts of those that contributed, in the order of ranks.
"""

from abc import abstractmethod
from typing import ClassVar

from meshwire.collectives.exchange import BucketExchange, Part, Place, Strategy, Work
from meshwire.collectives.topology import Op, Program, Step
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.frames.header import Flags, Header


class PartsStrategy(Strategy):
    """The others' parts of what this rank finishes lie in one block for each step at which one is received, behind the
    vector, if the area holds one."""

    holds_vector: ClassVar[bool] = True
    own_kept = True

    def __init__(self, layout: EncodedLayout, program: Program) -> None:
        super().__init__(layout, program)
        self._lay_out(_parts_steps(program), vector=self.holds_vector)

    @classmethod
    def area_vectors(cls, program: Program) -> float:
        return cls.holds_vector + len(_parts_steps(program)) / program.shard_count


def _parts_steps(program: Program) -> list[int]:
    """Those at which a part is received."""
    return [index for index, step in enumerate(program.steps) if step.op is not Op.COPY and step.recv_shard is not None]


class PartsExchange(BucketExchange):
    """The state of one bucket in one round."""

    def __init__(self, bucket: int, strategy: PartsStrategy) -> None:
        super().__init__(bucket, strategy)
        # The runs that are summed here, with their shards; by first segment of each, what others have sent of it.
        self._owned = {run: shard for shard in sorted(self._program.owned) for run in self._chunks[shard]}
        self._received: dict[int, dict[int, Header]] = {first: {} for first, _ in self._owned}

    def _wrong(self, step: Step, header: Header, left: int) -> str | None:
        cut = min(left, self._layout.chunk_segments(self._bucket))
        if header.segment_count != cut:
            return f"{header.segment_count} segments in a chunk that all cut at {cut}"
        assert step.recv_from is not None
        if step.op is not Op.COPY and header.contributors & ~(1 << step.recv_from):
            return f"contributors {header.contributors:#x} in the part of rank {step.recv_from} alone"
        return None

    def _part_landed(self, header: Header) -> Work | None:
        received = self._received[header.first_segment]
        sender = self._program.steps[header.step].recv_from
        assert sender is not None
        received[sender] = header
        return self._summed(header.first_segment, header.segment_count) if self._all_there(received) else None

    def _all_there(self, received: dict[int, Header]) -> bool:
        return self._part is not None and len(received) == len(self._program.ranks) - 1

    @abstractmethod
    def _final_steps(self, shard: int) -> tuple[int, ...]:
        """Those that send what is finished here."""

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
                        self._strategy.place(header.step, self._bucket, first_segment, segment_count)[0],
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
            send_steps=self._final_steps(self._owned[first_segment, segment_count]),
            contributors=contributors,
            weight=weight,
            poison=poison,
            length_bytes=0,
            parts=tuple(parts),
            weights=tuple(weights),
        )


class ShardedStrategy(PartsStrategy):
    """To each shard's owner and back."""

    def exchange(self, bucket: int) -> "ShardedExchange":
        return ShardedExchange(bucket, self)


class ShardedExchange(PartsExchange):
    """The state of one bucket in one round."""

    def landed(self, header: Header) -> Work | None:
        copied = self._program.steps[header.step].op is Op.COPY
        return self._final(header, header.payload_bytes, ()) if copied else self._part_landed(header)

    def _contributed(self) -> list[Work]:
        works: list[Work] = []
        for index, step in enumerate(self._program.steps):
            if step.send_shard is not None and step.send_shard not in self._program.owned:
                works += [self._sent((index,), first, count) for first, count in self._chunks[step.send_shard]]
        there = [run for run in self._owned if self._all_there(self._received[run[0]])]
        return works + [self._summed(first, count) for first, count in there]

    def _final_steps(self, shard: int) -> tuple[int, ...]:
        return self._program.routes[shard].spread


class AllToAllStrategy(PartsStrategy):
    """From everybody to everybody, of codecs that encode the mean anew: each does so for itself, in the same bits."""

    projections = False

    def exchange(self, bucket: int) -> "GatherExchange":
        return GatherExchange(bucket, self)


class GatherStrategy(AllToAllStrategy):
    """From everybody to everybody, of codecs that do not: there are parts alone."""

    holds_vector = False


class GatherExchange(PartsExchange):
    """The state of one bucket in one round."""

    def landed(self, header: Header) -> Work | None:
        return self._part_landed(header)

    def _contributed(self) -> list[Work]:
        works: list[Work] = []
        everywhere = tuple(range(len(self._program.steps)))
        for first, count in self._owned:
            if everywhere:  # none for a member alone
                works.append(self._sent(everywhere, first, count))
            if self._all_there(self._received[first]):
                works.append(self._summed(first, count))
        return works

    def _final_steps(self, shard: int) -> tuple[int, ...]:
        return ()
