"""The codecs there are: names, parameters, sizes, and the reduction each allows (DESIGN section 8, C2).

One entry for each family. How its segments look is in `meshtraind.codecs`.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from meshwire.codecs.quantizers import QUANTISING_FAMILIES
from meshwire.codecs.sketch import HOMOMORPHIC
from meshwire.codecs.sparsifiers import SPARSE_FAMILIES
from meshwire.codecs.spec import (
    ITERATION,
    MAP,
    WARMUP_MAX,
    Choice,
    CodecSpec,
    Family,
    Number,
    Reduction,
    always,
    warmup,
)

__all__ = [
    "BF16",
    "FAMILIES",
    "FP16",
    "FP32",
    "SEGMENT_FAMILIES",
    "CodecSpec",
    "Family",
    "Reduction",
    "buffer_codec",
    "cast_codec",
    "parse_codec",
    "values_codec",
    "whole_codec",
]


LGC_VALUES_MIN = 256  # of a tensor: smaller ones and vectors travel as they are


def _fixed(header_bytes: int, value_bytes: int) -> Callable[[CodecSpec, int], int]:
    return lambda _, count: header_bytes + value_bytes * count


_FAMILIES = (
    Family("fp32", Reduction.LINEAR, _fixed(0, 4), about="the values as they are", source="IEEE 754"),
    Family(
        "fp16",
        Reduction.LINEAR,
        _fixed(4, 2),  # the header is the exponent of the power of two that the values were divided by
        about="half precision, scaled by a power of two for each segment",
        source="IEEE 754; Micikevicius et al. 2018, arXiv 1710.03740",
    ),
    Family(
        "bf16",
        Reduction.LINEAR,
        _fixed(0, 2),
        about="the upper half of fp32",
        source="Kalamkar et al. 2019, arXiv 1905.12322",
    ),
    *QUANTISING_FAMILIES,
    *SPARSE_FAMILIES,
    HOMOMORPHIC,
    Family(
        "powersgd",
        Reduction.LINEAR,
        lambda spec, count: values_codec(spec).segment_bytes_max(count),
        about="the two factors of each matrix, one after the other in a round, or in turn one; all else as it is",
        source="Vogels et al. 2019, arXiv 1905.13727; Zhang et al. 2023 (ACP-SGD), arXiv 2306.08881",
        parameters=(
            Number("rank", 1, 64, 4.0, "rows of each factor", whole=True),
            Number("min_rate", 1, 1000, 2.0, "matrices that both factors make smaller by less are sent as they are"),
            ITERATION,
            warmup(10.0),
            Choice("values", ("fp32", "fp16"), "fp32", "how the factors are written"),
        ),
        error_feedback=always,
        transforms=True,
        example="powersgd:4,warmup=100+fp16",
    ),
    Family(
        "lgc",
        Reduction.LINEAR,
        lambda spec, count: values_codec(spec).segment_bytes_max(count),
        about="values at places that one member chooses for all, as fewer numbers by a basis that is learnt",
        source="Abrahamyan et al. 2021, arXiv 2103.08870",
        parameters=(
            Number("ratio", 0.005, 1.0, 0.01, "the part of the values that is chosen"),
            Number("latent", 1, 16, 4.0, "chosen values for each number that travels in their place", whole=True),
            Number("refresh", 1, 64, 2.0, "rounds in which all places are chosen anew once", whole=True),
            warmup(10.0),
            Number(
                "train", 0, WARMUP_MAX, 20.0, "rounds after those that send chosen values, to learn from", whole=True
            ),
            MAP,
            Choice("values", ("fp16", "fp32", "int4"), "fp16", "how what travels is written"),
        ),
        error_feedback=always,
        takes=lambda _, shape: len(shape) > 1 and math.prod(shape) >= LGC_VALUES_MIN,
        transforms=True,
        example="lgc:0.01,latent=4,train=100+fp32",
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _FAMILIES})
SEGMENT_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in _FAMILIES if not family.transforms}
)
"""Those that encode segments of the model's vector themselves."""


def parse_codec(text: str) -> CodecSpec:
    """The codec that a person has typed as NAME[:VALUE,...][+WORD]: "fp16", "topk:0.01+fp16", "threshold:rms=3".

    Raises ValueError, which names the parameter, what is legal and an example.
    """
    head, plus, after_plus = text.partition("+")
    name, colon, typed = head.partition(":")
    family = FAMILIES.get(name)
    if family is None:
        raise ValueError(f"there is no codec {name!r}; there are {', '.join(FAMILIES)}")
    if (colon and not typed) or (plus and not after_plus):
        raise ValueError(f"codec {text!r} ends where a parameter should follow, as in {family.example or name}")
    return family.spec(typed, after_plus if plus else None)


_SUMMED = {"int4": "int4:sr"}  # encoded anew at every hop, where nothing is fed back: rounded by chance
_CASTS = {"int4": "fp16"}  # of what is too exact for so few bits


def values_codec(codec: CodecSpec) -> CodecSpec:
    """By which segments are encoded: where the job's codec sends a shorter vector, how its values are written."""
    if not codec.family.transforms:
        return codec
    values = codec.choice("values")
    return parse_codec(_SUMMED.get(values, values))


def cast_codec(codec: CodecSpec) -> CodecSpec:
    """The same, but for what is no value of the vector, or none that error feedback is for: a cast."""
    if not codec.family.transforms:
        return codec
    values = codec.choice("values")
    return parse_codec(_CASTS.get(values, values))


def buffer_codec(codec: CodecSpec) -> CodecSpec:
    """How float buffers travel in a job with this codec (O5).

    Error feedback needs contributions that do not depend on what was left out. A buffer's does: it is the difference
    from a base that has not moved, so it says again what is still owed. A running variance that waits 100 rounds for
    its turn would be moved ten times too far, and a mask that never changes would be moved by 1-bit's means. So where
    a codec leaves something out, buffers are rounded to fp16, and what did not change takes next to nothing, but on the
    ring.
    """
    buffers = codec.reduction.buffers
    return cast_codec(codec) if buffers is None else parse_codec(buffers)


def whole_codec(codec: CodecSpec) -> CodecSpec:
    """How the tensors travel that this codec does not take: all values, rounded as its own are, without feedback."""
    whole = codec.reduction.whole
    return cast_codec(codec) if whole is None else parse_codec(whole.format(values=codec.choice("values")))


FP32 = parse_codec("fp32")
FP16 = parse_codec("fp16")
BF16 = parse_codec("bf16")
