"""int8: whole steps of 1/127 of a block's largest magnitude, a byte each."""

import numpy as np

from meshtraind.codecs.bit_packing import Bytes
from meshtraind.codecs.blocks import BlockCodec
from meshwire.codecs.quantizers import INT8_LEVELS
from meshwire.codecs.registry import CodecSpec


class Int8(BlockCodec):
    """Error at most 1/253 of the block's largest magnitude; stochastic, twice that and 0 on average."""

    def __init__(self, spec: CodecSpec) -> None:
        stochastic = spec.choice("rounding") == "sr"
        super().__init__(spec, block=int(spec.number("block")), levels=INT8_LEVELS, stochastic=stochastic)

    def _pack(self, numbers: Bytes, out: Bytes) -> None:
        np.copyto(out, numbers)

    def _unpack(self, packed: Bytes, out: Bytes) -> None:
        np.copyto(out, packed)
