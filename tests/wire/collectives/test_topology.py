import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.collectives.strategy import topology_of
from meshwire.collectives.topology import (
    Op,
    Program,
    Route,
    Step,
    bucket_shards,
    owner_of,
    simulate,
)
from meshwire.model.plan import Shard

ring_program = topology_of("ring").program
sharded_program = topology_of("sharded").program
gather_program = topology_of("gather").program

MEMBERS = range(1, 10)
RINGS = [tuple(range(members)) for members in MEMBERS] + [(5,), (0, 63), (1, 2, 4), (0, 3, 7, 8, 60)]
RANKS = st.sets(st.integers(0, 63), min_size=1, max_size=9).map(lambda ranks: tuple(sorted(ranks)))


Topology = Callable[[tuple[int, ...], int], Program]
SHARDED: list[Topology] = [ring_program, sharded_program]
TOPOLOGIES: list[Topology] = [*SHARDED, gather_program]


def shards_of(topology: Topology, segment_count: int, members: int, bucket: int) -> tuple[Shard, ...]:
    """Of a gather there is one."""
    if topology is gather_program:
        return (Shard(0, segment_count),)
    return bucket_shards(segment_count, members, bucket)


def ring(ranks: tuple[int, ...]) -> list[Program]:
    return programs_of(ring_program, ranks)


def programs_of(topology: Topology, ranks: tuple[int, ...]) -> list[Program]:
    return [topology(ranks, rank) for rank in ranks]


@pytest.mark.parametrize("ranks", RINGS)
def test_the_steps_of_a_ring(ranks: tuple[int, ...]) -> None:
    """Step t: position p sends shard (p - t) mod m on; what a rank receives is what its predecessor sends."""
    programs = ring(ranks)
    members = len(ranks)
    for position, program in enumerate(programs):
        assert len(program.steps) == 2 * (members - 1)
        assert [step.op for step in program.steps] == [Op.REDUCE] * (members - 1) + [Op.COPY] * (members - 1)
        for index, step in enumerate(program.steps):
            before = programs[(position - 1) % members]
            assert step.send_shard == (position - index) % members
            assert (step.recv_shard, before.rank) == (before.steps[index].send_shard, step.recv_from)
            assert before.steps[index].send_to == program.rank == ranks[position]


@pytest.mark.parametrize("ranks", RINGS)
def test_every_shard_has_one_owner_and_lands_once_in_each_half(ranks: tuple[int, ...]) -> None:
    """W3: the sum is finished once; a shard lands at a rank at most once in each half, so one area is enough."""
    for program in ring(ranks):
        assert {shard for shard in range(len(ranks)) if owner_of(ranks, shard) == program.rank} == program.owned
        assert len(program.owned) == 1
        for op in Op:
            landed = [step.recv_shard for step in program.steps if step.op is op]
            assert len(set(landed)) == len(landed)
        assert not program.owned & {step.recv_shard for step in program.steps if step.op is Op.COPY}


@pytest.mark.parametrize("ranks", [ranks for ranks in RINGS if len(ranks) > 1])
def test_what_a_rank_receives_leaves_at_the_next_step(ranks: tuple[int, ...]) -> None:
    for position, program in enumerate(ring(ranks)):
        last = len(program.steps) - 1
        for shard, route in enumerate(program.routes):
            assert route.finishes == (shard in program.owned)
            assert (route.sums == ()) == (shard == position), "only there the own part stands alone"
            assert not route.onward if route.finishes else len(route.onward) == 1
            assert len(route.spread) <= 1
            for index in (*route.onward, *route.spread):
                assert index == 0 or program.steps[index - 1].recv_shard == shard
        leaves = [index for route in program.routes for index in (*route.onward, *route.spread)]
        assert sorted(leaves) == list(range(last + 1))


