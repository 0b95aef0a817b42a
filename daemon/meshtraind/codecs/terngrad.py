"""TernGrad: each value becomes -s, 0 or s, drawn so that its mean is the value, in 1.6 bits.

A segment is the scaler s of each tensor that it holds a part of, fp32, then five base-3 digits in each byte: 0 for -s,
1 for 0, 2 for s.

Values are clipped to 2.5 sigma first, or a few large ones would make s large and all others noise. Sigma is taken about
zero: it is the authors' for gradients, whose mean is about zero, and does not clip a constant segment to nothing.

What clipping takes off is lost, for there is no residual: 0.2 % of the squared norm of normal values, but 11 % of that
of a small GPT's gradient, whose large values are then all too small. Where that matters take qsgd or int4:sr.
"""

import numpy as np

from meshtraind.codecs.base import Bits, Codec, CodecError, Terms, Values
from meshtraind.codecs.bit_packing import Bytes, pack_trits, unpack_trits
from meshtraind.codecs.blocks import by_run
from meshtraind.codecs.dither import add_dither
from meshtraind.codecs.moments import root_mean_square
from meshwire import limits
from meshwire.codecs.registry import CodecSpec

CLIP_SIGMAS = 2.5
LARGEST = np.finfo(np.float32).max


class TernGrad(Codec):
    """Error 0 on average for the clipped value g; its variance is s * |g| - g^2."""

    draws = True

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._digits: Bytes = np.empty(limits.SEGMENT_VALUES_MAX, np.uint8)

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        runs = self._blocks(len(values))
        scalers = np.array([self._scaler(part, bits) for part in runs.each(values)], np.float32)[: len(runs)]
        scaled = self._decoded[: len(values)]
        with np.errstate(over="ignore"):  # infinite: clipped
            by_run(np.divide, values, np.where(scalers == 0, np.float32(np.inf), scalers), runs, out=scaled)
        np.clip(scaled, -1, 1, out=scaled)
        add_dither(scaled, terms.seed, scratch=bits.view(np.float32))
        np.rint(scaled, out=scaled)
        np.add(scaled, 1, out=scaled)
        digits = self._digits[: len(values)]
        np.copyto(digits, scaled, casting="unsafe")
        np.frombuffer(out, "<f4", len(scalers))[:] = scalers
        pack_trits(digits, np.frombuffer(out, np.uint8, offset=scalers.nbytes))
        return len(out)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        runs = self._blocks(len(out))
        scalers = np.frombuffer(payload, "<f4", len(runs)).astype(np.float32)
        if len(wrong := scalers[~((scalers >= 0) & (scalers <= LARGEST))]):
            raise CodecError(f"{self.spec}: scaler {wrong[0]} is infinite, not a number, or below 0")
        digits = self._digits[: len(out)]
        unpack_trits(np.frombuffer(payload, np.uint8, offset=scalers.nbytes), digits)
        np.subtract(digits, 1, out=digits)
        np.copyto(out, digits.view(np.int8))
        by_run(np.multiply, out, scalers, runs, out=out)

    def _scaler(self, values: Values, bits: Bits) -> np.float32:
        """What the values of one tensor are drawn from, of either sign. Raises CodecError when one is not finite."""
        peak = self._peak(values.view(np.uint32), bits[: len(values)])
        return np.float32(min(CLIP_SIGMAS * root_mean_square(values), peak))
