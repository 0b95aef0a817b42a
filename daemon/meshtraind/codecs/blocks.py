"""Whole steps of a size that each block of a segment has for itself: what int8, int4 and QSGD share.

A segment is the blocks' step sizes as bf16, then for each value how many steps it is above the lowest number of them. A
step size of 8 significant bits times such a number is exact in fp32, and so is what rounding to the nearest step leaves
out of a value: error feedback loses nothing, and decoded values encode to the same bytes again.

A number of some bits has one value more to one side of zero than to the other. int8 and QSGD do without it; int4, which
has 16 of them, does not: its steps have a sign, so that the block's largest magnitude is at the side that reaches
further.
"""

from abc import abstractmethod
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import INFINITY_FP32, MAGNITUDE_FP32, Bits, Codec, CodecError, Runs, Terms, Values
from meshtraind.codecs.bit_packing import Bytes
from meshtraind.codecs.dither import add_dither
from meshwire import limits
from meshwire.codecs import quantizers as quantcodecs
from meshwire.codecs.registry import CodecSpec

FINEST = np.float32(2.0**-126)  # the least step with 8 significant bits; a block that needs less is sent as zeros
LARGEST_FP32 = float(np.finfo(np.float32).max)
UPPER_HALF = np.uint32(0xFFFF0000)
NEGATIVE_ZERO = np.uint32(0x80000000)


class BlockCodec(Codec):
    """A codec of this kind says how the numbers are packed, and what the steps of a block are.

    Error at most half a step when rounding to the nearest, less than a step with noise. The exceptions are at the ends
    of fp32: a block within `levels` times FINEST becomes zeros, and what lies beyond the last step that is finite (less
    than a step) becomes it.

    Args:
        levels: steps to the side of zero that has more of them.
        fewer: by so many fewer to the other one.
    """

    def __init__(self, spec: CodecSpec, *, block: int, levels: int, stochastic: bool, fewer: int = 0) -> None:
        super().__init__(spec)
        self._block = block
        self._levels = levels
        self._highest = levels - fewer
        self._signed = fewer > 0
        self.draws = stochastic
        self._numbers: Bytes = np.empty(limits.SEGMENT_VALUES_MAX, np.uint8)

    def _steps(self, values: Values, bits: Bits) -> Values:
        """The step size of each block. Raises CodecError when a value is not finite."""
        return step_sizes(self._extents(values, bits), self._levels, reaching=self.draws)

    def _extents(self, values: Values, bits: Bits) -> Values:
        """The magnitude that the steps of each block must reach: its largest one.

        Raises CodecError when a value is not finite.
        """
        peaks = block_peaks(values, self._block, bits)
        if peaks.view(np.uint32).max(initial=0) >= INFINITY_FP32:
            raise CodecError(f"{self.spec}: a value is infinite or not a number")
        return peaks

    @abstractmethod
    def _pack(self, numbers: Bytes, out: Bytes) -> None:
        """Numbers are at most as many as there are steps."""

    @abstractmethod
    def _unpack(self, packed: Bytes, out: Bytes) -> None:
        """Raises CodecError for what `_pack` does not make."""

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        steps = self._steps(values, bits)
        scaled = self._decoded[: len(values)]
        by_block(np.divide, values, np.where(steps == 0, np.float32(np.inf), steps), self._block, out=scaled)
        if self.draws:
            add_dither(scaled, terms.seed, scratch=bits.view(np.float32))
        np.rint(scaled, out=scaled)
        np.clip(scaled, -self._levels, self._highest, out=scaled)
        numbers = self._numbers[: len(values)]
        np.copyto(numbers.view(np.int8), scaled, casting="unsafe")
        np.add(numbers, self._levels, out=numbers)
        write_steps(steps, out)
        self._pack(numbers, np.frombuffer(out, np.uint8, offset=quantcodecs.STEP_BYTES * len(steps)))
        return len(out)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        count = quantcodecs.blocks(len(out), self._block)
        try:
            steps = read_steps(payload, count, self._levels, signed=self._signed)
        except CodecError as error:
            raise CodecError(f"{self.spec}: {error}") from None
        numbers = self._numbers[: len(out)]
        self._unpack(np.frombuffer(payload, np.uint8, offset=quantcodecs.STEP_BYTES * count), numbers)
        if numbers.max(initial=0) > self._levels + self._highest:
            raise CodecError(f"{self.spec}: a value is more than {self._levels} steps")
        np.subtract(numbers, self._levels, out=numbers)
        np.copyto(out, numbers.view(np.int8))
        by_block(np.multiply, out, steps, self._block, out=out)