@pytest.mark.parametrize("ranks", RINGS)
def test_the_steps_of_the_sharded_exchange(ranks: tuple[int, ...]) -> None:
    """Step j: position p sends its part of shard p+1+j to its owner, later its own shard, final, to position p+1+j.

    So each owner has every other's part once, everybody every shard once, and at each step all send and all receive.
    """
    members = len(ranks)
    programs = programs_of(sharded_program, ranks)
    for position, program in enumerate(programs):
        assert program.owned == {position}
        reduces, copies = program.steps[: members - 1], program.steps[members - 1 :]
        assert all(step.op is Op.REDUCE for step in reduces)
        assert all(step.op is Op.COPY for step in copies)
        others = [shard for shard in range(members) if shard != position]
        assert sorted(step.send_shard for step in reduces if step.send_shard is not None) == others
        assert [step.send_to for step in reduces] == [ranks[step.send_shard or 0] for step in reduces]
        assert {step.recv_shard for step in reduces} <= {position}
        assert sorted(step.recv_shard for step in copies if step.recv_shard is not None) == others
        assert {step.send_shard for step in copies} <= {position}
        for half in (reduces, copies):
            assert {step.recv_from for step in half} == {step.send_to for step in half} == {*ranks} - {program.rank}
    for index in range(2 * (members - 1)):
        steps = {program.rank: program.steps[index] for program in programs}
        for rank, step in steps.items():
            assert step.send_to is not None
            other = steps[step.send_to]
            assert (other.recv_from, other.recv_shard) == (rank, step.send_shard)


@pytest.mark.parametrize("ranks", RINGS)
def test_the_steps_of_the_gather(ranks: tuple[int, ...]) -> None:
    """C2: each part goes from its member straight to each other one, once; at each step all send and all receive, and
    no two to the same: so all links carry the same."""
    programs = programs_of(gather_program, ranks)
    for program in programs:
        assert program.owned == {0}, "everybody finishes everything"
        assert program.sends() == [0] * (len(ranks) - 1)
        assert all(step.op is Op.KEEP for step in program.steps)
        assert [step.parts for step in program.steps] == [1 << (step.recv_from or 0) for step in program.steps]
        assert not any(step.after for step in program.steps), "nothing is passed on"
        for peers in ([step.send_to for step in program.steps], [step.recv_from for step in program.steps]):
            assert len(peers) == len(set(peers))
            assert set(peers) == {*ranks} - {program.rank}
    for index in range(len(ranks) - 1):
        steps = {program.rank: program.steps[index] for program in programs}
        assert {step.send_to for step in steps.values()} == {*ranks}
        assert all(steps[step.send_to or 0].recv_from == rank for rank, step in steps.items())


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("rank", [0, 1, 63])
def test_a_world_of_one_owns_everything_and_sends_nothing(rank: int, topology: Topology) -> None:
    program = topology((rank,), rank)
    assert program.steps == ()
    assert program.finishes(0)
    assert program.routes == (Route((), (), (), finishes=True),)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_rank_outside_the_ring_is_refused(topology: Topology) -> None:
    with pytest.raises(ValueError, match=r"rank 2 is not one of \(0, 1, 3\)"):
        topology((0, 1, 3), 2)
    for ranks in ((1, 0), (1, 1)):
        with pytest.raises(ValueError, match="not in order"):
            topology(ranks, 1)


@settings(max_examples=100)
@given(st.integers(0, 200), st.integers(1, 64), st.integers(0, 500))
def test_shards_are_balanced_runs(segment_count: int, members: int, bucket: int) -> None:
    end = 0
    for shard in bucket_shards(segment_count, members, bucket):
        assert shard.first_segment == end
        assert shard.segment_count - segment_count // members in (0, 1)
        end += shard.segment_count
    assert end == segment_count


@settings(max_examples=50)
@given(st.integers(0, 200), st.integers(1, 64))
def test_equal_buckets_load_all_shards_equally(segment_count: int, members: int) -> None:
    """What is left over goes round: after any number of equal buckets two shards differ by one segment at most."""
    loads = [0] * members
    for bucket in range(2 * members):
        for index, shard in enumerate(bucket_shards(segment_count, members, bucket)):
            loads[index] += shard.segment_count
        assert max(loads) - min(loads) <= 1


