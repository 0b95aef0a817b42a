"""2-bit: each value becomes -t, 0 or t, packed as MXNet does.

A segment is the exponent of t = 2^exponent, then 16 values in every 32-bit word, four in each of its bytes, the first
one in the two highest bits: 11 for t, 10 for -t, 00 for 0.

MXNet's t is a constant, 0.5 unless chosen: far above gradients, nothing is sent for hundreds of steps; far below them,
what is left out grows without limit. Here it is the largest power of two up to `rms` root mean squares of the segment,
error feedback included, so it grows with what is left out; and up to rms=1 the segment's largest value is always sent.
As a power of two, and never far below the values, t leaves out of each what fp32 can hold exactly.
"""

import math
import struct

import numpy as np

from meshtraind.codecs.base import Bits, Codec, CodecError, Terms, Values
from meshtraind.codecs.bit_packing import Bytes, pack_quads
from meshtraind.codecs.moments import root_mean_square
from meshwire import limits
from meshwire.codecs.registry import CodecSpec

HEADER = struct.Struct("<i")
EXPONENT_MIN, EXPONENT_MAX = -149, 127  # of the powers of two in fp32
LOWER_BITS = 0x55  # of a byte's four numbers
# Of each byte, its four values in units of t. 01 is no value.
FOURS: Values = np.array([0, 0, -1, 1], np.float32)[np.arange(256)[:, None] >> np.array([6, 4, 2, 0]) & 3]


class TwoBit(Codec):
    """Each value that reaches the threshold t becomes t, with its sign; others become 0."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._rms = spec.number("rms")
        self._numbers: Bytes = np.empty(limits.SEGMENT_VALUES_MAX, np.uint8)

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        limit = self._rms * root_mean_square(values)
        exponent = min(max(math.frexp(limit)[1] - 1, EXPONENT_MIN), EXPONENT_MAX) if limit else EXPONENT_MIN
        threshold = np.float32(2.0**exponent)
        packed = np.frombuffer(out, np.uint8, offset=HEADER.size)
        numbers = self._numbers[: 4 * len(packed)]
        numbers[len(values) :] = 0
        above = numbers[: len(values)]
        below = bits.view(np.uint8)[: len(values)]
        np.greater_equal(values, threshold, out=above.view(np.bool_))
        np.less_equal(values, -threshold, out=below.view(np.bool_))
        np.add(below, above, out=below)
        np.add(below, below, out=below)
        np.add(above, below, out=above)  # 3 above, 2 below
        HEADER.pack_into(out, 0, exponent)
        pack_quads(numbers, packed)
        return len(out)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        (exponent,) = HEADER.unpack_from(payload)
        if not EXPONENT_MIN <= exponent <= EXPONENT_MAX:
            raise CodecError(f"{self.spec}: exponent {exponent} is not within {EXPONENT_MIN} to {EXPONENT_MAX}")
        packed = np.frombuffer(payload, np.uint8, offset=HEADER.size)
        if np.bitwise_and(packed & LOWER_BITS, ~(packed >> 1)).any():
            raise CodecError(f"{self.spec}: a value is 01, which is none")
        whole, rest = divmod(len(out), 4)
        fours = FOURS * np.float32(2.0**exponent)
        last = fours[packed[whole:]].ravel()
        if last[rest:].any():
            raise CodecError(f"{self.spec}: what fills the last word up is not zero")
        out[4 * whole :] = last[:rest]
        # Indices of numpy's own kind, in scratch: it would make a copy of them.
        indices = bits[: 2 * whole].view(np.intp)[:whole]
        np.copyto(indices, packed[:whole])
        np.take(fours, indices, axis=0, out=out[: 4 * whole].reshape(whole, 4), mode="clip")
