"""Topologies in which sums grow from hop to hop, and what programs are made of: who sends what to whom, with 1 to 17
members."""

import itertools
import math
import random

import pytest

from meshwire.collectives.load import load_of, transfers_of, waves_of
from meshwire.collectives.strategy import topology_of
from meshwire.collectives.topology import Op, Program, Scheme, Transfer, bucket_shards, programs_from, simulate

MEMBERS = range(1, 18)
TOPOLOGIES = (
    "ring",
    "tree",
    "butterfly",
    "grid",
    "grid:4x3",
    "grid:3x2x2",
    "sharded",
    "sharded:1,7,13",
    "sharded:7,1,1,4,1",  # more than one shard each
    "star",
    "star:4",
    "hierarchical:5",
    "hierarchical:5,6,7,20,40",
)


def programs_of(topology: str, members: int) -> tuple[Program, ...]:
    """Every member's program, for ranks that do not follow each other, as after losses: 1, 4, 7 .."""
    return topology_of(topology).programs(tuple(3 * position + 1 for position in range(members)))


@pytest.mark.parametrize("topology", [*TOPOLOGIES, "gather"])
@pytest.mark.parametrize("members", range(1, 9))
def test_transfers_say_all_of_a_program(topology: str, members: int) -> None:
    """W3: whose parts can be in a chunk, and what its sender needs before, follow from who sends what to whom."""
    programs = programs_of(topology, members)
    owners = [
        [at for at, each in enumerate(programs) if each.finishes(shard)] for shard in range(programs[0].shard_count)
    ]
    assert programs_from(Scheme(transfers_of(programs), owners), programs[0].ranks) == programs


