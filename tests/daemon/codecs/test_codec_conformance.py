"""What holds for every codec there is (ALGORITHMS section 3, P1 to P5; C1, V1; DESIGN section 8).

A family is in as soon as it is registered: with its defaults, and with the choices that `MORE` adds. `claims`
says what a family promises beyond what all do, and why if it does not.
"""

import itertools
import tracemalloc
import warnings
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import CodecError, Terms
from meshwire import limits
from meshwire.codecs.quantizers import INT4_BLOCK, ONEBIT_COLUMN, TWOBIT_COLUMN
from meshwire.codecs.registry import SEGMENT_FAMILIES, parse_codec
from meshwire.codecs.sparsifiers import kept_in_round
from tests.daemon.codectrips import Values, codec, decoded, encoded, heavy

MORE = (
    *("topk:0.1", "topk:1", "topk:0.3+int8", "topk:0.05+fp32", "threshold:0.5", "threshold:rms=0"),
    *("threshold:magnitude=0.3+int8", "threshold:magnitude=0.7+2bit"),
    *("threshold:rms=1+int8", "threshold:rms=2+fp32", "sidco:0.1,gamma,gather", "sidco:0.02,pareto+fp32"),
    *("dgc:0.01,ramp=0+fp32", "dgc:1"),
    *("randomk:0.3+fp32", "randomk:0.5+int8", "topk:0.1+int4", "threshold:rms=1+int4", "cocktail:1,ratio=0.1+fp16"),
    *("dct:4096+fp32", "dct:3,gather+int8"),
    *(
        "int8:sr,block=256",
        "int8:block=17",
        "int4:sr",
        "int4:block=64",
        "nf4:block=64",
        "qsgd:1",
        "qsgd:127",
        "twobit:rms=0.25",
    ),
    *("twobit:rms=2", "topk:0.05,chunk=300+2bit", "threshold:rms=1+2bit", "homomorphic:0.3"),
)
CODECS = sorted({str(parse_codec(text)) for text in (*SEGMENT_FAMILIES, *MORE)})
ROUNDED = ("int8", "2bit")  # forms of values whose rest is rounded to fp32
LARGEST = float(np.finfo(np.float32).max)
TINIEST = float(np.finfo(np.float32).smallest_subnormal)
SEED = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Claims:
    """What a codec promises beyond what all do.

    Attributes:
        exact: sent + rest is the input, to the last bit, over many rounds, for dyadic values of moderate range.
        fixed_point: what is decoded is encoded to the same bytes again.
        kept: of the squared norm, the part that one encoding sends at least.
        stalls: without error feedback it does not reach an optimum where workers disagree.
    """

    exact: bool = False
    fixed_point: bool = True
    kept: float = 0.0
    stalls: bool = True


