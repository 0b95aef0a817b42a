"""TernGrad: each value becomes -s, 0 or s, drawn so that its mean is the value, in 1.6 bits.

A segment is the scaler s, fp32, then five base-3 digits in each byte: 0 for -s, 1 for 0, 2 for s.

Values are clipped to 2.5 sigma first, or a few large ones would make s large and all others noise. Sigma is taken about
zero: it is the authors' for gradients, whose mean is about zero, and does not clip a constant segment to nothing.

What clipping takes off is lost, for there is no residual: 0.2 % of the squared norm of normal values, but 11 % of that
of a small GPT's gradient, whose large values are then all too small. Where that matters take qsgd or int4:sr.
"""

import struct

import numpy as np

from meshtraind.codecs.base import Bits, Codec, CodecError, Terms, Values
from meshtraind.codecs.bit_packing import Bytes, pack_trits, unpack_trits
from meshtraind.codecs.dither import add_dither
from meshtraind.codecs.moments import root_mean_square
from meshwire import limits
from meshwire.codecs.registry import CodecSpec

HEADER = struct.Struct("<f")
CLIP_SIGMAS = 2.5
LARGEST = np.finfo(np.float32).max


class TernGrad(Codec):
    """Error 0 on average for the clipped value g; its variance is s * |g| - g^2."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._digits: Bytes = np.empty(limits.SEGMENT_VALUES_MAX, np.uint8)

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        peak = self._peak(values.view(np.uint32), bits)
        scaler = np.float32(min(CLIP_SIGMAS * root_mean_square(values), peak))
        scaled = self._decoded[: len(values)]
        np.clip(values, -scaler, scaler, out=scaled)
        np.divide(scaled, scaler or np.float32(np.inf), out=scaled)
        add_dither(scaled, terms.seed, scratch=bits.view(np.float32))
        np.rint(scaled, out=scaled)
        np.add(scaled, 1, out=scaled)
        digits = self._digits[: len(values)]
        np.copyto(digits, scaled, casting="unsafe")
        HEADER.pack_into(out, 0, scaler)
        pack_trits(digits, np.frombuffer(out, np.uint8, offset=HEADER.size))
        return len(out)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        (scaler,) = HEADER.unpack_from(payload)
        if not 0 <= scaler <= LARGEST:
            raise CodecError(f"{self.spec}: scaler {scaler} is infinite, not a number, or below 0")
        digits = self._digits[: len(out)]
        unpack_trits(np.frombuffer(payload, np.uint8, offset=HEADER.size), digits)
        np.subtract(digits, 1, out=digits)
        np.copyto(out, digits.view(np.int8))
        np.multiply(out, np.float32(scaler), out=out)
