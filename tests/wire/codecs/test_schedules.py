"""Rates over the rounds of a job: as typed, and round by round (ALGORITHMS section 3, VARCO)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.codecs.schedules import ByteSize, Ramp, Rate, size_text

RATE = Rate("ratio", 1e-5, 1.0, Ramp.constant(0.01), "")
SIZE = ByteSize("budget", 100, 10**12, "")
PARTS = st.floats(1e-5, 1.0)
RAMPS = st.builds(Ramp, PARTS, PARTS, st.integers(1, 10**7), st.booleans()).filter(lambda ramp: ramp.first != ramp.last)


@given(RAMPS, st.lists(st.integers(1, 10**7 + 2), min_size=2, max_size=20))
def test_a_ramp_is_monotone_and_exact_at_both_ends(ramp: Ramp, numbers: list[int]) -> None:
    rates = [ramp.at(number) for number in (1, *sorted(numbers), ramp.rounds + 1, 2 * ramp.rounds)]
    assert rates[0] == ramp.first
    assert rates[-2:] == [ramp.last, ramp.last]
    inner = rates[:-2]
    assert inner == sorted(inner, reverse=ramp.first > ramp.last)
    assert max(rates) <= ramp.largest


def test_a_ramp_goes_by_equal_factors_or_linearly_in_its_inverse() -> None:
    rates = [Ramp(0.16, 0.01, 4).at(number) for number in range(1, 7)]
    assert rates == pytest.approx([0.16, 0.08, 0.04, 0.02, 0.01, 0.01])
    # VARCO: r(t) = max(rmax - (rmax - rmin) t / T, rmin), from every 100th value to all of them.
    compression = [1 / Ramp(0.01, 1.0, 99, linear=True).at(number) for number in range(1, 103)]
    assert compression == pytest.approx([*range(100, 0, -1), 1, 1])


@given(RAMPS | st.builds(Ramp.constant, PARTS))
def test_the_text_of_a_ramp_is_parsed_to_the_same(ramp: Ramp) -> None:
    assert RATE.parse(str(ramp)) == ramp
    assert RATE.bare(str(ramp))


def test_a_ramp_between_equal_rates_is_constant() -> None:
    assert RATE.parse("0.5..0.5/10") == Ramp.constant(0.5)


@pytest.mark.parametrize(
    "text",
    [
        *("", "2", "nan", "0..1/5", "1..0/5", "0.1..0.2", "0.1..0.2/", "0.1..0.2/0", "0.1..0.2/-1", "0.1..0.2/1.5"),
        *("0.1..nan/5", "0.1..0.2/5/cubic", "0.1..0.2/5/linear/linear", "0.1..0.2/99999999", "0.1..0.2/" + "9" * 5000),
        *("..", "../", "0.1../5", "0.1..0.2/\u0663"),
    ],
)
def test_an_illegal_rate_is_none(text: str) -> None:
    assert RATE.parse(text) is None


@pytest.mark.parametrize(
    ("text", "size"), [("100B", 100), ("100", 100), ("2MB", 2e6), ("1.5kB", 1500), ("0.25 GB", 25e7), ("1000GB", 1e12)]
)
def test_sizes_are_typed_with_a_unit(text: str, size: float) -> None:
    assert SIZE.parse(text) == size
    assert SIZE.parse(size_text(size)) == size


@pytest.mark.parametrize("text", ["99", "1001GB", "-2MB", "2mb", "2MiB", "MB", "inf", "9" * 400, "1e6", "2 MB "])
def test_an_illegal_size_is_none(text: str) -> None:
    assert SIZE.parse(text) is None


@given(st.integers(100, 10**12))
def test_the_text_of_a_size_is_parsed_to_the_same(size: int) -> None:
    assert SIZE.parse(size_text(size)) == size
    assert not SIZE.bare(size_text(size))