def claims(text: str) -> Claims:
    spec = parse_codec(text)
    match spec.name:
        case "fp32" | "fp16" | "bf16":
            return Claims(exact=True)
        case "topk":
            # int8 loses up to half a step at each value; of a bucket of int4 the largest one is sent at least. The mean
            # of n values of one sign has at least 1/n of their squared norm; what it leaves is rounded to fp32.
            rough = {"int8": 0.9, "int4": 0.9 / INT4_BLOCK, "2bit": 0.9 / limits.SEGMENT_VALUES_MAX}
            part = rough.get(spec.choice("values"), 1 - 2**-20)
            exact, fixed_point = spec.choice("values") not in ROUNDED, spec.choice("values") != "int4"
            return Claims(exact=exact, fixed_point=fixed_point, kept=spec.ramp("ratio").last * part)
        case "dgc":
            return Claims(exact=True, kept=kept_in_round(spec, 1, 10**6) / 10**6 * (1 - 2**-20))
        case "threshold":
            # The rms of what was sent is another. Of a bucket of int4 small values become zeros, and others neighbours;
            # where 2 bits are sent for all, means are of what is below the threshold, too.
            fixed_point = bool(spec.number("magnitude")) and spec.choice("values") not in ("int4", "2bit")
            return Claims(exact=spec.choice("values") not in ROUNDED, fixed_point=fixed_point)
        case "sidco":
            # The fit to what was sent is another.
            return Claims(exact=spec.choice("values") != "int8", fixed_point=False)
        case "cocktail":
            # As with randomk no place is left out for ever; with int4 what is left of a bucket makes other ones.
            return Claims(exact=True, fixed_point=spec.choice("values") == "fp16", stalls=False)
        case "dct":
            # Sums of cosines are rounded, and what is decoded has other coefficients by as much.
            # Of the largest fp32 numbers coefficients would be larger still.
            return Claims(fixed_point=False, kept=0.8 * spec.number("coefficients") / 4096)
        case "randomk":
            # No place is left out for ever: rounds without error feedback are slow, but no worse.
            return Claims(exact=spec.choice("values") != "int8", stalls=False)
        case "homomorphic":
            # Largest magnitudes, but not of what is beyond fp16's range. The optimum's segment is so short that all
            # of it is sent.
            return Claims(exact=True, stalls=False)
        case "int8" | "int4":
            # Steps that are drawn may not reach the last one, and what is sent then has other steps.
            nearest = spec.choice("rounding") == "nearest"
            return Claims(exact=nearest, fixed_point=nearest, kept=0.9 / spec.number("block"))
        case "nf4":
            # The largest one is sent.
            return Claims(kept=0.9 / spec.number("block"))
        case "twobit":
            # The root mean square of what was sent is another. The mean of n values has at least 1/n of their squared
            # norm.
            return Claims(fixed_point=False, kept=0.99 / TWOBIT_COLUMN)
        case "onebit":
            # The mean of n values has at least 1/n of their squared norm.
            return Claims(kept=0.99 / ONEBIT_COLUMN)
        case "qsgd" | "terngrad":
            # Drawn anew; the norm and the deviation of what was sent are others.
            return Claims(fixed_point=False)
        case _:
            return Claims()


@pytest.mark.parametrize("text", CODECS)
def test_who_looks_at_the_seed_says_so(text: str) -> None:
    """Nobody else is given one."""
    values = heavy(4096)
    assert (encoded(text, values, 1) != encoded(text, values, 2)) == codec(text).draws


def with_feedback() -> list[str]:
    return [text for text in CODECS if parse_codec(text).error_feedback]


def dyadic(count: int, seed: int = 1) -> Values:
    """Whole multiples of 2^-12 below 1, so that a hundred of them add up exactly."""
    return (np.round(np.random.default_rng(seed).laplace(0, 0.05, count).clip(-0.99, 0.99) * 2**12) / 2**12).astype(
        np.float32
    )


def edges() -> dict[str, Values]:
    """Finite segments of every awkward kind."""
    rng = np.random.default_rng(2)
    normal = rng.standard_normal(1000).astype(np.float32)
    spike = np.zeros(777, np.float32)
    spike[333] = -3.0
    return {
        "empty": np.empty(0, np.float32),
        "one": np.array([0.7], np.float32),
        "one zero": np.zeros(1, np.float32),
        "one negative zero": np.array([-0.0], np.float32),
        "two": np.array([1, -2], np.float32),
        "prime": heavy(1009),
        "odd and small": heavy(7),
        "zeros": np.zeros(1000, np.float32),
        "constant": np.full(1000, -0.3, np.float32),
        "two constants": np.where(rng.random(1000) < 0.3, np.float32(0.25), np.float32(-4)),
        "denormal": (normal * 1e-40).astype(np.float32),
        "tiniest": np.where(normal > 0, np.float32(TINIEST), np.float32(-TINIEST)),
        "smallest normal": np.full(300, np.finfo(np.float32).tiny, np.float32),
        "huge": (normal.clip(-3, 3) * 1e38).astype(np.float32),
        "largest": np.where(normal > 0, np.float32(LARGEST), np.float32(-LARGEST)),
        "of all sizes": (normal * 10.0 ** rng.integers(-44, 37, 1000)).astype(np.float32),
        "spike": spike,
        "spike over noise": np.where(spike, np.float32(LARGEST), normal[:777]),
        "striped": np.tile(np.array([5, *[0.001] * 15], np.float32), 512),  # a sample of every so-manieth sees one kind
        "sorted": np.sort(heavy(5000)),
        "sparse": np.where(rng.random(20000) < 0.003, rng.standard_normal(20000), 0).astype(np.float32),
        "full": heavy(limits.SEGMENT_VALUES_MAX),
    }


EDGES = edges()
for values in EDGES.values():
    values.flags.writeable = False
