"""1-bit SGD (Seide et al. 2014; ALGORITHMS section 3): column means of either sign, N bits packed."""

import struct

import numpy as np
import pytest

from tests.daemon.codectrips import Values, decoded, encoded, heavy, refused, round_trip

COLUMN = 4096
COUNTS = [1, 2, 7, 8, 9, 4095, 4096, 4097, 10_000, 65536]


def slow(values: Values) -> tuple[bytes, list[float]]:
    """The segment and its values by definition, one after the other."""
    above, below, bits, result = [], [], [], []
    for start in range(0, len(values), COLUMN):
        part = [float(value) for value in values[start : start + COLUMN]]
        ups, downs = [x for x in part if x >= 0], [x for x in part if x < 0]
        above.append(float(np.float32(sum(ups) / len(ups))) if ups else 0.0)
        below.append(float(np.float32(sum(downs) / len(downs))) if downs else 0.0)
        bits += [x >= 0 for x in part]
        result += [above[-1] if x >= 0 else below[-1] for x in part]
    packed = bytearray((len(bits) + 7) // 8)
    for place, bit in enumerate(bits):
        packed[place // 8] |= bit << place % 8
    return struct.pack(f"<{2 * len(above)}f", *above, *below) + packed, result


@pytest.mark.parametrize("count", COUNTS)
def test_segments_are_as_defined(count: int) -> None:
    values = (np.random.default_rng(count).integers(-(2**20), 2**20, count) * 2.0**-24).astype(np.float32)
    payload, result = slow(values)
    assert encoded("onebit", values) == payload
    assert decoded("onebit", payload, count).tolist() == result


def test_within_two_percent_of_a_bit_a_value() -> None:
    """P5."""
    assert 65536 / 8 < len(encoded("onebit", heavy(65536))) <= 65536 / 8 * 1.02


@pytest.mark.parametrize("count", COUNTS)
def test_what_is_left_of_each_sign_group_adds_up_to_zero(count: int) -> None:
    """Up to the rounding of the mean to fp32."""
    values = heavy(count)
    rest = values.astype(np.float64) - round_trip("onebit", values)
    for start in range(0, count, COLUMN):
        part, of = rest[start : start + COLUMN], values[start : start + COLUMN]
        for group in (of >= 0, of < 0):
            assert abs(part[group].sum()) <= 2**-24 * np.abs(of[group]).astype(np.float64).sum()


def test_error_feedback_loses_nothing() -> None:
    """P1: sent + residual == sum of gradients, up to the rounding of fp32 sums; it stays bounded for 300 rounds."""
    rng = np.random.default_rng(6)
    residual, sent, came = np.zeros(5000, np.float32), np.zeros(5000), np.zeros(5000)
    for _ in range(300):
        gradient = (rng.standard_t(3, 5000) * 1e-3 + 2e-4).astype(np.float32)
        came += gradient
        residual += gradient
        result = round_trip("onebit", residual)
        sent += result
        residual -= result
    assert np.abs(sent + residual - came).max() <= 300 * 2**-24 * np.abs(residual).max() * 4
    assert np.abs(residual).mean() < np.abs(came).mean()


def test_a_column_of_one_sign_and_zeros() -> None:
    """Negative zero counts as zero, and never makes a mean of another bit pattern."""
    values = np.array([-0.0, 1, 3, 0], np.float32)
    assert round_trip("onebit", values).tolist() == [1, 1, 1, 1]
    assert encoded("onebit", values) == struct.pack("<ff", 1, 0) + bytes([0b1111])
    assert encoded("onebit", -values[1:3]) == struct.pack("<ff", 0, -2) + bytes([0])
    for zero in (0.0, -0.0):
        assert encoded("onebit", np.full(3, zero, np.float32)) == bytes(8) + bytes([0b111])


def test_sums_beyond_fp32_make_no_difference() -> None:
    values = np.tile(np.array([3e38, -3e38], np.float32), 3000)
    assert (round_trip("onebit", values) == values).all()
    assert (round_trip("onebit", np.full(100, 1e-45, np.float32)) == np.float32(1e-45)).all()


@pytest.mark.parametrize(
    ("above", "below"), [(np.nan, 0), (0, np.nan), (np.inf, 0), (0, -np.inf), (-1, 0), (0, 1), (-np.inf, np.inf)]
)
def test_a_mean_that_no_encoder_makes_is_refused(above: float, below: float) -> None:
    refused("onebit", struct.pack("<ff", above, below) + b"\x01", 1, "a mean is infinite, not a number")


def test_bits_behind_the_last_are_refused() -> None:
    refused("onebit", struct.pack("<ff", 1, -1) + b"\x02", 1, "behind the last")
