"""How an epoch is seeded, counted and cut: pure functions that all members compute alike (X1, X4).

Positions index the permutation of an epoch, which every member computes from the same seed.
"""

import hashlib
import struct
from collections.abc import Sequence
from itertools import accumulate

from meshwire.sync_modes.batch_sizes import SIZE_MIN


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of one epoch's permutation, 63 bits. `seed` in [0, 2**64), `epoch` from 0."""
    return int.from_bytes(hashlib.sha256(struct.pack("<QQ", seed, epoch)).digest()[:8], "little") >> 1


def rounds_per_epoch(total: int, batch_sizes: Sequence[int], *, drop_last: bool = False) -> int:
    """How many rounds an epoch of `total` samples has.

    X4: a remainder smaller than the number of members joins the last round; a larger one is a short round. With
    `drop_last` only whole joint batches count.

    Args:
        batch_sizes: samples per round, by rank.

    Raises:
        ValueError: when there is not one round in which every member gets a sample.
    """
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch sizes {list(batch_sizes)}: every member needs at least one sample a round")
    members, joint = len(batch_sizes), sum(batch_sizes)
    if total < members:
        raise ValueError(
            f"the data set has {total} samples, fewer than the {members} members: "
            "each needs at least one a round; submit with fewer peers"
        )
    rounds, remainder = divmod(total, joint)
    if drop_last and not rounds:
        raise ValueError(
            f"the data set has {total} samples, less than one joint batch of {joint}, and drop_last drops them all: "
            "use a smaller batch size or fewer peers"
        )
    return rounds if drop_last else rounds + (remainder >= members)


def members_most(total: int, batch: int, *, drop_last: bool) -> int:
    """How many members with batches of one size `rounds_per_epoch` takes."""
    return total // batch if drop_last else total


def cuts(count: int, batch_sizes: Sequence[int]) -> list[int]:
    """Bounds that split `count` samples in proportion to the batch sizes, with one at least for each rank, and SIZE_MIN
    where there are as many.

    A whole joint batch splits into exactly `batch_sizes`; a short one gives nobody more than its batch size.
    """
    members, joint = len(batch_sizes), sum(batch_sizes)
    least = min(SIZE_MIN, count // members, *batch_sizes)
    bounds = [0]
    for rank, upto in enumerate(accumulate(batch_sizes)):
        others_after = members - rank - 1
        bounds.append(min(max(count * upto // joint, bounds[-1] + least), count - least * others_after))
    return bounds


def part_of_learner(count: int, learner: int, learners: int) -> tuple[int, int]:
    """The positions [first, end) of a device's `count` samples that one of its learners takes (R6): as many as each
    other of them, or one more. At least one if count >= learners."""
    return count * learner // learners, count * (learner + 1) // learners


def part_of_epoch(total: int, batch: int, members: int, rank: int, *, drop_last: bool = False) -> list[tuple[int, int]]:
    """The positions [first, end) that a rank takes in each round of an epoch, where all ranks are in all rounds with
    batches of one size (X4): what a ledger grants it then, known beforehand.

    Raises ValueError as `rounds_per_epoch` does.
    """
    sizes = [batch] * members
    rounds, joint = rounds_per_epoch(total, sizes, drop_last=drop_last), batch * members
    whole = rounds if drop_last else rounds - 1
    part = [(first, first + batch) for first in range(rank * batch, whole * joint, joint)]
    if not drop_last:
        bounds = cuts(total - whole * joint, sizes)
        part.append((whole * joint + bounds[rank], whole * joint + bounds[rank + 1]))
    return part
