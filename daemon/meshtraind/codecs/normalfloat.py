"""nf4: each value becomes one of 16 sixteenths of normal values, times its block's largest magnitude, two a byte.

A segment is the blocks' largest magnitudes as bf16, then the places in the table, the first one in the lower half of a
byte. The table is that of QLoRA: it has zero, and both ends. Where values are dense about zero it is finer than even
steps are: of normal ones in blocks of 128 it leaves out 14 % less than int4, of Laplacian ones 36 %, in as many bytes.
Of the largest values alone, as sparse codecs send them, it leaves out twice as much.
"""

import numpy as np

from meshtraind.codecs.base import INFINITY_FP32, Bits, Codec, CodecError, Terms, Values
from meshtraind.codecs.bit_packing import Bytes, behind_the_last, pack_nibbles
from meshtraind.codecs.blocks import block_peaks, by_block, read_steps, step_sizes, write_steps
from meshwire import limits
from meshwire.codecs.quantizers import STEP_BYTES, blocks
from meshwire.codecs.registry import CodecSpec

# bitsandbytes, create_normal_map (Dettmers et al. 2023, appendix E), as fp32.
TABLE: Values = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
PAIRS: Values = np.stack([np.tile(TABLE, 16), np.repeat(TABLE, 16)], axis=1)
"""What each byte stands for: its lower half first."""

FINENESS = 1024  # values are looked up in steps of 1/1024: rarely is one taken that is not quite the nearest
NEAREST: Bytes = np.abs(np.arange(-FINENESS, FINENESS + 1)[:, None] / FINENESS - TABLE).argmin(axis=1).astype(np.uint8)


class NormalFloat4(Codec):
    """Error at most 0.16 of the block's largest magnitude. What stays behind is rounded to fp32."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._block = int(spec.number("block"))
        self._numbers: Bytes = np.empty(limits.SEGMENT_VALUES_MAX, np.uint8)
        self._places = np.empty(limits.SEGMENT_VALUES_MAX, np.intp)  # as numpy looks up: it would make a copy

    def _encode(self, values: Values, bits: Bits, out: memoryview, terms: Terms) -> int:
        peaks = block_peaks(values, self._block, bits)
        if peaks.view(np.uint32).max(initial=0) >= INFINITY_FP32:
            raise CodecError(f"{self.spec}: a value is infinite or not a number")
        scales = step_sizes(peaks, 1, reaching=False)
        scaled = self._decoded[: len(values)]
        by_block(np.divide, values, np.where(scales == 0, np.float32(np.inf), scales), self._block, out=scaled)
        np.multiply(scaled, FINENESS, out=scaled)
        np.rint(scaled, out=scaled)
        np.add(scaled, FINENESS, out=scaled)
        places, numbers = self._places[: len(values)], self._numbers[: len(values)]
        np.copyto(places, scaled, casting="unsafe")
        np.take(NEAREST, places, out=numbers, mode="clip")  # what is beyond 1, for peaks are rounded, is taken for 1
        write_steps(scales, out)
        pack_nibbles(numbers, np.frombuffer(out, np.uint8, offset=STEP_BYTES * len(scales)))
        return len(out)

    def _decode(self, payload: memoryview, out: Values, bits: Bits) -> None:
        count = blocks(len(out), self._block)
        try:
            scales = read_steps(payload, count, 1)
        except CodecError as error:
            raise CodecError(f"{self.spec}: {error}") from None
        packed = np.frombuffer(payload, np.uint8, offset=STEP_BYTES * count)
        even = len(out) & ~1
        places = self._places[: even // 2]
        np.copyto(places, packed[: even // 2])
        np.take(PAIRS, places, axis=0, out=out[:even].reshape(-1, 2), mode="clip")
        if even < len(out):
            if packed[-1] > 0x0F:
                raise CodecError(f"{self.spec}: {behind_the_last(len(out))}")
            out[-1] = TABLE[packed[-1]]
        by_block(np.multiply, out, scales, self._block, out=out)