@settings(max_examples=100)
@given(st.data(), st.sampled_from(TOPOLOGIES), RANKS, st.integers(0, 40), st.integers(0, 20))
def test_every_rank_ends_with_the_same_mean(
    data: st.DataObject, topology: Topology, ranks: tuple[int, ...], segment_count: int, bucket: int
) -> None:
    """R4, W3: the mean weighted by samples over those who contribute, bit-identical on all ranks.

    For any ranks and number of segments, also none and fewer than members; a rank that nulls only forwards.
    """
    members = len(ranks)
    weights: list[int] = data.draw(st.lists(st.integers(0, 100), min_size=members, max_size=members))
    values = st.floats(-1e6, 1e6, width=32)
    gradients = data.draw(
        st.lists(st.lists(values, min_size=segment_count, max_size=segment_count), min_size=members, max_size=members)
    )
    parts = [
        [weight * value for value in gradient] if weight else None
        for weight, gradient in zip(weights, gradients, strict=True)
    ]
    shards = shards_of(topology, segment_count, members, bucket)
    results = simulate(programs_of(topology, ranks), shards, parts, weights)
    for segment in range(segment_count):
        contributed = [part[segment] for part in parts if part is not None]
        expected = math.fsum(contributed) / sum(weights) if contributed else 0.0
        tolerance = 1e-15 * members * sum(map(abs, contributed))
        assert math.isclose(results[0][segment], expected, rel_tol=0, abs_tol=tolerance)
        if topology is gather_program and contributed:
            assert results[0][segment] == sum(contributed) / sum(weights), "to the bit, in the order of ranks"
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("topology", SHARDED)
@pytest.mark.parametrize("members", MEMBERS)
@pytest.mark.parametrize("segment_count", [0, 1, 5, 64, 65])
def test_a_rank_sends_no_more_than_a_ring_does(members: int, segment_count: int, topology: Topology) -> None:
    """2(m-1) shards, which is 2(m-1)/m of the vector when the segments divide evenly."""
    shards = bucket_shards(segment_count, members, 3)
    for program in programs_of(topology, tuple(range(members))):
        sent = sum(shards[shard].segment_count for shard in program.sends())
        assert sent <= 2 * (members - 1) * -(-segment_count // members)
        if segment_count % members == 0:
            assert sent == 2 * (members - 1) * segment_count // members


def test_other_topologies_fit_the_same_programs() -> None:
    """DESIGN section 7: a star at rank 0 is the one-hot sharded exchange."""
    members = 4
    leaves = range(1, members)
    hub = [Step(None, None, 0, leaf, Op.REDUCE) for leaf in leaves] + [
        Step(0, leaf, None, None, Op.COPY) for leaf in leaves
    ]
    programs = [Program(tuple(range(members)), 0, 1, tuple(hub), frozenset({0}))]
    for leaf in leaves:
        steps = [Step(None, None, None, None, Op.COPY)] * len(hub)
        steps[leaf - 1] = Step(0, 0, None, None, Op.COPY)
        steps[members - 2 + leaf] = Step(None, None, 0, 0, Op.COPY)
        programs.append(Program(tuple(range(members)), leaf, 1, tuple(steps), frozenset()))
    parts = [[1.0, 2.0], [3.0, 4.0], None, [5.0, 12.0]]
    assert simulate(programs, [Shard(0, 2)], parts, [1, 1, 0, 1]) == [[3.0, 6.0]] * members


def test_the_simulator_names_a_receipt_that_nobody_sends() -> None:
    waiting = Program((0, 1), 0, 1, (Step(None, None, 0, 1, Op.REDUCE),), frozenset())
    idle = Program((0, 1), 1, 1, (), frozenset())
    with pytest.raises(ValueError, match="rank 0 waits for shard 0 of rank 1 in vain"):
        simulate([waiting, idle], [Shard(0, 1)], [[1.0], [1.0]], [1, 1])


def test_steps_at_which_a_member_does_nothing_take_no_memory() -> None:
    """One member may own 63 of 64 shards: then there are 7938 steps, at each of which 2 of 64 members do anything."""
    programs = topology_of("sharded:" + "0," * 63 + "1").programs(tuple(range(16)))
    steps = [step for program in programs for step in program.steps]
    assert len({id(step) for step in steps}) <= 4 * len(programs[0].steps)
    assert len(steps) > 10 * len(programs[0].steps)
