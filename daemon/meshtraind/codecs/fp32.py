"""fp32: the values as they are."""

import numpy as np

from meshtraind.codecs.base import Bits, Codec, Values
from meshwire import codec


class Fp32(Codec):
    """Exact."""

    spec = codec.FP32

    def _encode(self, values: Values, bits: Bits, out: memoryview) -> None:
        source = values.view(np.uint32)
        self._peak(source, bits)
        np.copyto(np.frombuffer(out, "<u4"), source)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        received = np.frombuffer(payload, "<u4")
        self._peak(received, bits)
        np.copyto(out.view(np.uint32), received)
