"""The topologies there are, one entry each: which codecs go over it (C2), and how its buckets go.

A new one is a file that gives its scheme, and an entry here. What a round takes in memory and on links follows from the
programs that are made of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from meshwire import limits
from meshwire.codecs.registry import FP32
from meshwire.codecs.spec import CodecSpec, Family, Reduction
from meshwire.collectives.direct import AllToAllStrategy, GatherStrategy, ShardedStrategy
from meshwire.collectives.exchange import Strategy
from meshwire.collectives.grid import Sides, grid_scheme, halves, squarest
from meshwire.collectives.hierarchical import hierarchical_scheme
from meshwire.collectives.hops import HopStrategy
from meshwire.collectives.load import load_of
from meshwire.collectives.sharded import sharded_scheme
from meshwire.collectives.topology import Program, Scheme, gather_scheme, programs_from, ring_scheme
from meshwire.collectives.tree import tree_scheme
from meshwire.encoded_layout.encoded import EncodedLayout

Ranks = tuple[int, ...]
SchemeOf = Callable[[Ranks, Ranks | Sides], Scheme]
"""Of a generation's ranks, in ring order, and of the ranks or sides that were typed with the topology's name."""


@dataclass(frozen=True, slots=True)
class Topology:
    """One way from member to member for a round's bytes, as chosen by `--topology NAME[:RANK,...]` or `grid:AxB`.

    Attributes:
        about: one line.
        ways: how buckets go their way, by reduction of the codecs that go over it.
        scheme: which transfers there are.
        takes: what stands behind the name; None: nothing does.
        named: ranks that do.
        named_min, named_max: how many there may be.
        of_sides: whether the sides of a grid do, and no ranks.
        sides: these.
    """

    name: str
    about: str
    ways: Mapping[Reduction, type[Strategy]]
    scheme: SchemeOf
    takes: str | None = None
    named: Ranks = ()
    named_min: int = 0
    named_max: int = 0
    of_sides: bool = False
    sides: Sides = ()

    def __str__(self) -> str:
        """As it is typed."""
        typed = ",".join(map(str, self.named)) or "x".join(map(str, self.sides))
        return f"{self.name}:{typed}" if typed else self.name

    def programs(self, ranks: Ranks) -> tuple[Program, ...]:
        """Of all members, in ring order. Raises ValueError when `ranks` are not sorted."""
        return _programs(str(self), ranks)

    def program(self, ranks: Ranks, rank: int) -> Program:
        """One member's. Raises ValueError when `ranks` are not sorted, or `rank` is none of them."""
        programs = self.programs(ranks)
        if rank not in ranks:
            raise ValueError(f"rank {rank} is not one of {ranks}")
        return programs[ranks.index(rank)]

    def strategy(self, layout: EncodedLayout, ranks: Ranks, rank: int) -> Strategy:
        """Of the rounds that are laid out so. Raises ValueError as the programs do."""
        return self.ways[layout.reduction](layout, self.program(ranks, rank))

    def sent_vectors(self, members: int) -> float:
        """What the busiest member sends in a round, in encoded vectors."""
        return max(load_of(self.programs(tuple(range(members)))).sent)

    def area_vectors(self, reduction: Reduction, members: int) -> int:
        """About what a round takes in the largest area of any member, in encoded vectors."""
        way = self.ways[reduction]
        return math.ceil(max(map(way.area_vectors, self.programs(tuple(range(members))))))


