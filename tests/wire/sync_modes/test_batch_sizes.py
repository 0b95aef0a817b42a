"""X4a: batch sizes that follow speed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwire import limits
from meshwire.messages.job import Metrics
from meshwire.sync_modes.batch_sizes import DEAD_BAND, GAIN_MIN, SIZE_MIN, sizes_by_speed

SPEEDS = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=9)


def round_s(sizes: list[int] | tuple[int, ...], speeds: list[float]) -> float:
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True))


@given(SPEEDS, st.integers(1, 64))
def test_the_joint_batch_is_kept_and_everybody_has_a_sample(speeds: list[float], batch: int) -> None:
    """X4a: the sum stays m x batch; a change always makes the round shorter."""
    equal = [batch] * len(speeds)
    sizes = sizes_by_speed(speeds, batch, equal)
    if sizes is not None:
        assert sum(sizes) == batch * len(speeds)
        assert min(sizes) >= min(SIZE_MIN, batch)
        assert round_s(sizes, speeds) < round_s(equal, speeds)
        assert sizes_by_speed(speeds, batch, sizes) is None, "at the same speeds they stay"


@given(st.lists(st.floats(0, limits.SAMPLES_MAX), min_size=1, max_size=9), st.integers(1, 64))
def test_no_speed_of_a_report_makes_it_raise(speeds: list[float], batch: int) -> None:
    sizes = sizes_by_speed(speeds, batch, [batch] * len(speeds))
    assert sizes is None or (sum(sizes) == batch * len(speeds) and min(sizes) >= min(SIZE_MIN, batch))


@pytest.mark.parametrize("speed", [float("nan"), float("inf"), 1e308, -1.0])
def test_a_report_holds_no_other_speed(speed: float) -> None:
    """What a member says of itself must not break the arithmetic of rank 0."""
    with pytest.raises(ValidationError, match="samples_per_s"):
        Metrics(samples_per_s=speed)


def test_sizes_are_in_proportion_to_speed() -> None:
    assert sizes_by_speed([100.0, 300.0], 32, [32, 32]) == (16, 48)
    assert sizes_by_speed([10.0, 10.0, 5.0], 10, [10, 10, 10]) == (12, 12, 6)
    assert sizes_by_speed([1.0, 1.0, 1000.0], 8, [8, 8, 8]) == (2, 2, 20), "BatchNorm takes two"
    assert sizes_by_speed([1.0, 1.0, 1000.0], 2, [2, 2, 2]) is None


@pytest.mark.parametrize("speeds", [[0.0, 5.0], [0.0, 0.0]])
def test_unknown_speeds_change_nothing(speeds: list[float]) -> None:
    assert sizes_by_speed(speeds, 8, [8, 8]) is None


def test_small_differences_are_left_alone() -> None:
    """The dead band is about the times that follow from the sizes in force, not about the speeds."""
    assert sizes_by_speed([100.0, 99.0 * DEAD_BAND], 64, [64, 64]) is None
    assert sizes_by_speed([100.0, 101.0 * DEAD_BAND], 64, [64, 64]) is not None
    assert sizes_by_speed([100.0, 300.0], 64, [32, 96]) is None
    assert sizes_by_speed([100.0, 100.0], 64, [32, 96]) == (64, 64)


def test_unequal_sizes_change_again_only_for_a_real_gain() -> None:
    """One of nine is faster than its size says: times differ much, the round by less."""
    speeds = [1.0] * 8 + [1.4]
    equal, unequal = [70] * 9, [70] * 8 + [71]
    better = sizes_by_speed(speeds, 70, equal)
    assert better is not None
    assert 1 - GAIN_MIN < round_s(better, speeds) / round_s(unequal, speeds) < 1
    assert sizes_by_speed(speeds, 70, unequal) is None


def test_unequal_sizes_follow_one_that_keeps_many_waiting() -> None:
    """Its small batches cost it more a sample than was measured before the job: the others wait for a fifth of a round,
    which the dead band of equal sizes would leave."""
    current, speeds = (160, 160, 160, 32), [160 / 0.78] * 3 + [32.0]
    assert max(n / v for n, v in zip(current, speeds, strict=True)) < DEAD_BAND * 0.78
    assert sizes_by_speed(speeds, 128, current) == (163, 162, 162, 25)


def test_one_sample_each_cannot_be_shared_otherwise() -> None:
    assert sizes_by_speed([1.0, 5.0], 1, [1, 1]) is None
