"""The codecs that send some values of a segment and keep the rest for the next round: what is typed, and their sizes.

A segment of those that choose by size is a header, the indices in the form that takes fewest bytes, and the values; see
`meshtraind.codecs.sparse`. When all values of the segment take no more than that, it sends them all.

They can be gathered, so that no mean is encoded anew. Not those that draw places: all members draw the same, so a mean
has hardly more values than one message.
"""

import math
from collections.abc import Callable, Iterator, Mapping

from meshwire import limits
from meshwire.codecs.quantizers import INT4_BLOCK, QUAD_LEVELS, STEP_BYTES, blocks, nibble_bytes
from meshwire.codecs.schedules import Ramp, Rate
from meshwire.codecs.spec import (
    BUDGET,
    DECAY,
    EXCHANGE,
    EXCHANGE_OR_SENDERS,
    Choice,
    CodecSpec,
    Family,
    Number,
    Reduction,
    always,
)

HEADER_BYTES = 5  # form of the indices, how many, their bytes
SEED_BYTES = 8
GAP_WIDTHS = (4, 8, 12, 16)  # bits of a digit
CHUNK_SIDE = 64  # of the squares that are transformed
DGC_STAGES = 5
SIDCO_EXCESS = 1.2  # a fitted threshold may keep so many times the values that were asked for


