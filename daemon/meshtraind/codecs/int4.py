"""int4: whole steps of 1/7 of a block's largest magnitude, two a byte."""

from meshtraind.codecs.bit_packing import Bytes, pack_nibbles, unpack_nibbles
from meshtraind.codecs.blocks import BlockCodec
from meshwire.codecs.quantizers import INT4_LEVELS
from meshwire.codecs.registry import CodecSpec


class Int4(BlockCodec):
    """Error at most 1/13 of the block's largest magnitude; stochastic, twice that and 0 on average."""

    def __init__(self, spec: CodecSpec) -> None:
        stochastic = spec.choice("rounding") == "sr"
        super().__init__(spec, block=int(spec.number("block")), levels=INT4_LEVELS, stochastic=stochastic)

    def _pack(self, numbers: Bytes, out: Bytes) -> None:
        pack_nibbles(numbers, out)

    def _unpack(self, packed: Bytes, out: Bytes) -> None:
        unpack_nibbles(packed, out)
