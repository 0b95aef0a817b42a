"""What programs move, counted from themselves: bytes, latencies, airtime (C2)."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.collectives.load import Load, all_to_all, load_of, transfers_of, waves_of
from meshwire.collectives.strategy import TOPOLOGIES, topology_of
from meshwire.collectives.topology import Program


def programs_of(name: str, members: int) -> tuple[Program, ...]:
    return topology_of(name).programs(tuple(range(members)))


NAMES = [each if each != "hierarchical" else "hierarchical:2,3" for each in TOPOLOGIES]
LATENCIES: dict[str, Callable[[int], int]] = {
    "ring": lambda m: 2 * (m - 1),
    "butterfly": lambda m: 2 * math.floor(math.log2(m)) + 2 * (m > 2 ** math.floor(math.log2(m))),
    "sharded": lambda m: 2 * (m > 1),
    "star": lambda m: 2 * (m > 1),
    "gather": lambda m: int(m > 1),
}


@pytest.mark.parametrize("name", LATENCIES)
@pytest.mark.parametrize("members", range(1, 18))
def test_so_many_latencies_come_one_after_the_other(name: str, members: int) -> None:
    assert load_of(programs_of(name, members)).latencies == LATENCIES[name](members)


def test_a_tree_takes_a_latency_for_each_level_each_way() -> None:
    """Where it is full; else its longest way counts."""
    assert [load_of(programs_of("tree", 2**levels)).latencies for levels in range(5)] == [0, 2, 4, 6, 8]
    assert load_of(programs_of("tree", 5)).latencies == 4


@pytest.mark.parametrize("members", range(1, 18))
def test_a_grid_of_its_own_sides_takes_the_fewest_latencies_of_two_dimensions(members: int) -> None:
    """Where rows differ it may be one less, for who holds the last shard of a shorter row is another one."""
    fewest = 2 * min(math.ceil(members / rows) + rows - 2 for rows in range(1, members + 1))
    assert fewest - 1 <= load_of(programs_of("grid", members)).latencies <= fewest


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("members", range(1, 18))
def test_what_is_sent_is_received_and_crosses_the_air_twice(name: str, members: int) -> None:
    """In a cell without a cable; with one at everybody nothing crosses it."""
    programs = programs_of(name, members)
    load = load_of(programs)
    assert math.isclose(sum(load.sent), sum(load.received))
    assert math.isclose(load.air, 2 * sum(load.sent))
    assert load_of(programs, range(members)).air == 0
    each = 1 if name == "gather" else 2 / members
    assert math.isclose(sum(load.sent), each * members * (members - 1)), "2 (m - 1) vectors, or m (m - 1)"


@given(st.data())
def test_no_fractions_take_less_air_than_those_of_laptops_on_cables(data: st.DataObject) -> None:
    """An owner of the fraction f sends and receives 1 + (m - 2) f vectors: least crosses the air where those have all
    of it that have a cable, and the more the others own the more does."""
    members = data.draw(st.integers(2, 7))
    ranks = st.integers(0, members - 1)
    cables = sorted(data.draw(st.sets(ranks, min_size=1, max_size=members)))
    owners = data.draw(st.lists(ranks, min_size=1, max_size=8))

    def air(owners: list[int]) -> float:
        name = f"sharded:{','.join(map(str, owners))}"
        return load_of(topology_of(name).programs(tuple(range(members))), cables).air

    least, without = air(cables), sum(owner not in cables for owner in owners) / len(owners)
    assert math.isclose(air(owners), least + 2 * without * (members - 2), abs_tol=1e-9)


@pytest.mark.parametrize("members", range(2, 9))
def test_the_air_that_a_cable_spares(members: int) -> None:
    """Of a ring, one in m: 4 (m - 1)^2 / m vectors are left of 4 (m - 1)."""
    one_wired = load_of(programs_of("ring", members), (0,)).air
    assert math.isclose(one_wired, 4 * (members - 1) ** 2 / members)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("members", [2, 3, 4, 7, 8])
def test_a_wave_needs_earlier_ones_alone(name: str, members: int) -> None:
    """All transfers are in one; who passes a shard on has had it brought before, the last of it by the wave before."""
    programs = programs_of(name, members)
    waves = waves_of(programs)
    assert sorted(map(repr, (each for wave in waves for each in wave))) == sorted(map(repr, transfers_of(programs)))
    for number, wave in enumerate(waves):
        for each in wave:
            before = [
                index
                for index, earlier in enumerate(waves)
                for other in earlier
                if (other.receiver, other.shard) == (each.sender, each.shard) and other.step < each.step
            ]
            assert name == "gather" or max(before, default=-1) == number - 1


def test_a_member_alone_moves_nothing() -> None:
    assert load_of(programs_of("ring", 1)) == Load((0.0,), (0.0,), 0, 0.0)


@pytest.mark.parametrize("name", ["sharded", "gather"])
@pytest.mark.parametrize("members", [3, 4, 8, 13])
def test_everybody_sends_to_all_others_at_once(name: str, members: int) -> None:
    assert all_to_all(programs_of(name, members))


@pytest.mark.parametrize("name", ["ring", "butterfly", "tree", "star:1", "sharded:0,1", "grid"])
def test_else_some_wait_for_what_they_send_on_or_send_less(name: str) -> None:
    assert not all_to_all(programs_of(name, 4))


@pytest.mark.parametrize("members", [1, 2])
def test_who_has_one_other_at_most_sends_to_nobody_else(members: int) -> None:
    assert not all_to_all(programs_of("sharded", members))
