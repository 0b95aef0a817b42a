"""The binomial tree: sums climb to one member that finishes them all, and the result comes down the same way.

In ceil(log2 m) steps each way, where a ring takes m - 1. The members together send 2 (m - 1) vectors, as in a ring, but
the one at the root sends and receives up to ceil(log2 m) of them. So it is for small models and many members, where
latency counts and not bytes.
"""

from collections.abc import Iterator

from meshwire.collectives.topology import Op, Scheme, Transfer


def tree_scheme(members: int) -> Scheme:
    """The root is position 0, and finishes the one shard, the whole bucket."""
    return Scheme(_transfers(members), [{0}])


def _transfers(members: int) -> Iterator[Transfer]:
    """Position p hangs on p without its lowest bit that is set: on level j those whose lowest bit is 2^j send up."""
    levels = (members - 1).bit_length()
    for level in range(levels):
        for child in range(1 << level, members, 2 << level):
            yield Transfer(level, child, child - (1 << level), 0, Op.REDUCE)
    for step in range(levels, 2 * levels):
        level = 2 * levels - 1 - step
        for child in range(1 << level, members, 2 << level):
            yield Transfer(step, child - (1 << level), child, 0, Op.COPY)
