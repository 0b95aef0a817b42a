"""Whether values are finite, by V1 (non-finite values), at the speed of memory or of the processor's cache."""

import math

import torch

PIECE_VALUES = 64 * 1024  # that and what it is made from stay in a core's own cache


def are_finite(values: torch.Tensor) -> bool:
    """A sum of squares that is finite proves it, at the speed of memory. One that is not may have overflowed: then the
    largest magnitude tells, which is infinite or NaN when any value is and takes about thirty times as long."""
    if math.isfinite(torch.dot(values, values).item()):
        return True
    return math.isfinite(torch.linalg.vector_norm(values, ord=math.inf).item())


def write_scaled(values: torch.Tensor, factor: float, out: torch.Tensor) -> bool:
    """values * factor into `out`, piece by piece, so that the check reads each from where it was just written.

    Args:
        values: in one dimension, fp32 on the CPU, as is `out`.

    Returns:
        Whether all of `out` is finite.
    """
    finite = True
    for source, target in zip(values.split(PIECE_VALUES), out.split(PIECE_VALUES), strict=True):
        torch.mul(source, factor, out=target)
        finite = finite and are_finite(target)
    return finite
