"""The values that a sparse codec sends, as bytes: fp16, fp32 or int8, with one scale for all of a segment.

What is written is a fixed point: decoded values are written as the same bytes again. What the values lose is exact in
fp32, unless they are denormal, so that nothing is lost besides what error feedback keeps.
"""

import math
import struct
from abc import ABC, abstractmethod

import numpy as np

from meshtraind.codecs.base import INFINITY_FP32, MAGNITUDE_FP32, CodecError, Values
from meshwire.sparsecodecs import values_bytes

FP16_PEAK_BITS = 15  # scaled magnitudes are below 2^15
FP16_EXPONENT_MIN = -127
FP16_EXPONENT_MAX = 128 - FP16_PEAK_BITS
FP16_CEILING = 32752.0  # the last half before 2^15, which times 2^FP16_EXPONENT_MAX would be infinite
FP16_HALF_ULP = 0x1000  # of a half's 11 bits, in those of fp32

INT8_LEVELS = 127
INT8_STEP_BITS = 0xFFFFFF00  # 16 significant bits: a step times a level is exact in fp32, and the peak gives it again
INT8_STEP_MIN = 2.0**-126
INT8_STEP_MAX = float(np.finfo(np.float32).max) / INT8_LEVELS


class KeptValues(ABC):
    """Turns values into bytes. `name` is what is typed behind the +."""

    name: str

    def size(self, count: int) -> int:
        """Exact bytes of so many values."""
        return values_bytes(self.name, count)

    @abstractmethod
    def quantised(self, values: Values) -> Values:
        """A new array of what will be decoded. The values are finite, and so are those."""

    @abstractmethod
    def write(self, quantised: Values, out: memoryview) -> None:
        """Fills `out` with what `quantised` made, or with a part of it that has its largest magnitude."""

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
    """Error at most 2^-11 of each value, or 2^-39 of the largest magnitude."""

    name = "fp16"

    def quantised(self, values: Values) -> Values:
        exponent = _fp16_exponent(values)
        scaled = values * np.float32(2.0**-exponent)
        if exponent == FP16_EXPONENT_MAX:
            np.clip(scaled, -FP16_CEILING, FP16_CEILING, out=scaled)
        return scaled.astype(np.float16).astype(np.float32) * np.float32(2.0**exponent)

    def write(self, quantised: Values, out: memoryview) -> None:
        exponent = _fp16_exponent(quantised)
        struct.pack_into("<b", out, 0, exponent)
        np.frombuffer(out, "<f2", offset=1)[:] = quantised * np.float32(2.0**-exponent)

    def read(self, payload: memoryview, count: int) -> Values:
        (exponent,) = struct.unpack_from("<b", payload)
        if exponent > FP16_EXPONENT_MAX or exponent < FP16_EXPONENT_MIN:
            raise CodecError(f"exponent {exponent} is not within {FP16_EXPONENT_MIN} to {FP16_EXPONENT_MAX}")
        scaled = np.frombuffer(payload, "<f2", offset=1).astype(np.float32)
        # Written so that a NaN is refused as well.
        if not np.abs(scaled).max(initial=0.0) <= (FP16_CEILING if exponent == FP16_EXPONENT_MAX else 65504.0):
            raise CodecError("a value is infinite or not a number")
        scaled *= np.float32(2.0**exponent)
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


FORMS: dict[str, type[KeptValues]] = {form.name: form for form in (Fp16Values, Fp32Values, Int8Values)}


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


def _int8_step(values: Values) -> np.float32:
    peak = np.uint32(_peak_bits(values)).view(np.float32)
    step = (peak / np.float32(INT8_LEVELS)).view(np.uint32) & np.uint32(INT8_STEP_BITS)
    return max(step.view(np.float32), np.float32(INT8_STEP_MIN))