VALUES_BYTES: Mapping[str, Callable[[int], int]] = {  # by what is typed behind the +: exact bytes of so many
    "fp16": lambda count: 1 + 2 * count,  # the exponent of a power of two first
    "fp32": lambda count: 4 * count,
    "int8": lambda count: 4 + count,  # the step between two levels first
    "int4": lambda count: STEP_BYTES * blocks(count, INT4_BLOCK) + nibble_bytes(count),
    "2bit": lambda count: STEP_BYTES * QUAD_LEVELS + -(-count // 4),  # the levels first
}
_EXACT_FORMS = ("fp16", "fp32")  # nothing is lost but what a cast rounds off
_VALUES = Choice("values", tuple(VALUES_BYTES), "fp16", "how the values that are sent are written")
_AJI_HEAFIELD = "Aji and Heafield 2017, arXiv 1704.05021"


_RATIO_ABOUT = "the part of a segment's values that is sent"
_RATIO = Number("ratio", 1e-5, 1.0, 0.01, _RATIO_ABOUT)
_RATE = Rate("ratio", 1e-5, 1.0, Ramp.constant(0.01), _RATIO_ABOUT)
_CHUNK = Number(
    "chunk",
    16,
    limits.SEGMENT_VALUES_MAX,
    float(limits.SEGMENT_VALUES_MAX),
    "so many neighbours compete: of each run of them in a segment the largest are sent",
    whole=True,
)


def kept_values(ratio: float, count: int) -> int:
    """How many of `count` values are sent: at least `ratio` of them, and one if there is any."""
    return min(math.ceil(ratio * count), count)


def bitmap_bytes(count: int) -> int:
    """Exact bytes of the indices of any number of `count` values as a bitmap."""
    return (count + 7) // 8


def gap_bytes(digits: int, width: int) -> int:
    """Exact bytes of so many digits of `width` bits; those of 4 and 12 bits are written in pairs."""
    if width % 8:
        digits += digits % 2
    return digits * width // 8


def index_bytes_max(kept: int, count: int) -> int:
    """Upper limit of the indices of `kept` of `count` values."""
    by_width = (gap_bytes(kept + (count - kept) // ((1 << width) - 1), width) for width in GAP_WIDTHS)
    return min(bitmap_bytes(count), *by_width)


def kept_in_round(spec: CodecSpec, number: int, count: int) -> int:
    """How many of `count` values are asked for in a round; rounds count from 1."""
    if spec.name != "dgc":
        return kept_values(spec.ramp("ratio").at(number), count)
    ratio, rounds = spec.number("ratio"), int(spec.number("ramp"))
    stage = (number - 1) * DGC_STAGES // rounds + 1 if rounds else DGC_STAGES
    return kept_values(ratio ** (min(stage, DGC_STAGES) / DGC_STAGES), count)


def competing(spec: CodecSpec, count: int) -> list[tuple[int, int, int]]:
    """(start, length, how many) of the runs that `count` values are cut into, of each of which the largest are sent;
    what is left at the end is a shorter one."""
    length = int(spec.number(_CHUNK.name)) if _CHUNK in spec.family.parameters else limits.SEGMENT_VALUES_MAX
    number, rest = divmod(count, length)
    runs = [(0, length, number)] if number else []
    return [*runs, (count - rest, rest, 1)] if rest else runs


def most_kept(spec: CodecSpec, count: int) -> int:
    """Upper limit of the values that are chosen from `count` in any round, while they are not all sent because that is
    smaller."""
    match spec.name:
        case "topk":
            ratio = spec.ramp("ratio").largest
            return sum(number * kept_values(ratio, length) for _, length, number in competing(spec, count))
        case "dgc":
            return kept_in_round(spec, 1, count)
        case "randomk":
            return kept_values(spec.number("ratio"), count)
        case "sidco":
            return with_excess(kept_values(spec.ramp("ratio").largest, count), count)
        case "dct":
            kept = int(spec.number("coefficients"))
            return sum(number * min(kept, side * side) for _, side, number in square_chunks(count))
        case _:
            return count


def with_excess(wanted: int, count: int) -> int:
    """Upper limit of what a fitted threshold may keep of `count` values where `wanted` were asked for."""
    return min(int(SIDCO_EXCESS * wanted), count)


def chosen_bytes_max(spec: CodecSpec, kept: int, count: int) -> int:
    """Upper limit of a segment of `count` values with the indices of `kept` of them."""
    return HEADER_BYTES + index_bytes_max(kept, count) + VALUES_BYTES[spec.choice("values")](kept)


def kept_within(spec: CodecSpec, count: int, size_bytes: int) -> int:
    """How many of `count` values surely take no more than `size_bytes`, wherever they are."""
    few, many = 0, count  # few are surely not too many
    while few < many:
        middle = (few + many + 1) // 2
        if chosen_bytes_max(spec, middle, count) <= size_bytes:
            few = middle
        else:
            many = middle - 1
    return few


def square_chunks(count: int) -> Iterator[tuple[int, int, int]]:
    """(start, side, how many) of the squares that `count` values are cut into, as large ones as there are: their sides
    are CHUNK_SIDE, and the powers of two below for what is left."""
    start, side = 0, CHUNK_SIDE
    while start < count:
        number = (count - start) // (side * side)
        if number:
            yield start, side, number
        start += number * side * side
        side //= 2


def _threshold_feeds_back(spec: CodecSpec) -> bool:
    """Not where all that is left out is a cast's rounding, as with the casts, unless a decay is asked for."""
    every = not spec.number("magnitude") and not spec.number("rms")
    return not every or spec.choice("values") not in _EXACT_FORMS or spec.decay < 1


def _sparse_bytes_max(spec: CodecSpec, count: int) -> int:
    every = HEADER_BYTES + VALUES_BYTES[spec.choice("values")](count)
    return min(chosen_bytes_max(spec, most_kept(spec, count), count), every)


def _randomk_bytes(spec: CodecSpec, count: int) -> int:
    return SEED_BYTES + VALUES_BYTES[spec.choice("values")](most_kept(spec, count))


_TOPK = Family(
    "topk",
    Reduction.TWO_SIDED,
    _sparse_bytes_max,
    parameters=(_RATE, _CHUNK, BUDGET, DECAY, EXCHANGE_OR_SENDERS, _VALUES),
    fixed=False,
    selects=True,
    error_feedback=always,
    example="topk:0.01+fp16",
    about="the largest magnitudes of each segment",
    source=_AJI_HEAFIELD,
)


def masked_values(spec: CodecSpec, count: int) -> int:
    """How many of `count` values a cocktail chooses from."""
    return kept_values(spec.number("mask"), count)


def of_masked(spec: CodecSpec) -> CodecSpec:
    """What a cocktail does with the values under its mask."""
    return _TOPK.spec(f"{spec.number('ratio'):.17g}", spec.choice("values"))


def _cocktail_bytes_max(spec: CodecSpec, count: int) -> int:
    return SEED_BYTES + of_masked(spec).segment_bytes_max(masked_values(spec, count))


def _dgc_leaves_out(spec: CodecSpec) -> bool:
    """With ratio 1 it is the dense path: raw gradients, and the momentum is the optimizer's. Sending all through the
    sparse one would wipe the momentum in every round."""
    return spec.number("ratio") < 1


def _dgc_takes(spec: CodecSpec, shape: tuple[int, ...]) -> bool:
    return _dgc_leaves_out(spec) and len(shape) > 1


SPARSE_FAMILIES = (
    _TOPK,
    Family(
        "dgc",
        Reduction.TWO_SIDED,
        _sparse_bytes_max,
        parameters=(
            Number("ratio", 1e-5, 1.0, 0.001, f"{_RATIO_ABOUT} in the end; 1: all, and no momentum is taken over"),
            Number("ramp", 0, 1e6, 250.0, "rounds of warm-up: the ratio falls in five stages, by equal factors", True),
            Number("clip", 0, 1e6, 0.0, "norm that a tensor's gradient is clipped to before it is added; 0: none"),
            EXCHANGE,
            Choice("values", _EXACT_FORMS, "fp16", "how the values that are sent are written"),
        ),
        fixed=False,
        selects=True,
        error_feedback=_dgc_leaves_out,
        takes=_dgc_takes,
        momentum=True,
        example="dgc:0.001,ramp=500+fp16",
        about="the largest magnitudes of each worker's momentum, which SGD leaves to it",
        source="Lin et al. 2018, arXiv 1712.01887",
    ),
    Family(
        "threshold",
        Reduction.TWO_SIDED,
        _sparse_bytes_max,
        parameters=(
            Number("magnitude", 1e-30, 1e30, 0.0, "what reaches it is sent; rms is then not used"),
            Number("rms", 0.0, 1000.0, 3.0, "what reaches so many root mean squares of its segment is sent"),
            BUDGET,
            DECAY,
            EXCHANGE,
            _VALUES,
        ),
        fixed=False,
        selects=True,
        error_feedback=_threshold_feeds_back,
        example="threshold:rms=3+fp16",
        about="magnitudes from a threshold on, fixed or relative to each segment",
        source=f"Strom 2015, Interspeech; {_AJI_HEAFIELD}",
    ),
    Family(
        "sidco",
        Reduction.TWO_SIDED,
        _sparse_bytes_max,
        parameters=(
            _RATE,
            Choice("fit", ("exponential", "gamma", "pareto"), "exponential", "the distribution fitted to magnitudes"),
            BUDGET,
            DECAY,
            EXCHANGE,
            _VALUES,
        ),
        fixed=False,
        selects=True,
        error_feedback=always,
        example="sidco:0.001,gamma+fp16",
        about="nearly the largest magnitudes of each segment, from a threshold fitted in stages",
        source="Abdelmoniem et al. 2021, MLSys, arXiv 2101.10761",
    ),
    Family(
        "randomk",
        Reduction.TWO_SIDED,
        _randomk_bytes,
        parameters=(_RATIO, DECAY, _VALUES),
        error_feedback=always,
        example="randomk:0.01+fp16",
        about="values at random places that follow from a seed, so that no indices travel",
        source="Stich et al. 2018, arXiv 1809.07599",
    ),
    Family(
        "cocktail",
        Reduction.TWO_SIDED,
        _cocktail_bytes_max,
        parameters=(
            Number("mask", 1e-5, 1.0, 0.1, "the part of a segment's values, at places drawn anew, that may be sent"),
            Number("ratio", 1e-5, 1.0, 0.2, "the part of those that is sent"),
            DECAY,
            Choice("values", tuple(VALUES_BYTES), "int4", "how the values that are sent are written"),
        ),
        fixed=False,
        selects=True,
        error_feedback=always,
        example="cocktail:0.1,ratio=0.2+int4",
        about="the largest magnitudes among values at random places, in 4 bits",
        source="Wang et al. 2023 (CocktailSGD), ICML",
    ),
    Family(
        "dct",
        Reduction.TWO_SIDED,
        _sparse_bytes_max,
        parameters=(
            Number("coefficients", 1, CHUNK_SIDE**2, 32.0, "how many of each 4096 are sent", whole=True),
            DECAY,
            EXCHANGE,
            _VALUES,
        ),
        fixed=False,
        selects=True,
        error_feedback=always,
        example="dct:32,decay=0.999+fp16",
        about="the largest coefficients of the cosine transform of each 64 x 64 values",
        source="Peng et al. 2024 (DeMo), arXiv 2411.19870",
    ),
)
