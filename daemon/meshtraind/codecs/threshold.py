"""threshold: values whose magnitude reaches a threshold, which is fixed or relative to the segment's root mean square.

With a relative one every segment sends at most 1 / rms^2 of its values, whatever their distribution.
"""

import math

import numpy as np

from meshtraind.codecs.base import Bits
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.selection import at_least
from meshtraind.codecs.sparse import SparseCodec


class Threshold(SparseCodec):
    """Every value that is left out is below the threshold."""

    def _chosen(self, magnitudes: Bits) -> Indices:
        threshold = self.spec.number("magnitude") or self.spec.number("rms") * self._rms(magnitudes)
        if threshold > np.finfo(np.float32).max:
            return np.empty(0, np.intp)
        floor = np.float32(threshold).view(np.uint32)
        return at_least(int(floor), magnitudes, self._mask)

    def _rms(self, magnitudes: Bits) -> float:
        """Relative to the peak at first: squares of fp32 values overflow and underflow."""
        peak = magnitudes.max(initial=0).view(np.float32)
        if not peak:
            return 0.0
        scaled = np.divide(magnitudes.view(np.float32), peak, out=self._decoded[: len(magnitudes)])
        mean_square = float(np.dot(scaled, scaled)) / len(scaled)
        return float(peak) * math.sqrt(mean_square)
