"""The values that a sparse codec sends, as bytes: fp16, fp32 or int8, with one scale for all of a segment, int4, or
2 bits.

What is written is a fixed point: decoded values are written as the same bytes again. What the values lose is exact in
fp32, unless they are denormal or have 2 bits, so that nothing is lost besides what error feedback keeps. With 2 bits it
is rounded once, to fp32.
"""

import math
import struct
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import INFINITY_FP32, MAGNITUDE_FP32, CodecError, Values
from meshtraind.codecs.bit_packing import FOURS, either_sign, pack_nibbles, pack_quads, unpack_nibbles
from meshtraind.codecs.blocks import by_block, read_steps, signed_step_sizes, step_sizes, write_steps
from meshwire.codecs.quantizers import INT4_BLOCK, INT4_LEVELS, QUAD_LEVELS, STEP_BYTES, blocks
from meshwire.codecs.sparsifiers import VALUES_BYTES

FP16_PEAK_BITS = 15  # scaled magnitudes are below 2^15
FP16_EXPONENT_MIN = -127
FP16_EXPONENT_MAX = 128 - FP16_PEAK_BITS
FP16_CEILING = 32752.0  # the last half before 2^15, which times 2^FP16_EXPONENT_MAX would be infinite
FP16_CEILING_BITS = 0x77FF
FP16_LARGEST_BITS = 0x7BFF
FP16_NORMAL_BITS = 0x38800000  # of 2^-14 in fp32: from there on a half has 11 significant bits
FP16_BIAS_BITS = 112 << 23  # the difference of the two formats' exponent biases, in fp32
FP16_BIAS = np.float32(2.0**112)
FP16_SHIFT = 13  # how many bits more the mantissa of fp32 has
FP16_FEW = 4096  # so many are cast as quickly by numpy
FP16_HALF_ULP = 0x1000  # of a half's 11 bits, in those of fp32

INT8_LEVELS = 127
INT8_STEP_BITS = 0xFFFFFF00  # 16 significant bits: a step times a level is exact in fp32, and the peak gives it again
INT8_STEP_MIN = 2.0**-126
INT8_STEP_MAX = float(np.finfo(np.float32).max) / INT8_LEVELS

Codes = NDArray[np.intp]


class KeptValues(ABC):
    """Turns values into bytes. `name` is what is typed behind the +."""

    name: str
    drops_zeros: ClassVar[bool] = True  # what is quantised to zero may be left out of what is written

    def size(self, count: int) -> int:
        """Exact bytes of so many values."""
        return VALUES_BYTES[self.name](count)

    @abstractmethod
    def quantised(self, values: Values) -> Values:
        """A new array of what will be decoded. The values are finite, and so are those."""

    def floor(self, threshold: float, peak: float) -> float:
        """The least magnitude that is sent, where `peak` is the largest: the threshold, or what is written for it if
        that is less. So what is sent reaches it once it is decoded, too."""
        pair = np.array([peak, threshold], np.float32)
        return min(threshold, float(self.quantised(pair)[1]))

    @abstractmethod
    def write(self, quantised: Values, out: memoryview) -> None:
        """Fills `out` with what `quantised` made, without its zeros if they may be left out."""

    def quantised_into(self, values: Values, out: memoryview) -> Values:
        """As `quantised`, and `write` of all that it makes, zeros too."""
        quantised = self.quantised(values)
        self.write(quantised, out)
        return quantised

    @abstractmethod
    def read(self, payload: memoryview, count: int) -> Values:
        """So many values; `payload` has their size. All are finite. Raises CodecError for what is never written."""


class Fp32Values(KeptValues):
    """Exact."""

    name = "fp32"

    def quantised(self, values: Values) -> Values:
        return values.copy()

    def write(self, quantised: Values, out: memoryview) -> None:
        np.frombuffer(out, "<f4")[:] = quantised

    def read(self, payload: memoryview, count: int) -> Values:
        values = np.frombuffer(payload, "<f4").astype(np.float32)
        if _peak_bits(values) >= INFINITY_FP32:
            raise CodecError("a value is infinite or not a number")
        return values


