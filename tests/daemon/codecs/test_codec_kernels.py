"""What codecs compute quickly, bit for bit what the plain formula gives: each is written down here as it reads."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import CodecError, Runs, Terms
from meshtraind.codecs.bit_packing import Bytes
from meshtraind.codecs.cosines import Cosines, exact_secants
from meshtraind.codecs.fp16 import CEILING, EXPONENT_MAX
from meshtraind.codecs.kept_values import FORMS, FP16_FEW
from meshtraind.codecs.normalfloat import NEAREST, TABLE
from meshtraind.codecs.randomk import Draws, drawn_places
from meshtraind.codecs.selection import MANY, largest
from meshtraind.codecs.sketch import PASSES_MAX, UNUSED_BITS, cells_of, peel, peel_order, poured
from meshtraind.codecs.twobit import _counts
from meshwire.codecs.registry import FAMILIES
from meshwire.codecs.sketch import HASHES, cells_for
from tests.daemon.codectrips import Values, heavy

FULL = 65_536
SEEDS = st.integers(0, 2**32 - 1)
MASK = np.empty(FULL, np.bool_)
MASK_64 = (1 << 64) - 1


@settings(max_examples=60)
@given(
    seed=SEEDS,
    count=st.sampled_from([1, 5000, 20_000, FULL]),
    distinct=st.sampled_from([1, 2, 50, 1 << 31]),
    part=st.floats(0, 1),
    sorted_=st.booleans(),
)
def test_the_largest_are_those_that_sorting_puts_first(
    seed: int, count: int, distinct: int, part: float, sorted_: bool
) -> None:
    """Also where so many are candidates that their threshold is looked for between two bounds of a sample."""
    magnitudes = np.random.default_rng(seed).integers(0, distinct, count).astype(np.uint32)
    if sorted_:
        magnitudes.sort()
    wanted = max(1, int(part * count))
    order = np.argsort(-magnitudes.astype(np.int64), kind="stable")[:wanted]
    expected = np.sort(order[magnitudes[order] > 0])
    assert (largest(magnitudes, wanted, MASK) == expected).all()


def test_a_sample_that_misleads_does_not() -> None:
    """Every so-manieth candidate is small, or large, and no other."""
    for stride in range(2, 40):
        for odd_one in (1, 2**31):
            magnitudes = np.random.default_rng(stride).integers(1000, 2000, 3 * MANY).astype(np.uint32)
            magnitudes[::stride] = odd_one
            wanted = 2 * MANY
            threshold = np.sort(magnitudes)[-wanted]
            found = magnitudes[largest(magnitudes, wanted, MASK)]
            assert len(found) == wanted
            assert found.min() == threshold


@settings(max_examples=60)
@given(
    seed=SEEDS,
    count=st.sampled_from([FP16_FEW - 1, FP16_FEW, 20_000]),
    spread=st.sampled_from([0.0, 3.0, 12.0, 30.0]),
    size=st.sampled_from([1e-44, 1e-38, 1e-3, 1.0, 3e30]),
)
def test_kept_halves_are_rounded_as_a_cast_rounds(seed: int, count: int, spread: float, size: float) -> None:
    """Ties, denormal halves and numbers at both ends of fp32 among them."""
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal(count) * np.exp2(spread * rng.uniform(-1, 0, count)) * size
    values = np.clip(wide, -3e38, 3e38).astype(np.float32)
    values.view(np.uint32)[::7] &= 0xFFFFF000  # in the middle of two halves, or on one
    form = FORMS["fp16"]()
    quantised = form.quantised(values)
    out = memoryview(bytearray(form.size(count)))
    form.write(quantised, out)
    exponent = np.frombuffer(out, np.int8, 1)[0]
    ceiling = 32752.0 if exponent == 113 else np.inf
    halves = np.clip(values * np.float32(2.0**-exponent), -ceiling, ceiling).astype(np.float16)
    plain = halves.astype(np.float32) * np.float32(2.0**exponent)
    assert quantised.tobytes() == plain.tobytes()
    assert bytes(out[1:]) == halves.astype("<f2").tobytes()
    assert form.read(out, count).tobytes() == quantised.tobytes()


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E01])
@pytest.mark.parametrize("count", [3, FP16_FEW])
def test_a_half_that_is_not_finite_is_refused(half: int, count: int) -> None:
    payload = np.zeros(count, "<u2")
    payload[count // 2] = half
    with pytest.raises(CodecError, match="infinite"):
        FORMS["fp16"]().read(memoryview(b"\0" + payload.tobytes()), count)


@settings(max_examples=80)
@given(
    seed=SEEDS,
    count=st.sampled_from([1, 127, 128, 1000]),
    size=st.sampled_from([1e-45, 1e-38, 1e-3, 1.0, 3e37]),
    zeros=st.booleans(),
)
@pytest.mark.parametrize("name", sorted(FORMS))
def test_what_is_quantised_and_written_at_once_is_the_same(
    name: str, seed: int, count: int, size: float, zeros: bool
) -> None:
    values = np.clip(np.random.default_rng(seed).standard_t(3, count) * size, -3e38, 3e38).astype(np.float32)
    if zeros:
        values[::2] = 0
    form = FORMS[name]()
    once, twice = (memoryview(bytearray(form.size(count))) for _ in range(2))
    quantised = form.quantised(values)
    form.write(quantised, twice)
    assert form.quantised_into(values.copy(), once).tobytes() == quantised.tobytes()
    assert once == twice


def _peeled(where: list[list[int]], cells: list[int]) -> dict[int, int] | None:
    """One pass after the other, cell by cell: the number of each place."""
    inside: defaultdict[int, set[int]] = defaultdict(set)
    for place, its in enumerate(where):
        for cell in its:
            inside[cell].add(place)
    found: dict[int, int] = {}
    for _ in range(PASSES_MAX):
        alone = {next(iter(who)): cell for cell, who in inside.items() if len(who) == 1}
        for place, at in alone.items():
            found[place] = held = cells[at]
            for cell in where[place]:
                inside[cell].discard(place)
                cells[cell] = cells[cell] - held & MASK_64
        if not alone:
            break
    return found if len(found) == len(where) else None


@settings(max_examples=60)
@given(seed=SEEDS, count=st.integers(0, 400), room=st.sampled_from([20, 100, 300, 400]), torn=st.booleans())
def test_a_sketch_is_peeled_as_one_by_one(seed: int, count: int, room: int, torn: bool) -> None:
    """Which numbers are found, whether all are, and that cells which are no sum leave something."""
    rng = np.random.default_rng(seed)
    places = np.sort(rng.choice(FULL, count, replace=False))
    numbers = rng.integers(-(2**40), 2**40, count)
    where = cells_of(seed, places, cells_for(room))
    assert where.shape == (HASHES, count)
    cells = poured(where, numbers, cells_for(room))
    if torn:
        cells[rng.integers(len(cells))] += np.int64(1 << UNUSED_BITS)
    left = [int(cell) & MASK_64 for cell in cells]
    expected = _peeled(where.T.tolist(), left)
    found = peel(where, cells)
    assert (found is None) == (expected is None) == (peel_order(where, cells_for(room)) is None)
    if found is not None and expected is not None:
        assert cells.any() == torn == any(left)
        if not torn:
            assert found.tolist() == numbers.tolist()


@settings(max_examples=60)
@given(seed=st.integers(0, MASK_64), kept=st.integers(1, 300), more=st.integers(0, 65_000))
def test_places_are_drawn_as_whole_numbers_say(seed: int, kept: int, more: int) -> None:
    def splitmix64(state: int) -> int:
        state = (state + 1) * 0x9E3779B97F4A7C15 & MASK_64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK_64
        return state ^ state >> 31

    count = kept + more
    draws = [splitmix64(number + splitmix64(seed) & MASK_64) >> 32 for number in range(kept + 1)]
    turn = draws[-1] * count >> 32
    bounds = [number * count // kept for number in range(kept + 1)]
    expected = [
        (bounds[number] + (draws[number] * (bounds[number + 1] - bounds[number]) >> 32) + turn) % count
        for number in range(kept)
    ]
    assert drawn_places(seed, kept, count).tolist() == expected


def test_places_that_are_kept_are_those_of_this_draw() -> None:
    """Seeds, numbers and lengths come in any order."""
    draws = Draws()
    for seed, kept, count in ((1, 5, 100), (1, 5, 100), (2, 5, 100), (2, 6, 100), (2, 6, 90), (1, 5, 100), (1, 0, 0)):
        assert (draws.places(seed, kept, count) == drawn_places(seed, kept, count)).all()


def _cosines(lines: Values) -> Values:
    """Lee's recursion: each sum and product is one of fp32 numbers."""
    if len(lines) == 1:
        return lines
    odd = lines[1::2].copy()
    odd[1:] += lines[1:-1:2]
    even, odd = _cosines(lines[0::2]), _cosines(odd)
    odd = odd * np.array(exact_secants(len(lines)), np.float32)[:, None]
    return np.concatenate([even + odd, (even - odd)[::-1]])


