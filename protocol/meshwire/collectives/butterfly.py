"""The butterfly: halves are exchanged with ever nearer members and summed, and then, final, with ever farther ones.

Recursive halving and doubling (Thakur, Rabenseifner and Gropp 2005): 2 log2 m exchanges instead of the ring's
2 (m - 1), at the ring's bytes, 2 (m - 1)/m vectors a member. Where m is no power of two, those above the largest power
k of two in it first give their whole vector to one below, which sums it, and are given the result at the end: they send
one vector, and their partners one more.
"""

from collections.abc import Iterator

from meshwire.collectives.topology import Op, Scheme, Transfer


def butterfly_scheme(members: int) -> Scheme:
    """Position p < k ends the first half with the sum of shard p."""
    return Scheme(_transfers(members), [{position} for position in range(_core(members))])


def _transfers(members: int) -> Iterator[Transfer]:
    """At distance d position p gives p xor d the d shards of that one's block, one shard at each step."""
    core = _core(members)
    folded = range(members - core)
    step = 0
    for shard in range(core if folded else 0):
        for partner in folded:
            yield Transfer(step, core + partner, partner, shard, Op.REDUCE)
        step += 1
    distances = [1 << bit for bit in range(core.bit_length() - 1)]
    for distance in reversed(distances):
        for turn in range(distance):
            for position in range(core):
                partner = position ^ distance
                yield Transfer(step, position, partner, partner // distance * distance + turn, Op.REDUCE)
            step += 1
    for distance in distances:
        for turn in range(distance):
            for position in range(core):
                yield Transfer(step, position, position ^ distance, position // distance * distance + turn, Op.COPY)
            step += 1
    for shard in range(core if folded else 0):
        for partner in folded:
            yield Transfer(step, partner, core + partner, shard, Op.COPY)
        step += 1


def _core(members: int) -> int:
    """k: the largest power of two that is not above `members`."""
    return 1 << (members.bit_length() - 1)
