"""sidco: values from a threshold on that is fitted so that about a given part of each segment reaches it.

One distribution fitted to everything is far off in the tail that a small ratio asks for: at 0.1 % five times too many
values were kept. So the threshold rises in stages; each fits those alone that are above the last one, and asks for no
less than a quarter of them. Abdelmoniem et al. adapt the number of stages over many steps, from the ratio that the last
steps achieved. Here each stage counts what is left, so that it converges within a segment and nothing is remembered.
The first stages do so in a sample.
"""

import math
from collections.abc import Callable

import numpy as np

from meshtraind.codecs.base import Bits, Values
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.selection import at_least, largest
from meshtraind.codecs.sparse import SparseCodec
from meshwire.codecs.registry import CodecSpec
from meshwire.codecs.sparsifiers import SIDCO_EXCESS, kept_in_round, with_excess

STAGE_RATIO = 0.25
STAGES_MAX = 12
FEWEST = 1 / SIDCO_EXCESS  # of the values asked for
SAMPLES = 8192
SAMPLES_LEFT = 256  # a sample's threshold is left at so many, where it is known to a few percent

Fit = Callable[[Values, float], float]


class Sidco(SparseCodec):
    """Keeps 1 / SIDCO_EXCESS to SIDCO_EXCESS times the values asked for; exactly those where no fit gets there."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        fit = spec.choice("fit")
        self._first_fit: Fit = {"exponential": exponential, "gamma": gamma, "pareto": pareto}[fit]
        self._later_fit: Fit = exponential if fit == "exponential" else pareto  # every tail is nearly a Pareto one

    def _chosen(self, magnitudes: Bits, number: int, most: int) -> Indices:
        peak = magnitudes.max(initial=0).view(np.float32)
        if not peak:
            return np.empty(0, np.intp)
        wanted = min(kept_in_round(self.spec, number, len(magnitudes)), most)
        most = min(with_excess(wanted, len(magnitudes)), most)
        stride = max(len(magnitudes) // SAMPLES, 1)
        # Relative to the peak, so that neither sums nor squares overflow.
        sample = magnitudes[::stride].view(np.float32) / peak
        threshold = self._raised(0.0, sample.compress(sample > 0), max(2 * wanted // stride, SAMPLES_LEFT))
        floor = np.float32(threshold * float(peak)).view(np.uint32)
        indices = at_least(int(floor), magnitudes, self._mask)
        if len(indices) < FEWEST * wanted:  # the sample misled
            threshold = 0.0
            indices = at_least(1, magnitudes, self._mask)
        above = magnitudes[indices].view(np.float32) / peak
        indices = indices.compress(above >= self._raised(threshold, above.compress(above > 0), wanted))
        return indices if len(indices) <= most else largest(magnitudes, wanted, self._mask)

    def _raised(self, threshold: float, above: Values, wanted: int) -> float:
        """A threshold that about `wanted` of those above `threshold` reach; more if stages do not get there."""
        boldness = 1.0  # exponent of a stage's ratio: halved after one that went too far
        fit = self._later_fit if threshold else self._first_fit
        for _ in range(STAGES_MAX):
            if len(above) <= SIDCO_EXCESS * wanted:
                break
            ratio = max(wanted / len(above), STAGE_RATIO) ** boldness
            higher = threshold + fit(above - np.float32(threshold), ratio)
            left = above.compress(above >= higher)
            if len(left) < FEWEST * wanted:
                boldness /= 2
            else:
                threshold, above = higher, left
            fit = self._later_fit
        return threshold


def exponential(excesses: Values, ratio: float) -> float:
    """What a `ratio` of an exponential distribution exceeds, of which these are samples."""
    return -_mean(excesses) * math.log(ratio)


def gamma(excesses: Values, ratio: float) -> float:
    """The same of a gamma distribution of small shape. Samples are positive.

    The paper's closed form, and from it one step towards the quantile: its tail is x^(shape - 1) e^-x / Gamma(shape).
    """
    mean = _mean(excesses)
    spread = max(math.log(mean) - _mean(np.log(excesses)), 1e-6)
    shape = (3 - spread + math.sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    quantile = -math.log(ratio) - math.lgamma(shape)
    if quantile > 1:
        quantile += (shape - 1) * math.log(quantile)
    return max(mean / shape * quantile, 0.0)


def pareto(excesses: Values, ratio: float) -> float:
    """The same of a generalised Pareto distribution, fitted to mean and variance."""
    mean = _mean(excesses)
    variance = float(np.dot(excesses, excesses)) / len(excesses) - mean * mean
    if variance <= 1e-4 * mean * mean:  # nearly all equal, or so far below the peak that their squares are zero
        return mean
    steadiness = mean * mean / variance
    shape = 0.5 * (steadiness - 1)
    scale = 0.5 * mean * (steadiness + 1)
    return -scale * math.log(ratio) if abs(shape) < 1e-6 else scale * (1 - ratio**shape) / shape


def _mean(values: Values) -> float:
    """What `values.mean()` does takes longer for a few thousand than the sum."""
    return float(values.sum()) / len(values)
