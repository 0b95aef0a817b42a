"""Batch sizes that follow measured speed, with the joint batch kept (X4a).

A round lasts as long as its slowest member computes: max over members of size / speed. With sizes in proportion to
speed all members take equally long, which is the shortest round for that joint batch.
"""

from collections.abc import Sequence

DEAD_BAND = 1.3
"""The slowest member's time over the fastest's at which equal sizes stay equal: measured speeds scatter by 10 to 20 %
from one minute to the next, and equal sizes are what a person expects. Costs up to 13 % of a round with two members, up
to 23 % where one of many is slow."""

GAIN_MIN = 0.1
"""By how much the round must become shorter before sizes that are unequal already change again. Higher follows a
change of speed later, lower lets sizes swing with the noise of the measurement."""


SIZE_MIN = 2
"""Samples of a batch, where equal batches have as many: of one alone BatchNorm has no variance, and the script ends."""


def sizes_by_speed(speeds: Sequence[float], batch: int, current: Sequence[int]) -> tuple[int, ...] | None:
    """The sizes by rank to be used from now on; None if the current ones stay.

    Args:
        speeds: samples/s while computing, by rank; 0: not known.
        batch: the size of equal shares; the sizes' sum stays len(speeds) * batch.
        current: sizes in force, by rank.
    """
    if min(speeds) <= 0:
        return None
    times_s = [size / speed for size, speed in zip(current, speeds, strict=True)]
    equal = len(set(current)) == 1
    if equal and max(times_s) < DEAD_BAND * min(times_s):
        return None
    sizes = in_proportion(speeds, batch * len(speeds))
    round_s = max(size / speed for size, speed in zip(sizes, speeds, strict=True))
    return tuple(sizes) if round_s < (1.0 if equal else 1 - GAIN_MIN) * max(times_s) else None


def in_proportion(speeds: Sequence[float], joint: int) -> list[int]:
    """Sizes that are together `joint`: SIZE_MIN samples for each, if there are as many, and the rest where it lengthens
    the round least. Speeds are positive, and need only be right beside each other; `joint` >= len(speeds)."""
    total, least = sum(speeds), min(SIZE_MIN, joint // len(speeds))
    ideal = [joint * speed / total for speed in speeds]
    sizes = [max(least, int(share)) for share in ideal]
    while (missing := joint - sum(sizes)) > 0:
        sizes[min(range(len(sizes)), key=lambda rank: (sizes[rank] + 1) / speeds[rank])] += 1
    for _ in range(-missing):
        sizes[max((rank for rank in range(len(sizes)) if sizes[rank] > least), key=lambda r: sizes[r] - ideal[r])] -= 1
    return sizes