DENORMAL = (
    "denormal",
    "tiniest",
    "smallest normal",
    "of all sizes",
)  # where what is below the smallest step may be lost


@pytest.mark.parametrize("text", CODECS)
def test_every_finite_segment_is_encoded_within_its_size_and_decoded_to_finite_values(text: str) -> None:
    """P5: `fixed` means exactly `segment_bytes_max`. The values are not touched, and nothing warns."""
    spec = parse_codec(text)
    for name, values in EDGES.items():
        payload = memoryview(encoded(text, values))
        assert len(payload) <= spec.segment_bytes_max(len(values)), name
        assert len(payload) == spec.segment_bytes_max(len(values)) or not spec.fixed, name
        assert codec(text).length_of(payload, len(values)) == len(payload), name
        assert np.isfinite(decoded(text, payload, len(values))).all(), name


@pytest.mark.parametrize("text", with_feedback())
def test_what_stays_behind_is_no_larger_than_what_came(text: str) -> None:
    """P3: ||x - C(x)||^2 <= (1 - kept) ||x||^2, without which error feedback would not be bounded."""
    for name, values in EDGES.items():
        peak = np.abs(values).max(initial=np.float32(TINIEST)).astype(np.float64)
        left = (values - decoded(text, encoded(text, values), len(values)).astype(np.float64)) / peak
        kept = 0.0 if name in DENORMAL else claims(text).kept
        assert left @ left <= (1 - kept) * np.square(values / peak).sum() * (1 + 1e-9), name


@pytest.mark.parametrize("text", CODECS)
def test_sent_and_rest_are_what_came(text: str) -> None:
    """P1, one round: the rest is the values minus those decoded, and the bytes are those of `encode_into`. It is
    finite: an infinite one would make poison (V1) of all rounds that follow."""
    for name, values in EDGES.items():
        rest = values.copy()
        out = memoryview(bytearray(codec(text).spec.segment_bytes_max(len(values))))
        payload = out[: codec(text).encode_rest_into(rest, out, Terms(seed=SEED))]
        assert payload == encoded(text, values, SEED), name
        sent = decoded(text, payload, len(values))
        with np.errstate(over="ignore"):
            assert (rest == np.clip(values - sent, -LARGEST, LARGEST)).all(), name
        if claims(text).exact:
            assert (rest.astype(np.float64) + sent == values).all() or name in DENORMAL, name


@pytest.mark.parametrize("text", [text for text in CODECS if claims(text).exact])
def test_nothing_is_lost_over_many_rounds(text: str) -> None:
    """P1: sum of what was sent + residual == sum of gradients, exactly, for dyadic values."""
    residual, sent, came = np.zeros(2000, np.float32), np.zeros(2000), np.zeros(2000)
    for turn in range(25):
        gradient = dyadic(2000, turn)
        came += gradient
        residual += gradient
        payload = memoryview(bytearray(codec(text).spec.segment_bytes_max(2000)))
        length = codec(text).encode_rest_into(residual, payload, Terms(seed=turn))
        sent += decoded(text, payload[:length], 2000)
    assert (sent + residual == came).all()
    assert sent.any()


@pytest.mark.parametrize("text", [text for text in CODECS if claims(text).fixed_point])
def test_what_is_decoded_is_encoded_to_the_same_again(text: str) -> None:
    """P2, of values: bytes can differ where a peak is rounded up to the next power of two."""
    for name, values in EDGES.items():
        once = decoded(text, encoded(text, values), len(values))
        again = decoded(text, encoded(text, once), len(once))
        assert (again == once).all(), name


@pytest.mark.parametrize("text", CODECS)
def test_the_same_values_and_seed_give_the_same_bytes(text: str) -> None:
    """Nothing is remembered: not in a fresh codec, not in one that encoded others in between."""
    values = heavy(3001)
    first = encoded(text, values, 5)
    encoded(text, EDGES["huge"], 6)
    assert encoded(text, values, 5) == first
    out = memoryview(bytearray(parse_codec(text).segment_bytes_max(3001)))
    assert bytes(out[: codec_named(text).encode_into(values, out, Terms(seed=5))]) == first
    assert np.isfinite(decoded(text, encoded(text, values, 2**64 - 1), 3001)).all()


