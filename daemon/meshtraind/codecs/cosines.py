"""Two-dimensional cosine transforms of the square chunks of a segment: DCT-II there, DCT-III back, both orthonormal.

Back, all members must get equal bits from equal bytes, whatever their processors. A matrix product is added up in an
order that differs between BLAS kernels; so values are added and multiplied one by one here, in the butterflies of Lee
(1984), where every operation is a numpy ufunc of its own and rounded as IEEE 754 says. Of lines without coefficients,
most if few are sent, the first of both directions leaves nothing to do. There, only the sender's own result counts: a
matrix product.

Values are brought to about 1 before, by a power of two, so that neither large nor denormal ones lose more than others.
"""

import math
from functools import cache

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.codecs.indices import Indices
from meshwire import limits
from meshwire.codecs.sparsifiers import CHUNK_SIDE, square_chunks

EXPONENT_MAX = 126  # of the power of two, to either side: its inverse is not denormal
LARGEST_FP32 = float(np.finfo(np.float32).max)


class Cosines:
    """Scratch memory for one segment; use it from one thread."""

    def __init__(self) -> None:
        self._scaled: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)
        self._lines: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)
        self._others: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)
        self._columns: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)

    def forward(self, values: Values, peak: float, out: Values) -> None:
        """The coefficients of finite values, chunk by chunk. What would be infinite becomes the largest there is.

        Args:
            peak: the largest magnitude.
        """
        scaled, scale = self._to_one(values, peak)
        for start, side, number in square_chunks(len(values)):
            run = slice(start, start + number * side * side)
            matrix = _matrix(side)
            rows = self._lines[run]
            np.matmul(scaled[run].reshape(number * side, side), matrix, out=rows.reshape(number * side, side))
            chunks = rows.reshape(number, side, side)
            # Transposed: frequencies across come before those down.
            np.matmul(chunks.transpose(0, 2, 1), matrix, out=out[run].reshape(number, side, side))
        _from_one(out, scale)

    def inverse(self, places: Indices, coefficients: Values, peak: float, out: Values) -> None:
        """The values of finite coefficients at ascending places, where all others are 0. What would be infinite becomes
        the largest there is.

        Args:
            peak: the largest magnitude.
        """
        scaled, scale = self._to_one(coefficients, peak)
        for start, side, number in square_chunks(len(out)):
            first, last = np.searchsorted(places, (start, start + number * side * side))
            columns = self._columns[: number * side * side].reshape(side, number, side)
            self._across(places[first:last] - start, scaled[first:last], columns)
            lines, _ = _butterflies(columns, self._lines[: columns.size].reshape(columns.shape))
            run = out[start : start + columns.size]
            np.copyto(run.reshape(number, side, side), lines.transpose(1, 0, 2))
        _from_one(out, scale)

    def _across(self, places: Indices, coefficients: Values, out: Values) -> None:
        """Transforms each chunk's lines of equal frequency down, those alone that have a coefficient.

        Args:
            places: in the chunks, one behind the other.
            out: (down, chunk, across), a frequency and then a place.
        """
        side, number, _ = out.shape
        chunk, across, down = places // (side * side), places // side % side, places % side
        used = np.zeros(number * side, np.bool_)
        used[chunk * side + down] = True
        lines = np.flatnonzero(used)
        out.fill(0)
        if not len(lines):
            return
        size = side * len(lines)
        values, others = (each[:size].reshape(side, len(lines)) for each in (self._lines, self._others))
        values.fill(0)
        values[across, (np.cumsum(used) - 1)[chunk * side + down]] = coefficients * _weights(side)[across, down]
        values, _ = _butterflies(values, others)
        out[lines % side, lines // side] = values.T

    def _to_one(self, values: Values, peak: float) -> tuple[Values, float]:
        """(values times a power of two, that)."""
        exponent = math.frexp(peak)[1]
        scale = 2.0 ** -min(max(exponent, -EXPONENT_MAX), EXPONENT_MAX)
        return np.multiply(values, np.float32(scale), out=self._scaled[: len(values)]), scale


def _from_one(values: Values, scale: float) -> None:
    most = np.float32(min(LARGEST_FP32 * scale, LARGEST_FP32))
    np.clip(values, -most, most, out=values)
    np.multiply(values, np.float32(1 / scale), out=values)


def _butterflies(lines: Values, others: Values) -> tuple[Values, Values]:
    """sum_k lines[k] cos(pi k (x + 1/2) / side) for each x, of all columns.

    Args:
        lines, others: of shape (side, ...), a power of two; both are overwritten.

    Returns (the array of the two that holds the result, the other one).
    """
    side = len(lines)
    # Into sums over the even k, and over neighbours of the odd k, each of which is a transform of half the size.
    for size in _halvings(side)[:-1]:
        half = size // 2
        now, then = _blocks(lines, size), _blocks(others, size)
        then[:, :half] = now[:, 0::2]
        then[:, half] = now[:, 1]
        np.add(now[:, 1:-1:2], now[:, 3::2], out=then[:, half + 1 :])
        lines, others = others, lines
    for size in reversed(_halvings(side)):
        half = size // 2
        now, then = _blocks(lines, size), _blocks(others, size)
        even, odd = now[:, :half], now[:, half:]
        np.multiply(odd, _secants(size), out=odd)
        np.add(even, odd, out=then[:, :half])
        np.subtract(even, odd, out=then[:, half:][:, ::-1])
        lines, others = others, lines
    return lines, others


def _halvings(side: int) -> list[int]:
    """side, side/2, ... 2."""
    return [side >> bit for bit in range(side.bit_length() - 1)]


def _blocks(lines: Values, size: int) -> Values:
    """Runs of `size` lines: (run, line, column)."""
    return lines.reshape(-1, size, lines.size // len(lines))


@cache
def _matrix(side: int) -> Values:
    """Values times this are coefficients: (side, side)."""
    places = np.arange(side)
    matrix = np.cos(np.pi * np.outer(places + 0.5, places) / side) * math.sqrt(2 / side)
    matrix[:, 0] /= math.sqrt(2)
    return matrix.astype(np.float32)


@cache
def _weights(side: int) -> Values:
    """What makes the butterflies in both directions orthonormal: (side, side). Roots are equal on all machines."""
    line = np.full(side, math.sqrt(2 / side))
    line[0] = math.sqrt(1 / side)
    return np.outer(line, line).astype(np.float32)


@cache
def _secants(size: int) -> Values:
    """1 / (2 cos) of the butterflies of a size: (size / 2, 1).

    A cosine may differ in its last bits between mathematical libraries, by far less than would change it in fp32: of
    all these, none lies nearer to the middle of two fp32 numbers than 2^21 of its own last bits.
    """
    return np.array(exact_secants(size), np.float32)[:, None]


def exact_secants(size: int) -> list[float]:
    """The same in float64."""
    return [1 / (2 * math.cos((place + 0.5) * math.pi / size)) for place in range(size // 2)]


assert CHUNK_SIDE & (CHUNK_SIDE - 1) == 0
