"""The tree and the butterfly, and the programs made of transfers: who sends what to whom, for every m from 1 to 17."""

import math
import random

import pytest

from meshwire.collectives.butterfly import butterfly_program
from meshwire.collectives.strategy import ProgramOf
from meshwire.collectives.topology import (
    Op,
    Program,
    Transfer,
    bucket_shards,
    program_from,
    ring_program,
    sharded_program,
    simulate,
)
from meshwire.collectives.tree import tree_program

MEMBERS = range(1, 18)
TOPOLOGIES: list[ProgramOf] = [tree_program, butterfly_program]


def programs_of(program_of: ProgramOf, members: int) -> list[Program]:
    """Every member's program, for ranks that do not follow each other, as after losses."""
    ranks = tuple(3 * position + 1 for position in range(members))
    return [program_of(ranks, rank) for rank in ranks]


def transfers_of(programs: list[Program]) -> list[Transfer]:
    """What the programs send, in the order of steps, as the receivers take it."""
    ranks = programs[0].ranks
    return [
        Transfer(
            index, position, ranks.index(receiver), step.send_shard, programs[ranks.index(receiver)].steps[index].op
        )
        for index in range(len(programs[0].steps))
        for position, program in enumerate(programs)
        if (step := program.steps[index]).send_shard is not None and (receiver := step.send_to) is not None
    ]


@pytest.mark.parametrize("program_of", [ring_program, sharded_program])
@pytest.mark.parametrize("members", range(1, 9))
def test_transfers_say_all_of_a_program(program_of: ProgramOf, members: int) -> None:
    """W3: whose parts can be in a chunk, and what its sender needs before, follow from who sends what to whom."""
    programs = programs_of(program_of, members)
    shards = range(members)
    owners = [next(at for at, each in enumerate(programs) if each.finishes(shard)) for shard in shards]
    for program in programs:
        assert program_from(transfers_of(programs), program.ranks, program.rank, owners) == program


@pytest.mark.parametrize("program_of", TOPOLOGIES)
@pytest.mark.parametrize("members", MEMBERS)
def test_all_end_with_the_same_bytes(program_of: ProgramOf, members: int) -> None:
    """W3, R4: the weighted mean of who contributes, to the bit the same on all; who has nothing forwards."""
    numbers = random.Random(members)
    programs = programs_of(program_of, members)
    for segment_count in (0, 1, 7, 40):
        weights = [float(numbers.choice([0, 1, 3, 8])) for _ in programs]
        parts = [[w * numbers.gauss(0, 1) for _ in range(segment_count)] if w else None for w in weights]
        shards = bucket_shards(segment_count, programs[0].shard_count, 2)
        results = simulate(programs, shards, parts, weights)
        assert all(result == results[0] for result in results)
        for segment, result in enumerate(results[0]):
            added = [part[segment] for part in parts if part is not None]
            assert math.isclose(result, math.fsum(added) / sum(weights) if added else 0.0, abs_tol=1e-12)


@pytest.mark.parametrize("members", MEMBERS)
def test_a_tree_sends_each_vector_up_once_and_down_once(members: int) -> None:
    """2 (m - 1) messages of the whole bucket in 2 ceil(log2 m) steps; the root sends ceil(log2 m) of them."""
    programs = programs_of(tree_program, members)
    levels = math.ceil(math.log2(members))
    assert {len(program.steps) for program in programs} == {2 * levels}
    assert sum(len(program.sends()) for program in programs) == 2 * (members - 1)
    assert max(len(program.sends()) for program in programs) == len(programs[0].sends()) == levels
    assert [program.owned for program in programs] == [frozenset({0})] + [frozenset()] * (members - 1)


@pytest.mark.parametrize("members", MEMBERS)
def test_a_butterfly_sends_what_a_ring_does(members: int) -> None:
    """2 (k - 1)/k vectors from each of the k = 2^n members; of the others each sends one vector, and has one sent."""
    programs = programs_of(butterfly_program, members)
    core = 2 ** math.floor(math.log2(members))
    folded = members - core
    assert {len(program.steps) for program in programs} == {2 * (core - 1) + 2 * core * (folded > 0)}
    for position, program in enumerate(programs):
        back = core if position < folded else 0
        assert len(program.sends()) == (2 * (core - 1) + back if position < core else core)
        assert program.owned == ({position} if position < core else set())
    # All together 2 (m - 1) vectors, as on a ring and in a tree.
    assert sum(len(program.sends()) for program in programs) == 2 * (members - 1) * core


@pytest.mark.parametrize("program_of", TOPOLOGIES)
@pytest.mark.parametrize("members", MEMBERS)
def test_each_shard_climbs_to_its_owner_and_comes_back_once(program_of: ProgramOf, members: int) -> None:
    """W3: one owner; every other one sends its sum once, after all that comes to it, and receives the final once."""
    programs = programs_of(program_of, members)
    for shard in range(programs[0].shard_count):
        routes = [program.routes[shard] for program in programs]
        assert sum(route.finishes for route in routes) == 1
        assert all(len(route.onward) == (not route.finishes) for route in routes)
        assert all(max(route.sums, default=-1) < route.onward[0] for route in routes if route.onward)
        finals = [
            sum(step.recv_shard == shard and step.op is Op.COPY for step in program.steps) for program in programs
        ]
        assert finals == [not route.finishes for route in routes]


@pytest.mark.parametrize("program_of", TOPOLOGIES)
@pytest.mark.parametrize("members", MEMBERS)
def test_a_chunk_holds_what_its_sender_has_gathered(program_of: ProgramOf, members: int) -> None:
    """R2: sums that meet have no member in common, a final one has all; the sender needs those receipts and no more."""
    programs = {program.rank: program for program in programs_of(program_of, members)}
    for program in programs.values():
        for shard, route in enumerate(program.routes):
            gathered = 1 << program.rank
            for index in route.sums:
                assert not gathered & program.steps[index].parts
                gathered |= program.steps[index].parts
            assert not route.finishes or gathered == program.bitmap
            for index in (*route.onward, *route.spread):
                receiver = program.steps[index].send_to
                assert receiver is not None
                got = programs[receiver].steps[index]
                assert (got.recv_from, got.recv_shard) == (program.rank, shard)
                assert got.parts == (gathered if index in route.onward else program.bitmap)
                before = [at for at in range(index) if program.steps[at].recv_shard == shard]
                assert got.after == max(before, default=-1) + 1


@pytest.mark.parametrize("program_of", TOPOLOGIES)
def test_a_rank_outside_the_generation_is_refused(program_of: ProgramOf) -> None:
    """G2."""
    with pytest.raises(ValueError, match=r"rank 2 is not one of \(0, 1, 3\)"):
        program_of((0, 1, 3), 2)
