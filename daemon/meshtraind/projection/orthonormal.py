"""The arithmetic of low rank: factors from a matrix, the matrix that they stand for, and an orthonormal basis.

A factor is an array of r rows. What a member sends of its own, no other repeats: BLAS may sum as it likes. What all
members compute from the same bytes must be equal to the last bit, whatever their processors: there every sum has one
order, made of whole-array additions, whose single results IEEE 754 defines.
"""

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import Values

Wide = NDArray[np.float64]

BLOCK_VALUES = 16 * 1024  # of a matrix, at a time: they stay in the processor's cache between two terms
DEPENDENT = 2.0**-20  # a row of which less than this part is left is noise of fp32
DRAW_STEP = 2.0**-31


def orthonormal(rows: Values, seed: int) -> Values:
    """An orthonormal basis that begins as `rows` do, by modified Gram-Schmidt. Equal to the last bit everywhere.

    Rows that depend on those before them, as zeros do, are replaced by drawn ones.

    Args:
        rows: r x n, finite, r <= n; not changed.
        seed: a non-negative 64-bit number, for what is drawn.
    """
    basis: Wide = rows.astype(np.float64)
    peak = np.abs(basis).max(initial=0.0)
    if peak:
        basis /= peak  # so that no square overflows, and none that matters vanishes
    drawn: Wide | None = None
    for index, row in enumerate(basis):
        if not _orthogonal(row, basis[:index]):
            if drawn is None:
                drawn = _drawn(rows.shape, seed)
            row[:] = drawn[index]
            if not _orthogonal(row, basis[:index]):
                # Two random directions in n > r dimensions that are one: as good as impossible, and any other will do.
                _first_free(row, basis[:index])
    return basis.astype(np.float32)


def left_factor(matrix: Values, basis: Values, out: Values) -> None:
    """out = basis x matrix^T: the best L for which L^T x basis is near to the matrix.

    Args:
        matrix: rows x columns.
        basis: r x columns, orthonormal.
        out: r x rows.
    """
    np.matmul(basis, matrix.T, out=out)


def right_factor(matrix: Values, basis: Values, out: Values) -> None:
    """out = basis x matrix: the best R for which basis^T x R is near to the matrix.

    Args:
        matrix: rows x columns.
        basis: r x rows, orthonormal.
        out: r x columns.
    """
    np.matmul(basis, matrix, out=out)


def subtract_product(matrix: Values, left: Values, right: Values) -> None:
    """matrix -= left^T x right, in place. What of a member's own part stays behind."""
    rows = block_rows(matrix.shape[1])
    product = np.empty((min(rows, len(matrix)), matrix.shape[1]), np.float32)
    for first in range(0, len(matrix), rows):
        block = matrix[first : first + rows]
        np.matmul(left[:, first : first + rows].T, right, out=product[: len(block)])
        np.subtract(block, product[: len(block)], out=block)


def product_into(left: Values, right: Values, out: Values, scratch: Values) -> None:
    """out = left^T x right. Equal to the last bit everywhere.

    Args:
        left: r x rows of the block.
        right: r x columns.
        out: rows x columns.
        scratch: as many values as `out`, in one piece.
    """
    term = scratch.reshape(out.shape)
    np.multiply(left[0][:, None], right[0], out=out)
    for of_left, of_right in zip(left[1:], right[1:], strict=True):
        np.multiply(of_left[:, None], of_right, out=term)
        np.add(out, term, out=out)


def block_rows(columns: int) -> int:
    """How many rows of a matrix make up a block; at least one."""
    return max(1, BLOCK_VALUES // columns)


def _orthogonal(row: Wide, before: Wide) -> bool:
    """Takes from a row, in place, its part along those before it, and gives it length 1. False if nothing is left."""
    whole = np.sqrt(_dot(row, row))
    for other in before:
        row -= _dot(row, other) * other
    left = np.sqrt(_dot(row, row))
    if not left > DEPENDENT * whole:
        return False
    row /= left
    return True


def _dot(one: Wide, other: Wide) -> np.float64:
    """Products of halves added to halves until one number is left: the order follows from the length alone."""
    sums = one * other
    while len(sums) > 1:
        half = len(sums) // 2
        rest = sums[2 * half :]
        sums = sums[:half] + sums[half : 2 * half]
        if len(rest):
            sums[0] += rest[0]
    return np.float64(sums[0])


def _drawn(shape: tuple[int, ...], seed: int) -> Wide:
    """Uniform between -1 and 1. numpy promises that raw generator output never changes."""
    words = np.random.SFC64(seed).random_raw(shape[0] * shape[1])
    numbers: Wide = (words >> np.uint64(32)).astype(np.float64) * DRAW_STEP - 1.0
    return numbers.reshape(shape)


def _first_free(row: Wide, before: Wide) -> None:
    """The first unit vector that does not depend on the rows before."""
    for place in range(len(row)):
        row[:] = 0.0
        row[place] = 1.0
        if _orthogonal(row, before):
            return
    raise AssertionError(f"{len(before)} rows already span all {len(row)} dimensions")
