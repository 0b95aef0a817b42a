"""Groups: each sums within itself, then the leaders of groups among themselves round a ring, then the result goes back.

For devices of which some are near each other, on one machine or at one site, and others far: what crosses between g
groups is 2 (g - 1) vectors in all, however many members they have. Within a group all goes through the leader, who
sends a vector to each of the others, and 2 (g - 1)/g to the next leader. In 2 g latencies.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from meshwire.collectives.topology import Op, Scheme, Transfer, ring_scheme


def hierarchical_scheme(ranks: Sequence[int], borders: Sequence[int]) -> Scheme:
    """Another group begins at each of the ranks `borders`; the lowest rank of each that is there leads it. There is one
    shard for each group, and the leaders own them as on a ring."""
    groups: dict[int, list[int]] = {}
    for position, rank in enumerate(ranks):
        groups.setdefault(bisect_right(sorted(borders), rank), []).append(position)
    leaders = [group[0] for group in groups.values()]
    owners = [{leaders[leader] for leader in owner} for owner in ring_scheme(len(leaders)).owners]
    return Scheme(_transfers([*groups.values()]), owners)


def _transfers(groups: Sequence[Sequence[int]]) -> Iterator[Transfer]:
    """In all groups at once, member by member, one shard at each step."""
    shards = len(groups)
    within = shards * (max(map(len, groups)) - 1)
    ways = [
        (turn * shards + shard, group[0], member, shard)
        for turn in range(within // shards)
        for shard in range(shards)
        for group in groups
        if turn + 1 < len(group)
        for member in [group[turn + 1]]
    ]
    for step, leader, member, shard in ways:
        yield Transfer(step, member, leader, shard, Op.REDUCE)
    step = within
    for each in ring_scheme(shards).transfers:
        step = within + each.step + 1
        yield Transfer(step - 1, groups[each.sender][0], groups[each.receiver][0], each.shard, each.op)
    for behind, leader, member, shard in ways:
        yield Transfer(step + behind, leader, member, shard, Op.COPY)
