"""The codecs that send every value of a segment in a few bits: what is typed, and their exact sizes.

How the bits lie is in `meshtraind.codecs`; every segment of so many values takes the same.
"""

from meshwire import limits
from meshwire.codecs.spec import OF, Blocks, Choice, CodecSpec, Family, Number, Reduction, always, warmup

STEP_BYTES = 2  # of each block, as bf16
SCALE_BYTES = 4  # fp32
INT8_LEVELS = 127  # to either side of 0
INT4_LEVELS = 8  # to the side of the largest magnitude, 7 to the other
INT4_BLOCK = 128  # 2 bytes for so many values are 3 % more; in blocks of 1024 half as much again is left out
QSGD_BUCKET = 128
ONEBIT_COLUMN = 4096  # 8 bytes for so many bits are 1.6 % more
TRITS_PER_BYTE = 5  # 3^5 = 243
TWOBIT_COLUMN = 4096  # 8 bytes for so many times two bits are 0.8 % more
QUAD_LEVELS = 4  # what a number of 2 bits stands for
QUADS_PER_WORD = 16  # numbers of 2 bits in a 32-bit word

_ONEBIT_COLUMNS = Blocks(ONEBIT_COLUMN, 2 * SCALE_BYTES)
_TWOBIT_COLUMNS = Blocks(TWOBIT_COLUMN, STEP_BYTES * QUAD_LEVELS)
_TENSORS = Blocks(limits.SEGMENT_VALUES_MAX, SCALE_BYTES)

_ROUNDING = Choice(
    "rounding", ("nearest", "sr"), "nearest", "to the nearest step, or stochastic without error feedback"
)
_BLOCK = Number("block", 16, 65536, 1024.0, "values that share a step size", whole=True)
_SHORT_BLOCK = Number("block", 16, 65536, float(INT4_BLOCK), "values that share a step size", whole=True)


def blocks(count: int, length: int) -> int:
    """How many blocks `count` values make; the last one may be short."""
    return -(-count // length)


def plane_bytes(count: int) -> int:
    """Of one bit for each of `count` values."""
    return -(-count // 8)


def nibble_bytes(count: int) -> int:
    """Of four bits for each of `count` values."""
    return -(-count // 2)


def quad_bytes(count: int) -> int:
    """Of two bits for each of `count` values, in whole words of 16."""
    return 4 * -(-count // QUADS_PER_WORD)


def trit_bytes(count: int) -> int:
    """Of a base-3 digit for each of `count` values, five a byte: 1.6 bits each."""
    return -(-count // TRITS_PER_BYTE)


def qsgd_bits(levels: int) -> int:
    """Of one of the numbers from -levels to levels."""
    return (2 * levels).bit_length()


def _int8_bytes(spec: CodecSpec, count: int) -> int:
    return STEP_BYTES * blocks(count, int(spec.number("block"))) + count


def _int4_bytes(spec: CodecSpec, count: int) -> int:
    return STEP_BYTES * blocks(count, int(spec.number("block"))) + nibble_bytes(count)


def _qsgd_bytes(spec: CodecSpec, count: int) -> int:
    return STEP_BYTES * blocks(count, QSGD_BUCKET) + qsgd_bits(int(spec.number("levels"))) * plane_bytes(count)


def _onebit_bytes(_: CodecSpec, count: int) -> int:
    return _ONEBIT_COLUMNS.header_bytes * blocks(count, ONEBIT_COLUMN) + plane_bytes(count)


def _twobit_bytes(_: CodecSpec, count: int) -> int:
    return _TWOBIT_COLUMNS.header_bytes * blocks(count, TWOBIT_COLUMN) + quad_bytes(count)


def _terngrad_bytes(_: CodecSpec, count: int) -> int:
    return SCALE_BYTES + trit_bytes(count)


def _rounded_to_nearest(spec: CodecSpec) -> bool:
    return spec.choice("rounding") == "nearest"


QUANTISING_FAMILIES = (
    Family(
        "int8",
        Reduction.TWO_SIDED,
        _int8_bytes,
        about="whole steps of 1/127 of a block's largest magnitude",
        source="Dettmers 2016, arXiv 1511.04561",
        parameters=(_ROUNDING, _BLOCK),
        error_feedback=_rounded_to_nearest,
        example="int8:sr,block=256",
    ),
    Family(
        "int4",
        Reduction.TWO_SIDED,
        _int4_bytes,
        about="whole steps of 1/8 of a block's largest magnitude, which has the side with one step more",
        source="Wang et al. 2023 (ZeRO++), arXiv 2306.10209; ggml, Q4_0",
        parameters=(_ROUNDING, _SHORT_BLOCK),
        error_feedback=_rounded_to_nearest,
        example="int4:block=64",
    ),
    Family(
        "nf4",
        Reduction.TWO_SIDED,
        _int4_bytes,
        about="16 sixteenths of normal values, times a block's largest magnitude",
        source="Dettmers et al. 2023 (QLoRA), arXiv 2305.14314",
        parameters=(_SHORT_BLOCK,),
        error_feedback=always,
        example="nf4:block=64",
    ),
    Family(
        "qsgd",
        Reduction.TWO_SIDED,
        _qsgd_bytes,
        about="stochastic steps of a part of the norm of 128 values",
        source="Alistarh et al. 2017, arXiv 1610.02132",
        parameters=(Number("levels", 1, 127, 7.0, "steps from 0 to the norm", whole=True),),
        example="qsgd:7",
    ),
    Family(
        "onebit",
        Reduction.TWO_SIDED,
        _onebit_bytes,
        about="signs, and the means of the positive and the negative values",
        source="Seide et al. 2014, Interspeech; Tang et al. 2021 (1-bit Adam), arXiv 2102.02888",
        parameters=(OF, warmup(0.0)),
        error_feedback=always,
        example="onebit:warmup=100",
        blocks=_ONEBIT_COLUMNS,
    ),
    Family(
        "twobit",
        Reduction.TWO_SIDED,
        _twobit_bytes,
        about="signs, and of each the means of the small and of the large values",
        source="Max 1960, IRE Trans. Inf. Theory 6(1); MXNet, src/kvstore/gradient_compression-inl.h",
        parameters=(Number("rms", 0.125, 8, 1.0, "what reaches so many root mean squares of 4096 values is large"),),
        error_feedback=always,
        example="twobit:rms=2",
        blocks=_TWOBIT_COLUMNS,
    ),
    Family(
        "terngrad",
        Reduction.TWO_SIDED,
        _terngrad_bytes,
        about="-s, 0 or s, drawn so that the mean is the value clipped to 2.5 root mean squares",
        source="Wen et al. 2017, arXiv 1705.07878",
        blocks=_TENSORS,
    ),
)
