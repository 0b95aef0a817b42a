"""The largest magnitudes of a segment, or of each run of neighbours in it, without sorting or partitioning all."""

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import Bits
from meshtraind.codecs.indices import Indices

SAMPLES = 2048
MARGIN = 3.0  # standard deviations: rarely is a sampled floor so high that too few values reach it
MANY = 4096  # candidates; of fewer a threshold is as quickly found among all


def at_least(floor: int, magnitudes: Bits, mask: NDArray[np.bool_]) -> Indices:
    """Ascending indices of the magnitudes, given as bits, that are neither below `floor` nor 0. `mask` is scratch."""
    reached = np.greater_equal(magnitudes, np.uint32(max(floor, 1)), out=mask[: len(magnitudes)])
    return np.flatnonzero(reached)


def largest(magnitudes: Bits, wanted: int, mask: NDArray[np.bool_]) -> Indices:
    """Ascending indices of the `wanted` largest, at least one; of equal ones those that come first, and never a zero.

    A floor that rather more of them reach than are wanted comes from every so-manieth one; those alone are
    partitioned. Where the sample misleads, all are.
    """
    floor = int(_sampled_floors(magnitudes[None, :], wanted)[0]) if len(magnitudes) else 1
    indices = at_least(floor, magnitudes, mask)
    if len(indices) < wanted and floor > 1:
        at = max(len(magnitudes) - wanted, 0)
        indices = at_least(int(np.partition(magnitudes, at)[at]), magnitudes, mask)
    if len(indices) <= wanted:
        return indices
    candidates = magnitudes.take(indices)
    threshold = _nth_largest(candidates, wanted)
    kept = np.greater_equal(candidates, threshold, out=mask[: len(candidates)])
    surplus = int(np.count_nonzero(kept)) - wanted
    if surplus:
        kept[np.flatnonzero(candidates == threshold)[-surplus:]] = False
    return indices.compress(kept)


def _nth_largest(magnitudes: Bits, nth: int) -> np.uint32:
    """From 1 on, of no more than there are. Of many, two bounds come from a sample; what lies between them is
    partitioned, or everything where they miss."""
    count = len(magnitudes)
    if count > MANY:
        sample = np.sort(magnitudes[:: 2 * count // SAMPLES])
        expected = len(sample) * nth / count
        margin = 1 + MARGIN * (expected * (1 - nth / count)) ** 0.5
        low = sample[max(len(sample) - 1 - int(expected + margin), 0)]
        high = sample[min(len(sample) - int(expected - margin), len(sample) - 1)]
        below_high = magnitudes < high
        missing = nth - (count - int(np.count_nonzero(below_high)))
        between = magnitudes.compress(np.logical_and(below_high, magnitudes >= low, out=below_high))
        if 0 < missing <= len(between):
            return np.uint32(np.partition(between, len(between) - missing)[len(between) - missing])
    return np.uint32(np.partition(magnitudes, count - nth)[count - nth])


def largest_of_each(rows: Bits, wanted: int, mask: NDArray[np.bool_]) -> Indices:
    """The same of each row, as indices into all of them, one behind the other. `rows` are contiguous."""
    number, length = rows.shape
    if number == 1:
        return largest(rows[0], wanted, mask)
    floors = _sampled_floors(rows, wanted)
    reached = np.greater_equal(rows, floors[:, None], out=mask[: rows.size].reshape(number, length))
    indices = np.flatnonzero(reached)
    counts = _by_row(indices, number, length)
    if (misled := (counts < wanted) & (floors > 1)).any():
        whole = rows[misled]
        floors = np.maximum(np.partition(whole, length - wanted, axis=1)[:, length - wanted], 1)
        reached[misled] = whole >= floors[:, None]
        indices = np.flatnonzero(reached)
        counts = _by_row(indices, number, length)
    most = counts.max(initial=0)
    if most <= wanted:
        return indices
    taken = np.arange(most) < counts[:, None]  # side by side, filled up with zeros
    candidates = np.zeros((number, most), np.uint32)
    candidates[taken] = rows.reshape(-1)[indices]
    thresholds = np.maximum(np.partition(candidates, most - wanted, axis=1)[:, most - wanted], 1)[:, None]
    kept = candidates >= thresholds
    surplus = kept.sum(axis=1) - wanted
    for row in np.flatnonzero(surplus > 0):
        kept[row, np.flatnonzero(candidates[row] == thresholds[row])[-surplus[row] :]] = False
    return indices.compress(kept[taken])


def _by_row(indices: Indices, number: int, length: int) -> Indices:
    """How many of the ascending indices lie in each row."""
    return np.diff(np.searchsorted(indices, np.arange(number + 1) * length))


def _sampled_floors(rows: Bits, wanted: int) -> Bits:
    """Of each row, as bits; 1 where all but zeros are to be looked at."""
    stride = max(rows.size // SAMPLES, 1)
    sample = rows[:, ::stride]
    expected = wanted / stride
    rank = int(expected + MARGIN * expected**0.5) + 1
    at = sample.shape[1] - rank
    if at <= 0:
        return np.ones(len(rows), np.uint32)
    return np.maximum(np.partition(sample, at, axis=1)[:, at], 1)
