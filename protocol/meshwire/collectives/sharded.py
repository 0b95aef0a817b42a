"""The sharded exchange: everybody sends each shard's owner its own part, and each owner everybody the mean.

In two latencies, whatever m is, and a value is encoded twice on its way. Who owns how much is data. Where all own equal
shares the bytes are those of a ring, and all send the same (round-robin; Zhao and Canny 2013, arXiv 1312.3020). Where
one owns everything that is a star, or master and workers: it sends m - 1 vectors, everybody else one. An owner of the
fraction f sends and receives 1 + (m - 2) f vectors; so on one WiFi cell the air is taken least where those own all of
it that have a cable.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from meshwire.collectives.topology import Op, Scheme, Transfer


def sharded_scheme(ranks: Sequence[int], named: Sequence[int]) -> Scheme:
    """Of equally large shards each named rank owns one, for each time that it is named; where none of them is there,
    each member one."""
    owners = [ranks.index(rank) for rank in named if rank in ranks] or [*range(len(ranks))]
    return Scheme(_transfers(len(ranks), owners), [{owner} for owner in owners])


def _transfers(members: int, owners: Sequence[int]) -> Iterator[Transfer]:
    """In turn j an owner receives the part of the jth member before it, and sends the mean to the jth after it. Owners
    do so at once, each with the first of its shards, then each with its second one, and so on."""
    of_owner: Counter[int] = Counter()
    laps: list[list[tuple[int, int]]] = []  # (shard, owner): in one no owner comes twice
    for shard, owner in enumerate(owners):
        laps += [[]] if of_owner[owner] == len(laps) else []
        laps[of_owner[owner]].append((shard, owner))
        of_owner[owner] += 1
    step = 0
    for op in (Op.REDUCE, Op.COPY):
        for lap in laps:
            for turn in range(1, members):
                for shard, owner in lap:
                    if op is Op.REDUCE:
                        yield Transfer(step, (owner - turn) % members, owner, shard, op)
                    else:
                        yield Transfer(step, owner, (owner + turn) % members, shard, op)
                step += 1
