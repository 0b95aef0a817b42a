"""Numbers that look random and follow from a seed, many at once."""

import numpy as np
from numpy.typing import NDArray

GOLDEN_RATIO = 0x9E3779B97F4A7C15  # splitmix64's increment
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


def mixed(seed: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 bits for each number. On every machine the same.

    numpy's generators are no agreement between peers: what they draw may change with its version.
    """
    states = numbers + np.uint64(_splitmix64(seed))
    states += np.uint64(1)
    states *= np.uint64(GOLDEN_RATIO)
    shifted = np.empty_like(states)
    for shift, factor in ((30, FACTORS[0]), (27, FACTORS[1])):
        states ^= np.right_shift(states, np.uint64(shift), out=shifted)
        states *= np.uint64(factor)
    states ^= np.right_shift(states, np.uint64(31), out=shifted)
    return states


def _splitmix64(state: int) -> int:
    """The generator of Steele, Lea and Flood 2014, at any of its steps; `mixed` does the same with arrays."""
    mixed = (state + 1) * GOLDEN_RATIO & MASK
    mixed = (mixed ^ mixed >> 30) * FACTORS[0] & MASK
    mixed = (mixed ^ mixed >> 27) * FACTORS[1] & MASK
    return mixed ^ mixed >> 31