class Fp16Values(KeptValues):
    """Error at most 2^-11 of each value, or 2^-39 of the largest magnitude.

    numpy's own casts from and to halves go value by value; so of many values whole arrays of bits are rounded here.
    Where a half would be denormal, as only values below 2^-29 of the largest magnitude are, the cast is left to numpy.
    """

    name = "fp16"

    def quantised(self, values: Values) -> Values:
        exponent = _fp16_exponent(values)
        scaled = values * np.float32(2.0**-exponent)
        if exponent == FP16_EXPONENT_MAX:
            np.clip(scaled, -FP16_CEILING, FP16_CEILING, out=scaled)
        if not _cast_as_bits(scaled):
            return scaled.astype(np.float16).astype(np.float32) * np.float32(2.0**exponent)
        bits = scaled.view(np.uint32)
        odd = bits >> FP16_SHIFT
        np.bitwise_and(odd, 1, out=odd)
        np.add(bits, odd, out=bits)
        np.add(bits, FP16_HALF_ULP - 1, out=bits)  # just under half, and the odd bit: a tie goes to even
        np.bitwise_and(bits, 0xFFFFFFFF << FP16_SHIFT & 0xFFFFFFFF, out=bits)
        np.multiply(scaled, np.float32(2.0**exponent), out=scaled)
        return scaled

    def write(self, quantised: Values, out: memoryview) -> None:
        exponent = _fp16_exponent(quantised)
        struct.pack_into("<b", out, 0, exponent)
        scaled = quantised * np.float32(2.0**-exponent)
        if not _cast_as_bits(scaled):
            np.frombuffer(out, "<f2", offset=1)[:] = scaled
            return
        bits = scaled.view(np.uint32)
        signs = bits >> 16
        np.bitwise_and(signs, 0x8000, out=signs)
        np.bitwise_and(bits, MAGNITUDE_FP32, out=bits)
        np.subtract(bits, FP16_BIAS_BITS, out=bits)
        np.right_shift(bits, FP16_SHIFT, out=bits)
        np.bitwise_or(bits, signs, out=bits)
        np.copyto(np.frombuffer(out, "<u2", offset=1), bits, casting="unsafe")

    def read(self, payload: memoryview, count: int) -> Values:
        (exponent,) = struct.unpack_from("<b", payload)
        if exponent > FP16_EXPONENT_MAX or exponent < FP16_EXPONENT_MIN:
            raise CodecError(f"exponent {exponent} is not within {FP16_EXPONENT_MIN} to {FP16_EXPONENT_MAX}")
        halves = np.frombuffer(payload, "<i2", offset=1)
        peak = int((halves & 0x7FFF).max(initial=0))
        if peak > (FP16_CEILING_BITS if exponent == FP16_EXPONENT_MAX else FP16_LARGEST_BITS):
            raise CodecError("a value is infinite or not a number")
        if count < FP16_FEW:
            scaled = halves.view("<f2").astype(np.float32)
            scaled *= np.float32(2.0**exponent)
            return scaled
        bits = halves.astype(np.int32).view(np.uint32)  # as signed numbers, so that the sign comes to stand in front
        np.left_shift(bits, FP16_SHIFT, out=bits)
        np.bitwise_and(bits, 0x8FFFE000, out=bits)
        scaled = bits.view(np.float32)
        np.multiply(scaled, FP16_BIAS, out=scaled)
        np.multiply(scaled, np.float32(2.0**exponent), out=scaled)
        return scaled


class Int8Values(KeptValues):
    """Error at most 1/253 of the largest magnitude."""

    name = "int8"

    def quantised(self, values: Values) -> Values:
        step = _int8_step(values)
        quantised: Values = np.rint(values / step) * step
        return quantised

    def write(self, quantised: Values, out: memoryview) -> None:
        step = _int8_step(quantised)
        struct.pack_into("<f", out, 0, step)
        np.frombuffer(out, np.int8, offset=4)[:] = quantised / step

    def read(self, payload: memoryview, count: int) -> Values:
        (step,) = struct.unpack_from("<f", payload)
        if not INT8_STEP_MIN <= step <= INT8_STEP_MAX:
            raise CodecError(f"a step of {step:g} between levels")
        levels = np.frombuffer(payload, np.int8, offset=4)
        if levels.min(initial=0) < -INT8_LEVELS:
            raise CodecError("a level of -128")
        return levels * np.float32(step)


class Int4Values(KeptValues):
    """Error at most 1/15 of the largest magnitude among 128 neighbours, 1/7 at the end that steps do not reach: as
    those of `int4.py`."""

    name = "int4"
    drops_zeros = False  # the others would change neighbours, and with them steps

    def floor(self, threshold: float, peak: float) -> float:
        """The threshold: beside a large neighbour everything may be written as zero."""
        return threshold

    def quantised(self, values: Values) -> Values:
        steps, quantised = self._levels(values)
        by_block(np.multiply, quantised, steps, INT4_BLOCK, out=quantised)
        return quantised

    def write(self, quantised: Values, out: memoryview) -> None:
        self._write(*self._levels(quantised), out)

    def quantised_into(self, values: Values, out: memoryview) -> Values:
        # What it makes has these steps and levels again.
        steps, levels = self._levels(values)
        self._write(steps, levels, out)
        by_block(np.multiply, levels, steps, INT4_BLOCK, out=levels)
        return levels

    def _write(self, steps: Values, levels: Values, out: memoryview) -> None:
        write_steps(steps, out)
        numbers = (levels + np.float32(INT4_LEVELS)).astype(np.uint8)
        pack_nibbles(numbers, np.frombuffer(out, np.uint8, offset=STEP_BYTES * len(steps)))

    def read(self, payload: memoryview, count: int) -> Values:
        steps = read_steps(payload, blocks(count, INT4_BLOCK), INT4_LEVELS, signed=True)
        numbers = np.empty(count, np.uint8)
        unpack_nibbles(np.frombuffer(payload, np.uint8, offset=STEP_BYTES * len(steps)), numbers)
        values = numbers.astype(np.float32)
        values -= np.float32(INT4_LEVELS)
        by_block(np.multiply, values, steps, INT4_BLOCK, out=values)
        return values

    def _levels(self, values: Values) -> tuple[Values, Values]:
        """Steps of each bucket; whole numbers of them for each value."""
        steps = signed_step_sizes(values, INT4_BLOCK, INT4_LEVELS, reaching=False)
        levels = np.empty_like(values)
        by_block(np.divide, values, np.where(steps == 0, np.float32(np.inf), steps), INT4_BLOCK, out=levels)
        np.rint(levels, out=levels)
        np.clip(levels, -INT4_LEVELS, INT4_LEVELS - 1, out=levels)
        return steps, levels