@settings(max_examples=25)
@given(
    seed=SEEDS,
    count=st.sampled_from([FULL, 4096, 5000, 64, 7, 1]),
    part=st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]),
    exponent=st.sampled_from([-140, -20, 0, 126]),
)
def test_cosines_go_back_as_the_recursion_says(seed: int, count: int, part: float, exponent: int) -> None:
    """In any number of lines, chunks of any side, and one segment after the other in the same memory."""
    rng = np.random.default_rng(seed)
    cosines = Cosines()
    for _ in range(2):
        places = np.flatnonzero(rng.random(count) <= part)
        coefficients = np.ldexp(rng.standard_normal(len(places)).clip(-1, 1), exponent).astype(np.float32)
        peak = float(np.abs(coefficients).max(initial=0))
        out = np.full(count, np.nan, np.float32)
        cosines.inverse(places, coefficients, peak, out)
        scale = np.float32(2.0 ** -min(max(math.frexp(peak)[1], -126), 126))
        whole = np.zeros(count, np.float32)
        whole[places] = coefficients * scale
        at = 0
        while at < count:
            side = 64
            while side * side > count - at:
                side //= 2
            chunk = whole[at : at + side * side].reshape(side, side)  # frequencies across, then down
            line = np.array([math.sqrt(1 / side)] + [math.sqrt(2 / side)] * (side - 1))
            across = _cosines(chunk * np.outer(line, line).astype(np.float32))  # (across, frequency down)
            back = _cosines(np.ascontiguousarray(across.T))  # (down, across)
            most = np.float32(min(float(np.finfo(np.float32).max) * float(scale), float(np.finfo(np.float32).max)))
            expected = np.clip(back, -most, most) * np.float32(1 / scale)
            assert out[at : at + side * side].tobytes() == expected.ravel().tobytes()
            at += side * side