def block_peaks(values: Values, length: int, bits: Bits) -> Values:
    """The largest magnitude of each block, infinite or not a number where a value is. `bits` is scratch as long."""
    np.bitwise_and(values.view(np.uint32), MAGNITUDE_FP32, out=bits)
    return np.maximum.reduceat(bits, starts(len(bits), length)).view(np.float32)


def step_sizes(extents: Values, levels: int, *, reaching: bool) -> Values:
    """Step sizes of 8 significant bits, `levels` of which make each extent; 0 where that takes finer ones than FINEST.

    Rounded to the nearest: half a step beyond the last one is still rounded to it, and a size is off by less than
    that. With noise, the steps must reach the extents themselves: rounded up.
    """
    return _rounded(extents / np.float32(levels), levels, reaching=reaching)


def signed_step_sizes(values: Values, length: int, levels: int, *, reaching: bool) -> Values:
    """Those of each block of `values`, `levels` of which make its largest magnitude, at its side of zero, and one fewer
    the other end. They are negative where the largest is positive, for the lowest number is then its own.

    To the nearest, what is beyond the last step at the other end becomes it, and is off by a step at most: making all
    steps larger for the few such values would leave out more. With noise both ends are reached. Infinite or not a
    number where a value is.
    """
    of_blocks = starts(len(values), length)
    with np.errstate(invalid="ignore"):
        highest, lowest = np.maximum.reduceat(values, of_blocks), -np.minimum.reduceat(values, of_blocks)
        peaks, others = np.maximum(highest, lowest), np.minimum(highest, lowest)
        steps = np.divide(peaks, np.float32(levels), dtype=np.float32)
        if reaching:
            steps = np.maximum(steps, others / np.float32(levels - 1))
    if not np.isfinite(steps).all():
        raise CodecError("a value is infinite or not a number")
    steps = _rounded(steps, levels, reaching=reaching)
    return np.where((highest >= lowest) & (steps > 0), -steps, steps)


def _rounded(steps: Values, levels: int, *, reaching: bool) -> Values:
    """To 8 significant bits, within what read_steps takes. `steps` are finite, not negative, and overwritten."""
    bits = steps.view(np.uint32)
    bits += np.uint32(0xFFFF) if reaching else 0x7FFF + (bits >> 16 & 1)
    steps = np.minimum(_upper_half(steps), _coarsest(levels))
    steps[steps < FINEST] = 0
    return steps


def write_steps(steps: Values, out: memoryview) -> None:
    """To the beginning of `out`, as bf16."""
    np.copyto(np.frombuffer(out, "<u2", len(steps)), steps.view(np.uint32) >> 16, casting="unsafe")


def read_steps(payload: memoryview, count: int, levels: int, *, signed: bool = False) -> Values:
    """From its beginning. Raises CodecError for a size that `step_sizes`, or `signed_step_sizes`, does not make."""
    bits = np.frombuffer(payload, "<u2", count).astype(np.uint32) << 16
    # As bits, negative numbers and what is not a number are above all others. No step is a negative zero.
    sizes = np.where(bits == NEGATIVE_ZERO, bits, bits & MAGNITUDE_FP32) if signed else bits
    if sizes.max(initial=0) > _coarsest(levels).view(np.uint32):
        raise CodecError(
            f"a step size is not within {-_coarsest(levels) if signed else 0:.3g} to {_coarsest(levels):.3g}"
        )
    return bits.view(np.float32)


def by_block(ufunc: np.ufunc, values: NDArray[Any], of_blocks: NDArray[Any], length: int, *, out: NDArray[Any]) -> None:
    """Applies `ufunc` to each value and what belongs to its block of `length`; the last block may be short."""
    whole = len(values) // length
    end = whole * length
    ufunc(values[:end].reshape(whole, length), of_blocks[:whole, None], out=out[:end].reshape(whole, length))
    ufunc(values[end:], of_blocks[whole:], out=out[end:])


def by_run(ufunc: np.ufunc, values: NDArray[Any], of_runs: NDArray[Any], runs: Runs, *, out: NDArray[Any]) -> None:
    """As `by_block`, of runs of any lengths."""
    if runs.even is not None:
        by_block(ufunc, values, of_runs, runs.even, out=out)
    else:
        ufunc(values, np.repeat(of_runs, runs.lengths), out=out)


def starts(count: int, length: int) -> NDArray[np.intp]:
    """Where the blocks of `count` values begin, for a ufunc's `reduceat`."""
    return np.arange(0, count, length, dtype=np.intp)


def _upper_half(values: Values) -> Values:
    """Cut to 8 significant bits."""
    return (values.view(np.uint32) & UPPER_HALF).view(np.float32)


@cache
def _coarsest(levels: int) -> np.float32:
    """The largest step with 8 significant bits of which so many are finite."""
    return np.float32(_upper_half(np.array([LARGEST_FP32 / levels], np.float32))[0])
