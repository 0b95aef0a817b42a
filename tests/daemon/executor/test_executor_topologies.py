"""Executors over all topologies of codecs that add up: the mean that the program says, to the bit, whatever a fence
interrupts."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Codec
from meshtraind.contributions.received import squared_norm_by_halves
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.collectives.topology import Op, Program, bucket_shards
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.model.plan import Shard
from tests.daemon.churnring import ChurnRing, offers_of
from tests.daemon.executorring import NORM_BUCKETS, PLAN, Offer, Values, offers, ring_mean
from tests.tiers import mostly_slow

TOPOLOGIES = (
    "tree",
    "butterfly",
    "grid:2x2",
    "sharded",
    "sharded:0,0,2",
    "star",
    "star:1",
    "hierarchical:2",
    "hierarchical:1,2,4",
    "gather",
)


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Several chunks to a shard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwire.limits.CHUNK_BYTES", 16 * 1024)
        yield


def rounded(coder: Codec, values: Values) -> Values:
    """As it is after a hop."""
    area = memoryview(bytearray(coder.spec.segment_bytes_max(len(values))))
    coder.encode_into(values, area)
    out = np.empty_like(values)
    coder.decode_into(area, out)
    return out


def program_mean(made: Sequence[Offer], codec: str, topology: str, staleness: int, ranks: tuple[int, ...]) -> Values:
    """The mean of a round, to the bit, by playing the programs: at each rank the own part and then what comes are added
    in the order of steps, rounded once, and sent; the owner divides once (W3)."""
    coder = codec_named(codec)
    program_of = collective_for(parse_codec(codec), topology).topology.program
    programs = {rank: program_of(ranks, rank) for rank in ranks}
    weight = np.float32(sum(made[rank].weight for rank in ranks))
    mean = np.full(PLAN.total_values, np.nan, np.float32)

    def kept(run: slice) -> Values | None:
        total = None
        for rank in ranks:
            if (own := made[rank].values) is not None:
                part = rounded(coder, own[run])
                total = part if total is None else total + part
        return total

    def gathered(rank: int, shard: int, run: slice) -> Values | None:
        program: Program = programs[rank]
        if any(step.op is Op.KEEP for step in program.steps):
            return kept(run)
        own = made[rank].values
        total = None if own is None else own[run]
        if total is not None and (staleness or topology == "gather"):
            total = rounded(coder, total)
        for step in program.steps:
            if step.recv_shard == shard and step.op is Op.REDUCE:
                assert step.recv_from is not None
                came = gathered(step.recv_from, shard, run)
                if came is not None:
                    came = rounded(coder, came)
                    total = came if total is None else total + came
        return total

    for bucket in PLAN.buckets:
        for index, shard in enumerate(
            bucket_shards(bucket.segment_count, programs[ranks[0]].shard_count, bucket.index)
        ):
            owner = next(rank for rank in ranks if index in programs[rank].owned)
            for segment in range(shard.first_segment, shard.first_segment + shard.segment_count):
                start, count = bucket.segment_bounds(segment)
                run = slice(start, start + count)
                total = gathered(owner, index, run)
                assert total is not None
                mean[run] = rounded(coder, total / weight)
    return mean


class TopologyMesh(ChurnRing):
    """Members that are all linked, whose generations change, over any topology of a linear codec."""

    topology: str

    def __init__(self, members: int, codec: str, topology: str, staleness: int, seed: int) -> None:
        self.topology = topology
        super().__init__(members, codec, staleness, seed, offers_of(members + 1, 7, seed))

    def receivers(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in self.ranks if other != rank)

    def mean(self, made: Sequence[Offer], ranks: tuple[int, ...]) -> Values:
        return program_mean(made, self.codec, self.topology, self.staleness, ranks)


JOBS: dict[str, st.SearchStrategy[Any]] = {
    "members": st.integers(2, 5),
    "codec": st.sampled_from(["fp32", "fp16", "bf16"]),
    "staleness": st.integers(0, 2),
    "seed": st.integers(0, 2**32),
}


@settings(max_examples=9)
@given(topology=st.sampled_from(TOPOLOGIES), **JOBS)
def test_rounds_are_the_programs_mean_through_generations(
    topology: str, members: int, codec: str, staleness: int, seed: int
) -> None:
    """G2, G6, G8, W3, V1: members are killed and come at any moment; whoever is left has the same bits, and no area is
    used while a link still reads or writes it."""
    asyncio.run(TopologyMesh(members, codec, topology, staleness, seed).churn(150 * members))


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
@settings(max_examples=2)
@given(**JOBS)
def test_over_each_topology(topology: str, members: int, codec: str, staleness: int, seed: int) -> None:
    asyncio.run(TopologyMesh(members, codec, topology, staleness, seed).churn(150 * members))


@pytest.mark.parametrize("topology", ["tree", "butterfly"])
@pytest.mark.parametrize("members", mostly_slow([6, 7, 17, *range(1, 6), *range(8, 17)], 3))
def test_trees_and_butterflies_of_1_to_17_have_a_rings_mean(topology: str, members: int) -> None:
    """W3, R4: to the bit what the program says, and a ring's to 1e-6: sums are made in another order. Every third
    member only forwards."""

    async def play() -> TopologyMesh:
        mesh = TopologyMesh(members, "fp32", topology, 0, seed=members)
        mesh.rounds = {1: offers(members, seed=members, absent=range(2, members, 3))}
        await mesh.finish()
        mesh.close()
        return mesh

    mesh = asyncio.run(play())
    expected = ring_mean(mesh.rounds[1], "fp32", 0).astype(np.float64)
    assert mesh.completed_in == {1: tuple(range(members))}
    for member in mesh.members:
        assert np.linalg.norm(member.means[1] - expected) <= 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("topology", "members", "victim", "liar", "late"),
    [
        ("tree", 4, 0, 2, False),  # beside the sum of another child
        ("butterfly", 4, 0, 2, False),
        ("tree", 4, 0, 1, True),  # it lies there already when the own part comes
        ("grid:2x2", 3, 0, 1, True),  # the one sum of a row of one
        ("grid:3x2", 5, 2, 4, False),  # beside the sum of another member of its row
        ("star:2", 4, 2, 1, False),  # beside two others'
        ("star:2", 4, 2, 3, True),
        ("sharded", 4, 3, 0, False),
        ("hierarchical:2", 4, 2, 3, False),  # within a group
        ("hierarchical:2", 4, 2, 0, True),  # from the other group
        ("gather", 4, 1, 3, False),
        ("gather", 3, 2, 0, True),
    ],
)
def test_who_sends_nonsense_is_named(topology: str, members: int, victim: int, liar: int, late: bool) -> None:
    """V3: of the sums that come, the one that no encoder makes is found, and its sender, whoever came last."""

    async def play() -> list[str]:
        mesh = TopologyMesh(members, "fp32", topology, 0, seed=3)
        offer = Offer(np.ones(PLAN.total_values, np.float32), 1.0)
        mesh.rounds = {1: [offer] * members}
        mesh.broken = told = list[str]()
        for rank in range(members):
            for _ in PLAN.buckets:
                if rank != victim or not late:
                    mesh.contribute(rank, offer)
        while waiting := [way for way, link in mesh.wires.items() if link.queue]:
            for sender, receiver in waiting:
                link = mesh.wires[sender, receiver]
                header, payload = link.queue[0]
                place = mesh.members[receiver].executor.chunk_announced(sender, header)
                assert isinstance(place, memoryview), place
                if payload is not None:
                    place[:] = payload
                    if (sender, receiver) == (liar, victim):
                        np.frombuffer(place, np.float32)[:] = np.inf
                mesh.members[receiver].executor.chunk_received(header)
                link.left()
            await asyncio.sleep(0)
        if late:
            for _ in PLAN.buckets:
                mesh.contribute(victim, offer)
        mesh.close()
        return told

    told = asyncio.run(play())
    assert told
    assert {text.partition(":")[0] for text in told} == {str(liar)}


def test_norms_that_each_finds_for_itself_do_not_depend_on_the_processor() -> None:
    """O4: all-to-all nobody tells them, and a BLAS adds up in another order elsewhere."""

    async def play() -> TopologyMesh:
        mesh = TopologyMesh(3, "fp32", "gather", 0, seed=3)
        mesh.rounds = {1: offers(3, seed=3)}
        await mesh.finish()
        mesh.close()
        return mesh

    mesh = asyncio.run(play())
    layout = EncodedLayout(PLAN, parse_codec("fp32"))
    for bucket in PLAN.buckets[:NORM_BUCKETS]:
        runs: list[float] = []
        for first, count in layout.chunks(bucket.index, Shard(0, bucket.segment_count)):
            bounds = map(bucket.segment_bounds, range(first, first + count))
            values = (mesh.members[0].means[1][start : start + length].astype(np.float64) for start, length in bounds)
            runs.append(sum(map(squared_norm_by_halves, values)))
        assert {member.done[1, bucket.index].squared_norm for member in mesh.members} == {math.fsum(runs)}
