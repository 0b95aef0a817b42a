"""What is read off a curve of losses, and how far the means of several seeds are apart by chance."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

from tests.bench.proof.plots import Curve

NOISE_FACTOR = 2.0  # standard errors of the difference of two means


def steps_to(curve: Curve, loss: float) -> float | None:
    """Where a curve comes down to a loss, between two points on a straight line; None where it does not."""
    for (before, high), (after, low) in pairwise(curve):
        if low <= loss:
            return before if high <= loss else before + (after - before) * (high - loss) / (high - low)
    return None


def loss_at(curve: Curve, steps: float) -> float:
    """Between two points on a straight line."""
    for (before, one), (after, other) in pairwise(curve):
        if before <= steps <= after:
            return one + (other - one) * (steps - before) / (after - before)
    return curve[-1][1]


def noise(base: Sequence[float]) -> float | None:
    """Two standard errors of the difference between two trainings as the base's seeds are; None of a single seed. What
    scatters more than the base is not nearer to it for that."""
    if len(base) < 2:
        return None
    return float(NOISE_FACTOR * (2 * statistics.variance(base) / len(base)) ** 0.5)


def mean_and_seeds(losses: Sequence[float]) -> str:
    """For tables: the mean, and in brackets each seed's."""
    return f"{statistics.mean(losses):.3f} ({' '.join(f'{loss:.3f}' for loss in losses)})"


def mean_curve(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """The mean of several seeds' curves, at the places at which each of them has a point."""
    each = [dict(curve) for curve in curves]
    common = sorted(set.intersection(*map(set, each)))
    return [(at, statistics.mean(curve[at] for curve in each)) for at in common]
