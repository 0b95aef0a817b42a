"""Which way of exchanging a codec takes (C2), and what that needs on one rank."""

from collections.abc import Callable
from dataclasses import dataclass

from meshwire.codecs.spec import Reduction
from meshwire.collectives.direct import PartsLayout
from meshwire.collectives.exchange import Exchange
from meshwire.collectives.gather import GatherExchange
from meshwire.collectives.ring import RingExchange
from meshwire.collectives.sharded import ShardedExchange
from meshwire.collectives.topology import Program, bucket_shards, gather_program, ring_program, sharded_program
from meshwire.layout.encoded import EncodedLayout
from meshwire.model.plan import Shard


@dataclass(frozen=True)
class Way:
    """One rank's, in one generation.

    Attributes:
        shards: by bucket.
        area_bytes: memory of a round: the encoded vector first, but for a gather.
        exchange: of a bucket, for a new round.
    """

    program: Program
    shards: tuple[tuple[Shard, ...], ...]
    area_bytes: int
    exchange: Callable[[int], Exchange]

    def owned(self, bucket: int) -> range:
        """The segments of a bucket that this rank finishes."""
        (shard,) = self.program.owned
        run = self.shards[bucket][shard]
        return range(run.first_segment, run.first_segment + run.segment_count)


def way_of(layout: EncodedLayout, ranks: tuple[int, ...], rank: int) -> Way:
    """Of the rounds that are laid out so. Raises ValueError for a codec that no way is built for, and as the programs
    do."""
    shards = tuple(bucket_shards(bucket.segment_count, len(ranks), bucket.home) for bucket in layout.plan.buckets)
    match layout.reduction:
        case Reduction.LINEAR | Reduction.SKETCH:
            program = ring_program(ranks, rank)
            return Way(
                program,
                shards,
                layout.total_bytes,
                lambda bucket: RingExchange(bucket, program, shards[bucket], layout),
            )
        case Reduction.TWO_SIDED:
            program = sharded_program(ranks, rank)
            parts = PartsLayout(layout, program, shards, layout.total_bytes)
            return Way(
                program,
                shards,
                parts.area_bytes,
                lambda bucket: ShardedExchange(bucket, program, shards[bucket], layout, parts),
            )
        case Reduction.GATHER:
            program = gather_program(ranks, rank)
            whole = tuple((Shard(0, bucket.segment_count),) for bucket in layout.plan.buckets)
            parts = PartsLayout(layout, program, whole, 0)
            return Way(
                program,
                whole,
                parts.area_bytes,
                lambda bucket: GatherExchange(bucket, program, whole[bucket], layout, parts),
            )
        case _:
            raise ValueError(f"no exchange is built for {layout.reduction.value} codecs")
