"""What a job whose learners stay in step deals round by round, said without a ledger, to compare with (X4)."""

from collections.abc import Sequence
from itertools import pairwise

from meshwire.samples.epochs import cuts, rounds_per_epoch


def deal(
    total: int, batch_sizes: Sequence[int], round_index: int, *, drop_last: bool = False
) -> tuple[tuple[int, int], ...]:
    """The positions [first, end) that each rank takes in round `round_index` (from 0) of an epoch.

    Every position is dealt exactly once in an epoch, except those that `drop_last` leaves out, and every rank gets at
    least one in each round. Raises ValueError as `rounds_per_epoch` does, and IndexError beyond its result.
    """
    rounds = rounds_per_epoch(total, batch_sizes, drop_last=drop_last)
    if not 0 <= round_index < rounds:
        raise IndexError(f"round {round_index} of an epoch of {rounds}")
    joint = sum(batch_sizes)
    first = round_index * joint
    end = total if round_index == rounds - 1 and not drop_last else first + joint
    return tuple((first + low, first + high) for low, high in pairwise(cuts(end - first, batch_sizes)))
