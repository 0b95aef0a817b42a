"""bf16: the upper half of fp32, rounded to nearest even."""

import numpy as np

from meshtraind.codecs.base import Bits, Codec, CodecError, Terms, Values

MAGNITUDE = 0x7FFF
INFINITY = 0x7F80
LARGEST = float(np.uint32(0x7F7F0000).view(np.float32))  # what is larger would be rounded to infinity


class Bf16(Codec):
    """Relative error at most 2^-8 of each value; values beyond the largest one become it."""

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        if self._peak(values.view(np.uint32), bits) > LARGEST:
            values = np.clip(values, -LARGEST, LARGEST, out=self._decoded[: len(values)])
        source = values.view(np.uint32)
        np.right_shift(source, 16, out=bits)
        np.bitwise_and(bits, 1, out=bits)
        np.add(bits, source, out=bits)
        np.add(bits, 0x7FFF, out=bits)  # just under half, and the odd bit: a tie goes to even
        np.right_shift(bits, 16, out=bits)
        np.copyto(np.frombuffer(out, "<u2"), bits, casting="unsafe")
        return len(out)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        received = np.frombuffer(payload, "<u2")
        magnitudes = np.bitwise_and(received, MAGNITUDE, out=bits.view(np.uint16)[: len(received)])
        if magnitudes.max(initial=0) >= INFINITY:
            raise CodecError("bf16: a value is infinite or not a number")
        target = out.view(np.uint32)
        np.copyto(target, received)
        np.left_shift(target, 16, out=target)
