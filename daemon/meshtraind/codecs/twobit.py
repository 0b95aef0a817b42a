"""2-bit: each value becomes one of four means of its column of 4096: of the small or of the large ones of its sign. A
column ends where a tensor does.

A segment is each column's four means as bf16 magnitudes (small and large from zero up, small and large below zero),
then 16 values in every 32-bit word, four in each of its bytes, the first one in the two highest bits: the sign, then
whether it is large.

Large is what reaches `rms` root mean squares of its column, error feedback included. With one, the default, that is
where two levels of either sign leave least out of normal values (12 % of the squared norm, the least there is; 1-bit 36
%), and about so for those with heavier tails. MXNet's 2 bits are -t, 0 and t with a fixed t, which leaves out more than
1-bit does.
"""

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import Bits, Codec, CodecError, Runs, Terms, Values
from meshtraind.codecs.bit_packing import FOURS, Bytes, either_sign, pack_quads
from meshtraind.codecs.blocks import by_run, read_steps, step_sizes, write_steps
from meshtraind.codecs.moments import root_mean_squares
from meshwire import limits
from meshwire.codecs.quantizers import QUAD_LEVELS, STEP_BYTES
from meshwire.codecs.registry import CodecSpec

CLASSES_8_BITS = 256


class TwoBit(Codec):
    """What a mean leaves out of its values adds up to zero, but for the mean's rounding to 8 significant bits."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._rms = spec.number("rms")
        self._numbers: Bytes = np.empty(limits.SEGMENT_VALUES_MAX, np.uint8)
        # As numpy counts: it would convert them once for each pass.
        self._classes = np.empty(limits.SEGMENT_VALUES_MAX, np.intp)
        self._narrow: Bytes = np.empty(limits.SEGMENT_VALUES_MAX, np.uint8)
        self._weights = np.empty(limits.SEGMENT_VALUES_MAX, np.float64)

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        columns = self._blocks(len(values))
        large_from = self._thresholds(values, columns)
        packed = np.frombuffer(out, np.uint8, offset=STEP_BYTES * QUAD_LEVELS * len(columns))
        numbers = self._numbers[: 4 * len(packed)]
        numbers[len(values) :] = 0
        codes = numbers[: len(values)]
        magnitudes = np.abs(values, out=self._decoded[: len(values)])
        np.right_shift(values.view(np.uint32), 31, out=bits)
        np.add(bits, bits, out=bits)
        np.copyto(codes, bits, casting="unsafe")
        large = self._rest[: len(values)].view(np.uint8)[: len(values)]
        by_run(np.greater_equal, magnitudes, large_from, columns, out=large.view(np.bool_))
        np.add(codes, large, out=codes)
        write_steps(self._means(magnitudes, codes, columns), out)
        pack_quads(numbers, packed)
        return len(out)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        columns = self._blocks(len(out))
        try:
            magnitudes = read_steps(payload, QUAD_LEVELS * len(columns), 1)
        except CodecError as error:
            raise CodecError(f"{self.spec}: {error}") from None
        levels = either_sign(magnitudes.reshape(-1, QUAD_LEVELS))
        packed = np.frombuffer(payload, np.uint8, offset=magnitudes.size * STEP_BYTES)
        whole, rest = divmod(len(out), 4)
        last = FOURS[packed[whole:]].ravel()
        if last[rest:].any():
            raise CodecError(f"{self.spec}: what fills the last word up is not zero")
        # Indices of numpy's own kind, in scratch: it would make a copy of them.
        indices = bits[: 2 * whole].view(np.intp)[:whole]
        np.copyto(indices, packed[:whole])
        fours = out[: 4 * whole].reshape(whole, 4)
        ends = np.append(columns.starts, 4 * whole)[1:] // 4
        for of_column, first, end in zip(levels, columns.starts // 4, ends, strict=True):
            np.take(of_column[FOURS], indices[first:end], axis=0, out=fours[first:end], mode="clip")
        if rest:
            out[4 * whole :] = levels[-1][last[:rest]]

    def _thresholds(self, values: Values, columns: Runs) -> Values:
        """From where on a value of each column is large. Raises CodecError when a value is not finite."""
        with np.errstate(over="ignore"):  # infinite: nothing is large
            return np.array([self._rms * each for each in root_mean_squares(columns.each(values))]).astype(np.float32)

    def _means(self, magnitudes: Values, codes: Bytes, columns: Runs) -> Values:
        """Of each column's values of each code, as they are written; 0 where there are none."""
        classes, weights = self._classes[: len(codes)], self._weights[: len(codes)]
        np.copyto(weights, magnitudes)
        number = QUAD_LEVELS * len(columns)
        if number <= CLASSES_8_BITS:
            firsts = QUAD_LEVELS * np.arange(len(columns), dtype=np.uint8)
            narrow = self._narrow[: len(codes)]
            by_run(np.add, codes, firsts, columns, out=narrow)
            np.copyto(classes, narrow)
        else:
            by_run(np.add, codes, QUAD_LEVELS * np.arange(len(columns)), columns, out=classes)
        sums = np.bincount(classes, weights=weights, minlength=number)
        means: NDArray[np.float32] = (sums / np.maximum(_counts(codes, columns), 1)).astype(np.float32)
        return step_sizes(means, 1, reaching=False)


def _counts(codes: Bytes, columns: Runs) -> NDArray[np.int64]:
    """How many values of each column have each code."""
    at = columns.starts // 8
    large, negative, both = (
        np.add.reduceat(np.bitwise_count(np.packbits(bits)), at, dtype=np.int64)
        for bits in (np.bitwise_and(codes, 1), np.bitwise_and(codes, 2), np.equal(codes, 3))
    )
    small = columns.lengths - large - negative + both
    return np.stack([small, large - both, negative - both, both], axis=1).ravel()
