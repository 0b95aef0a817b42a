"""Which values of a segment a sparse codec sends: an ascending set of indices as bytes, in the form that takes fewest.

- bitmap: a bit for each value of the segment, the first in the lowest bit.
- gaps in digits of 4, 8, 12 or 16 bits: how many values are passed over before the next one sent. The largest digit is
  an escape: so many are passed over, and the next digit goes on. An index takes 5.0 bits at 10 %, 8.7 at 1 %, and 12.2
  at 0.1 % of random places, whose information is 4.7, 8.1 and 11.4 bits.

Gaps make every set in exactly one way, and no set twice or out of order. The 12-bit offsets inside blocks of 4096 of
other systems (SparseLoCo) are left out: 64 of each 4096 take 8.2 bits as gaps. Offsets would be smaller where fewer
than four of a block are sent, and would need a count for each block.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import CodecError
from meshwire.codecs.sparsifiers import GAP_WIDTHS, bitmap_bytes, gap_bytes

Indices = NDArray[np.intp]
Digits = NDArray[np.uint16]
Gaps = NDArray[np.uint32]

ESCAPES = {width: np.uint32((1 << width) - 1) for width in GAP_WIDTHS}
"""By width of a digit: the largest one."""


class Form(IntEnum):
    """How the indices of a segment are written. Gaps are named by their digits' width."""

    ALL = 0  # every value is sent: there is nothing to write
    BITMAP = 1
    GAPS_4 = 4
    GAPS_8 = 8
    GAPS_12 = 12
    GAPS_16 = 16


def gaps_between(indices: Indices) -> Gaps:
    """How many values are passed over before each index."""
    gaps = np.empty(len(indices), np.uint32)
    if len(indices):
        gaps[0] = indices[0]
        np.subtract(indices[1:], indices[:-1], out=gaps[1:], casting="unsafe")
        gaps[1:] -= np.uint32(1)
    return gaps


def gaps_can_be_smaller(number: int, count: int) -> bool:
    """Whether so many indices in [0, count) may take fewer bytes as gaps than in a bitmap."""
    return number * min(GAP_WIDTHS) < bitmap_bytes(count) * 8


def smallest_form(gaps: Gaps, count: int) -> tuple[Form, int]:
    """The form other than ALL that takes fewest bytes for indices in [0, count) with these gaps, and how many."""
    form, size = Form.BITMAP, bitmap_bytes(count)
    widest = int(gaps.max(initial=0))
    for width, escape in ESCAPES.items():
        if len(gaps) * width >= size * 8:
            continue  # without a single escape; a wider one can be smaller, for those of 12 bits come in pairs
        escapes = int((gaps // escape).sum()) if widest >= escape else 0
        size_bytes = gap_bytes(len(gaps) + escapes, width)
        if size_bytes < size:
            form, size = Form(width), size_bytes
    return form, size


def write_bitmap(indices: Indices, count: int, out: memoryview) -> None:
    """Fills `out`, which has `bitmap_bytes(count)`."""
    marked = np.zeros(count, np.bool_)
    marked[indices] = True
    np.frombuffer(out, np.uint8)[:] = np.packbits(marked, bitorder="little")


def write_gaps(form: Form, gaps: Gaps, out: memoryview) -> None:
    """Fills `out`, which is as long as `smallest_form` said."""
    target = np.frombuffer(out, np.uint8)
    escape = ESCAPES[form]
    digits = np.full(len(target) * 8 // form, escape, np.uint16)  # one that fills the last byte is an escape too
    if gaps.max(initial=0) < escape:
        digits[: len(gaps)] = gaps
    else:
        escapes = gaps // escape
        digits[np.cumsum(escapes + np.uint32(1), dtype=np.intp) - 1] = gaps - escapes * escape
    _pack(digits, form, target)


def read_indices(form: int, payload: memoryview, kept: int, count: int) -> Indices:
    """The `kept` indices in [0, count), ascending. `payload` is at most as long as a bitmap.

    Raises CodecError unless that is exactly what the payload says.
    """
    source = np.frombuffer(payload, np.uint8)
    if form == Form.BITMAP:
        if len(source) != bitmap_bytes(count):
            raise CodecError(f"a bitmap of {len(source)} bytes for {count} values")
        marked = np.unpackbits(source, bitorder="little")
        indices = np.flatnonzero(marked.view(np.bool_))
    else:
        if form not in GAP_WIDTHS:
            raise CodecError(f"indices in the unknown form {form}")
        digits = _unpack(source, form)
        ends = digits != ESCAPES[form]
        used = len(digits) if not len(digits) or ends[-1] else len(digits) - 1
        if gap_bytes(used, form) != len(source) or not ends[used - 1 : used].all():
            raise CodecError("bytes behind the last index")
        indices = np.cumsum(digits + ends.view(np.uint8), dtype=np.intp)[ends] - 1
    if len(indices) != kept:
        raise CodecError(f"{len(indices)} indices where {kept} are announced")
    if kept and indices[-1] >= count:
        raise CodecError(f"index {indices[-1]} in a segment of {count} values")
    return indices


def _pack(digits: Digits, width: int, out: NDArray[np.uint8]) -> None:
    """Little-endian: the first digit lies in the lowest bits."""
    match width:
        case 4:
            out[:] = digits[::2] | digits[1::2] << 4
        case 8:
            out[:] = digits
        case 12:
            out[::3] = digits[::2] & 0xFF
            out[1::3] = digits[::2] >> 8 | (digits[1::2] & 0xF) << 4
            out[2::3] = digits[1::2] >> 4
        case _:
            out[:] = digits.astype("<u2", copy=False).view(np.uint8)


def _unpack(source: NDArray[np.uint8], width: int) -> Digits:
    """As many whole digits as there are; those of 4 and 12 bits come in pairs."""
    if len(source) % {4: 1, 8: 1, 12: 3, 16: 2}[width]:
        raise CodecError(f"{len(source)} bytes are no whole number of {width}-bit digits")
    if width == 8:
        return source.astype(np.uint16)
    if width == 16:
        return source.view("<u2").astype(np.uint16, copy=False)
    digits = np.empty(len(source) * 8 // width, np.uint16)
    if width == 4:
        digits[::2] = source & 0xF
        digits[1::2] = source >> 4
    else:
        low, middle, high = (source[part::3].astype(np.uint16) for part in range(3))
        digits[::2] = low | (middle & 0xF) << 8
        digits[1::2] = middle >> 4 | high << 4
    return digits
