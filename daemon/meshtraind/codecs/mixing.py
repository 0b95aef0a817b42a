"""Numbers that look random and follow from a seed, many at once."""

import numpy as np
from numpy.typing import NDArray

GOLDEN_RATIO = 0x9E3779B97F4A7C15  # splitmix64's increment


def mixed(seed: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 bits for each number. On every machine the same.

    numpy's generators are no agreement between peers: what they draw may change with its version.
    """
    return _splitmix64(numbers + np.uint64(_splitmix64(np.array([seed], np.uint64))[0]))


def _splitmix64(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The generator of Steele, Lea and Flood 2014, at any of its steps."""
    mixed = (states + np.uint64(1)) * np.uint64(GOLDEN_RATIO)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
