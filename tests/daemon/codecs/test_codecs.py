import struct
import sys
import warnings
from subprocess import run

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Codec, CodecError
from meshtraind.codecs.fp16 import EXPONENT_MAX, EXPONENT_MIN
from meshwire import limits
from meshwire.codecs.registry import SEGMENT_FAMILIES, Reduction

Values = NDArray[np.float32]

NAMES = sorted(family.name for family in SEGMENT_FAMILIES.values() if family.reduction is Reduction.LINEAR)
LARGEST = float(np.finfo(np.float32).max)
TINIEST = float(np.finfo(np.float32).smallest_subnormal)

# Relative to the segment's peak; what is not covered by it, at the very bottom of fp32, is the second number.
TOLERANCES = {"fp32": (0.0, 0.0), "fp16": (2**-11, 0.0), "bf16": (2**-8, 2**-134)}

SCALES = st.sampled_from([TINIEST, 1e-40, 1e-30, 1e-6, 1.0, 1e6, 1e30, LARGEST])
SEGMENTS = st.builds(
    lambda values, scale: (values * scale).astype(np.float32),
    npst.arrays(np.float64, st.integers(0, 300), elements=st.floats(-1, 1)),
    SCALES,
) | npst.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


def encoded(codec: Codec, values: Values) -> memoryview:
    out = memoryview(bytearray(codec.spec.segment_bytes_max(len(values))))
    assert codec.encode_into(values, out) == len(out)
    return out


def decoded(codec: Codec, payload: memoryview, count: int) -> Values:
    out = np.full(count, 7, np.float32)
    codec.decode_into(payload, out)
    return out


def round_trip(name: str, values: Values) -> Values:
    codec = codec_named(name)
    return decoded(codec, encoded(codec, values), len(values))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(SEGMENTS)
def test_errors_are_bounded_and_finite_stays_finite(name: str, values: Values) -> None:
    """C1: any finite segment, from denormals to the largest values, also an empty one."""
    relative, absolute = TOLERANCES[name]
    result = round_trip(name, values)
    assert np.isfinite(result).all()
    peak = np.abs(values.astype(np.float64)).max(initial=0)
    error = np.abs(result.astype(np.float64) - values).max(initial=0)
    assert error <= relative * peak + absolute
    assert (np.signbit(result) == np.signbit(values)).all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(SEGMENTS)
def test_a_second_trip_changes_nothing(name: str, values: Values) -> None:
    """What the owner's bytes decode to, encodes to the same values again."""
    once = round_trip(name, values)
    assert (round_trip(name, once).view(np.uint32) == once.view(np.uint32)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exponent", [-149, -140, -126, -100, 0, 60, 120])
def test_dyadic_values_that_fit_are_exact(name: str, exponent: int) -> None:
    values = np.array([0, 1, -1, 3, 5, -7, 96, 127, 128, -0.0], np.float64) * 2.0**exponent
    whole = values.astype(np.float32)
    if name == "bf16" and exponent < -133:  # below the smallest bf16
        return
    assert (round_trip(name, whole).view(np.uint32) == whole.view(np.uint32)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.0, TINIEST, -TINIEST, 1e-40, 3e38, -3e38, LARGEST, -LARGEST])
def test_single_values(name: str, value: float) -> None:
    values = np.array([value], np.float32)
    result = round_trip(name, values)
    relative, absolute = TOLERANCES[name]
    assert np.isfinite(result[0])
    assert abs(float(result[0]) - float(values[0])) <= relative * abs(float(values[0])) + absolute


