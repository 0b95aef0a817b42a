"""TernGrad (Wen et al. 2017; ALGORITHMS section 3): unbiased for the clipped gradient, five trits a byte."""

import math
import struct

import numpy as np
import pytest

from tests.daemon.codectrips import Values, decoded, encoded, heavy, refused, round_trip

LARGEST = float(np.finfo(np.float32).max)
DRAWS = 40_000


def scaler_of(values: Values) -> float:
    """min(2.5 sigma, max |g|), the largest magnitude of the clipped gradient."""
    sigma = math.sqrt(math.fsum(float(value) ** 2 for value in values) / len(values))
    return float(np.float32(min(2.5 * sigma, float(np.abs(values).max()))))


@pytest.mark.parametrize("count", [1, 4, 5, 6, 999, 65536])
def test_values_are_minus_s_zero_or_s(count: int) -> None:
    values = heavy(count)
    scaler = scaler_of(values)
    payload = encoded("terngrad", values, 4)
    assert struct.unpack_from("<f", payload)[0] == pytest.approx(scaler, rel=1e-6)
    (exact,) = struct.unpack_from("<f", payload)
    result = decoded("terngrad", payload, count)
    assert set(result.tolist()) <= {-exact, 0.0, exact}
    assert (result * values >= 0).all()


def test_at_most_1_7_bits_a_value() -> None:
    """P5: five trits a byte, and the scaler."""
    assert len(encoded("terngrad", heavy(65536))) == 4 + math.ceil(65536 / 5)
    assert len(encoded("terngrad", heavy(65536))) * 8 / 65536 < 1.601
    assert [len(encoded("terngrad", heavy(count))) for count in (0, 1, 5, 6)] == [4, 5, 5, 6]


def test_mean_and_variance_are_those_of_the_paper() -> None:
    """E = clip(g) within 5 sigma over 40000 draws of each; the variance is s|g| - g^2."""
    values = np.tile(np.array([0, 1e-4, -0.01, 0.3, -0.5, 0.9, 1.6, -2.2, 0.05, 20], np.float32), 100)
    results = np.concatenate([round_trip("terngrad", values, seed).reshape(100, 10) for seed in range(DRAWS // 100)])
    results = results.astype(np.float64)
    scaler = scaler_of(values)
    clipped = values[:10].astype(np.float64).clip(-scaler, scaler)
    assert scaler < 20
    variance = scaler * np.abs(clipped) - clipped**2
    assert (np.abs(results.mean(axis=0) - clipped) <= 5 * np.sqrt(variance / DRAWS) + 2**-16 * scaler).all()
    # Of a Bernoulli with probability p, the variance of (x - mean)^2 is p(1-p)(1-2p)^2.
    part = np.abs(clipped) / scaler
    spread = scaler**2 * np.sqrt(part * (1 - part) * (1 - 2 * part) ** 2 / DRAWS)
    assert (np.abs(results.var(axis=0) - variance) <= 5 * spread + 2**-13 * scaler**2).all()


def test_workers_add_up_to_no_more_than_their_number() -> None:
    """|sum| <= m scalers; independent seeds average out, one seed for all would not."""
    values = np.random.default_rng(3).uniform(-1, 1, 2000).astype(np.float32)
    scaler = scaler_of(values)
    total = sum(round_trip("terngrad", values, seed).astype(np.float64) for seed in range(16))
    assert np.abs(total).max() <= 16 * scaler * (1 + 1e-6)
    alone = np.square(round_trip("terngrad", values, 0) - values).mean()
    assert np.square(total / 16 - values).mean() == pytest.approx(alone / 16, rel=0.15)


def test_the_seed_makes_the_draw() -> None:
    values = heavy(3000)
    assert encoded("terngrad", values, 1) == encoded("terngrad", values, 1)
    assert encoded("terngrad", values, 1) != encoded("terngrad", values, 2)


def test_golden_bytes() -> None:
    """Where every value is the scaler or zero, nothing is drawn. Byte j holds values j, j + n, j + 2n, ..."""
    values = np.array([2, -2, 0, 0, 2, 2, -2], np.float32)
    digits = [2, 0, 1, 1, 2, 2, 0]
    first = digits[0] + 3 * digits[2] + 9 * digits[4] + 27 * digits[6]
    second = digits[1] + 3 * digits[3] + 9 * digits[5]
    assert encoded("terngrad", values) == struct.pack("<f", 2) + bytes([first, second])


def test_a_constant_segment_is_not_clipped_to_nothing() -> None:
    """About its mean, its sigma is 0."""
    values = np.full(1000, -0.3, np.float32)
    assert (round_trip("terngrad", values, 9) == values).all()


def test_at_the_ends_of_fp32() -> None:
    top = np.array([LARGEST, -LARGEST] * 50, np.float32)
    assert (round_trip("terngrad", top) == top).all()
    bottom = np.full(100, 1e-45, np.float32)
    assert (round_trip("terngrad", bottom) == bottom).all()
    assert not round_trip("terngrad", np.zeros(7, np.float32)).any()


@pytest.mark.parametrize("scaler", [np.nan, np.inf, -np.inf, -1.0])
def test_a_scaler_that_no_encoder_makes_is_refused(scaler: float) -> None:
    refused("terngrad", struct.pack("<f", scaler) + bytes([121]), 5, "scaler .* is infinite, not a number")


def test_digits_that_no_encoder_makes_are_refused() -> None:
    refused("terngrad", struct.pack("<f", 1) + bytes([243]), 5, "above 242")
    refused("terngrad", struct.pack("<f", 1) + bytes([81]), 4, "behind the last")