class TwoBitValues(KeptValues):
    """Each becomes a mean: of the small ones or of the large ones of its sign. Which are large: those above the mean
    magnitude of their sign.

    SparseLoCo's means are those of four bins of 1.5 standard deviations, from -3 on. One of them is then nearly empty,
    and one holds small values of both signs, whose mean is about zero: of the largest 64 of 4096 Student-distributed
    values it loses 28 % of the squared norm, and this 10 %.
    """

    name = "2bit"

    def quantised(self, values: Values) -> Values:
        codes, levels = self._split(values)
        return either_sign(levels)[codes]

    def write(self, quantised: Values, out: memoryview) -> None:
        codes, levels = self._split(quantised)
        write_steps(levels, out)
        packed = np.frombuffer(out, np.uint8, offset=STEP_BYTES * QUAD_LEVELS)
        numbers = np.zeros(4 * len(packed), np.uint8)
        numbers[: len(codes)] = codes
        pack_quads(numbers, packed)

    def read(self, payload: memoryview, count: int) -> Values:
        levels = either_sign(read_steps(payload, QUAD_LEVELS, 1))
        packed = np.frombuffer(payload, np.uint8, offset=STEP_BYTES * QUAD_LEVELS)
        if count % 4 and packed[-1] & 0xFF >> 2 * (count % 4):
            raise CodecError("what fills the last byte up is not zero")
        values: Values = levels[FOURS[packed].ravel()[:count]]
        return values

    def _split(self, values: Values) -> tuple[Codes, Values]:
        """Numbers below 4: twice the sign bit, and one for the large; and the magnitudes of what each stands for.

        Of values that this has made the means are they themselves: sums of 65,536 numbers of 8 bits are exact.
        """
        signs: Codes = np.signbit(values).astype(np.intp)
        magnitudes = np.abs(values)
        codes: Codes = 2 * signs + (magnitudes > _means(magnitudes, signs, 2)[signs])
        means = _means(magnitudes, codes, QUAD_LEVELS).astype(np.float32)
        return codes, step_sizes(means, 1, reaching=False)


FORMS: dict[str, type[KeptValues]] = {
    form.name: form for form in (Fp16Values, Fp32Values, Int8Values, Int4Values, TwoBitValues)
}


def _means(magnitudes: Values, codes: Codes, number: int) -> NDArray[np.float64]:
    """Of those with each code below `number`; 0 where there are none."""
    sums = np.bincount(codes, weights=magnitudes, minlength=number)
    return sums / np.maximum(np.bincount(codes, minlength=number), 1)


def _peak_bits(values: Values) -> int:
    """Of the largest magnitude."""
    return int((values.view(np.uint32) & MAGNITUDE_FP32).max(initial=0))


def _fp16_exponent(values: Values) -> int:
    """Of the power of two that leaves the largest magnitude, once it is rounded, just below 2^FP16_PEAK_BITS."""
    peak = _peak_bits(values)
    if not peak:
        return 0
    # Rounding up may reach the next power of two, which must then be told apart from infinity: hence not as fp32.
    if peak >= 0x00800000:
        exponent = ((peak + FP16_HALF_ULP) >> 23) - 126
    else:
        exponent = math.frexp(float(np.uint32(peak).view(np.float32)))[1]
    return min(max(exponent - FP16_PEAK_BITS, FP16_EXPONENT_MIN), FP16_EXPONENT_MAX)


def _cast_as_bits(scaled: Values) -> bool:
    """Whether every one of them has 11 significant bits as a half, which a zero has not, and they are enough for it."""
    if len(scaled) < FP16_FEW:
        return False
    magnitudes = scaled.view(np.uint32) & MAGNITUDE_FP32
    return int(magnitudes.min(initial=FP16_NORMAL_BITS)) >= FP16_NORMAL_BITS


def _int8_step(values: Values) -> np.float32:
    peak = np.uint32(_peak_bits(values)).view(np.float32)
    step = (peak / np.float32(INT8_LEVELS)).view(np.uint32) & np.uint32(INT8_STEP_BITS)
    return max(step.view(np.float32), np.float32(INT8_STEP_MIN))
