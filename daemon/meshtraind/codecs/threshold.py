"""threshold: values whose magnitude reaches a threshold, which is fixed or relative to the segment's root mean square.

With a relative one a segment sends its largest magnitude, or else it could wait for ever where none stands out; and at
most 1 / rms^2 of its values where any does, whatever their distribution. With a fixed one it may send nothing; a value
that is written as less than the threshold, for it has been rounded, still reaches it for whoever encodes it again.
"""

import math

import numpy as np

from meshtraind.codecs.base import Bits
from meshtraind.codecs.indices import Indices
from meshtraind.codecs.selection import at_least, largest
from meshtraind.codecs.sparse import SparseCodec


class Threshold(SparseCodec):
    """Every value that is left out is below the threshold."""

    def _chosen(self, magnitudes: Bits, number: int, most: int) -> Indices:
        if magnitude := self.spec.number("magnitude"):
            threshold = self._written.floor(
                float(np.float32(magnitude)), float(magnitudes.max(initial=0).view(np.float32))
            )
        else:
            threshold = self._relative(magnitudes, self.spec.number("rms"))
        indices = at_least(int(np.float32(threshold).view(np.uint32)), magnitudes, self._mask)
        return indices if len(indices) <= most else largest(magnitudes, most, self._mask)

    def _relative(self, magnitudes: Bits, factor: float) -> float:
        """Computed relative to the peak: squares of fp32 values overflow and underflow."""
        peak = magnitudes.max(initial=0).view(np.float32)
        if not peak:
            return 0.0
        scaled = np.divide(magnitudes.view(np.float32), peak, out=self._decoded[: len(magnitudes)])
        rms = math.sqrt(float(np.dot(scaled, scaled)) / len(scaled))
        return min(factor * rms, 1.0) * float(peak)