@settings(max_examples=60)
@given(seed=SEEDS, lengths=st.lists(st.integers(1, 40), min_size=1, max_size=90), left=st.integers(0, 7))
def test_values_of_each_code_are_counted(seed: int, lengths: list[int], left: int) -> None:
    """Columns begin at multiples of eight, as tensors do."""
    ends = np.cumsum([8 * length for length in lengths])
    count = int(ends[-1]) - left
    runs = Runs.of(np.concatenate([[0], ends[:-1]]), count)
    codes: Bytes = np.random.default_rng(seed).integers(0, 4, count).astype(np.uint8)
    expected = [int((part == code).sum()) for part in np.split(codes, runs.starts[1:]) for code in range(4)]
    assert _counts(codes, runs).tolist() == expected


@settings(max_examples=40)
@given(seed=SEEDS, count=st.sampled_from([1, 2, 63, 128, 1001]), size=st.sampled_from([1e-44, 1e-38, 1e-3, 3e38]))
def test_nf4_is_the_table_times_the_largest_magnitude(seed: int, count: int, size: float) -> None:
    """What lies beyond it, where that is rounded down, counts as the table's end."""
    codec = codec_named("nf4")
    values = (np.random.default_rng(seed).uniform(-1, 1, count) * size).astype(np.float32)
    out = memoryview(bytearray(codec.spec.segment_bytes_max(count)))
    codec.encode_into(values, out)
    blocks = -(-count // 128)
    scales = (np.frombuffer(out, "<u2", blocks).astype(np.uint32) << 16).view(np.float32).repeat(128)[:count]
    parts = np.divide(values, scales, out=np.zeros_like(values), where=scales > 0)
    numbers = NEAREST[(np.rint(parts.clip(-1, 1) * np.float32(1024)) + 1024).astype(int)]
    packed = np.frombuffer(out, np.uint8, offset=2 * blocks)
    assert (numbers == np.stack([packed & 15, packed >> 4], axis=1).ravel()[:count]).all()
    decoded = np.empty(count, np.float32)
    codec.decode_into(out, decoded)
    assert decoded.tobytes() == (TABLE[numbers] * scales).tobytes()


@pytest.mark.parametrize("text", sorted(name for name, family in FAMILIES.items() if not family.transforms))
@pytest.mark.parametrize("count", [FULL, 1001, 1])
def test_what_was_sent_is_what_its_bytes_are_decoded_to(text: str, count: int) -> None:
    """An owner takes it for what all others decode."""
    codec = codec_named(text)
    if not codec.error_feedback:
        return
    values = heavy(count)
    out = memoryview(bytearray(codec.spec.segment_bytes_max(count)))
    payload = out[: codec.encode_rest_into(values, out, Terms(seed=7))]
    sent, decoded = (np.full(count, np.nan, np.float32) for _ in range(2))
    codec.decode_sent_into(payload, sent)
    codec.decode_into(payload, decoded)
    assert sent.tobytes() == decoded.tobytes()


@settings(max_examples=80)
@given(seed=SEEDS, size=st.integers(-149, 127), spread=st.sampled_from([0, 20, 45]))
def test_fp16_scales_in_two_steps_though_it_takes_one(seed: int, size: int, spread: int) -> None:
    """By the segment's power of two, then by the difference of the formats' biases: each rounds where it has to."""
    rng = np.random.default_rng(seed)
    wide = np.ldexp(rng.uniform(-2, 2, 1000), size) * np.exp2(rng.uniform(-spread, 0, 1000))
    values = np.clip(wide, -3.4e38, 3.4e38).astype(np.float32)
    values.view(np.uint32)[::3] &= 0xFFFFF000
    codec = codec_named("fp16")
    out = memoryview(bytearray(codec.spec.segment_bytes_max(1000)))
    codec.encode_into(values, out)
    exponent = int(np.frombuffer(out, "<i4", 1)[0])
    scaled = values * np.float32(2.0**-exponent)
    if exponent == EXPONENT_MAX:
        scaled = scaled.clip(-CEILING, CEILING)
    bits = (scaled * np.float32(2.0**-112)).view(np.uint32)
    bits = bits + (bits >> 13 & 1) + 0xFFF
    halves = (bits >> 13 | bits >> 16 & 0x8000).astype("<u2")
    assert bytes(out[4:]) == halves.tobytes()
    decoded = np.empty(1000, np.float32)
    codec.decode_into(out, decoded)
    expected = halves.view("<f2").astype(np.float32) * np.float32(2.0**exponent)
    assert decoded.tobytes() == expected.tobytes()
