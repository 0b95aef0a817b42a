"""What a topology moves, counted from its programs: who sends what to whom, in which order, how much, and for how long
that takes the air of a WiFi cell.

Amounts are in encoded vectors: a shard is one part in `shard_count` of it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from meshwire.collectives.topology import Program, Transfer


def transfers_of(programs: Sequence[Program]) -> Iterator[Transfer]:
    """What the programs of all members send, in the order of steps: what `program_from` makes programs of."""
    ranks = programs[0].ranks
    for index in range(max(len(program.steps) for program in programs)):
        for position, program in enumerate(programs):
            step = program.steps[index]
            if step.send_shard is not None and step.send_to is not None:
                receiver = ranks.index(step.send_to)
                yield Transfer(index, position, receiver, step.send_shard, programs[receiver].steps[index].op)


def waves_of(programs: Sequence[Program]) -> tuple[tuple[Transfer, ...], ...]:
    """The transfers in the order in which they can be on their way: each needs what earlier waves have brought to its
    sender of its shard, and nothing of its own wave. So many latencies come one after the other."""
    waves: list[list[Transfer]] = []
    brought: dict[tuple[int, int], int] = {}  # by receiver and step: after how many waves it is there
    for each in transfers_of(programs):
        needs = programs[each.sender].needs[each.step]
        wave = max((brought[each.sender, step] for step in needs), default=0)
        waves += [[] for _ in range(wave + 1 - len(waves))]
        waves[wave].append(each)
        brought[each.receiver, each.step] = wave + 1
    return tuple(map(tuple, waves))


def all_to_all(programs: Sequence[Program]) -> bool:
    """Whether everybody sends to all others at once, whenever anybody sends, and there are others to tell apart: where
    all shards go to their owners, and in a gather. Around a ring each waits for what it sends on."""
    others = len(programs) - 1
    ways = [{(each.sender, each.receiver) for each in wave} for wave in waves_of(programs)]
    return others > 1 and all(len(way) == len(programs) * others for way in ways)


def crossings(sender_wired: bool, receiver_wired: bool) -> int:
    """How often what one member sends to another crosses the air of their WiFi cell: up to the access point, and down
    from it, but not where a cable is."""
    return (not sender_wired) + (not receiver_wired)


@dataclass(frozen=True, slots=True)
class Load:
    """What one exchange of a whole vector takes.

    Attributes:
        sent, received: vectors, by position in the ring.
        latencies: that come one after the other.
        air: vectors that cross the air of one WiFi cell.
    """

    sent: tuple[float, ...]
    received: tuple[float, ...]
    latencies: int
    air: float


def load_of(programs: Sequence[Program], wired: Collection[int] = ()) -> Load:
    """Counted from the programs of all members. `wired`: ranks that have a cable."""
    ranks, shard_count = programs[0].ranks, programs[0].shard_count
    sent, received = [0] * len(ranks), [0] * len(ranks)
    air = 0
    for each in transfers_of(programs):
        sent[each.sender] += 1
        received[each.receiver] += 1
        air += crossings(ranks[each.sender] in wired, ranks[each.receiver] in wired)
    return Load(
        tuple(count / shard_count for count in sent),
        tuple(count / shard_count for count in received),
        len(waves_of(programs)),
        air / shard_count,
    )
