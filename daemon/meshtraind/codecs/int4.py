"""int4: whole steps of 1/8 of a block's largest magnitude, two a byte.

Of 16 numbers one more lies to one side of zero than to the other. The block's largest magnitude is on that side,
whatever its sign: a positive one makes the step negative (as in ggml's Q4_0). Of normal values that leaves out 23 %
less than 15 steps do, in as many bytes.
"""

from meshtraind.codecs.base import Bits, CodecError, Values
from meshtraind.codecs.bit_packing import Bytes, pack_nibbles, unpack_nibbles
from meshtraind.codecs.blocks import BlockCodec, signed_step_sizes
from meshwire.codecs.quantizers import INT4_LEVELS
from meshwire.codecs.registry import CodecSpec


class Int4(BlockCodec):
    """Error at most 1/15 of the block's largest magnitude, 1/7 at the end that steps do not reach; stochastic, 1/6 and
    0 on average."""

    def __init__(self, spec: CodecSpec) -> None:
        stochastic = spec.choice("rounding") == "sr"
        super().__init__(spec, block=int(spec.number("block")), levels=INT4_LEVELS, stochastic=stochastic, fewer=1)

    def _steps(self, values: Values, bits: Bits) -> Values:
        try:
            return signed_step_sizes(values, self._block, INT4_LEVELS, reaching=self.draws)
        except CodecError as error:
            raise CodecError(f"{self.spec}: {error}") from None

    def _pack(self, numbers: Bytes, out: Bytes) -> None:
        pack_nibbles(numbers, out)

    def _unpack(self, packed: Bytes, out: Bytes) -> None:
        unpack_nibbles(packed, out)
