"""How large the values of a segment are."""

import math
from collections.abc import Sequence

import numpy as np

from meshtraind.codecs.base import CodecError, Values

TRUSTED = (1e-30, 1e37)  # between them, a sum of squares in fp32 has neither lost small ones nor overflowed


def root_mean_square(values: Values) -> float:
    """About zero, 0 for an empty segment. Raises CodecError when a value is not finite."""
    return root_mean_squares([values])[0]


def root_mean_squares(parts: Sequence[Values]) -> list[float]:
    """The same of each part.

    A sum of squares in fp32 proves both at once that all are finite; only tiny and huge values need more.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        powers = [float(np.dot(values, values)) for values in parts]
    found = []
    for values, power in zip(parts, powers, strict=True):
        if not TRUSTED[0] <= power <= TRUSTED[1]:
            wide = values.astype(np.float64)
            power = float(np.dot(wide, wide))
            if not math.isfinite(power):
                raise CodecError("a value is infinite or not a number")
        found.append(math.sqrt(power / max(len(values), 1)))
    return found
