"""The binomial tree: sums climb to one member that finishes them all, and the result comes down the same way.

In ceil(log2 m) steps each way, where a ring takes m - 1. The members together send 2 (m - 1) vectors, as in a ring, but
the one at the root sends and receives up to ceil(log2 m) of them. So it is for small models and many members, where
latency counts and not bytes.
"""

from collections.abc import Iterator

from meshwire.collectives.topology import Op, Program, Transfer, program_from


def tree_transfers(members: int) -> Iterator[Transfer]:
    """Position p hangs on p without its lowest bit that is set; the root is position 0. There is one shard, the whole
    bucket: on level j those whose lowest bit is 2^j send up."""
    levels = (members - 1).bit_length()
    for level in range(levels):
        for child in range(1 << level, members, 2 << level):
            yield Transfer(level, child, child - (1 << level), 0, Op.REDUCE)
    for step in range(levels, 2 * levels):
        level = 2 * levels - 1 - step
        for child in range(1 << level, members, 2 << level):
            yield Transfer(step, child - (1 << level), child, 0, Op.COPY)


def tree_program(ranks: tuple[int, ...], rank: int) -> Program:
    """One rank's. A world of one has no steps and owns everything. Raises ValueError as `program_from`."""
    return program_from(tree_transfers(len(ranks)), ranks, rank, owners=(0,))


def tree_area_vectors(members: int) -> int:
    """What a round takes at the root, in vectors: its children's sums, the first of them where its own is made."""
    return max(1, (members - 1).bit_length())


def tree_sent_vectors(members: int) -> float:
    """What the busiest member sends in a round: the root, to each of its children."""
    return float((members - 1).bit_length())
