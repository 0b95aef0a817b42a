"""2-bit (MXNet; ALGORITHMS section 3): packed as its kernel packs, P1 to the last bit, a threshold that follows."""

import math
import struct

import numpy as np
import pytest

from meshtraind.codecs.base import Terms
from tests.daemon.codectrips import Values, codec, decoded, encoded, heavy, refused, round_trip

LARGEST = float(np.finfo(np.float32).max)
POSITIVE_BITS = (0xC0, 0x30, 0x0C, 0x03)
NEGATIVE_BITS = (0x80, 0x20, 0x08, 0x02)


def mxnet_quantize(residual: list[float], gradient: Values, threshold: float) -> bytes:
    """quantize_2bit of gradient_compression-inl.h, a value at a time; `residual` is updated."""
    packed = bytearray(4 * math.ceil(len(gradient) / 16))
    for place, value in enumerate(gradient):
        residual[place] += float(value)
        if residual[place] >= threshold:
            residual[place] -= threshold
            packed[place >> 2] |= POSITIVE_BITS[place & 3]
        elif residual[place] <= -threshold:
            residual[place] += threshold
            packed[place >> 2] |= NEGATIVE_BITS[place & 3]
    return bytes(packed)


def threshold_of(values: Values, rms: float = 1.0) -> float:
    """The largest power of two up to `rms` root mean squares, in fp64; the least there is for zeros."""
    exact = rms * math.sqrt(math.fsum(float(value) ** 2 for value in values) / len(values))
    return 2.0 ** math.floor(math.log2(exact)) if exact else 2.0**-149


def test_golden_bytes() -> None:
    """The root mean square is 1, and so is the threshold."""
    values = np.array([1, -1, 0.5, 1.5, -1.5, 0.5, 0.5, -1, 0.5, 1, 1.0625, -0.5, -1, -0.5, 0.5, 1.3], np.float32)
    assert threshold_of(values) == 0.5
    doubled = encoded("twobit:rms=2", values)
    assert doubled == struct.pack("<i", 0) + bytes([0b11_10_00_11, 0b10_00_00_10, 0b00_11_11_00, 0b10_00_00_11])
    assert decoded("twobit:rms=2", doubled, 16).tolist() == [1, -1, 0, 1, -1, 0, 0, -1, 0, 1, 1, 0, -1, 0, 0, 1]


@pytest.mark.parametrize("count", [1, 3, 4, 5, 15, 16, 17, 31, 1000, 4099])
@pytest.mark.parametrize("rms", [0.125, 1, 3])
def test_many_rounds_are_those_of_mxnet_with_the_same_thresholds(count: int, rms: float) -> None:
    """P1, bit-exact: bytes, and sum of what was sent + residual == sum of gradients."""
    text = f"twobit:rms={rms}"
    rng = np.random.default_rng(count + 1)
    residual, theirs = np.zeros(count, np.float32), [0.0] * count
    sent, came = np.zeros(count), np.zeros(count)
    out = memoryview(bytearray(codec(text).spec.segment_bytes_max(count)))
    for seed in range(12):
        gradient = np.round(rng.laplace(0, 50, count)).astype(np.float32) * np.float32(2**-16)
        residual += gradient
        came += gradient
        threshold = threshold_of(residual, rms)
        assert codec(text).encode_rest_into(residual, out, Terms(seed=seed)) == len(out)
        assert out == struct.pack("<i", int(math.log2(threshold))) + mxnet_quantize(theirs, gradient, threshold)
        assert residual.tolist() == theirs
        sent += decoded(text, bytes(out), count)
    assert (sent + residual == came).all()


def test_a_quarter_byte_a_value() -> None:
    """P5: N/4 bytes and the exponent, 16 values in each word."""
    assert len(encoded("twobit", heavy(65536))) == 65536 // 4 + 4
    assert [len(encoded("twobit", heavy(count))) for count in (0, 1, 16, 17)] == [4, 8, 8, 12]


@pytest.mark.parametrize("scale", [1e-44, 1e-42, 1e-30, 1e-12, 1e-3, 1.0, 1e18, 3e38])
@pytest.mark.parametrize("rms", [0.125, 1, 1.9, 8])
def test_the_threshold_follows_the_root_mean_square(scale: float, rms: float) -> None:
    """Also where squares are beyond fp32: a power of two in (c/2, c] root mean squares, as far as fp32 has it."""
    values = (np.random.default_rng(2).uniform(-1, 1, 5000) * scale).astype(np.float32)
    (exponent,) = struct.unpack_from("<i", encoded(f"twobit:rms={rms}", values))
    assert exponent == min(max(math.log2(threshold_of(values, rms)), -149), 127)


@pytest.mark.parametrize("values", [[7e-4] * 1000, [1.0] + [0.0] * 65535, [3e38], [1e-45], [2.0, 1e-20]])
def test_the_largest_value_is_always_sent(values: list[float]) -> None:
    """Contraction: at least half of rms^2 leaves the residual in every round. MXNet's 0.5 would send no gradient."""
    given = np.array(values, np.float32)
    result = round_trip("twobit", given)
    assert result[0] != 0
    left, norm = (float(np.square(each.astype(np.float64)).sum()) for each in (given - result, given))
    assert left <= norm * (1 - 1 / (2 * len(given)))


def test_the_residual_stays_bounded_whatever_the_gradient() -> None:
    """With a constant threshold it grows for ever where the gradient is above it: only t is sent in each round."""
    residual = np.zeros(1000, np.float32)
    gradient = np.full(1000, 0.7, np.float32)
    gradient[::10] = -4
    for _ in range(500):
        residual += gradient
        residual -= round_trip("twobit", residual)
    assert np.abs(residual).max() < 20


def test_zeros_and_nothing() -> None:
    assert encoded("twobit", np.zeros(5, np.float32)) == struct.pack("<i", -149) + bytes(4)
    assert encoded("twobit", np.zeros(0, np.float32)) == struct.pack("<i", -149)
    assert not round_trip("twobit", np.zeros(5, np.float32)).any()


@pytest.mark.parametrize("place", range(16))
def test_the_code_that_is_none_is_refused(place: int) -> None:
    packed = bytearray(4)
    packed[place // 4] = 1 << (6, 4, 2, 0)[place % 4]
    refused("twobit", struct.pack("<i", 0) + packed, 16, "01")


def test_what_no_encoder_makes_is_refused() -> None:
    for exponent in (128, -150, 2**31 - 1, -(2**31)):
        refused("twobit", struct.pack("<i", exponent) + bytes(4), 16, "exponent .* is not within")
    for count, packed in ((1, b"\xf0\0\0\0"), (4, b"\xff\x80\0\0"), (5, b"\xff\xc3\0\0"), (1, b"\xc0\0\0\x02")):
        refused("twobit", struct.pack("<i", 0) + packed, count, "fills the last word up")
