"""The largest magnitudes of a segment, without sorting or partitioning it."""

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import Bits
from meshtraind.codecs.indices import Indices

SAMPLES = 4096
MARGIN = 3.0  # standard deviations: rarely is a sampled floor so high that too few values reach it


def at_least(floor: int, magnitudes: Bits, mask: NDArray[np.bool_]) -> Indices:
    """Ascending indices of the magnitudes, given as bits, that are neither below `floor` nor 0. `mask` is scratch."""
    reached = np.greater_equal(magnitudes, np.uint32(max(floor, 1)), out=mask[: len(magnitudes)])
    return np.flatnonzero(reached)


def largest(magnitudes: Bits, wanted: int, mask: NDArray[np.bool_]) -> Indices:
    """Ascending indices of the `wanted` largest; of equal ones those that come first, and never a zero.

    At least one is wanted, unless there is none. A floor that rather more reach than are wanted comes from every
    so-manieth value; those alone are partitioned. Where the sample misleads, all are.
    """
    indices = at_least(_sampled_floor(magnitudes, wanted), magnitudes, mask)
    if len(indices) < wanted:
        indices = at_least(1, magnitudes, mask)
    if len(indices) <= wanted:
        return indices
    candidates = magnitudes[indices]
    last = len(candidates) - wanted
    threshold = np.partition(candidates, last)[last]
    reached = candidates >= threshold
    surplus = int(np.count_nonzero(reached)) - wanted
    if surplus:
        reached[np.flatnonzero(candidates == threshold)[-surplus:]] = False
    return indices.compress(reached)


def _sampled_floor(magnitudes: Bits, wanted: int) -> int:
    stride = max(len(magnitudes) // SAMPLES, 1)
    sample = magnitudes[::stride]
    expected = wanted / stride
    rank = int(expected + MARGIN * expected**0.5) + 1
    if rank >= len(sample):
        return 1
    return int(np.partition(sample, len(sample) - rank)[len(sample) - rank])
