"""The sharded exchange of one bucket: any delivery order gives every rank the same mean (C2, W1, W3, V1, R4)."""

import math
import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.codec import FP32, CodecSpec, Family, Reduction
from meshwire.exchange import Part, Work
from meshwire.header import Flags, Header, Kind
from meshwire.layout import EncodedLayout
from meshwire.shardedexchange import PartsLayout, ShardedExchange
from meshwire.topology import bucket_shards, sharded_program
from tests.wire.onebucket import SEGMENT_VALUES, generations, make_plan

SEGMENT_BYTES = 4 * SEGMENT_VALUES
FIXED = CodecSpec(replace(FP32.family, reduction=Reduction.TWO_SIDED), ())
VARIABLE = CodecSpec(Family("some", Reduction.TWO_SIDED, lambda _, count: 4 * count, "", "", fixed=False), ())

Runs = dict[int, list[float]]
"""What lies in an area, by offset of a run: one number for each segment."""


@pytest.fixture(autouse=True, scope="module")
def two_segments_to_a_chunk() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwire.limits.CHUNK_BYTES", 2 * SEGMENT_BYTES)
        yield


@dataclass
class Rank:
    """One rank, with a single number standing for each segment."""

    rank: int
    exchange: ShardedExchange
    own: list[float]
    area_bytes: int
    area: Runs = field(default_factory=dict)
    result: dict[int, float] = field(default_factory=dict)
    outboxes: dict[int, deque[tuple[Header, list[float]]]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)  # where runs begin and may end


