"""What grows without bound is named; what fills, saws or jumps once is not."""

import random

import pytest

from tests.bench.soakgrowth import BOUNDS, HOUR_S, MIB, POINTS_MAX, Growth, slope

EVERY_S = 15.0
ROUNDS_A_SECOND = 8


def grown(what: str, values: list[float], every_s: float = EVERY_S) -> list[str]:
    growth = Growth()
    for number, value in enumerate(values):
        growth.note("anna", what, number * every_s, value)
    return [str(line) for line in growth.lines() if line.too_steep]


def noisy(count: int, each: float, *, start: float = 60 * MIB, noise: float = 3 * MIB) -> list[float]:
    draw = random.Random(1)
    return [start + number * each + draw.uniform(-noise, noise) for number in range(count)]


def test_a_list_that_keeps_a_little_of_every_round_is_named() -> None:
    """1.7 kB a round, as a peer that only forwarded once did; in half an hour of some rounds a second."""
    kept: list[bytes] = []
    values = []
    for value in noisy(120, 0.0):
        kept += [bytes(1700)] * int(ROUNDS_A_SECOND * EVERY_S)
        values.append(value + sum(map(len, kept)))
    (said,) = grown("memory", values)
    assert said.startswith("anna: memory grew by ")
    assert "are allowed" in said


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("memory", noisy(120, 0.0)),
        ("memory", [60 * MIB + min(number, 5) * 20 * MIB for number in range(120)]),
        ("memory", [60 * MIB + (number % 7) * 15 * MIB for number in range(120)]),
        ("memory", [60 * MIB + (400 * MIB if number == 60 else 0) for number in range(120)]),
        ("memory", noisy(120, BOUNDS["memory"].per_hour * EVERY_S / HOUR_S / 2)),
        ("descriptors", [20 + number % 5 for number in range(120)]),
        ("memory", [60 * MIB, 600 * MIB]),
    ],
    ids=["level", "fills", "saws", "jumps", "slow", "dials", "two points"],
)
def test_what_has_a_limit_is_not(what: str, values: list[float]) -> None:
    assert grown(what, values) == []


@pytest.mark.parametrize("what", [*BOUNDS])
def test_each_bound_is_one(what: str) -> None:
    """Twice as steep is too much, half as steep is not, over an hour."""
    bound = BOUNDS[what]
    each = (bound.step + bound.per_hour) * EVERY_S / HOUR_S
    count = int(HOUR_S / EVERY_S)
    assert grown(what, [1000 + number * each * 2 for number in range(count)])
    assert not grown(what, [1000 + number * each / 2 for number in range(count)])


def test_another_process_is_another_series() -> None:
    growth = Growth()
    for number in range(100):
        growth.note("anna", "memory", number * EVERY_S, 60 * MIB + (number // 20) * 30 * MIB, process=number // 20)
    assert not [line for line in growth.lines() if line.too_steep]


def test_a_long_soak_keeps_few_points() -> None:
    growth = Growth()
    for number in range(50 * POINTS_MAX):
        growth.note("anna", "log", number, 2 * number)
    (line,) = growth.lines()
    assert line.grown == pytest.approx(2 * line.lasted_s)
    assert line.lasted_s > 49 * POINTS_MAX
    assert sum(map(len, growth._series.values())) <= POINTS_MAX


def test_a_slope_needs_two_instants() -> None:
    assert slope([]) == slope([(1.0, 5.0), (1.0, 7.0)]) == 0.0
    assert slope([*((float(number), 2.0 * number) for number in range(9)), (9.0, 600.0)]) == pytest.approx(2.0)