@pytest.mark.parametrize("text", CODECS)
def test_adding_is_decoding_and_adding(text: str) -> None:
    """Also in place; a sum may overflow in silence, for whoever encodes it will see it (V1)."""
    for name, values in EDGES.items():
        payload = memoryview(encoded(text, values))
        start = np.ascontiguousarray(np.resize(EDGES["huge" if name == "huge" else "prime"], len(values)))
        with np.errstate(over="ignore"):
            expected = start + decoded(text, payload, len(values))
        total = np.empty_like(start)
        codec(text).sum_into(payload, start, total)
        assert (total == expected).all(), name
        codec(text).sum_into(payload, start, start)
        assert (start == expected).all(), name


@pytest.mark.parametrize("text", CODECS)
def test_values_that_are_not_finite_are_refused_and_left_alone(text: str) -> None:
    """V1: they travel as poison."""
    out = memoryview(bytearray(parse_codec(text).segment_bytes_max(1000)))
    for value, place in itertools.product([np.inf, -np.inf, np.nan], [0, 500, 999]):
        values = heavy(1000)
        values[place] = value
        before = values.copy()
        with pytest.raises(CodecError, match="not a number"):
            codec(text).encode_into(values, out, Terms(seed=SEED))
        with pytest.raises(CodecError, match="not a number"):
            codec(text).encode_rest_into(values, out, Terms(seed=SEED))
        assert (values.view(np.uint32) == before.view(np.uint32)).all()


@pytest.mark.parametrize("text", CODECS)
def test_segments_lie_back_to_back(text: str) -> None:
    """Lengths follow from the bytes, wherever they begin; what lies around a segment is not touched."""
    counts = [1009, 0, 1, 4096, 7, 1000]
    area = memoryview(bytearray(b"\xa5" * (3 + sum(map(parse_codec(text).segment_bytes_max, counts)))))
    at = 3
    for count in counts:
        at += codec(text).encode_into(heavy(count), area[at:], Terms(seed=SEED))
    assert set(area[:3]) == {0xA5}
    assert set(area[at:]) <= {0xA5}
    area, at = area[:at], 3
    for count in counts:
        length = codec(text).length_of(area[at:], count)
        alone = decoded(text, encoded(text, heavy(count), SEED), count)
        assert (decoded(text, area[at : at + length], count) == alone).all()
        at += length
    assert at == len(area)


@pytest.mark.parametrize("text", CODECS)
def test_wrong_lengths_are_refused(text: str) -> None:
    values = heavy(300)
    payload = memoryview(encoded(text, values))
    for length in range(len(payload)):
        with pytest.raises(CodecError):
            codec(text).length_of(payload[:length], 300)
        with pytest.raises(CodecError):
            codec(text).decode_into(payload[:length], values)
    with pytest.raises(CodecError):
        codec(text).decode_into(memoryview(payload.tobytes() + b"\0"), values)
    with pytest.raises(CodecError):
        codec(text).sum_into(memoryview(payload.tobytes() + b"\0"), values, values)
    with pytest.raises(CodecError):
        codec(text).encode_into(values, memoryview(bytearray(parse_codec(text).segment_bytes_max(300) - 1)))
    many = limits.SEGMENT_VALUES_MAX + 1
    with pytest.raises(CodecError, match="at most 65536"):
        codec(text).encode_into(np.zeros(many, np.float32), memoryview(bytearray(8 * many)))
    with pytest.raises(CodecError, match="at most 65536"):
        codec(text).length_of(memoryview(bytes(8 * many)), many)


