"""The grid: sums are made within rows, then across them, dimension by dimension, and the mean comes back the same way.

Moshpit All-Reduce (Ryabinin et al. 2021, arXiv 2103.03239, algorithm 1) has members stand in a grid of d dimensions and
average whole vectors along one after the other: on a full grid the d-th average is everybody's mean, after d averages
of whole vectors. Here a member takes part in the average along a dimension for that part of the vector alone which it
is to hold afterwards: a reduce-scatter along the first dimension, then of what is left along the second, and so on, and
all-gathers back. So all of it is one exact round, with a ring's bytes, in 2 ((M_1 - 1) + .. + (M_d - 1)) latencies for
M_1 x .. x M_d members instead of 2 (m - 1). One dimension is a ring; with two members along each it is the butterfly,
recursive halving and doubling (Thakur, Rabenseifner and Gropp 2005), in 2 log2 m.

Rows may differ by one member, so any number of members has a grid. There are as many shards to a row as the longest
has members. A shorter row's members hold one each, and of the last one they take turns, row by row of its owners. So
for each shard each row has one member that holds the row's sum of it; the other dimensions are those in which rows
stand, and rows always stand in a full grid.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from meshwire.collectives.topology import Op, Scheme, Transfer

Sides = tuple[int, ...]
Way = tuple[int, int, int]  # from position to position, and of which shard


def squarest(members: int) -> Sides:
    """How rows stand in the grid of two dimensions that takes the fewest latencies; of several a full one, then that
    with the fewest rows."""
    return (min(range(1, members + 1), key=lambda rows: (-(-members // rows) + rows, members % rows > 0)),)


def halves(members: int) -> Sides:
    """How rows stand in a butterfly: two along each dimension. Rows are of one member, or of one and two where there
    is no power of two of members."""
    return (2,) * (members.bit_length() - 1)


def grid_scheme(members: int, stand: Sequence[int]) -> Scheme:
    """Rows are runs of positions. On a full grid position p owns shard p.

    Args:
        stand: how rows stand: the grid's sides but for the first, which follows from `members`. Where that is more rows
            than members, the last dimensions are left out.
    """
    while math.prod(stand) > members:
        stand = stand[:-1]
    count = math.prod(stand)
    rows = [list(range(members * row // count, members * (row + 1) // count)) for row in range(count)]
    longest = max(map(len, rows))
    up: list[list[Way]] = [[] for _ in range(longest - 1 + sum(side - 1 for side in stand))]
    down: list[list[Way]] = [[] for _ in up]

    def reduce_along(line: list[int], end: int, shard: int, begins: int, hops: int) -> None:
        """Round a line of members, from hop to hop, to the one at `end`; later the result from there."""
        for hop, (sender, receiver) in enumerate(pairwise(line[end + 1 :] + line[: end + 1])):
            up[begins + hop].append((sender, receiver, shard))
        for hop, (sender, receiver) in enumerate(pairwise(line[end:] + line[:end])):
            down[len(down) - begins - hops + hop].append((sender, receiver, shard))

    owners: list[set[int]] = []
    for shard in range(count * longest):
        owning_row, place = divmod(shard, longest)
        places = [place if place < len(row) else owning_row % len(row) for row in rows]
        for row, end in zip(rows, places, strict=True):
            reduce_along(row, end, shard, 0, longest - 1)
        column = [row[end] for row, end in zip(rows, places, strict=True)]
        begins, stride = longest - 1, 1
        for side in stand:
            for first in range(owning_row % stride, count, stride * side):
                line = column[first : first + stride * side : stride]
                reduce_along(line, owning_row // stride % side, shard, begins, side - 1)
            begins, stride = begins + side - 1, stride * side
        owners.append({column[owning_row]})
    return Scheme(_in_steps([*((Op.REDUCE, ways) for ways in up), *((Op.COPY, ways) for ways in down)]), owners)


def _in_steps(waves: Iterable[tuple[Op, list[Way]]]) -> Iterator[Transfer]:
    """Each wave in as many steps as it takes for nobody to send or receive twice at one."""
    begins = 0
    for op, ways in waves:
        steps: list[list[Way]] = []
        busy: list[set[tuple[int, str]]] = []  # by step
        for way in ways:
            ends = {(way[0], "sends"), (way[1], "receives")}
            step = next((step for step, those in enumerate(busy) if those.isdisjoint(ends)), len(steps))
            if step == len(steps):
                steps.append([])
                busy.append(set())
            steps[step].append(way)
            busy[step] |= ends
        for step, there in enumerate(steps, begins):
            yield from (Transfer(step, *way, op) for way in there)
        begins += len(steps)
