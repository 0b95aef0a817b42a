"""Index sets as bytes: every set in fewest bytes and back, and nothing but what can be meant."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtraind.codecs.base import CodecError
from meshtraind.codecs.indices import (
    Form,
    Indices,
    gaps_between,
    read_indices,
    smallest_form,
    write_bitmap,
    write_gaps,
)
from meshwire import limits
from meshwire.codecs.sparsifiers import GAP_WIDTHS, bitmap_bytes, gap_bytes, index_bytes_max

FULL = limits.SEGMENT_VALUES_MAX


def written(form: Form, indices: Indices, count: int, size: int) -> bytes:
    out = bytearray(size)
    if form is Form.BITMAP:
        write_bitmap(indices, count, memoryview(out))
    else:
        write_gaps(form, gaps_between(indices), memoryview(out))
    return bytes(out)


def there_and_back(indices: Indices, count: int) -> tuple[Form, int]:
    """In the smallest form; checked."""
    form, size = smallest_form(gaps_between(indices), count)
    assert size <= index_bytes_max(len(indices), count)
    payload = memoryview(written(form, indices, count, size))
    assert (read_indices(form, payload, len(indices), count) == indices).all()
    return form, size


def at_random(ratio: float, count: int = FULL) -> Indices:
    return np.flatnonzero(np.random.default_rng(3).random(count) < ratio)


@settings(max_examples=300)
@given(st.sets(st.integers(0, FULL - 1), max_size=80), st.sampled_from([1, 300, FULL]))
def test_every_set_comes_back(places: set[int], scale: int) -> None:
    indices = np.array(sorted({place % scale for place in places}), np.intp)
    there_and_back(indices, scale)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4096, FULL])
def test_none_all_first_and_last(count: int) -> None:
    everything = np.arange(count)
    for indices in (
        everything,
        everything[:0],
        everything[:1],
        everything[-1:],
        everything[::2],
        everything[::-5][::-1],
    ):
        there_and_back(indices, count)


@pytest.mark.parametrize(
    ("ratio", "form", "bits"),
    [
        (0.5, Form.BITMAP, 2.01),
        (0.1, Form.GAPS_4, 5.1),
        (0.01, Form.GAPS_8, 8.75),
        (0.001, Form.GAPS_12, 12.4),
        (0.00005, Form.GAPS_16, 17.0),
    ],
)
def test_the_form_follows_the_density_and_stays_near_the_information(ratio: float, form: Form, bits: float) -> None:
    indices = at_random(ratio)
    chosen, size = there_and_back(indices, FULL)
    assert chosen is form
    assert size * 8 <= bits * len(indices)


@pytest.mark.parametrize("ratio", [0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0001])
def test_no_form_is_smaller_than_the_smallest(ratio: float) -> None:
    """Each form can write each set; the one chosen takes fewest bytes."""
    indices = at_random(ratio)
    gaps = np.diff(indices, prepend=-1) - 1
    sizes = {
        width: gap_bytes(len(indices) + int((gaps // ((1 << width) - 1)).sum()), width) for width in GAP_WIDTHS
    } | {Form.BITMAP: bitmap_bytes(FULL)}
    for form, size in sizes.items():
        payload = memoryview(written(Form(form), indices, FULL, size))
        assert (read_indices(form, payload, len(indices), FULL) == indices).all()
    assert smallest_form(gaps_between(indices), FULL)[1] == min(sizes.values())


@pytest.mark.parametrize("count", [256, 1024])
def test_the_upper_limit_holds_for_every_one_and_two(count: int) -> None:
    """Few indices: there digits of 12 bits, which come in pairs, can take more than those of 16."""
    for last in range(count):
        there_and_back(np.array([last]), count)
        there_and_back(np.unique([last // 3, last]), count)


def test_the_upper_limit_holds_for_the_worst_sets() -> None:
    """The last of a segment, so that all escapes there can be are needed; and equal gaps."""
    for count in (1, 100, 5000, FULL):
        for kept in {1, 2, count // 300, count // 20, count // 3, count} - {0}:
            if kept <= count:
                there_and_back(np.arange(count - kept, count), count)
                there_and_back(np.linspace(0, count - 1, kept).astype(np.intp), count)


def test_what_lies_in_the_bytes() -> None:
    """The wire: little-endian digits, low bits first, escapes pass 2^width - 1 values."""
    indices = np.array([0, 15, 31, 32], np.intp)  # gaps 0, 14, 15, 0
    assert written(Form.GAPS_4, indices, 40, 3) == bytes([0xE0, 0x0F, 0xF0])
    assert written(Form.GAPS_8, np.array([3, 260], np.intp), 300, 3) == bytes([3, 255, 1])
    assert written(Form.GAPS_12, np.array([0x123, 0x123 + 0x457], np.intp), FULL, 3) == bytes([0x23, 0x61, 0x45])
    assert written(Form.GAPS_16, np.array([0x1234], np.intp), FULL, 2) == bytes([0x34, 0x12])
    assert written(Form.BITMAP, np.array([0, 9], np.intp), 10, 2) == bytes([1, 2])


REFUSED = [
    (Form.BITMAP, b"\x01", 1, 9, "bitmap of 1 bytes for 9"),
    (Form.BITMAP, b"\x03", 1, 8, "2 indices where 1"),
    (Form.BITMAP, b"\x00", 1, 8, "0 indices where 1"),
    (Form.BITMAP, b"\x80", 1, 7, "index 7 in a segment of 7"),
    (Form.GAPS_8, b"\x05", 1, 5, "index 5 in a segment of 5"),
    (Form.GAPS_8, b"\x05", 2, 50, "1 indices where 2"),
    (Form.GAPS_8, b"\x05\x05", 1, 50, "2 indices where 1"),
    (Form.GAPS_8, b"\x05\xff", 1, 50, "behind the last index"),
    (Form.GAPS_8, b"\xff", 0, 50, "behind the last index"),
    (Form.GAPS_4, b"\xff", 0, 50, "behind the last index"),
    (Form.GAPS_4, b"\x01\xff", 2, 50, "behind the last index"),
    (Form.GAPS_12, b"\x01\x00", 1, 50, "no whole number of 12-bit digits"),
    (Form.GAPS_12, b"\xff\xff\xff", 0, 50, "behind the last index"),
    (Form.GAPS_16, b"\x01", 1, 50, "no whole number of 16-bit digits"),
    (Form.GAPS_16, b"\xfe\xff" * 9, 9, FULL, "index"),
    (Form.ALL, b"", 0, 5, "unknown form 0"),
    (7, b"", 0, 5, "unknown form 7"),
]


@pytest.mark.parametrize(("form", "payload", "kept", "count", "match"), REFUSED)
def test_what_no_encoder_writes_is_refused(form: int, payload: bytes, kept: int, count: int, match: str) -> None:
    with pytest.raises(CodecError, match=match):
        read_indices(form, memoryview(payload), kept, count)


@settings(max_examples=300)
@given(st.sampled_from([1, *GAP_WIDTHS]), st.binary(max_size=60), st.integers(0, 90), st.integers(0, 480))
def test_whatever_the_bytes_ascending_indices_or_a_refusal(form: int, payload: bytes, kept: int, count: int) -> None:
    try:
        indices = read_indices(form, memoryview(payload), kept, count)
    except CodecError:
        return
    assert len(indices) == kept
    assert all(before < after for before, after in pairwise([-1, *indices, count]))
    if form != Form.BITMAP:
        assert written(Form(form), indices, count, len(payload)) == payload  # there is one way to write a set
