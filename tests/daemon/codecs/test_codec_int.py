"""int8 and int4 (ALGORITHMS section 3): block-wise steps, to the nearest with error feedback, or stochastic."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from meshtraind.codecs.normalfloat import TABLE
from tests.daemon.codectrips import Values, decoded, encoded, heavy, refused, round_trip

LEVELS = {"int8": 127, "int4": 8}
NAMES = sorted(LEVELS)
LARGEST = float(np.finfo(np.float32).max)
INFINITY = 0x7F80  # as bf16


def bf16_nearest(value: float) -> int:
    """Half of the bits of an fp32 number, ties to even: with whole numbers."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    upper, lower = bits >> 16, bits & 0xFFFF
    return int(upper + (lower > 0x8000 or (lower == 0x8000 and upper & 1)))


def from_bf16(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def slow(name: str, values: Values, block: int) -> tuple[bytes, list[float]]:
    """The segment and its values by definition, one after the other."""
    levels, steps, numbers, result = LEVELS[name], [], [], []
    for start in range(0, len(values), block):
        part = [float(value) for value in values[start : start + block]]
        largest = max(map(abs, part))
        if name == "int4" and largest in part:  # it is the lowest number of steps
            largest = -largest
        steps.append(bf16_nearest(float(np.float32(largest) / np.float32(levels))))
        step = from_bf16(steps[-1])
        whole = [round(float(np.float32(value) / np.float32(step))) if step else 0 for value in part]
        whole = [min(number, levels - (name == "int4")) for number in whole]
        numbers += [number + levels for number in whole]
        result += [number * step for number in whole]
    if name == "int4":
        numbers += [0] * (len(numbers) % 2)
        numbers = [low | high << 4 for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
    return struct.pack(f"<{len(steps)}H", *steps) + bytes(numbers), result


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("count", "block"), [(1, 16), (100, 16), (1024, 1024), (1025, 1024), (5000, 1000), (4099, 17)])
def test_segments_are_as_defined(name: str, count: int, block: int) -> None:
    values = heavy(count)
    payload, result = slow(name, values, block)
    assert encoded(f"{name}:block={block}", values) == payload
    assert decoded(f"{name}:block={block}", payload, count).tolist() == result


def test_golden_bytes() -> None:
    """Of 1/127 = 0x3c010204 and -1/8 = 0xbe000000, the upper half. The largest magnitude is the lowest number of steps;
    its negative is one step short."""
    values = np.array([1, -1, 0.5, 0, -0.25, 0.004, 0.003], np.float32)
    assert encoded("int8", values) == b"\x01\x3c" + bytes([254, 0, 191, 127, 95, 128, 127])
    assert encoded("int4", values) == b"\x00\xbe" + bytes([0xF0, 0x84, 0x8A, 0x08])
    assert round_trip("int4", values).tolist() == [1, -0.875, 0.5, 0, -0.25, 0, 0]
    assert (round_trip("int4", -values[1:]) == -round_trip("int4", values[1:])).all()


@pytest.mark.parametrize(
    ("text", "bits"), [("int8", 8.02), ("int8:256", 8.0625), ("int4", 4.125), ("int4:1024", 4.02), ("int4:sr", 4.125)]
)
def test_bits_a_value(text: str, bits: float) -> None:
    """P5: (1 + 2/block) N or (1/2 + 2/block) N bytes."""
    assert len(encoded(text, heavy(65536))) * 8 / 65536 == pytest.approx(bits, abs=0.005)


SEGMENTS = npst.arrays(np.float32, st.integers(0, 60), elements=st.floats(-1, 1, width=32, allow_subnormal=False))
SCALES = st.sampled_from([2.0**-80, 1e-3, 1.0, 1e10, 3e38])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(SEGMENTS, SCALES)
def test_to_the_nearest_it_is_half_a_step_and_the_rest_is_exact(name: str, values: Values, scale: float) -> None:
    """P1: nothing is lost in what error feedback adds to the next round; |error| <= s/2, and <= s at the end that
    int4 does not reach."""
    values = values * np.float32(scale)
    result = round_trip(f"{name}:block=16", values)
    rest = values - result
    for start in range(0, len(values), 16):
        part = slice(start, start + 16)
        peak = float(np.abs(values[part]).max())
        step = max(peak / LEVELS[name] * (1 + 2**-8), LEVELS[name] * 2.0**-126)
        if scale < 3e38:
            reached = values[part] * 8 / 7.5 if name == "int4" else values[part]
            assert np.abs(rest[part])[np.abs(reached) <= peak].max(initial=0) <= step / 2
            assert np.abs(rest[part]).max() <= (step * (1 + 2**-5) if name == "int4" else step / 2)
    assert (rest.astype(np.float64) == values.astype(np.float64) - result).all()


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_apart(name: str) -> None:
    """A large value spoils its own block alone; a block of zeros is exact."""
    values = heavy(4096)
    values[1024:2048] = 0
    before = round_trip(name, values)
    values[5] = 1e30
    after = round_trip(name, values)
    block = 1024 if name == "int8" else 128
    assert (before[block:] == after[block:]).all()
    assert not after[1024:2048].any()
    assert np.flatnonzero(after[:block]).tolist() == [5]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rounding", ["", ":sr"])
def test_at_the_ends_of_fp32(name: str, rounding: str) -> None:
    """What the last finite step does not reach becomes it; what needs steps below 2^-126 becomes zero."""
    top = np.tile(np.array([LARGEST, -LARGEST, 0], np.float32), 5000)  # noise goes either way
    result = round_trip(name + rounding, top)
    away = 1 / 7 if name == "int4" else 2**-7
    assert (np.abs(result - top) <= away * np.abs(top)).all()
    assert np.isfinite(result).all()
    bottom = np.array([1e-38, -1e-45, 2.0**-127], np.float32)
    assert not round_trip(name + rounding, bottom).any()
    smallest = np.array([LEVELS[name] * 2.0**-126], np.float32)
    assert round_trip(name + rounding, smallest) == smallest


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_is_right_on_average(name: str) -> None:
    """Within 5 sigma over 60000 draws of each value, and never a whole step away."""
    draws, step = 60_000, 2.0**-5
    for part in (0.0, 0.01, 0.3, 0.5, 0.77, 0.999, 2.25, -0.4, -3.9):
        values = np.full(draws + 1, part * step, np.float32)
        values[-1] = LEVELS[name] * step
        result = round_trip(f"{name}:sr,block=65536", values, seed=17)[:draws].astype(np.float64)
        assert np.abs(result - part * step).max() < step
        fraction = part % 1
        sigma = step * np.sqrt(fraction * (1 - fraction) / draws)
        assert abs(result.mean() - part * step) <= 5 * sigma + 2**-16 * step


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_makes_the_noise(name: str) -> None:
    values = heavy(3000)
    assert encoded(f"{name}:sr", values, 1) == encoded(f"{name}:sr", values, 1)
    assert encoded(f"{name}:sr", values, 1) != encoded(f"{name}:sr", values, 2)
    assert encoded(name, values, 1) == encoded(name, values, 2)


@pytest.mark.parametrize("kind", ["normal", "laplace", "student"])
def test_sixteen_numbers_leave_out_a_fifth_less_than_fifteen_at_equal_bytes(kind: str) -> None:
    """Steps of 1/7 of the largest magnitude to either side were what int4 had; the same on seeds, and blocks of 128."""
    rng = np.random.default_rng(11)
    drawn = {
        "normal": rng.standard_normal(65536),
        "laplace": rng.laplace(0, 1, 65536),
        "student": rng.standard_t(5, 65536),
    }
    values = drawn[kind].astype(np.float32)
    steps = np.abs(values).reshape(-1, 128).max(1, keepdims=True) / np.float32(7)
    before = np.rint(values.reshape(-1, 128) / steps) * steps - values.reshape(-1, 128)
    left = {text: float(np.square(round_trip(text, values) - values).sum()) for text in ("int4", "int4:1024", "nf4")}
    assert left["int4"] < 0.8 * float(np.square(before).sum())
    assert left["int4"] < 0.7 * left["int4:1024"]
    assert left["nf4"] < 0.88 * left["int4"]
    assert len(encoded("nf4", values)) == len(encoded("int4", values)) == 65536 // 128 * 66


def test_steps_that_are_drawn_reach_both_ends() -> None:
    """Else the mean at the other end would be a step short: within 5 sigma."""
    values = np.tile(np.array([1, -1], np.float32), 32768)
    assert abs(float(round_trip("int4:sr", values, 3).sum())) / 65536 < 5 * (1 / 7) / 256
    assert round_trip("int4:sr", values, 3)[::2].mean() == pytest.approx(1, abs=0.005)


def test_normal_floats_are_as_defined() -> None:
    """Golden, and the ends: the table is QLoRA's, the scale the upper half of the block's largest magnitude."""
    values = np.array([2, -2, 0, 0.17, -1.0, 0.9], np.float32)
    assert encoded("nf4", values) == b"\x00\x40" + bytes([0x0F, 0x87, 0xC2])
    assert round_trip("nf4", values).tolist() == [2, -2, 0, *(np.float32(2) * TABLE[[8, 2, 12]])]
    assert np.square(TABLE).sum() == pytest.approx(4.280103, abs=1e-6)
    heavy_ones = heavy(5000)
    for start in range(0, 5000, 128):
        part = heavy_ones[start : start + 128]
        scale = np.float32(from_bf16(bf16_nearest(float(np.abs(part).max()))))
        nearest = (scale * TABLE)[np.abs(part[:, None] / scale - TABLE).argmin(axis=1)]
        found = round_trip("nf4", part)
        assert (np.abs(found - part) <= np.abs(nearest - part) + scale / 1000).all()


@pytest.mark.parametrize("scale", [0x7F80, 0x7FC0, 0x8000, 0xBF80])
def test_a_scale_that_no_encoder_makes_is_refused(scale: int) -> None:
    refused("nf4", struct.pack("<H", scale) + bytes(2), 3, "a step size is not within")
    refused("nf4", b"\x80\x3f" + bytes([0x17]), 1, "behind the last")


def test_two_thirds_of_the_error_of_stochastic_rounding_is_avoidable() -> None:
    """Uniform within a step: variance 1/12 to the nearest, 1/6 stochastic."""
    values = heavy(65536)
    nearest, drawn = (np.square(round_trip(text, values) - values).sum() for text in ("int8", "int8:sr"))
    assert drawn / nearest == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("step", [INFINITY, INFINITY + 1, 0x7FFF, 0x8000, 0xBF80, 0xFF80, 0x7F7F])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_no_encoder_makes_is_refused(name: str, step: int) -> None:
    """Infinite, not a number, negative (for int4 a negative zero alone), or so large that the last step would be
    infinite."""
    payload = struct.pack("<H", step) + encoded(name, np.ones(3, np.float32))[2:]
    if name == "int4" and step == 0xBF80:
        assert decoded(name, payload, 3).tolist() == [8, 8, 8]
    else:
        refused(name, payload, 3, "a step size is not within")


def test_a_number_that_no_encoder_makes_is_refused() -> None:
    refused("int8", b"\x80\x3f" + bytes([254, 255]), 2, "more than 127 steps")
    refused("int4", b"\x80\x3f" + bytes([0x17]), 1, "behind the last")
