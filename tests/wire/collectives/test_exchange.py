"""The exchange of one bucket: any delivery order gives every rank the same weighted mean (W1, W3, V1, R4)."""

import math
import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.codecs.registry import FP32
from meshwire.collectives.exchange import Part, Work
from meshwire.collectives.hops import HopExchange, HopStrategy
from meshwire.collectives.strategy import topology_of
from meshwire.collectives.topology import Program
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.frames.header import Flags, Header, Kind
from tests.wire.onebucket import SEGMENT_VALUES, announce, generations, make_plan

ring_program = topology_of("ring").program
tree_program = topology_of("tree").program


@dataclass
class Rank:
    """One rank, with a single number standing for each segment."""

    rank: int
    exchange: HopExchange
    own: list[float]
    area: list[float]
    result: list[float | None]
    outbox: deque[tuple[Header, list[float]]] = field(default_factory=deque)


def exchange_of(program: Program, layout: EncodedLayout) -> HopExchange:
    return HopStrategy(layout, program).exchange(0)


class Ring:
    """Ranks joined by FIFO links, run in an order that a seed decides. `parts` and `ranks` go by position."""

    def __init__(self, ranks: tuple[int, ...], segment_count: int, parts: list[Part], seed: int) -> None:
        self.random = random.Random(seed)
        self.members = len(ranks)
        self.plan = make_plan(segment_count)
        layout = EncodedLayout(self.plan, FP32)
        self.parts = parts
        self.weights = [float(index + 1) if part is not Part.NOTHING else 0.0 for index, part in enumerate(parts)]
        self.ranks = [
            Rank(
                rank,
                exchange_of(ring_program(ranks, rank), layout),
                own=[self.weights[position] * (100 * position + segment) for segment in range(segment_count)],
                area=[0.0] * segment_count,
                result=[None] * segment_count,
            )
            for position, rank in enumerate(ranks)
        ]
        self.layout = layout

    def work(self, index: int, work: Work) -> None:
        rank = self.ranks[index]
        run = range(work.first_segment, work.first_segment + work.segment_count)
        if not work.poison:
            for segment in run:
                if work.add_own:
                    rank.area[segment] = rank.own[segment] + (rank.area[segment] if work.incoming else 0.0)
                if work.finish and work.contributors:
                    rank.area[segment] /= work.weight
                if work.deliver:
                    rank.result[segment] = rank.area[segment] if work.contributors else 0.0
            if work.finish and work.contributors:
                work = replace(work, squared_norm=math.fsum(rank.area[segment] ** 2 for segment in run))
        if work.deliver:
            rank.exchange.delivered(work)
        if not work.send_steps:
            return
        (send_step,) = work.send_steps
        first = work.first_segment
        while first < run.stop:
            # A sum may be cut anew at every hop. A final run is not: its squared norm is of all of it.
            count = len(run) if work.deliver else self.random.randint(1, run.stop - first)
            empty = work.poison or not work.contributors
            header = Header(
                kind=Kind.CHUNK,
                payload_bytes=0 if empty else self.layout.span(0, first, count)[1],
                flags=Flags.POISON if work.poison else Flags.NONE,
                round=1,
                step=send_step,
                first_segment=first,
                segment_count=count,
                contributors=work.contributors,
                weight=work.weight,
                squared_norm=work.squared_norm,
            )
            rank.outbox.append((header, rank.area[first : first + count]))
            first += count

    def run(self) -> None:
        to_contribute = list(range(self.members))
        while True:
            ready = [("send", index) for index, rank in enumerate(self.ranks) if rank.outbox]
            ready += [("contribute", index) for index in to_contribute]
            if not ready:
                return
            what, index = self.random.choice(ready)
            if what == "contribute":
                to_contribute.remove(index)
                for work in self.ranks[index].exchange.contribute(self.parts[index], self.weights[index]):
                    self.work(index, work)
                continue
            header, values = self.ranks[index].outbox.popleft()
            receiver = (index + 1) % self.members
            exchange = self.ranks[receiver].exchange
            place = exchange.announce(self.ranks[index].rank, header)
            assert not isinstance(place, str), place
            if header.payload_bytes:
                self.ranks[receiver].area[header.first_segment : header.first_segment + header.segment_count] = values
            possible = exchange.landed(header)
            if possible is not None:
                self.work(receiver, possible)


@settings(max_examples=150)
@given(
    parts=generations(Part.DATA, Part.DATA, Part.NOTHING), segment_count=st.integers(1, 12), seed=st.integers(0, 2**32)
)
def test_every_rank_gets_the_same_weighted_mean(parts: dict[int, Part], segment_count: int, seed: int) -> None:
    """W3: the wire carries w*g, the owner divides once; a rank with nothing to add forwards (R4)."""
    ring = Ring(tuple(parts), segment_count, list(parts.values()), seed)
    ring.run()
    total = sum(ring.weights)
    for rank in ring.ranks:
        assert rank.exchange.complete
        assert rank.exchange.weight == total
        assert rank.exchange.contributors == sum(1 << rank for rank, part in parts.items() if part is Part.DATA)
        assert rank.result == ring.ranks[0].result
    for segment in range(segment_count):
        expected = sum(rank.own[segment] for rank in ring.ranks) / total if total else 0.0
        assert ring.ranks[0].result[segment] == pytest.approx(expected)
    squared_norms = {rank.exchange.squared_norm for rank in ring.ranks}
    assert len(squared_norms) == 1, "O4: the same runs everywhere, so the same bits in any order of arrival"
    means = [value for value in ring.ranks[0].result if value is not None]
    assert squared_norms.pop() == pytest.approx(math.fsum(mean**2 for mean in means))


