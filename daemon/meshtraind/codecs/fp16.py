"""fp16 with a power-of-two scale per segment: 4 bytes of exponent, then IEEE half-precision values.

The segment is divided by 2^exponent so that its largest magnitude lies in [2^14, 2^15): just below the largest half, so
nothing overflows and as little as possible underflows. The conversions are integer arithmetic on whole arrays: numpy's
own float16 casts go value by value and take two to four times as long.
"""

import math
import struct

import numpy as np

from meshtraind.codecs.base import Bits, Codec, CodecError, Terms, Values

HEADER = struct.Struct("<i")
PEAK_BITS = 15  # scaled magnitudes are below 2^15
EXPONENT_MIN = -127  # 2^127 is the largest power of two in fp32, and enough for its smallest value
EXPONENT_MAX = 128 - PEAK_BITS
CEILING = 32752.0  # the last half before 2^15, which times 2^EXPONENT_MAX would be infinite

MAGNITUDE = 0x7FFF
INFINITY = 0x7C00
CEILING_BITS = 0x77FF

# A half's bits, shifted left by 13, are those of an fp32 value that is smaller by 2^112, the difference of the two
# formats' exponent biases. This holds for subnormal halves too.
MANTISSA_SHIFT = 13
BIAS_BITS = 112
EXPONENT_WITH_BIAS_MAX = 127 - BIAS_BITS


class Fp16(Codec):
    """Error at most 2^-11 of the segment's largest magnitude."""

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        peak = self._peak(values.view(np.uint32), bits)
        exponent = max(math.frexp(peak)[1] - PEAK_BITS, EXPONENT_MIN) if peak else 0
        scaled = self._decoded[: len(values)]
        if exponent <= 0:  # scaling up is exact, so that both steps are one
            np.multiply(values, np.float32(2.0 ** (-BIAS_BITS - exponent)), out=scaled)
        else:
            np.multiply(values, np.float32(2.0**-exponent), out=scaled)
            if exponent == EXPONENT_MAX:
                np.clip(scaled, -CEILING, CEILING, out=scaled)
            np.multiply(scaled, np.float32(2.0**-BIAS_BITS), out=scaled)
        source = scaled.view(np.uint32)
        np.right_shift(source, MANTISSA_SHIFT, out=bits)
        np.bitwise_and(bits, 1, out=bits)
        np.add(source, bits, out=source)
        np.add(source, 0xFFF, out=source)  # just under half, and the odd bit: a tie goes to even
        np.right_shift(source, 16, out=bits)
        np.bitwise_and(bits, 0x8000, out=bits)
        np.right_shift(source, MANTISSA_SHIFT, out=source)
        np.bitwise_or(source, bits, out=bits)
        HEADER.pack_into(out, 0, exponent)
        np.copyto(np.frombuffer(out, "<u2", offset=HEADER.size), bits, casting="unsafe")
        return len(out)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        (exponent,) = HEADER.unpack_from(payload)
        if not EXPONENT_MIN <= exponent <= EXPONENT_MAX:
            raise CodecError(f"fp16: exponent {exponent} is not within {EXPONENT_MIN} to {EXPONENT_MAX}")
        received = np.frombuffer(payload, "<i2", offset=HEADER.size)
        halves = bits.view(np.uint16)[: len(received)]
        np.bitwise_and(received.view("<u2"), MAGNITUDE, out=halves)
        if halves.max(initial=0) > (CEILING_BITS if exponent == EXPONENT_MAX else INFINITY - 1):
            raise CodecError("fp16: a value is infinite or not a number")
        np.copyto(out.view(np.int32), received)  # as signed numbers, so that the sign bit comes to stand in front
        target = out.view(np.uint32)
        np.left_shift(target, MANTISSA_SHIFT, out=target)
        np.bitwise_and(target, 0x8FFFE000, out=target)
        if exponent <= EXPONENT_WITH_BIAS_MAX:  # the first of both steps is exact
            np.multiply(out, np.float32(2.0 ** (BIAS_BITS + exponent)), out=out)
        else:
            np.multiply(out, np.float32(2.0**BIAS_BITS), out=out)
            np.multiply(out, np.float32(2.0**exponent), out=out)
