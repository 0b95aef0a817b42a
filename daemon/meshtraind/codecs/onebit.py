"""1-bit SGD: a sign for each value, and for each column of 4096 values the means of either sign. A column ends where a
tensor does: means of values of different sizes would be those of none.

A segment is the columns' means of the values from zero up, then those of the values below zero, both fp32, then a bit
for each value, 1 from zero up. What a mean leaves out of its values adds up to zero.
"""

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import Bits, Codec, CodecError, Terms, Values
from meshtraind.codecs.bit_packing import Bytes, unpack_planes
from meshtraind.codecs.blocks import by_run
from meshwire import limits
from meshwire.codecs.quantizers import SCALE_BYTES
from meshwire.codecs.registry import CodecSpec


class OneBit(Codec):
    """Each value becomes the mean of its column's values of the same sign."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._signs: Bytes = np.empty(limits.SEGMENT_VALUES_MAX, np.uint8)

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        columns = self._blocks(len(values))
        means = np.frombuffer(out, "<f4", 2 * len(columns)).reshape(2, len(columns))
        packed = np.frombuffer(out, np.uint8, offset=means.nbytes)
        signs = self._signs[: len(values)]
        packed[:] = np.packbits(np.greater_equal(values, 0, out=signs.view(np.bool_)), bitorder="little")

        source = values.view(np.int32)
        below = np.right_shift(source, 31, out=self._decoded[: len(values)].view(np.int32))  # all ones if negative
        np.bitwise_and(source, below, out=below)
        above = np.bitwise_xor(source, below, out=bits.view(np.int32))
        of_above = np.add.reduceat(np.bitwise_count(packed), columns.starts // 8, dtype=np.int64)
        of_below = columns.lengths - of_above
        means[0] = self._means(above.view(np.float32), columns.starts, of_above)
        means[1] = self._means(below.view(np.float32), columns.starts, of_below)
        return len(out)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        runs = self._blocks(len(out))
        columns = len(runs)
        above, below = np.frombuffer(payload, "<f4", 2 * columns).astype(np.float32).reshape(2, columns)
        if not ((above >= 0) & (above < np.inf) & (below <= 0) & (below > -np.inf)).all():
            raise CodecError(f"{self.spec}: a mean is infinite, not a number, or of the wrong sign")
        signs = self._signs[: len(out)]
        unpack_planes(np.frombuffer(payload, np.uint8, offset=2 * SCALE_BYTES * columns), 1, signs)
        # below ^ sign * (above ^ below), as bits: several times as fast as choosing one of the two.
        np.copyto(bits, signs)
        below_bits = below.view(np.uint32)
        by_run(np.multiply, bits, above.view(np.uint32) ^ below_bits, runs, out=bits)
        by_run(np.bitwise_xor, bits, below_bits, runs, out=out.view(np.uint32))

    def _means(self, values: Values, columns: NDArray[np.intp], counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sums in fp64: they cannot overflow, and are exact for equal values: decoded ones keep their mean.

        Raises CodecError when a value is not finite, which makes its sum so.
        """
        with np.errstate(invalid="ignore"):
            sums = np.add.reduceat(values, columns, dtype=np.float64)
        if not np.isfinite(sums).all():
            raise CodecError(f"{self.spec}: a value is infinite or not a number")
        means: NDArray[np.float64] = sums / np.maximum(counts, 1) + 0.0  # no -0.0 from a column of zeros
        return means
