"""The arithmetic of low rank: what must be the same to the last bit on all machines, and how near it is."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshtraind.projection.orthonormal import left_factor, orthonormal, product_into, right_factor, subtract_product

Values = NDArray[np.float32]


def rows_of(kind: str, rank: int, count: int, seed: int) -> Values:
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((rank, count))
    match kind:
        case "zero":
            normal[:] = 0
        case "equal":
            normal[:] = normal[0]
        case "huge":
            normal = np.sign(normal) * float(np.finfo(np.float32).max)
        case "tiny":
            normal *= 1e-44
        case "of all sizes":
            normal *= 10.0 ** rng.integers(-30, 30, (rank, 1))
        case "one zero":
            normal[-1] = 0
        case "aligned":
            normal[:] = 0
            normal[:, 0] = 1
    return normal.astype(np.float32)


KINDS = ("normal", "zero", "equal", "huge", "tiny", "of all sizes", "one zero", "aligned")


@settings(max_examples=80)
@given(st.sampled_from(KINDS), st.integers(1, 8), st.integers(0, 300), st.integers(0, 2**32))
def test_every_basis_is_orthonormal(kind: str, rank: int, more: int, seed: int) -> None:
    """O4: the mean's norm is its factor's. Also where rows depend on each other: those are drawn, from the seed."""
    rows = rows_of(kind, rank, rank + more, seed)
    before = rows.copy()
    basis = orthonormal(rows, seed)
    assert (rows == before).all()
    assert np.abs(basis.astype(np.float64) @ basis.T.astype(np.float64) - np.eye(rank)).max() < 1e-6
    assert (orthonormal(rows, seed) == basis).all()


def test_what_has_full_rank_keeps_its_span() -> None:
    rows = rows_of("normal", 4, 100, 1)
    basis = orthonormal(rows, 2).astype(np.float64)
    assert np.abs(rows @ basis.T @ basis - rows).max() < 1e-5
    assert (orthonormal(rows, 2) == orthonormal(rows, 3)).all(), "nothing is drawn"


def in_plain_floats(rows: Values) -> list[list[float]]:
    """Modified Gram-Schmidt with Python's own floats, one operation after the other."""

    def dot(one: list[float], other: list[float]) -> float:
        sums = [a * b for a, b in zip(one, other, strict=True)]
        while len(sums) > 1:
            half, odd = divmod(len(sums), 2)
            last = sums[-1]
            sums = [sums[at] + sums[half + at] for at in range(half)]
            if odd:
                sums[0] += last
        return sums[0]

    peak = float(np.abs(rows).max())
    basis: list[list[float]] = []
    for row in (rows.astype(np.float64) / peak).tolist():
        for other in basis:
            along = dot(row, other)
            row = [value - along * unit for value, unit in zip(row, other, strict=True)]
        length = math.sqrt(dot(row, row))
        basis.append([value / length for value in row])
    return basis


@pytest.mark.parametrize("count", [4, 7, 64, 1000, 1537])
def test_a_basis_is_what_ieee_754_says(count: int) -> None:
    """DESIGN 5.6: bit-equal on all peers, whatever vector units and libraries they have."""
    rows = rows_of("normal", 4, count, count)
    assert (orthonormal(rows, 0) == np.array(in_plain_floats(rows), np.float32)).all()


def test_a_product_is_what_ieee_754_says() -> None:
    """Term after term, each rounded to fp32, without fused operations."""
    rng = np.random.default_rng(1)
    left, right = (rng.standard_normal((3, count)).astype(np.float32) for count in (37, 53))
    out, scratch = np.empty((37, 53), np.float32), np.empty(37 * 53, np.float32)
    product_into(left, right, out, scratch)
    for row in range(37):
        for column in range(53):
            total = left[0, row] * right[0, column]
            for of_left, of_right in zip(left[1:], right[1:], strict=True):
                total = np.float32(total + np.float32(of_left[row] * of_right[column]))
            assert out[row, column] == total


def test_factors_are_the_best_for_their_basis_and_the_rest_is_what_they_lack() -> None:
    """Least squares: the rest is orthogonal to the basis."""
    rng = np.random.default_rng(2)
    matrix = rng.standard_normal((500, 130)).astype(np.float32)
    for columns, factor in ((130, left_factor), (500, right_factor)):
        basis = orthonormal(rng.standard_normal((4, columns)).astype(np.float32), 1)
        other = np.empty((4, 630 - columns), np.float32)
        factor(matrix, basis, out=other)
        left, right = (other, basis) if factor is left_factor else (basis, other)
        rest = matrix.copy()
        subtract_product(rest, left, right)
        assert np.abs(rest + left.T @ right - matrix).max() < 1e-5
        assert np.abs(rest @ basis.T if factor is left_factor else basis @ rest).max() < 1e-4
