"""QSGD (ALGORITHMS section 3): per bucket of 128 a norm, level floor + Bernoulli, unbiased."""

import math
import struct

import numpy as np
import pytest

from tests.daemon.codectrips import Values, decoded, encoded, heavy, refused, round_trip

LARGEST = float(np.finfo(np.float32).max)


def steps_of(values: Values, levels: int) -> list[float]:
    """Of each bucket: its norm over the levels, with 8 significant bits, rounded up. By definition, in fp64."""
    steps = []
    for start in range(0, len(values), 128):
        exact = math.sqrt(math.fsum(float(value) ** 2 for value in values[start : start + 128])) / levels
        significand, exponent = math.frexp(exact)
        steps.append(math.ldexp(math.ceil(significand * 2**8 * (1 - 2**-20)), exponent - 8))
    return steps


@pytest.mark.parametrize("levels", [1, 3, 7, 127])
@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000])
def test_values_are_levels_beside_them(levels: int, count: int) -> None:
    """Floor or the one above it, of a level size that the norm gives."""
    values = heavy(count)
    step = np.repeat(steps_of(values, levels), 128)[:count]
    result = round_trip(f"qsgd:{levels}", values, seed=3)
    assert (np.round(result / step) * step == result).all()
    assert np.abs(result - values).max() < step.max()
    assert (np.abs(result - values) < step * (1 + 1e-6)).all()
    assert np.abs(result / step).max() <= levels


@pytest.mark.parametrize("levels", [1, 7, 64])
def test_it_is_unbiased(levels: int) -> None:
    """Within 5 sigma of sqrt(p(1-p)/n) level, for each value of a bucket."""
    values = heavy(128, seed=8)
    draws = 4000
    (step,) = steps_of(values, levels)
    total = np.zeros(128)
    for seed in range(draws // 500):
        total += (
            round_trip(f"qsgd:{levels}", np.tile(values, 500), seed).astype(np.float64).reshape(500, 128).sum(axis=0)
        )
    part = values.astype(np.float64) / step % 1
    sigma = step * np.sqrt(part * (1 - part) / draws)
    assert (np.abs(total / draws - values) <= 5 * sigma + 2**-16 * step).all()


def test_the_variance_is_that_of_the_paper() -> None:
    """Alistarh et al., lemma 3.1: E|Q(v) - v|^2 <= min(n/s^2, sqrt(n)/s) |v|^2; 2^-6 for the norm's rounding."""
    values = np.random.default_rng(2).standard_normal(128 * 500).astype(np.float32)
    for levels in (1, 4, 16, 127):
        error = np.square(round_trip(f"qsgd:{levels}", values, 5) - values).sum() / np.square(values).sum()
        assert error <= min(128 / levels**2, math.sqrt(128) / levels) * (1 + 2**-6)


@pytest.mark.parametrize(("levels", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (63, 7), (127, 8)])
def test_bits_a_value(levels: int, bits: int) -> None:
    """P5: the bits of 2L + 1 numbers, and 1/8 for the norms."""
    assert len(encoded(f"qsgd:{levels}", heavy(65536))) * 8 == (bits + 0.125) * 65536


def test_golden_bytes() -> None:
    """One value is the norm: always the last level. Planes of lowest bits first."""
    assert encoded("qsgd:1", np.array([-2], np.float32)) == b"\x00\x40" + bytes([0, 0])
    assert encoded("qsgd:1", np.array([2], np.float32)) == b"\x00\x40" + bytes([0, 1])
    assert encoded("qsgd:1", np.array([0], np.float32)) == b"\x00\x00" + bytes([1, 0])
    assert decoded("qsgd:3", b"\x00\x3f" + bytes([0b01, 0b10, 0b10]), 2).tolist() == [-1, 1.5]


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e18, 1e30])
def test_squares_beyond_fp32_make_no_difference(scale: float) -> None:
    values = heavy(1000) * np.float32(1e3)
    assert round_trip("qsgd:127", values * np.float32(scale)) == pytest.approx(
        round_trip("qsgd:127", values).astype(np.float64) * scale, rel=2**-6, abs=scale / 2
    )


def test_at_the_ends_of_fp32() -> None:
    """A norm beyond fp32 is cut to the last finite one; that still is no less than any value."""
    top = np.tile(np.array([LARGEST, -LARGEST], np.float32), 5000)  # noise goes either way
    for levels in (1, 7, 127):
        assert (np.abs(round_trip(f"qsgd:{levels}", top) - top) <= 2**-7 * LARGEST).all()
    assert not round_trip("qsgd:7", np.full(128, 1e-44, np.float32)).any()
    assert not round_trip("qsgd:7", np.zeros(300, np.float32)).any()


def test_what_no_encoder_makes_is_refused() -> None:
    for step in (0x7F80, 0x7FC0, 0xFFFF, 0x8000, 0x7F00):
        refused("qsgd:7", struct.pack("<H", step) + bytes(4), 5, "a step size is not within")
    refused("qsgd:7", b"\x00\x3f" + bytes([1, 1, 1, 1]), 1, "more than 7 steps")
    refused("qsgd:7", b"\x00\x3f" + bytes([2, 1, 1, 0]), 1, "behind the last")
