"""fp32: the values as they are."""

import sys

import numpy as np

from meshtraind.codecs.base import INFINITY_FP32, Bits, Codec, CodecError, Terms, Values

NEGATIVE_INFINITY_FP32 = 0xFF800000  # as bits


class Fp32(Codec):
    """Exact."""

    identity = sys.byteorder == "little"

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        _check_finite(values)
        np.copyto(np.frombuffer(out, "<f4"), values)
        return len(out)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        np.copyto(out, np.frombuffer(payload, "<f4"))
        _check_finite(out)

    def _sum(self, payload: memoryview, values: Values, out: Values) -> None:
        np.add(values, np.frombuffer(payload, "<f4"), out=out)


def _check_finite(values: Values) -> None:
    """Raises CodecError unless all are.

    A finite sum of squares proves it in one pass. An infinite one may have overflowed; then two passes tell: positive
    values are ordered as their bits are as integers, negative ones as unsigned bits.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(values, values)):
            return
    if (
        values.view(np.int32).max(initial=0) >= INFINITY_FP32
        or values.view(np.uint32).max(initial=0) >= NEGATIVE_INFINITY_FP32
    ):
        raise CodecError("fp32: a value is infinite or not a number")
