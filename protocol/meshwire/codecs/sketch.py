"""`homomorphic`: sums of sparse vectors without decoding them (Li et al. 2024, arXiv 2402.07529).

A segment is a seed, a bitmap of the places that are sent, and cells, integers of 48 bits. Every value is added to three
cells, which follow from the seed and its place. So the sum of segments is the segment of the sum: cells add, bitmaps
are OR-ed. Whoever has the sum finds the values again, as long as the cells have room for all places of all members
together; a segment that has not is told from one that has by the bytes alone, and counts as zero everywhere.

Values are whole multiples of STEP below LIMIT, so that MEMBERS_MAX of them fit into a cell: about the range of fp16,
and the same for all members in all rounds. What is smaller, or beyond, waits in the residual.
"""

import math

from meshwire import limits
from meshwire.codecs.spec import CodecSpec, Family, Number, Reduction, always

SEED_BYTES = 8
CELL_BYTES = 6
HASHES = 3
CELLS_A_VALUE = 1.3
CELLS_MORE = 32
"""Three hashes need 1.23 cells a value where there are many (Molloy 2005), and some more where there are few."""

STEP = 2.0**-24
LIMIT = 2.0**17
assert limits.MEMBERS_MAX * LIMIT / STEP <= 2 ** (8 * CELL_BYTES - 1)

LEAST_ROOM = limits.MEMBERS_MAX
"""Values that any segment has room for, if it has so many: so all members can send one at once, wherever it is."""


def room(ratio: float, count: int) -> int:
    """How many of `count` values all members can send together."""
    return min(max(math.ceil(ratio * count), LEAST_ROOM), count)


def cells_for(values: int) -> int:
    """How many cells, in HASHES runs of as many."""
    return HASHES * math.ceil((CELLS_A_VALUE * values + CELLS_MORE) / HASHES) if values else 0


def sketch_bytes(values: int, count: int) -> int:
    """Exact bytes of a segment of `count` values with room for `values` of them."""
    return SEED_BYTES + (count + 7) // 8 + CELL_BYTES * cells_for(values)


def segment_room(spec: CodecSpec, count: int) -> int:
    """How many of a segment's `count` values all members can send together."""
    return room(spec.number("ratio"), count)


HOMOMORPHIC = Family(
    "homomorphic",
    Reduction.SKETCH,
    lambda spec, count: sketch_bytes(segment_room(spec, count), count),
    parameters=(Number("ratio", 1e-4, 0.5, 0.02, "the part of a segment's values that all members send together"),),
    selects=True,
    error_feedback=always,
    example="homomorphic:0.02",
    about="the largest magnitudes, in cells that are added without decoding them",
    source="Li et al. 2024, arXiv 2402.07529",
)
