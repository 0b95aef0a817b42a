"""What all codecs have in common: checks, scratch memory, and adding."""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from meshwire import limits
from meshwire.codec import CodecSpec

Values = NDArray[np.float32]
Bits = NDArray[np.uint32]

MAGNITUDE_FP32 = 0x7FFFFFFF  # all bits but the sign
INFINITY_FP32 = 0x7F800000  # as bits; what is not smaller is infinite or NaN


class CodecError(ValueError):
    """Values or bytes that the codec does not take. From a peer it is a protocol error of that link."""


class Codec(ABC):
    """Encodes one segment at a time (C1). Values are contiguous fp32; bytes are little-endian.

    An instance owns scratch memory: use it from one thread.
    """

    spec: ClassVar[CodecSpec]
    identity: ClassVar[bool] = False  # encoded segments are the values' own memory

    def __init__(self) -> None:
        self._bits: Bits = np.empty(limits.SEGMENT_VALUES_MAX, np.uint32)
        self._decoded: Values = np.empty(limits.SEGMENT_VALUES_MAX, np.float32)

    def encode_into(self, values: Values, out: memoryview) -> int:
        """Writes `segment_bytes(len(values))` bytes, which `out` has exactly, and returns their number.

        Raises CodecError when a value is not finite (V1: such a bucket is sent as poison).
        """
        length = self._check(len(values), len(out))
        self._encode(values, self._bits[: len(values)], out)
        return length

    def decode_into(self, payload: memoryview, out: Values) -> None:
        """Overwrites `out` with the payload's values; all are finite.

        Raises CodecError when the payload has another length, or holds what no encoder makes; `out` is then undefined.
        """
        self._check(len(out), len(payload))
        self._decode(payload, out, self._bits[: len(out)])

    def sum_into(self, payload: memoryview, values: Values, out: Values) -> None:
        """Writes `values` plus the payload's values to `out`, another array, in fp32; sums may overflow to infinity.

        Raises CodecError when the payload has another length. What no encoder makes is found here, or makes a sum that
        `encode_into` refuses.
        """
        self._check(len(out), len(payload))
        with np.errstate(over="ignore", invalid="ignore"):
            self._sum(payload, values, out)

    def _sum(self, payload: memoryview, values: Values, out: Values) -> None:
        self._decode(payload, out, self._bits[: len(out)])
        np.add(values, out, out=out)

    @abstractmethod
    def _encode(self, values: Values, bits: Bits, out: memoryview) -> None:
        """Lengths are checked. `bits` is scratch as long as `values`."""

    @abstractmethod
    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        """Lengths are checked. `bits` is scratch as long as `out`. Raises CodecError."""

    def _check(self, count: int, length: int) -> int:
        if count > limits.SEGMENT_VALUES_MAX:
            raise CodecError(f"{self.spec.name}: a segment of {count} values; at most {limits.SEGMENT_VALUES_MAX}")
        expected = self.spec.segment_bytes(count)
        if length != expected:
            raise CodecError(f"{self.spec.name}: {length} bytes for {count} values, which take {expected}")
        return expected

    def _peak(self, values: Bits, bits: Bits) -> float:
        """max |x| of fp32 values given as bits, 0 if there are none. Raises CodecError when one is not finite.

        Magnitudes are ordered as their bits are: one pass finds maximum, infinity and NaN, and nothing warns.
        """
        np.bitwise_and(values, MAGNITUDE_FP32, out=bits)
        peak = np.uint32(bits.max(initial=0))
        if peak >= INFINITY_FP32:
            raise CodecError(f"{self.spec.name}: a value is infinite or not a number")
        return float(peak.view(np.float32))
