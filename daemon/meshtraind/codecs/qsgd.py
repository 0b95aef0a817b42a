"""QSGD: stochastic steps of a part of the norm of each bucket of values, in as few bits as their number takes."""

import math

import numpy as np

from meshtraind.codecs.base import Bits, Values
from meshtraind.codecs.bit_packing import Bytes, pack_planes, unpack_planes
from meshtraind.codecs.blocks import BlockCodec, starts
from meshwire.codecs.quantizers import QSGD_BUCKET, qsgd_bits
from meshwire.codecs.registry import CodecSpec

EXPONENT_MIN = -126  # 2^126 is enough for the smallest values: their steps are below the finest


class Qsgd(BlockCodec):
    """Error less than a step, which is at most 1.01/levels of the bucket's norm, and 0 on average."""

    def __init__(self, spec: CodecSpec) -> None:
        levels = int(spec.number("levels"))
        super().__init__(spec, block=QSGD_BUCKET, levels=levels, stochastic=True)
        self._width = qsgd_bits(levels)

    def _extents(self, values: Values, bits: Bits) -> Values:
        """Norms, of values divided by a power of two so that their squares stay within fp32."""
        exponent = max(math.frexp(self._peak(values.view(np.uint32), bits))[1], EXPONENT_MIN)
        scaled = np.multiply(values, np.float32(2.0**-exponent), out=self._decoded[: len(values)])
        np.square(scaled, out=scaled)
        norms = np.sqrt(np.add.reduceat(scaled, starts(len(scaled), QSGD_BUCKET)).astype(np.float64))
        with np.errstate(over="ignore"):  # to infinity, where steps are as coarse as they can be
            return (norms * 2.0**exponent).astype(np.float32)

    def _pack(self, numbers: Bytes, out: Bytes) -> None:
        pack_planes(numbers, self._width, out)

    def _unpack(self, packed: Bytes, out: Bytes) -> None:
        unpack_planes(packed, self._width, out)