class Mesh:
    """Ranks that are all joined by FIFO links, run in an order that a seed decides. Lists go by position."""

    def __init__(
        self, ranks: tuple[int, ...], segment_count: int, parts: list[Part], seed: int, codec: CodecSpec
    ) -> None:
        self.random = random.Random(seed)
        self.codec = codec
        self.parts = parts
        self.weights = [float(index + 1) if part is not Part.NOTHING else 0.0 for index, part in enumerate(parts)]
        self.layout = EncodedLayout(make_plan(segment_count), codec)
        shards = bucket_shards(segment_count, len(ranks), 0)
        self.ranks: dict[int, Rank] = {}
        for position, rank in enumerate(ranks):
            program = sharded_program(ranks, rank)
            parts_layout = PartsLayout(self.layout, program, [shards])
            self.ranks[rank] = Rank(
                rank,
                ShardedExchange(0, program, shards, self.layout, parts_layout),
                own=[self.weights[position] * (100 * position + segment) for segment in range(segment_count)],
                area_bytes=parts_layout.area_bytes,
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
                for work in rank.exchange.contribute(self.parts[position], self.weights[position]):
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
        program = sharded_program(tuple(self.ranks), rank.rank)
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
            to = program.steps[step].send_to
            assert to is not None
            rank.outboxes.setdefault(to, deque()).append((header, values))

    def size(self, most: int) -> int:
        """Of an encoded run."""
        return most if self.codec.fixed else self.random.randint(1, most)


@settings(max_examples=150, deadline=None)
@given(
    parts=generations(Part.DATA, Part.DATA, Part.NOTHING),
    segment_count=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    codec=st.sampled_from([FIXED, VARIABLE]),
)
def test_every_rank_gets_the_same_weighted_mean(
    parts: dict[int, Part], segment_count: int, seed: int, codec: CodecSpec
) -> None:
    """W3: the sum is that of all parts, in the order of ranks, divided once; nobody's counts for who nulls (R4)."""
    mesh = Mesh(tuple(parts), segment_count, list(parts.values()), seed, codec)
    mesh.run()
    total = sum(mesh.weights)
    for rank in mesh.ranks.values():
        assert rank.exchange.complete
        assert rank.exchange.weight == total
        assert rank.exchange.contributors == sum(1 << rank for rank, part in parts.items() if part is Part.DATA)
        for segment in range(segment_count):
            contributed = [each.own[segment] for each in mesh.ranks.values() if parts[each.rank] is Part.DATA]
            assert rank.result[segment] == (sum(contributed) / total if total else 0.0), "to the bit, in rank order"
    assert len({rank.exchange.squared_norm for rank in mesh.ranks.values()}) == 1, "O4"


@settings(max_examples=100, deadline=None)
@given(
    parts=generations(*Part).filter(lambda parts: Part.POISON in parts.values()),
    segment_count=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_poison_reaches_every_rank(parts: dict[int, Part], segment_count: int, seed: int) -> None:
    """V1: the owner of each shard broadcasts poison."""
    mesh = Mesh(tuple(parts), segment_count, list(parts.values()), seed, FIXED)
    mesh.run()
    for rank in mesh.ranks.values():
        assert rank.exchange.complete
        assert rank.exchange.poisoned
        assert rank.exchange.contributors == sum(1 << rank for rank, part in parts.items() if part is not Part.NOTHING)


def announced(codec: CodecSpec = FIXED, **changes: object) -> tuple[int, int] | str:
    """What rank 1 of 3 says to a chunk of rank 0, its part of shard 1 if `changes` do not say otherwise."""
    layout = EncodedLayout(make_plan(9), codec)
    program, shards = sharded_program((0, 1, 2), 1), bucket_shards(9, 3, 0)
    exchange = ShardedExchange(0, program, shards, layout, PartsLayout(layout, program, [shards]))
    fields: dict[str, object] = {
        "kind": Kind.CHUNK,
        "payload_bytes": 2 * SEGMENT_BYTES,
        "round": 1,
        "step": 0,
        "first_segment": 3,
        "segment_count": 2,
        "contributors": 0b001,
        "weight": 4.0,
    }
    sender = changes.pop("sender", 0)
    assert isinstance(sender, int)
    fields.update(changes)
    return exchange.announce(sender, Header(**fields))  # type: ignore[arg-type]


FINAL: dict[str, object] = {"step": 2, "first_segment": 0, "contributors": 0b111}
"""What rank 0 sends rank 1 in the copy half: its own shard."""
VECTOR_BYTES = EncodedLayout(make_plan(9), FIXED).total_bytes


def test_a_part_lands_behind_the_vector_and_a_final_run_in_it() -> None:
    assert announced() == (VECTOR_BYTES, 2 * SEGMENT_BYTES)
    second = announced(sender=2, step=1, contributors=0b100)
    assert second == (VECTOR_BYTES + 3 * SEGMENT_BYTES, 2 * SEGMENT_BYTES), "in a block of its own"
    assert announced(FIXED, **FINAL, squared_norm=2.5) == (0, 2 * SEGMENT_BYTES)


def test_segments_that_vary_take_no_more_than_their_place() -> None:
    assert announced(VARIABLE, payload_bytes=17) == (VECTOR_BYTES, 17)
    assert announced(VARIABLE) == (VECTOR_BYTES, 2 * SEGMENT_BYTES)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sender": 2}, "rank 2 has nothing to send"),
        ({"first_segment": 4}, "expected to begin at 3"),
        ({"segment_count": 1}, "1 segments in a chunk that all cut at 2"),
        ({"segment_count": 3}, "3 segments in a chunk that all cut at 2"),
        ({"contributors": 0b101}, "in the part of rank 0 alone"),
        ({"contributors": 0b010}, "in the part of rank 0 alone"),
        ({"payload_bytes": 7}, "payload of 7 bytes where 8192 were due"),
        ({"codec": VARIABLE, "payload_bytes": 0}, "payload of 0 bytes where 1 to 8192 were due"),
        ({"codec": VARIABLE, "payload_bytes": 8193}, "payload of 8193 bytes where 1 to 8192 were due"),
        ({"flags": Flags.POISON}, "where 0 were due"),
        ({"squared_norm": 2.5}, "squared norm 2.5 of what is not final"),
        (FINAL | {"flags": Flags.POISON, "payload_bytes": 0, "squared_norm": 2.5}, "squared norm 2.5"),
    ],
)
def test_a_chunk_that_breaks_the_program_is_refused(changes: dict[str, object], complaint: str) -> None:
    """W1: the header is checked before a byte of the payload is received."""
    answer = announced(**changes)  # type: ignore[arg-type]
    assert isinstance(answer, str)
    assert complaint in answer
