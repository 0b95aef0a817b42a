"""One bucket's way among ranks that keep each other's parts, in any order of delivery (C2)."""

import math
import random
from collections import deque
from dataclasses import dataclass, field, replace

from meshwire.codecs.registry import FP32, CodecSpec, Family, Reduction
from meshwire.collectives.direct import PartsExchange
from meshwire.collectives.exchange import Part, Work
from meshwire.collectives.strategy import collective_for
from meshwire.collectives.topology import Program
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.frames.header import Flags, Header, Kind
from tests.wire.onebucket import make_plan

Runs = dict[int, list[float]]
"""What lies in an area, by offset of a run: one number for each segment."""


def codecs_of(reduction: Reduction) -> tuple[CodecSpec, CodecSpec]:
    """Codecs of so many bytes a segment as fp32 takes: always, and at most."""
    some = Family("some", reduction, lambda _, count: 4 * count, "", "", fixed=False)
    return CodecSpec(replace(FP32.family, reduction=reduction), ()), CodecSpec(some, ())


@dataclass
class Rank:
    """One rank, with a single number standing for each segment."""

    rank: int
    exchange: PartsExchange
    program: Program
    own: list[float]
    area_bytes: int
    area: Runs = field(default_factory=dict)
    result: dict[int, float] = field(default_factory=dict)
    outboxes: dict[int, deque[tuple[Header, list[float]]]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)  # where runs begin and may end


class Mesh:
    """Ranks that are all joined by FIFO links, run in an order that a seed decides. `parts` goes by rank; without
    `topology` it is the codec's usual one."""

    def __init__(
        self, parts: dict[int, Part], segment_count: int, seed: int, codec: CodecSpec, topology: str | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.codec = codec
        self.parts = parts
        self.weights = [0.0 if part is Part.NOTHING else index + 1.0 for index, part in enumerate(parts.values())]
        self.layout = EncodedLayout(make_plan(segment_count), codec)
        self.ranks: dict[int, Rank] = {}
        for position, rank in enumerate(parts):
            strategy = collective_for(self.codec, topology).topology.strategy(self.layout, tuple(parts), rank)
            exchange = strategy.exchange(0)
            assert isinstance(exchange, PartsExchange)
            self.ranks[rank] = Rank(
                rank,
                exchange,
                strategy.program,
                own=[self.weights[position] * (100 * position + segment) for segment in range(segment_count)],
                area_bytes=strategy.area_bytes,
            )

    def run(self) -> None:
        waiting = list(self.ranks.values())
        while True:
            ready = [(rank, to) for rank in self.ranks.values() for to, queue in rank.outboxes.items() if queue]
            if not ready and not waiting:
                return
            if waiting and (not ready or self.random.random() < 0.3):
                rank = waiting.pop(self.random.randrange(len(waiting)))
                position = list(self.ranks).index(rank.rank)
                for work in rank.exchange.contribute(self.parts[rank.rank], self.weights[position]):
                    self.work(rank, work)
                continue
            sender, to = self.random.choice(ready)
            header, values = sender.outboxes[to].popleft()
            receiver = self.ranks[to]
            place = receiver.exchange.announce(sender.rank, header)
            assert not isinstance(place, str), place
            offset, length = place
            assert 0 <= offset <= offset + length <= receiver.area_bytes
            if length:
                end = offset + self.layout.span(0, header.first_segment, header.segment_count)[1]
                assert all(end <= start or other <= offset for start, other in receiver.taken.items()), "runs overlap"
                receiver.taken[offset] = end
                receiver.area[offset] = values
            possible = receiver.exchange.landed(header)
            if possible is not None:
                self.work(receiver, possible)

    def work(self, rank: Rank, work: Work) -> None:
        run = range(work.first_segment, work.first_segment + work.segment_count)
        offset, most = self.layout.span(0, work.first_segment, work.segment_count)
        values: list[float] = []
        empty = work.poison or not work.contributors
        if not empty and work.finish:
            assert work.at_once
            sources = [rank.own[run.start : run.stop] if place is None else rank.area[place[0]] for place in work.parts]
            values = [sum(column) / work.weight for column in zip(*sources, strict=True)]
            if self.codec.reduction is not Reduction.GATHER:
                rank.area[offset] = values
            work = replace(work, squared_norm=math.fsum(value**2 for value in values), length_bytes=self.size(most))
        elif not empty and work.deliver:
            assert work.length_bytes
            values = rank.area[offset]
        elif not empty:
            values = rank.own[run.start : run.stop]
        if work.deliver:
            rank.result.update(zip(run, values or [0.0] * len(run), strict=True))
            rank.exchange.delivered(work)
        for step in work.send_steps:
            header = Header(
                kind=Kind.CHUNK,
                payload_bytes=0 if empty else work.length_bytes or self.size(most),
                flags=Flags.POISON if work.poison else Flags.NONE,
                round=1,
                step=step,
                first_segment=work.first_segment,
                segment_count=work.segment_count,
                contributors=work.contributors,
                weight=work.weight,
                squared_norm=work.squared_norm,
            )
            to = rank.program.steps[step].send_to
            assert to is not None
            rank.outboxes.setdefault(to, deque()).append((header, values))

    def size(self, most: int) -> int:
        """Of an encoded run."""
        return most if self.codec.fixed else self.random.randint(1, most)

    def check(self) -> None:
        """W3, O4, V1: every rank has the sum of all parts in the order of ranks, divided once, or poison; nobody's
        counts for who nulls (R4)."""
        poisoned = Part.POISON in self.parts.values()
        total = sum(self.weights)
        for rank in self.ranks.values():
            assert rank.exchange.complete
            assert rank.exchange.poisoned == poisoned
            assert rank.exchange.weight == total
            assert rank.exchange.contributors == sum(
                1 << rank for rank, part in self.parts.items() if part is not Part.NOTHING
            )
            for segment in range(0 if poisoned else len(rank.own)):
                contributed = [each.own[segment] for each in self.ranks.values() if self.parts[each.rank] is Part.DATA]
                assert rank.result[segment] == (sum(contributed) / total if total else 0.0), "to the bit"
        assert len({rank.exchange.squared_norm for rank in self.ranks.values()}) == 1