def test_fp16_is_ieee_half_precision() -> None:
    """The integer arithmetic rounds as numpy's own cast does."""
    rng = np.random.default_rng(5)
    normal = rng.standard_normal(5000) * 2.0 ** rng.integers(-12, 14, 5000)
    ties = (np.arange(2048, 4096, 0.5)) * 2.0**-5  # every second one lies halfway between two halves
    values = np.concatenate([normal.clip(-30000, 30000), ties, [20000.0]]).astype(np.float32)
    payload = encoded(codec_named("fp16"), values)
    assert struct.unpack_from("<i", payload) == (0,)
    assert (np.frombuffer(payload, "<u2", offset=4) == values.astype("<f2").view("<u2")).all()


def test_every_half_decodes_as_ieee_says() -> None:
    halves = np.arange(2**16, dtype="<u2")
    halves = halves[np.isfinite(halves.view("<f2"))]
    payload = memoryview(struct.pack("<i", 0) + halves.tobytes())
    result = decoded(codec_named("fp16"), payload, len(halves))
    assert (result.view(np.uint32) == halves.view("<f2").astype(np.float32).view(np.uint32)).all()


def test_fp16_loses_no_small_gradients() -> None:
    """The scale follows the segment: gradients of 1e-9, zero in plain fp16, keep 11 bits."""
    values = np.linspace(1e-9, 2e-9, 1000, dtype=np.float32)
    assert (values.astype(np.float16) == 0).all()
    assert np.allclose(round_trip("fp16", values), values, rtol=2**-11, atol=0)


