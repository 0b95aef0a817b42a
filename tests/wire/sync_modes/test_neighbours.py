"""Who mixes weights with whom within a period, and what that does to them (R9, `,gossip=G`)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.codecs.registry import parse_codec
from meshwire.sync_modes.neighbours import Over, Turn, neighbours, turns_in, value_bytes

Matrix = list[list[float]]


def matrix(over: Over, turn: Turn, members: int) -> Matrix:
    """W of a turn, by places."""
    rows = [[0.0] * members for _ in range(members)]
    learning = tuple(range(members))
    for place in learning:
        around = neighbours(over, turn, place, learning)
        for one in around:
            rows[place][one.rank] += one.weight
        rows[place][place] = 1.0 - sum(one.weight for one in around)
    return rows


def mixed(rows: Matrix, values: list[float]) -> list[float]:
    return [math.fsum(weight * value for weight, value in zip(row, values, strict=True)) for row in rows]


@given(st.sampled_from(["pairs", "ring"]), st.integers(1, 9), st.integers(1, 500), st.integers(1, 30))
def test_what_is_mixed_keeps_the_mean_of_all(over: Over, members: int, round_: int, number: int) -> None:
    """W is symmetric, its rows add up to 1, and nothing in it is negative: it is doubly stochastic."""
    rows = matrix(over, Turn(round_, number), members)
    for place in range(members):
        assert math.fsum(rows[place]) == pytest.approx(1.0, abs=1e-12)
        assert rows[place][place] >= 1 / 3 - 1e-12
        for other in range(members):
            assert rows[place][other] == rows[other][place] >= 0


@pytest.mark.parametrize("members", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("turns", [1, 2, 5])
def test_a_ring_contracts_by_its_second_eigenvalue(members: int, turns: int) -> None:
    """What is apart along the slowest eigenvector shrinks by (1 + 2 cos(2 pi / m)) / 3 in each turn, exactly."""
    start = [math.cos(2 * math.pi * place / members) for place in range(members)]
    values = start
    for number in range(1, turns + 1):
        values = mixed(matrix("ring", Turn(3, number), members), values)
    factor = ((1 + 2 * math.cos(2 * math.pi / members)) / 3) ** turns
    assert values == pytest.approx([factor * value for value in start], abs=1e-12)


@pytest.mark.parametrize("members", [2, 4, 8, 16])
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_pairs_have_the_exact_mean_after_all_distances(members: int, first: int) -> None:
    """With m a power of two any log2 m turns that follow each other are enough, across the rounds' borders, too."""
    values = [float(place**2) for place in range(members)]
    mean, levels = math.fsum(values) / members, members.bit_length() - 1
    for number in range(first, first + levels):
        assert max(abs(value - mean) for value in values) >= 0.5
        values = mixed(matrix("pairs", Turn(7, number), members), values)
    assert values == [mean] * members


@pytest.mark.parametrize("members", [3, 5, 6, 7])
def test_pairs_of_any_number_come_together(members: int) -> None:
    values = [1.0, *[0.0] * (members - 1)]
    for number in range(1, 60):
        values = mixed(matrix("pairs", Turn(1, number), members), values)
    assert values == pytest.approx([1 / members] * members, abs=1e-3)


def test_one_turn_a_period_gets_to_every_distance() -> None:
    partners = {neighbours("pairs", Turn(round_, 1), 0, range(8))[0].rank for round_ in range(1, 4)}
    assert partners == {1, 2, 4}


def test_two_in_a_ring_are_a_pair() -> None:
    assert matrix("ring", Turn(1, 1), 2) == [[0.5, 0.5], [0.5, 0.5]]


def test_only_who_computes_has_neighbours() -> None:
    """Ranks are the job's: those that rest, and hubs, are no places in the ring."""
    learning = (1, 4, 6)
    assert {one.rank for one in neighbours("ring", Turn(1, 1), 4, learning)} == {1, 6}
    assert neighbours("ring", Turn(1, 1), 2, learning) == ()
    assert neighbours("pairs", Turn(1, 1), 1, (1,)) == ()


@pytest.mark.parametrize(
    ("local_steps", "every", "turns"), [(8, 2, 3), (8, 3, 2), (8, 7, 1), (8, 8, 0), (1, 1, 0), (2, 1, 1), (8, 0, 0)]
)
def test_no_turn_comes_where_the_round_does(local_steps: int, every: int, turns: int) -> None:
    assert turns_in(local_steps, every) == turns


def test_weights_travel_as_they_are_or_in_half_the_bytes() -> None:
    assert [value_bytes(parse_codec(codec)) for codec in ("fp32", "fp16", "bf16", "int8", "topk:0.1")] == [
        4,
        2,
        2,
        2,
        2,
    ]
