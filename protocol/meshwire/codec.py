"""What peers must agree on about codecs: names, exact sizes, and the reduction each allows (DESIGN section 8, C2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Reduction(Enum):
    """What a collective may do with encoded vectors."""

    LINEAR = "linear"  # decode, add, encode again at every hop
    INTEGER_SUM = "integer-sum"  # encoded integers add without decoding
    SKETCH = "sketch"  # sketches add; decoded once at the end
    GATHER = "gather"  # messages travel whole; every peer decodes and adds them in rank order
    TWO_SIDED = "two-sided"  # encoded to the shard's owner, and once more from it


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A codec whose segments have a fixed size."""

    name: str
    reduction: Reduction
    header_bytes: int  # per segment
    value_bytes: int

    def segment_bytes(self, count: int) -> int:
        """Exact bytes of an encoded segment of `count` values."""
        return self.header_bytes + self.value_bytes * count


FP32 = CodecSpec("fp32", Reduction.LINEAR, header_bytes=0, value_bytes=4)
# The header is the exponent of the power of two that the values were divided by.
FP16 = CodecSpec("fp16", Reduction.LINEAR, header_bytes=4, value_bytes=2)
BF16 = CodecSpec("bf16", Reduction.LINEAR, header_bytes=0, value_bytes=2)

CODECS: Mapping[str, CodecSpec] = MappingProxyType({spec.name: spec for spec in (FP32, FP16, BF16)})
