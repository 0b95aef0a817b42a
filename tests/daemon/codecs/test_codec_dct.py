"""dct against its definition (ALGORITHMS section 5, DeMo), beside what all codecs are held to."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtraind.codecs.base import Terms
from meshtraind.codecs.cosines import Cosines, exact_secants
from meshtraind.contributions.error_feedback import Residual
from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.codecs.sparsifiers import square_chunks
from tests.daemon.codectrips import Values, codec, encoded, heavy, round_trip

FULL = limits.SEGMENT_VALUES_MAX


def cosine(side: int, down: int, across: int) -> Values:
    """One term of the two-dimensional DCT-II, of norm 1."""
    line = [np.cos(np.pi * (np.arange(side) + 0.5) * frequency / side) for frequency in (down, across)]
    term = np.outer(*line)
    values: Values = (term / np.linalg.norm(term)).astype(np.float32).ravel()
    return values


def spectrum(values: Values) -> Values:
    out = np.empty_like(values)
    Cosines().forward(values, float(np.abs(values).max()), out)
    return out


@given(st.integers(0, FULL))
def test_squares_are_all_of_a_segment(count: int) -> None:
    end = 0
    for start, side, number in square_chunks(count):
        assert start == end
        end += number * side * side
        assert side == 64 or number <= 3
    assert end == count


@pytest.mark.parametrize(("side", "down", "across"), [(64, 0, 0), (64, 5, 0), (64, 63, 62), (32, 7, 31), (2, 1, 1)])
def test_a_cosine_has_one_coefficient(side: int, down: int, across: int) -> None:
    """The definition; and the two directions are told apart."""
    coefficients = spectrum(cosine(side, down, across))
    assert coefficients[across * side + down] == pytest.approx(1, abs=1e-6)
    assert np.abs(np.delete(coefficients, across * side + down)).max() < 1e-6
    assert round_trip("dct:1+fp32", cosine(side, down, across)) == pytest.approx(cosine(side, down, across), abs=1e-6)


@pytest.mark.parametrize("count", [1, 3, 64, 1000, 4096, 5461, FULL])
@pytest.mark.parametrize("scale", [1e-38, 1e-3, 1e36])
def test_all_coefficients_are_the_values(count: int, scale: float) -> None:
    """decode(encode(x)) == x to 1e-5, of the norm."""
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32) * np.float32(scale)
    wide = values.astype(np.float64)
    assert np.linalg.norm(round_trip("dct:4096+fp32", values) - wide) <= 1e-6 * np.linalg.norm(wide)


def test_the_largest_coefficients_of_each_chunk_are_sent() -> None:
    values = heavy(2 * 4096 + 5)
    sent = spectrum(round_trip("dct:32+fp32", values))
    for chunk in (slice(0, 4096), slice(4096, 8192)):
        expected = np.sort(np.abs(spectrum(values)[chunk]))[-32:]
        assert np.sort(np.abs(sent[chunk]))[-32:] == pytest.approx(expected, rel=1e-4)
        assert np.sort(np.abs(sent[chunk]))[-33] < 1e-3 * expected[0]
    assert round_trip("dct:32+fp32", values)[8192:] == pytest.approx(values[8192:], rel=1e-4)  # fewer than 32 each


def test_of_equal_coefficients_no_more_are_sent_than_asked_for() -> None:
    """A single value has as large ones in several places."""
    values = np.zeros(4096, np.float32)
    values[0] = 1
    values[4095] = -1
    assert np.count_nonzero(np.abs(spectrum(round_trip("dct:5+fp32", values))) > 1e-4) <= 5


def test_32_of_4096_are_a_160th() -> None:
    """DeMo: 32 (index + value) / 4096. Here an index takes 9 bits, and a value 16."""
    assert len(encoded("dct", heavy(FULL))) * 160 < 4 * FULL


def test_decoding_is_the_same_on_every_machine() -> None:
    """O9. Golden: numpy's elementwise operations are those of IEEE 754; a matrix product here would differ between
    processors."""
    digits = hashlib.shake_128(b"coefficients").digest(2 * 9000)
    coefficients = np.frombuffer(digits, "<i2").astype(np.float32)
    out = np.empty_like(coefficients)
    Cosines().inverse(np.arange(len(out)), coefficients, float(np.abs(coefficients).max()), out)
    assert hashlib.sha256(out.astype("<f4").tobytes()).hexdigest()[:16] == "36b3cf3921496023"


@pytest.mark.parametrize("count", [5, 5000, FULL])
@pytest.mark.parametrize("sent", [0, 1, 200])
def test_few_coefficients_are_transformed_as_all_with_zeros(count: int, sent: int) -> None:
    """To the last bit: lines without any are left out, and change nothing."""
    rng = np.random.default_rng(count + sent)
    places = np.sort(rng.choice(count, min(sent, count), replace=False))
    spectrum = np.zeros(count, np.float32)
    spectrum[places] = rng.standard_normal(len(places))
    few, all_ = np.empty((2, count), np.float32)
    Cosines().inverse(places, spectrum[places], 4.0, few)
    Cosines().inverse(np.arange(count), spectrum, 4.0, all_)
    assert few.tobytes() == all_.tobytes()


def test_no_mathematical_library_rounds_a_constant_otherwise() -> None:
    """Those of C libraries err by a few last bits of float64. None of the constants comes that near to where fp32 is
    rounded up and not down."""
    for size in (2, 4, 8, 16, 32, 64):
        for exact in exact_secants(size):
            spacing = float(np.spacing(np.float32(exact)))
            from_middle = 0.5 * spacing - abs(exact - float(np.float32(exact)))
            assert from_middle > 2**21 * math.ulp(exact)


@pytest.mark.parametrize("value", [3.4e38, -3.4e38, 1e-45])
def test_coefficients_at_the_ends_of_fp32_make_finite_values(value: float) -> None:
    """Whatever a peer sends."""
    coefficients = np.full(5000, value, np.float32)
    out = np.empty_like(coefficients)
    with np.errstate(all="raise", under="ignore"):
        Cosines().inverse(np.arange(len(out)), coefficients, abs(float(coefficients[0])), out)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("decay", [0.999, 0.9])
def test_a_momentum_is_conserved_to_the_last_bits(decay: float) -> None:
    """Geometric P1 of DeMo: delta + sum b^(T-t) sent_t == sum b^(T-t) g_t, to the roundings of fp32."""
    count, rounds = 5000, 60
    residual, momentum, sent = Residual(count, decay), np.zeros(count), np.zeros(count)
    coder = codec("dct:32")
    out = memoryview(bytearray(coder.spec.segment_bytes_max(count)))
    decoded = np.empty(count, np.float32)
    for number in range(rounds):
        gradient = heavy(count, number)
        values = residual.begin(number, 0, count, 1.0)
        values += gradient
        coder.decode_into(out[: coder.encode_rest_into(values, out, Terms(seed=0))], decoded)
        residual.settle(number, void=False)
        momentum = float(np.float32(decay)) * momentum + gradient
        sent = float(np.float32(decay)) * sent + decoded
    assert np.abs(residual.values + sent - momentum).max() < 1e-6 * np.abs(momentum).max()
    assert np.linalg.norm(sent) > 0.3 * np.linalg.norm(momentum)


def test_everything_of_one_member_without_memory_is_sign_sgd() -> None:
    """k = all, m = 1, decay 0: after worker and owner, the signs of the gradients, in every round."""
    count, coder = 5000, codec("dct:4096,decay=0+fp32")
    out = memoryview(bytearray(coder.spec.segment_bytes_max(count)))
    worker, owner = (Residual(count, coder.spec.decay) for _ in range(2))
    for number in range(3):
        mean = gradient = heavy(count, number)
        for residual in (worker, owner):
            values = residual.begin(number, 0, count, 1.0)
            values += mean
            mean = np.empty(count, np.float32)
            coder.decode_into(out[: coder.encode_rest_into(values, out)], mean)
            residual.settle(number, void=False)
        clear = np.abs(gradient) > 1e-5 * np.linalg.norm(gradient) / math.sqrt(count)
        assert (np.sign(mean) == np.sign(gradient))[clear].all()
        assert clear.mean() > 0.99


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dct:0", "coefficients is '0'; it must be a whole number from 1 to 4096"),
        ("dct:2.5", "coefficients is '2.5'"),
        ("dct:4097", "coefficients is '4097'"),
        ("dct:decay=2", "decay is '2'; it must be a number from 0 to 1"),
    ],
)
def test_wrong_parameters_are_named_with_what_is_legal(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_codec(text)