@pytest.mark.parametrize(
    ("transfers", "complaint"),
    [
        ([Transfer(0, 0, 1, 0, Op.REDUCE), Transfer(0, 0, 2, 0, Op.REDUCE)], "position 0 sends twice"),
        ([Transfer(0, 1, 0, 0, Op.REDUCE), Transfer(0, 2, 0, 0, Op.REDUCE)], "position 0 receives twice"),
    ],
)
def test_a_scheme_whose_steps_do_too_much_is_found(transfers: list[Transfer], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        programs_from(Scheme(transfers, [{0}]), (0, 1, 2))


@pytest.mark.parametrize("topology", [*TOPOLOGIES, "gather"])
@pytest.mark.parametrize("members", MEMBERS)
def test_all_end_with_the_same_bytes(topology: str, members: int) -> None:
    """W3, R4: the weighted mean of who contributes, to the bit the same on all; who has nothing forwards."""
    numbers = random.Random(members)
    programs = programs_of(topology, members)
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
    programs = programs_of("tree", members)
    levels = math.ceil(math.log2(members))
    assert {len(program.steps) for program in programs} == {2 * levels}
    assert sum(len(program.sends()) for program in programs) == 2 * (members - 1)
    assert max(len(program.sends()) for program in programs) == len(programs[0].sends()) == levels
    assert [program.owned for program in programs] == [frozenset({0})] + [frozenset()] * (members - 1)


def sides_of(members: int) -> list[tuple[int, ...]]:
    """All full grids of so many members."""
    firsts = [side for side in range(2, members + 1) if members % side == 0]
    return [(side, *rest) for side in firsts for rest in (sides_of(members // side) or [()])]


FULL_GRIDS = [sides for members in range(2, 18) for sides in sides_of(members)]


@pytest.mark.parametrize("sides", FULL_GRIDS, ids=lambda sides: "x".join(map(str, sides)))
def test_a_full_grid_sends_what_a_ring_does_in_fewer_latencies(sides: tuple[int, ...]) -> None:
    """2 (m - 1)/m vectors from each, in 2 (M_1 - 1 + .. + M_d - 1) latencies."""
    members = math.prod(sides)
    programs = programs_of(f"grid:{'x'.join(map(str, sides))}", members)
    load = load_of(programs)
    assert load.sent == load.received == pytest.approx([2 * (members - 1) / members] * members)
    assert load.latencies == 2 * sum(side - 1 for side in sides)
    assert [program.owned for program in programs] == [{position} for position in range(members)]
    assert {len(program.steps) for program in programs} == {2 * (members - 1)}, "nobody is ever idle"


@pytest.mark.parametrize("sides", FULL_GRIDS, ids=lambda sides: "x".join(map(str, sides)))
def test_a_grids_stages_are_moshpits_averages(sides: tuple[int, ...]) -> None:
    """Ryabinin et al. 2021, algorithm 1: behind stage i each member has, of the shards that it goes on with, the
    weighted mean of the group that Moshpit has averaged by then; behind the last one that is everybody's."""
    members, numbers = math.prod(sides), random.Random(str(sides))
    programs = programs_of(f"grid:{'x'.join(map(str, sides))}", members)
    shards = range(members)
    weights = [numbers.choice([0.0, 1.0, 3.0]) for _ in shards]
    parts = [[weight * numbers.gauss(0, 1) for _ in shards] for weight in weights]
    waves = iter(waves_of(programs))
    sums = [[(part, weight) for part in own] for own, weight in zip(parts, weights, strict=True)]  # of the program
    averaged = [list(each) for each in sums]  # Moshpit's, as sums of w g and of w
    holds = [list(shards) for _ in programs]
    stride = 1
    for side in sides:
        for wave in itertools.islice(waves, side - 1):
            sent = [(each, sums[each.sender][each.shard]) for each in wave]
            for each, (value, weight) in sent:
                own, own_weight = sums[each.receiver][each.shard]
                sums[each.receiver][each.shard] = own + value, own_weight + weight
        groups = [[p + stride * (at - p // stride % side) for at in range(side)] for p in range(members)]
        averaged = [
            [(sum(averaged[p][s][0] for p in group), sum(averaged[p][s][1] for p in group)) for s in shards]
            for group in groups
        ]
        holds = [[s for s in held if s // stride % side == p // stride % side] for p, held in enumerate(holds)]
        stride *= side
        for p, held in enumerate(holds):
            for shard in held:
                assert sums[p][shard] == pytest.approx(averaged[p][shard], abs=1e-12)
    for everybodys in averaged[1:]:
        assert everybodys[0] == pytest.approx(averaged[0][0], abs=1e-12)
    assert holds == [[p] for p in range(members)]


def groups_along(programs: tuple[Program, ...], sides: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """By dimension, the groups whose members add up among themselves in the grid's own stage along it."""
    waves, dimensions = iter(waves_of(programs)), []
    for side in sides:
        group = {position: {position} for position in range(len(programs))}
        for wave in itertools.islice(waves, side - 1):
            for each in wave:
                together = group[each.sender] | group[each.receiver]
                group.update(dict.fromkeys(together, together))
        dimensions.append(sorted({tuple(sorted(each)) for each in group.values()}))
    return dimensions


@pytest.mark.parametrize(
    "sides", [sides for sides in FULL_GRIDS if len(sides) > 1], ids=lambda sides: "x".join(map(str, sides))
)
def test_one_average_along_each_dimension_of_a_full_grid_makes_the_exact_mean(sides: tuple[int, ...]) -> None:
    """Ryabinin et al. 2021, algorithm 1, round by round: in each all average whole vectors within their group along one
    dimension. Behind i of d rounds those have the same who differ in these dimensions alone, so there are as many
    vectors as grid points of the others; behind the d-th one, and not before it, all have the exact mean."""
    members, numbers = math.prod(sides), random.Random(str(sides))
    groups = groups_along(programs_of(f"grid:{'x'.join(map(str, sides))}", members), sides)
    values = [[float(members * numbers.randrange(-(10**6), 10**6)) for _ in range(5)] for _ in range(members)]
    mean = [sum(column) / members for column in zip(*values, strict=True)]
    for done, (side, along) in enumerate(zip(sides, groups, strict=True)):
        assert len({*map(tuple, values)}) == math.prod(sides[done:]), "integers, so all of it is exact"
        assert mean not in values
        assert [len(group) for group in along] == [side] * (members // side)
        for group in along:
            row = topology_of(f"grid:{side}").programs(group)
            parts = [values[position] for position in group]
            averaged = simulate(row, bucket_shards(5, row[0].shard_count, 0), parts, [1.0] * side)
            for position, result in zip(group, averaged, strict=True):
                values[position] = result
    assert values == [mean] * members


@pytest.mark.parametrize(
    ("topology", "members", "latencies"),
    [
        ("grid:4x3", 11, 2 * (3 + 2)),  # one is gone: rows of 3, 4 and 4
        ("grid:4x3", 14, 2 * (4 + 2)),  # two more have come
        ("grid:4x3", 3, 2 * 2),  # a column
        ("grid:4x3", 2, 2 * 1),  # not even that
        ("grid:2x2x2", 7, 2 * 3),
        ("grid:2x2x2", 3, 2 * (1 + 1)),  # two rows
        ("grid:5", 9, 2 * 8),  # one row
    ],
)
def test_rows_of_a_grid_are_as_long_as_there_are_members(topology: str, members: int, latencies: int) -> None:
    """G2: how rows stand is what was typed, as far as there are enough members."""
    assert load_of(programs_of(topology, members)).latencies == latencies


@pytest.mark.parametrize("members", range(2, 18))
def test_rows_that_differ_cost_nobody_much(members: int) -> None:
    """2 (m - 1) vectors in all, as on a ring, and nobody sends or receives more than an eighth more than there; where
    there are turns to be taken much less."""
    for topology in ("grid", "butterfly", "grid:4x3", "grid:3x2x2"):
        load = load_of(programs_of(topology, members))
        assert sum(load.sent) == pytest.approx(2 * (members - 1))
        more = max(*load.sent, *load.received) / (2 * (members - 1) / members)
        assert more <= {(7, "grid:4x3"): 1.04, (11, "grid:3x2x2"): 1.01}.get((members, topology), 1.125)


@pytest.mark.parametrize("members", MEMBERS)
def test_a_butterfly_is_a_grid_of_pairs(members: int) -> None:
    """2 log2 m latencies; where there is no power of two of members, one more each way, of pairs among them."""
    programs = programs_of("butterfly", members)
    core = 2 ** math.floor(math.log2(members))
    assert load_of(programs).latencies == 2 * round(math.log2(core)) + 2 * (members > core)
    assert programs[0].shard_count == core * (1 + (members > core))
    if members == core:
        assert [program.owned for program in programs] == [{position} for position in range(members)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("members", MEMBERS)
def test_each_shard_climbs_to_its_owner_and_comes_back_once(topology: str, members: int) -> None:
    """W3: one owner; every other one sends its sum once, after all that comes to it, and receives the final once."""
    programs = programs_of(topology, members)
    for shard in range(programs[0].shard_count):
        routes = [program.routes[shard] for program in programs]
        assert sum(route.finishes for route in routes) == 1
        assert all(len(route.onward) == (not route.finishes) for route in routes)
        assert all(max(route.sums, default=-1) < route.onward[0] for route in routes if route.onward)
        finals = [
            sum(step.recv_shard == shard and step.op is Op.COPY for step in program.steps) for program in programs
        ]
        assert finals == [not route.finishes for route in routes]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("members", MEMBERS)
def test_a_chunk_holds_what_its_sender_has_gathered(topology: str, members: int) -> None:
    """R2: sums that meet have no member in common, a final one has all; the sender needs those receipts and no more."""
    programs = {program.rank: program for program in programs_of(topology, members)}
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


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_rank_outside_the_generation_is_refused(topology: str) -> None:
    """G2."""
    with pytest.raises(ValueError, match=r"rank 2 is not one of \(0, 1, 3\)"):
        topology_of(topology).program((0, 1, 3), 2)


@pytest.mark.parametrize(
    ("topology", "owned"),
    [
        ("sharded", [{0}, {1}, {2}, {3}]),
        ("sharded:4,10", [set(), {0}, set(), {1}]),
        ("sharded:4,4,1", [{2}, {0, 1}, set(), set()]),
        ("sharded:10,5", [set(), set(), set(), {0}]),  # 5 is gone: whoever is there owns
        ("sharded:5", [{0}, {1}, {2}, {3}]),  # nobody of them is
        ("star", [{0}, set(), set(), set()]),
        ("star:7", [set(), set(), {0}, set()]),
        ("star:5", [{0}, {1}, {2}, {3}]),
    ],
)
def test_who_owns_what_is_data(topology: str, owned: list[set[int]]) -> None:
    """Two latencies; an owner of the fraction f sends and receives 1 + (m - 2) f vectors."""
    programs = programs_of(topology, 4)
    assert [program.owned for program in programs] == owned
    load = load_of(programs)
    assert load.latencies == 2
    expected = [1 + 2 * len(of_one) / programs[0].shard_count for of_one in owned]
    assert load.sent == pytest.approx(expected) == load.received


@pytest.mark.parametrize("members", range(2, 18))
def test_a_star_at_a_cable_takes_half_the_air(members: int) -> None:
    """2 (m - 1) vectors of a cell's air; of a ring with the same cable 4 (m - 1)^2 / m: 1.5 times that at m = 4."""
    star, ring = (load_of(programs_of(topology, members), {4}) for topology in ("star:4", "ring"))
    assert star.air == 2 * (members - 1)
    assert ring.air / star.air == pytest.approx(2 * (members - 1) / members)
    assert load_of(programs_of("star:4", members)).air == pytest.approx(load_of(programs_of("ring", members)).air)


@pytest.mark.parametrize("members", MEMBERS)
@pytest.mark.parametrize("borders", [(5,), (5, 6, 7, 20, 40), (60,)])
def test_groups_send_each_other_what_a_ring_of_leaders_does(borders: tuple[int, ...], members: int) -> None:
    """2 (g - 1) vectors in all cross from group to group, the others stay in theirs, in 2 g latencies."""
    programs = programs_of(f"hierarchical:{','.join(map(str, borders))}", members)
    group = [sum(program.rank >= border for border in borders) for program in programs]
    groups = len(set(group))
    transfers = list(transfers_of(programs))
    assert programs[0].shard_count == groups
    crossing = [each for each in transfers if group[each.sender] != group[each.receiver]]
    assert len(crossing) == 2 * (groups - 1) * groups
    assert len(transfers) - len(crossing) == 2 * (members - groups) * groups
    assert load_of(programs).latencies == 2 * (groups - 1) + 2 * (members > groups)


@pytest.mark.parametrize("members", MEMBERS)
def test_a_member_lost_leaves_a_program_of_the_others(members: int) -> None:
    """G2: whoever it is, leader, owner or hub, those that are left have a scheme in which all of them take part."""
    for topology in TOPOLOGIES:
        ranks = tuple(range(members + 1))
        for lost in ranks:
            programs = topology_of(topology).programs(tuple(rank for rank in ranks if rank != lost))
            shards = bucket_shards(programs[0].shard_count, programs[0].shard_count, 0)
            parts = [[float(program.rank + 1)] * len(shards) for program in programs]
            (result, *others) = simulate(programs, shards, parts, [1.0] * members)
            assert result == pytest.approx([sum(part[0] for part in parts) / members] * len(shards))
            assert all(each == result for each in others)