_TOPOLOGIES = (
    Topology(
        "ring",
        "from each member to the next, in 2 (m - 1) steps; all send the same",
        {Reduction.LINEAR: HopStrategy, Reduction.SKETCH: HopStrategy},
        lambda ranks, _: ring_scheme(len(ranks)),
    ),
    Topology(
        "tree",
        "up to one member and down again, in 2 log2 m steps; that one sends log2 m vectors",
        {Reduction.LINEAR: HopStrategy},
        lambda ranks, _: tree_scheme(len(ranks)),
    ),
    Topology(
        "butterfly",
        "halves, quarters .. with ever other members, in 2 log2 m exchanges; best with 2, 4, 8 .. of them",
        {Reduction.LINEAR: HopStrategy},
        lambda ranks, _: grid_scheme(len(ranks), halves(len(ranks))),
    ),
    Topology(
        "grid",
        "within rows, then across them, and back; of A x B members in 2 (A - 1 + B - 1) steps; all send the same",
        {Reduction.LINEAR: HopStrategy},
        lambda ranks, sides: grid_scheme(len(ranks), sides[1:] if sides else squarest(len(ranks))),
        "members in a row, and how rows stand, grid:4x3; else as near a square as it can be",
        of_sides=True,
    ),
    Topology(
        "sharded",
        "to each shard's owner, and from it to all, in 2 steps; all send the same, if all own shards",
        {Reduction.TWO_SIDED: ShardedStrategy, Reduction.LINEAR: HopStrategy},
        sharded_scheme,
        "the owners of equal shards, sharded:0,0,1, where 0 owns two thirds; else everybody",
        named_max=limits.MEMBERS_MAX,
    ),
    Topology(
        "star",
        "to one member, and from it to all, in 2 steps; that one sends m - 1 vectors, and should have a cable",
        {Reduction.LINEAR: HopStrategy, Reduction.TWO_SIDED: ShardedStrategy},
        lambda ranks, named: sharded_scheme(ranks, named or ranks[:1]),
        "the rank in the middle, star:2; else the lowest",
        named_max=1,
    ),
    Topology(
        "hierarchical",
        "within groups to a leader each, round the ring of leaders, and back; for two sites or machines",
        {Reduction.LINEAR: HopStrategy},
        hierarchical_scheme,
        "the ranks at which another group begins, hierarchical:3",
        named_min=1,
        named_max=limits.MEMBERS_MAX - 1,
    ),
    Topology(
        "gather",
        "all-to-all: from everybody to everybody, in 1 step; all send m - 1 vectors",
        {Reduction.GATHER: GatherStrategy, Reduction.LINEAR: AllToAllStrategy},
        lambda ranks, _: gather_scheme(len(ranks)),
    ),
)
TOPOLOGIES: Mapping[str, Topology] = MappingProxyType({topology.name: topology for topology in _TOPOLOGIES})
_SERVER = (
    "whoever owns values sums them, and all step on the same sum, for an owner's optimizer would be lost with it: use "
    "star:RANK, or sharded[:RANK,...] with several owners"
)
_UNDER_OTHER_NAMES = {
    "all-to-all": "each sends everything to everybody in gather; in sharded each sends all others their shards",
    "gossip": "mixing weights with neighbours is a mode: use --sync local:32,gossip=4",
    "master-worker": _SERVER,
    "moshpit": "Moshpit's groups are the rows of a grid here, and a round goes along all its dimensions: use grid",
    "parameter-server": _SERVER,
    "ps": _SERVER,
    "round-robin": "values that take turns at their owners are equal shards: use sharded, or sharded:RANK,...",
}
"""What the field calls by other names, and what to type for it."""


@lru_cache(maxsize=8)  # of 64 members they take a megabyte
def _programs(text: str, ranks: Ranks) -> tuple[Program, ...]:
    topology = topology_of(text)
    return programs_from(topology.scheme(ranks, topology.named or topology.sides), ranks)


@dataclass(frozen=True, slots=True)
class Collective:
    """How a job's vectors become a mean that all have: its codec, and the topology they go over. Chosen once a job."""

    codec: CodecSpec
    topology: Topology

    @property
    def reduction(self) -> Reduction:
        """What is done with encoded vectors on their way."""
        return self.codec.reduction

    @property
    def way(self) -> type[Strategy]:
        """How buckets go."""
        return self.topology.ways[self.reduction]

    def round_vectors(self, staleness: int, members: int) -> int:
        """About what a round takes in encoded vectors, until all hold it: what is on its way, and the own part, which
        with s=0 can stay in the raw slot where parts are plain sums (M1)."""
        own_kept = staleness or self.reduction.own_kept or self.way.own_kept
        return self.topology.area_vectors(self.reduction, members) + bool(own_kept)