def take_or_refuse(text: str, payload: memoryview, count: int) -> None:
    """As a link does: the length from the bytes, then the values; finite, or CodecError, and no warning."""
    out, total = np.zeros(count, np.float32), np.zeros(count, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            length = codec(text).length_of(payload, count)
        except CodecError:
            return
        assert 0 <= length <= len(payload)
        try:
            codec(text).decode_into(payload[:length], out)
        except CodecError:
            return
        assert np.isfinite(out).all()
        codec(text).sum_into(payload[:length], total, total)
        assert (total == out).all()


@pytest.mark.parametrize("text", CODECS)
@settings(max_examples=40)
@given(st.binary(max_size=200), st.integers(0, 90))
def test_any_bytes_are_finite_values_or_refused(text: str, payload: bytes, count: int) -> None:
    take_or_refuse(text, memoryview(payload), count)


@cache
def sound_segment(text: str, count: int) -> bytes:
    return bytes(encoded(text, heavy(count)))


@pytest.mark.parametrize("text", CODECS)
@settings(max_examples=20)
@given(st.data())
def test_damaged_segments_are_finite_values_or_refused(text: str, data: st.DataObject) -> None:
    """Bits flipped, a piece cut out, a piece twice, a tail cut off, another count."""
    count = data.draw(st.sampled_from([1, 9, 100, 2000]))
    payload = bytearray(sound_segment(text, count))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, min(len(payload), 12)), st.integers(0, len(payload))))
        match data.draw(st.sampled_from(["flip", "set", "cut", "double", "truncate"])):
            case "flip":
                payload[at : at + 1] = bytes(byte ^ 1 << data.draw(st.integers(0, 7)) for byte in payload[at : at + 1])
            case "set":
                payload[at : at + 1] = bytes([data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))])
            case "cut":
                del payload[at : at + data.draw(st.integers(1, 9))]
            case "double":
                payload[at:at] = payload[at : at + data.draw(st.integers(1, 9))]
            case _:
                del payload[at:]
    take_or_refuse(text, memoryview(bytes(payload)), data.draw(st.sampled_from([count, count - 1, count + 1])))


@pytest.mark.parametrize("text", CODECS)
def test_hostile_bytes_make_no_large_allocations(text: str) -> None:
    """Whatever a header claims: memory stays within a few times the segment's own."""
    rng = np.random.default_rng(7)
    payload = np.frombuffer(encoded(text, heavy(1000)), np.uint8)
    take_or_refuse(text, payload.data, 1000)  # scratch memory of the codec is made before
    damaged = [payload.copy() for _ in range(100)]
    for each in damaged:
        each[rng.integers(0, min(len(each), 16), 3)] = rng.choice([0, 1, 4, 0x7F, 0xFF], 3)
    tracemalloc.start()
    for each in damaged:
        take_or_refuse(text, each.data, 1000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 256 * 1024


def disagreeing(workers: int, count: int) -> tuple[Values, Values]:
    """(the optimum, each worker's own): large differences between workers hide the small ones that matter to all."""
    rng = np.random.default_rng(4)
    optimum = rng.standard_normal(count).astype(np.float32)
    apart = rng.standard_normal((workers, count)) * (1 + 9 * (rng.random(count) < 0.3))
    apart -= apart.mean(axis=0)
    return optimum, (optimum + apart).astype(np.float32)


ROUNDS = 400
BRISK = {"topk": "topk:0.1", "sidco": "sidco:0.1", "randomk": "randomk:0.1", "threshold": "threshold:rms=1"}
BRISK |= {"cocktail": "cocktail:0.5", "dct": "dct:6"}


def distance_left(text: str, *, feedback: bool) -> float:
    """Of the way to the minimum of sum_i |w - a_i|^2, the part that is left after ROUNDS of a two-sided exchange."""
    workers, count = 2, 64
    optimum, own = disagreeing(workers, count)
    model = np.zeros(count, np.float32)
    residuals = np.zeros((workers + 1, count), np.float32)
    out = memoryview(bytearray(codec(text).spec.segment_bytes_max(count)))
    for turn in range(ROUNDS):
        total = np.zeros(count, np.float32)
        for worker in range(workers + 1):
            owner = worker == workers
            gradient = total / workers if owner else model - own[worker]
            if not feedback:
                residuals[worker] = 0
            residuals[worker] += gradient
            # Workers share a seed, as those of one round do.
            length = codec(text).encode_rest_into(residuals[worker], out, Terms(seed=turn))
            if owner:
                total[:] = 0
            codec(text).sum_into(out[:length], total, total)
        model -= np.float32(0.2 / (1 + turn / 20)) * total
    return float(np.linalg.norm(model - optimum) / np.linalg.norm(optimum))


@pytest.mark.parametrize("text", [BRISK.get(name, name) for name in SEGMENT_FAMILIES if name in with_feedback()])
def test_with_error_feedback_the_optimum_is_reached_and_without_it_is_not(text: str) -> None:
    """P4."""
    reached = distance_left(text, feedback=True)
    assert reached < 0.1
    if claims(text).stalls:
        assert distance_left(text, feedback=False) > 5 * reached