def test_bf16_rounds_to_nearest_even() -> None:
    cases = {0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0x3F807FFF: 0x3F80, 0xBF818000: 0xBF82}
    values = np.array(list(cases), np.uint32).view(np.float32)
    assert list(np.frombuffer(encoded(codec_named("bf16"), values), "<u2")) == list(cases.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_wire_is_little_endian(name: str) -> None:
    expected = {
        "fp32": b"\x00\x00\x80\x3f\x00\x00\x00\xc0",
        "fp16": struct.pack("<i", -13) + b"\x00\x70\x00\xf4",
        "bf16": b"\x80\x3f\x00\xc0",
    }
    assert encoded(codec_named(name), np.array([1, -2], np.float32)).tobytes() == expected[name]


@pytest.mark.parametrize("name", NAMES)
def test_adding_is_decoding_and_adding(name: str) -> None:
    """C2, DESIGN section 8: sums are made in fp32."""
    rng = np.random.default_rng(3)
    values, start = rng.standard_normal((2, limits.SEGMENT_VALUES_MAX)).astype(np.float32)
    codec = codec_named(name)
    payload = encoded(codec, values)
    total = np.empty_like(start)
    codec.sum_into(payload, start, total)
    assert (total == start + decoded(codec, payload, len(values))).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_may_overflow_in_silence(name: str) -> None:
    """V1: whoever sums sees it and sends poison; it is no warning and no error here."""
    codec = codec_named(name)
    value, total = np.array([3e38], np.float32), np.empty(1, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codec.sum_into(encoded(codec, value), value, total)
    assert np.isinf(total[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_bytes_may_lie_anywhere(name: str, offset: int) -> None:
    """Segments lie behind one another in an area, wherever their sizes put them."""
    values = np.linspace(-3, 3, 101, dtype=np.float32)
    codec = codec_named(name)
    length = codec.spec.segment_bytes_max(len(values))
    area = memoryview(bytearray(length + 4))
    codec.encode_into(values, area[offset : offset + length])
    assert area[:offset].tobytes() == bytes(offset)
    assert area[offset + length :].tobytes() == bytes(4 - offset)
    assert (decoded(codec, area[offset : offset + length], len(values)) == round_trip(name, values)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_values_that_are_not_finite_are_not_encoded(name: str, bits: int) -> None:
    """V1: they travel as poison, never as bytes."""
    values = np.array([1, 0, 2], np.float32)
    values.view(np.uint32)[1] = bits
    with pytest.raises(CodecError, match="not a number"):
        encoded(codec_named(name), values)


HOSTILE = [
    *(("fp32", struct.pack("<ff", 1, value)) for value in (np.inf, -np.inf, np.nan)),
    *(("bf16", struct.pack("<HH", 0x3F80, bits)) for bits in (0x7F80, 0xFF80, 0x7FC0, 0xFFFF)),
    *(("fp16", struct.pack("<iHH", 0, 0, bits)) for bits in (0x7C00, 0xFC00, 0x7C01, 0xFFFF)),
    *(
        ("fp16", struct.pack("<iHH", exponent, 1, 1))
        for exponent in (EXPONENT_MAX + 1, EXPONENT_MIN - 1, 2**31 - 1, -(2**31))
    ),
    ("fp16", struct.pack("<fHH", np.inf, 1, 1)),
    ("fp16", struct.pack("<fHH", np.nan, 1, 1)),
    ("fp16", struct.pack("<iHH", EXPONENT_MAX, 0, 0x7800)),  # 2^15 * 2^113
]


@pytest.mark.parametrize(("name", "payload"), HOSTILE)
def test_a_hostile_payload_is_refused(name: str, payload: bytes) -> None:
    """DESIGN section 8: a protocol error, never an exception elsewhere; a sum with it cannot be encoded."""
    codec = codec_named(name)
    own, total = np.array([1, 2], np.float32), np.empty(2, np.float32)
    with pytest.raises(CodecError):
        codec.decode_into(memoryview(payload), total)

    def sum_and_encode() -> None:
        codec.sum_into(memoryview(payload), own, total)
        encoded(codec, total)

    with pytest.raises(CodecError):
        sum_and_encode()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(st.data(), st.integers(0, 20))
def test_any_bytes_decode_to_finite_values_or_are_refused(name: str, data: st.DataObject, count: int) -> None:
    codec = codec_named(name)
    length = codec.spec.segment_bytes_max(count)
    payload = memoryview(data.draw(st.binary(min_size=length, max_size=length)))
    out = np.zeros(count, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            codec.decode_into(payload, out)
        except CodecError:
            return
    assert np.isfinite(out).all()


@pytest.mark.parametrize("name", NAMES)
def test_wrong_lengths_are_refused(name: str) -> None:
    codec = codec_named(name)
    values = np.ones(5, np.float32)
    length = codec.spec.segment_bytes_max(5)
    for wrong in (0, length - 1, length + 1):
        place = memoryview(bytearray(wrong))
        with pytest.raises(CodecError, match=f"{wrong} bytes for 5 values, which take {length}"):
            codec.decode_into(place, values)
        with pytest.raises(CodecError, match=f"{wrong} bytes for 5 values, which take {length}"):
            codec.sum_into(place, values, np.empty(5, np.float32))
    with pytest.raises(CodecError):
        codec.encode_into(values, memoryview(bytearray(length - 1)))
    too_many = limits.SEGMENT_VALUES_MAX + 1
    with pytest.raises(CodecError, match="at most 65536"):
        codec.decode_into(memoryview(bytes(codec.spec.segment_bytes_max(too_many))), np.empty(too_many, np.float32))


def test_a_full_segment_of_each_codec() -> None:
    values = np.random.default_rng(1).standard_normal(limits.SEGMENT_VALUES_MAX).astype(np.float32)
    for name in NAMES:
        assert np.abs(round_trip(name, values) - values).max() <= TOLERANCES[name][0] * np.abs(values).max()


def test_the_registry_knows_exactly_what_peers_agree_on() -> None:
    assert {codec_named(name).spec.name for name in SEGMENT_FAMILIES} == set(SEGMENT_FAMILIES)
    with pytest.raises(ValueError, match="there is no codec 'int3'; there are fp32, fp16, bf16"):
        codec_named("int3")


def test_numpy_is_imported_when_first_needed() -> None:
    """An idle daemon does without it."""
    script = "import sys, meshtraind.codecs; sys.exit('numpy' in sys.modules)"
    assert run([sys.executable, "-c", script], check=False).returncode == 0