def topologies_for(family: Family, reduction: Reduction) -> tuple[Topology, ...]:
    """Those that codecs of a family go over; the first is taken unless another is chosen.

    Args:
        reduction: theirs, for some families allow several.
    """
    ways = [(each, each.ways[reduction]) for each in TOPOLOGIES.values() if reduction in each.ways]
    return tuple(each for each, way in ways if way.projections or not family.transforms)


def topology_of(text: str) -> Topology:
    """As typed behind `--topology`: NAME[:RANK,...] or grid:AxB. Raises ValueError, which says what there is."""
    name, colon, typed = text.partition(":")
    topology = TOPOLOGIES.get(name)
    if topology is None:
        known = _UNDER_OTHER_NAMES.get(name, f"there is no such topology; there are {', '.join(TOPOLOGIES)}")
        raise ValueError(f"--topology {text}: {known}")
    if topology.of_sides:
        return replace(topology, sides=_sides(text, topology, typed) if colon else ())
    ranks = typed.split(",") if colon else []
    if topology.takes is None and ranks:
        raise ValueError(f"--topology {text}: there is nothing to be said of a {name} behind a colon")
    legal = all(
        rank.isascii() and rank.isdecimal() and len(rank) <= 2 and int(rank) < limits.MEMBERS_MAX for rank in ranks
    )
    if not legal or not topology.named_min <= len(ranks) <= topology.named_max:
        raise ValueError(
            f"--topology {text}: behind {name}: stand ranks, 0 to {limits.MEMBERS_MAX - 1}: {topology.takes}"
        )
    return replace(topology, named=tuple(map(int, ranks)))


def _sides(text: str, topology: Topology, typed: str) -> Sides:
    sides = typed.split("x")
    known = all(side.isascii() and side.isdecimal() and len(side) <= 2 and int(side) > 1 for side in sides)
    if not known or math.prod(map(int, sides)) > limits.MEMBERS_MAX:
        raise ValueError(
            f"--topology {text}: behind {topology.name}: stand sides of 2 and more, of {limits.MEMBERS_MAX} members "
            f"at most: {topology.takes}"
        )
    return tuple(map(int, sides))


def topology_by_way_of(ranks: Sequence[int]) -> str | None:
    """A star at one of these ranks, equal shards on several; None: there is none."""
    return None if not ranks else f"{'star' if len(ranks) == 1 else 'sharded'}:{','.join(map(str, ranks))}"


def topology_after(topology: str | None, before: CodecSpec, after: CodecSpec) -> str:
    """That of a job which goes over from one codec to another (C3): its own, or the new one's usual one where it was
    the usual one before. Raises ValueError, as `collective_for`, where its own is not for the new codec."""
    if topology is not None and topology == topologies_for(before.family, before.reduction)[0].name:
        topology = None
    return str(collective_for(after, topology).topology)


def collective_for(codec: CodecSpec, topology: str | None = None) -> Collective:
    """Raises ValueError, which says what is legal.

    Args:
        topology: as typed; None: the codec's usual one.
    """
    legal = topologies_for(codec.family, codec.reduction)
    if topology is None:
        return Collective(codec, legal[0])
    chosen, names = topology_of(topology), [each.name for each in legal]
    if chosen.name not in names:
        dense = topologies_for(FP32.family, Reduction.LINEAR)
        other = " (or --codec fp32 or fp16)" if chosen.name in [each.name for each in dense] else ""
        raise ValueError(f"--topology {topology} is not for --codec {codec}: use {' or '.join(names)}{other}")
    return Collective(codec, chosen)
