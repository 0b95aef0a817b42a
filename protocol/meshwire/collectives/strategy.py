"""The topologies there are, one entry each: which codecs go over it (C2), and what that needs on one rank.

A new one is a file that gives each rank its program, and an entry here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwire.codecs.spec import CodecSpec, Reduction
from meshwire.collectives.butterfly import butterfly_area_vectors, butterfly_program, butterfly_sent_vectors
from meshwire.collectives.direct import GatherStrategy, ShardedStrategy
from meshwire.collectives.exchange import Strategy
from meshwire.collectives.hops import HopStrategy
from meshwire.collectives.topology import Program, gather_program, ring_program, sharded_program
from meshwire.collectives.tree import tree_area_vectors, tree_program, tree_sent_vectors
from meshwire.layout.encoded import EncodedLayout

ProgramOf = Callable[[tuple[int, ...], int], Program]
"""Of a generation's ranks, in ring order, and one of them."""


@dataclass(frozen=True, slots=True)
class Topology:
    """One way from member to member for a round's bytes, as chosen by `--topology`.

    Attributes:
        about: one line.
        reductions: of the codecs that go over it.
        exchanged: how buckets go their way, given a rank's program.
        area_vectors: about what a round takes in an area, in encoded vectors, by number of members.
        sent_vectors: what the busiest member sends in a round, in encoded vectors, by number of members.
    """

    name: str
    about: str
    reductions: tuple[Reduction, ...]
    program: ProgramOf
    exchanged: Callable[[EncodedLayout, Program], Strategy]
    area_vectors: Callable[[int], int]
    sent_vectors: Callable[[int], float]

    def programs(self, ranks: tuple[int, ...]) -> tuple[Program, ...]:
        """Of all members, in ring order. Raises ValueError as the programs do."""
        return tuple(self.program(ranks, rank) for rank in ranks)

    def strategy(self, layout: EncodedLayout, ranks: tuple[int, ...], rank: int) -> Strategy:
        """Of the rounds that are laid out so. Raises ValueError as the programs do."""
        return self.exchanged(layout, self.program(ranks, rank))


def _ring_sent_vectors(members: int) -> float:
    return 2 * (members - 1) / members


_TOPOLOGIES = (
    Topology(
        "ring",
        "from each member to the next, in 2 (m - 1) steps; all send the same",
        (Reduction.LINEAR, Reduction.SKETCH),
        ring_program,
        HopStrategy,
        area_vectors=lambda _: 1,
        sent_vectors=_ring_sent_vectors,
    ),
    Topology(
        "tree",
        "up to one member and down again, in 2 log2 m steps; that one sends log2 m vectors",
        (Reduction.LINEAR,),
        tree_program,
        HopStrategy,
        tree_area_vectors,
        tree_sent_vectors,
    ),
    Topology(
        "butterfly",
        "halves, quarters .. with ever other members, in 2 log2 m exchanges; best with 2, 4, 8 .. of them",
        (Reduction.LINEAR,),
        butterfly_program,
        HopStrategy,
        butterfly_area_vectors,
        butterfly_sent_vectors,
    ),
    Topology(
        "sharded",
        "to each shard's owner, and from it to all, in 2 steps; all send the same",
        (Reduction.TWO_SIDED,),
        sharded_program,
        ShardedStrategy,
        area_vectors=lambda _: 2,  # beside the vector lie the others' parts of what this rank owns: about another one
        sent_vectors=_ring_sent_vectors,
    ),
    Topology(
        "gather",
        "from everybody to everybody, in 1 step; all send m - 1 vectors",
        (Reduction.GATHER,),
        gather_program,
        GatherStrategy,
        area_vectors=lambda members: members - 1,
        sent_vectors=lambda members: members - 1.0,
    ),
)
TOPOLOGIES: Mapping[str, Topology] = MappingProxyType({topology.name: topology for topology in _TOPOLOGIES})


@dataclass(frozen=True, slots=True)
class Collective:
    """How a job's vectors become a mean that all have: its codec, and the topology they go over. Chosen once a job."""

    codec: CodecSpec
    topology: Topology

    @property
    def reduction(self) -> Reduction:
        """What is done with encoded vectors on their way."""
        return self.codec.reduction

    def round_vectors(self, staleness: int, members: int) -> int:
        """About what a round takes in encoded vectors, until all hold it: what is on its way, and the own part, which
        with s=0 can stay in the raw slot where parts are plain sums (M1)."""
        return self.topology.area_vectors(members) + bool(staleness or self.reduction.own_kept)


def topologies_for(reduction: Reduction) -> tuple[Topology, ...]:
    """Those that such codecs go over; the first is taken unless another is chosen."""
    return tuple(topology for topology in TOPOLOGIES.values() if reduction in topology.reductions)


def topology_of(text: str) -> Topology:
    """As typed behind `--topology`. Raises ValueError, which says what there is."""
    if text not in TOPOLOGIES:
        raise ValueError(f"--topology {text}: there is no such topology; there are {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[text]


def collective_for(codec: CodecSpec, topology: str | None = None) -> Collective:
    """Raises ValueError, which says what is legal.

    Args:
        topology: as typed; None: the codec's usual one.
    """
    legal = topologies_for(codec.reduction)
    chosen = legal[0] if topology is None else topology_of(topology)
    if chosen not in legal:
        names = " or ".join(each.name for each in legal)
        dense = topologies_for(Reduction.LINEAR)
        other = " (or --codec fp32 or fp16)" if chosen in dense else ""
        raise ValueError(f"--topology {topology} is not for --codec {codec}: use {names}{other}")
    return Collective(codec, chosen)
