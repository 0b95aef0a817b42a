"""2-bit (ALGORITHMS section 3): four means of each column of 4096 values, packed four a byte as MXNet packs."""

import math
import struct

import numpy as np
import pytest

from tests.daemon.codecs.test_codec_int import bf16_nearest, from_bf16
from tests.daemon.codectrips import Values, codec, decoded, encoded, heavy, refused, round_trip

COLUMN = 4096
SHIFTS = (6, 4, 2, 0)


def slow(values: Values, rms: float = 1.0) -> tuple[bytes, list[float]]:
    """The segment and its values by definition, one after the other."""
    header, codes, result = [], [], []
    for start in range(0, len(values), COLUMN):
        part = [float(value) for value in values[start : start + COLUMN]]
        large = np.float32(rms * math.sqrt(math.fsum(value * value for value in part) / len(part)))
        own = [2 * (math.copysign(1, value) < 0) + int(abs(value) >= large) for value in part]
        levels = []
        for code in range(4):
            of_code = [abs(value) for value, its in zip(part, own, strict=True) if its == code]
            header.append(bf16_nearest(math.fsum(of_code) / max(len(of_code), 1)))
            levels.append(from_bf16(header[-1]) * (1 if code < 2 else -1))
        codes += own
        result += [levels[code] for code in own]
    packed = bytearray(4 * math.ceil(len(values) / 16))
    for place, code in enumerate(codes):
        packed[place // 4] |= int(code) << SHIFTS[place % 4]
    return struct.pack(f"<{len(header)}H", *header) + packed, result


def test_golden_bytes() -> None:
    """The root mean square is 1.04: large are 1.5, 2 and -1.5."""
    values = np.array([0.5, -0.25, 1.5, 2, -1.5, -0.75, 0.5, 0.25, -0.5], np.float32)
    payload = encoded("twobit", values)
    small, large, below, far_below = 0x3ED5, 0x3FE0, 0x3F00, 0x3FC0  # 5/12, 7/4, 1/2, 3/2
    assert payload == struct.pack("<4H", small, large, below, far_below) + bytes(
        [0b00_10_01_01, 0b11_10_00_00, 0x80, 0]
    )
    assert decoded("twobit", payload, 9).tolist() == [
        0.416015625,
        -0.5,
        1.75,
        1.75,
        -1.5,
        -0.5,
        *[0.416015625] * 2,
        -0.5,
    ]


@pytest.mark.parametrize("count", [1, 3, 4, 17, 1000, 4096, 4099, 9001])
@pytest.mark.parametrize("rms", [0.125, 1, 3])
def test_segments_are_as_defined(count: int, rms: float) -> None:
    values = heavy(count)
    payload, result = slow(values, rms)
    assert encoded(f"twobit:rms={rms}", values) == payload
    assert decoded(f"twobit:rms={rms}", payload, count).tolist() == result


def test_two_bits_a_value() -> None:
    """P5: N/4 bytes, 16 values in each word, and 8 a column of 4096."""
    assert len(encoded("twobit", heavy(65536))) == 65536 // 4 + 16 * 8
    assert [len(encoded("twobit", heavy(count))) for count in (0, 1, 16, 17, 4097)] == [0, 12, 12, 16, 16 + 1024 + 4]


@pytest.mark.parametrize(("kind", "most", "of_one_bit"), [("normal", 0.119, 0.34), ("laplace", 0.182, 0.37)])
def test_it_leaves_out_about_as_little_as_two_bits_can(kind: str, most: float, of_one_bit: float) -> None:
    """Max (1960): four levels leave 0.1175 of a normal value's squared norm, 0.1765 of a Laplacian one's. 1-bit leaves
    three times as much; with -t, 0 and t it was 1.1 times as much as 1-bit's."""
    rng = np.random.default_rng(3)
    values = (rng.standard_normal(65536) if kind == "normal" else rng.laplace(0, 1, 65536)).astype(np.float32)
    left = np.square(values - round_trip("twobit", values)).sum() / np.square(values).sum()
    assert left < most
    assert left < of_one_bit * np.square(values - round_trip("onebit", values)).sum() / np.square(values).sum()


def test_columns_are_apart() -> None:
    """A large value spoils its own column alone."""
    values = heavy(3 * COLUMN)
    before = round_trip("twobit", values)
    values[5] = 1e30
    after = round_trip("twobit", values)
    assert (before[COLUMN:] == after[COLUMN:]).all()
    assert after[5] == pytest.approx(1e30, rel=2**-8)


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-3, 1e18, 1e38])
def test_large_is_relative_also_where_squares_are_beyond_fp32(scale: float) -> None:
    """Both kinds of either sign are there, and what is large is larger; below 2^-126 all becomes zero."""
    values = (np.random.default_rng(2).uniform(-3, 3, 5000) * scale).astype(np.float32)
    levels = np.unique(np.abs(round_trip("twobit", values)[:COLUMN]))
    assert len(levels) == 4 if scale > 1e-38 else levels.tolist() == [0]
    assert np.isfinite(levels).all()


def test_the_residual_stays_bounded_whatever_the_gradient() -> None:
    """With error feedback, over 500 rounds."""
    residual = np.zeros(1000, np.float32)
    gradient = np.full(1000, 0.7, np.float32)
    gradient[::10] = -4
    for _ in range(500):
        residual += gradient
        residual -= round_trip("twobit", residual)
    assert np.abs(residual).max() < 4


def test_a_mean_that_differs_is_learnt_while_a_value_waits() -> None:
    """What is decoded in 30 rounds with error feedback is 30 gradients, to a part of one."""
    gradient, residual, sent = heavy(8192), np.zeros(8192, np.float32), np.zeros(8192)
    out = memoryview(bytearray(codec("twobit").spec.segment_bytes_max(8192)))
    for _ in range(30):
        residual += gradient
        codec("twobit").encode_rest_into(residual, out)
        sent += decoded("twobit", out, 8192)
    assert np.linalg.norm(sent / 30 - gradient) < 0.2 * np.linalg.norm(gradient)


def test_zeros_and_nothing() -> None:
    assert encoded("twobit", np.zeros(5, np.float32)) == bytes(8) + b"\x55\x40\0\0"  # all reach a threshold of 0
    assert encoded("twobit", np.zeros(0, np.float32)) == b""
    assert not round_trip("twobit", np.zeros(5, np.float32)).any()


@pytest.mark.parametrize("level", [0x7F80, 0x7FC0, 0x8000, 0xBF80])
def test_a_level_that_no_encoder_makes_is_refused(level: int) -> None:
    """Infinite, not a number, or negative: signs are in the numbers."""
    for place in range(4):
        levels = [0x3F80] * 4
        levels[place] = level
        refused("twobit", struct.pack("<4H", *levels) + bytes(4), 16, "a step size is not within")


def test_what_no_encoder_makes_is_refused() -> None:
    for count, packed in ((1, b"\xf0\0\0\0"), (4, b"\xff\x80\0\0"), (5, b"\xff\xc3\0\0"), (1, b"\xc0\0\0\x02")):
        refused("twobit", struct.pack("<4H", *[0x3F80] * 4) + packed, count, "fills the last word up")