@settings(max_examples=100)
@given(
    parts=generations(*Part).filter(lambda parts: Part.POISON in parts.values()),
    segment_count=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_poison_reaches_every_rank(parts: dict[int, Part], segment_count: int, seed: int) -> None:
    """V1: a poisoned part makes every shard's result poison, everywhere."""
    ring = Ring(tuple(parts), segment_count, list(parts.values()), seed)
    ring.run()
    for rank in ring.ranks:
        assert rank.exchange.complete
        assert rank.exchange.poisoned


def announced(**changes: object) -> tuple[int, int] | str:
    """What rank 1 of 3 says to a chunk of rank 0, at step 0 if `changes` do not say otherwise."""
    plan = make_plan(6)
    layout = EncodedLayout(plan, FP32)
    exchange = exchange_of(ring_program((0, 1, 2), 1), layout)
    return announce(exchange, **changes)


def test_contributors_are_of_the_generation() -> None:
    """G2: a rank that has left contributes nothing, whatever its neighbours in number do."""
    plan = make_plan(6)
    exchange = exchange_of(ring_program((0, 2, 5), 2), EncodedLayout(plan, FP32))
    header = Header(Kind.CHUNK, 2 * SEGMENT_VALUES * 4, round=1, segment_count=2, contributors=0b11, weight=4.0)
    assert exchange.announce(0, header) == "contributors 0x3 name a rank outside the generation's (0, 2, 5)"
    assert exchange.announce(1, header) == "rank 1 has nothing to send at program step 0"
    assert exchange.announce(0, replace(header, contributors=0b100001)) == (0, 2 * SEGMENT_VALUES * 4)


def test_a_chunk_lands_at_its_segments() -> None:
    assert announced() == (0, 2 * SEGMENT_VALUES * 4)


FINAL = {"step": 2, "first_segment": 2, "contributors": 0b111}
"""What rank 0 sends rank 1 in the copy half: shard 1 whole, in this program."""


def test_a_final_chunk_carries_a_squared_norm() -> None:
    """O4: its owner's, for what is in the payload."""
    assert announced(**FINAL, squared_norm=2.5) == (2 * SEGMENT_VALUES * 4, 2 * SEGMENT_VALUES * 4)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sender": 2}, "rank 2 has nothing to send"),
        ({"step": 4}, "program step 4 of 4"),
        ({"first_segment": 1}, "expected to begin at 0"),
        ({"segment_count": 3}, "at most 2"),
        ({"segment_count": 0, "payload_bytes": 0}, "at most 2"),
        ({"contributors": 0b1000}, "a rank outside the generation's (0, 1, 2)"),
        ({"contributors": 0b011}, "already holds this rank's part"),
        ({"contributors": 0}, "does not suit contributors"),
        ({"payload_bytes": 7}, "payload of 7 bytes"),
        ({"flags": Flags.POISON}, "where 0 were due"),
        ({"squared_norm": 2.5}, "squared norm 2.5 of what is not final"),
        (FINAL | {"flags": Flags.POISON, "payload_bytes": 0, "squared_norm": 2.5}, "squared norm 2.5"),
        (FINAL | {"contributors": 0, "weight": 0.0, "payload_bytes": 0, "squared_norm": 2.5}, "squared norm 2.5"),
    ],
)
def test_a_chunk_that_breaks_the_program_is_refused(changes: dict[str, object], complaint: str) -> None:
    """W1: the header is checked before a byte of the payload is received."""
    answer = announced(**changes)
    assert isinstance(answer, str)
    assert complaint in answer


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"contributors": 0b0110}, "in a sum of no others than 0x4"),
        ({"contributors": 0b0100, "segment_count": 1, "payload_bytes": SEGMENT_VALUES * 4}, "that all cut at 2"),
        ({"contributors": 0b0100, "sender": 1}, "rank 1 has nothing to send"),
        ({"contributors": 0b0100, "step": 0, "sender": 2}, "rank 2 has nothing to send at program step 0"),
        ({"contributors": 0b0010, "step": 0, "sender": 1}, None),
        ({"contributors": 0b0100}, None),
    ],
)
def test_sums_that_meet_are_of_different_members(changes: dict[str, object], complaint: str | None) -> None:
    """W1, R2: what the root of a tree takes of its second child has a place of its own, behind the vector."""
    layout = EncodedLayout(make_plan(2), FP32)
    exchange = exchange_of(tree_program((0, 1, 2), 0), layout)
    length = layout.total_bytes
    answer = announce(exchange, **{"step": 1, "sender": 2, "payload_bytes": length} | changes)
    if complaint is None:
        assert answer == (0 if changes.get("step") == 0 else length, length)
    else:
        assert isinstance(answer, str)
        assert complaint in answer


def test_what_leaves_on_several_links_is_computed_once() -> None:
    """R4: the root of a tree whose children have nothing to add finishes what it alone adds, then and there."""
    layout = EncodedLayout(make_plan(2), FP32)
    exchange = exchange_of(tree_program((0, 1, 2), 0), layout)
    for step, child in enumerate((1, 2)):
        null = Header(Kind.CHUNK, 0, round=1, step=step, segment_count=2)
        assert exchange.announce(child, null) != ""
        assert exchange.landed(null) is None, "it waits for the own part"
    (work,) = exchange.contribute(Part.DATA, 3.0)
    assert (work.send_steps, work.contributors, work.weight, work.parts) == ((2, 3), 0b1, 3.0, ())
    assert work.finish
    assert work.at_once
