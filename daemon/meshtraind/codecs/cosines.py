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
LINES = 64  # transforms at once come in multiples of it, or else each number of them would be laid out anew
PLANS_MAX = 32
LARGEST_FP32 = float(np.finfo(np.float32).max)


class Cosines:
    """Scratch memory for one segment; use it from one thread."""

    def __init__(self) -> None:
        self._scaled: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)
        self._lines: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)
        self._others: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)
        self._columns: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)
        self._odds: Values = np.empty(limits.SEGMENT_VALUES_MAX // 2, np.float32)
        self._across_first: dict[tuple[int, int], _Butterflies] = {}  # by side and lines
        self._down_then: dict[tuple[int, int], _Butterflies] = {}

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
        _from_one(out, scale, out)

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
            down = self._planned(self._down_then, side, number * side, self._columns)
            run = out[start : start + columns.size].reshape(number, side, side)
            down.run()
            _from_one(columns.transpose(1, 0, 2), scale, run)

    def _across(self, places: Indices, coefficients: Values, out: Values) -> None:
        """Transforms each chunk's lines of equal frequency down, those alone that have a coefficient.

        Args:
            places: in the chunks, one behind the other.
            out: (down, chunk, across), a frequency and then a place.
        """
        side, number, _ = out.shape
        bits = side.bit_length() - 1
        across, of_line = places >> bits & side - 1, (places >> 2 * bits << bits) + (places & side - 1)
        used = np.zeros(number * side, np.bool_)
        used[of_line] = True
        lines = np.flatnonzero(used)
        out.fill(0)
        if not len(lines):
            return
        # So many lines that few numbers of them come up.
        transform = self._planned(self._across_first, side, -(-len(lines) // LINES) * LINES, self._others)
        values = transform.lines
        values.fill(0)
        columns = np.cumsum(used)
        values[across, columns.take(of_line) - 1] = coefficients * _weights(side)[across, places & side - 1]
        transform.run()
        out[lines & side - 1, lines >> bits] = values[:, : len(lines)].T

    def _planned(
        self, known: dict[tuple[int, int], "_Butterflies"], side: int, lines: int, memory: Values
    ) -> "_Butterflies":
        """So many transforms of `side` values, which lie in this memory."""
        butterflies = known.get((side, lines))
        if butterflies is None:
            if len(known) >= PLANS_MAX:
                known.clear()
            size = side * lines
            arrays = memory[:size].reshape(side, lines), self._lines[:size].reshape(side, lines)
            butterflies = known[side, lines] = _Butterflies(*arrays, self._odds)
        return butterflies

    def _to_one(self, values: Values, peak: float) -> tuple[Values, float]:
        """(values times a power of two, that)."""
        exponent = math.frexp(peak)[1]
        scale = 2.0 ** -min(max(exponent, -EXPONENT_MAX), EXPONENT_MAX)
        return np.multiply(values, np.float32(scale), out=self._scaled[: len(values)]), scale


class _Butterflies:
    """sum_k lines[k] cos(pi k (x + 1/2) / side) for each x, of all columns at once.

    Lines stay where they are as blocks are halved, and those of a block lie apart: so in every step what is added lies
    side by side, in as long stretches as can be. All steps are laid down in advance, as views of the memory.

    Args:
        lines, others: of shape (side, columns), the first a power of two; both are overwritten.
        odds: scratch of half as many values.

    Attributes:
        lines: where what is transformed is put, and the result is found.
    """

    def __init__(self, lines: Values, others: Values, odds: Values) -> None:
        self.lines = lines
        side, columns = lines.shape
        scratch = others.reshape(-1)
        # Into sums over the even k, and over neighbours of the odd k, each of which is a transform of half the size.
        self._neighbours: list[tuple[Values, Values, Values]] = []
        for size in _halvings(side)[:-1]:
            half, width = size // 2, side // size * columns
            odd = lines.reshape(half, 2, width)[:, 1]
            self._neighbours.append((odd[1:], odd[:-1], scratch[: (half - 1) * width].reshape(half - 1, width)))
        self._sums: list[tuple[Values, Values, Values, Values, Values, Values]] = []
        now, then = lines, others
        for size in reversed(_halvings(side)):
            half, width = size // 2, side // size * columns
            pairs, sums = now.reshape(half, 2, width), then.reshape(size, width)
            scaled = odds[: half * width].reshape(half, width)
            self._sums.append((pairs[:, 0], pairs[:, 1], _secants(size), scaled, sums[:half], sums[half:][::-1]))
            now, then = then, now
        self._result = now

    def run(self) -> None:
        """Transforms what lies in `lines`."""
        for left, right, sums in self._neighbours:
            np.add(left, right, out=sums)
            np.copyto(left, sums)
        for even, odd, secants, scaled, forwards, backwards in self._sums:
            np.multiply(odd, secants, out=scaled)
            np.add(even, scaled, out=forwards)
            np.subtract(even, scaled, out=backwards)
        if self._result is not self.lines:
            np.copyto(self.lines, self._result)


def _from_one(values: Values, scale: float, out: Values) -> None:
    """Of a transform of values below 1, which are below CHUNK_SIDE."""
    most = min(LARGEST_FP32 * scale, LARGEST_FP32)
    if most < 2 * CHUNK_SIDE:
        values = np.clip(values, -np.float32(most), np.float32(most), out=values)
    np.multiply(values, np.float32(1 / scale), out=out)


def _halvings(side: int) -> list[int]:
    """side, side/2, ... 2."""
    return [side >> bit for bit in range(side.bit_length() - 1)]


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
