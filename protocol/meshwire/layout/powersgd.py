"""Low rank: matrices travel as one of their two factors, and where the factors lie in a shorter vector.

A matrix M (rows x columns) is near to L^T R, with r rows in both factors. If the rows of one of them, the *basis*, are
orthonormal and known to all, the best other one is a product with M, which is linear: so members' parts of it are
summed like gradients. Odd rounds send the left factor, L = R M^T, even ones the right one, R = L M.

The basis of a round is what an earlier round has sent, so every round is half a step of the power iteration: PowerSGD
(Vogels et al. 2019, arXiv 1905.13727) with `num_iters_per_step=1` in its authors' code, analysed as ACP-SGD (arXiv
2306.08881). A mean's squared norm is that of its factor, for the basis is orthonormal (O4).
"""

import math
from dataclasses import dataclass
from enum import Enum

from meshwire.codecs.registry import CodecSpec, values_codec
from meshwire.layout.encoded import EncodedLayout, LayoutPhase
from meshwire.model.plan import VALUE_BYTES, Bucket, Plan, Span, aligned, values_per_segment


class Side(Enum):
    """Which factor a round sends."""

    LEFT = "left"  # r x rows
    RIGHT = "right"  # r x columns


def side_of(number: int) -> Side:
    """Of a round."""
    return Side.LEFT if number % 2 else Side.RIGHT


def lag(staleness: int) -> int:
    """How many rounds ago the basis of a round was sent.

    Odd, for it is the other side's; and more than the bound s, so that whoever computes on a base not older than s has
    applied that round when it binds (R1).
    """
    return staleness + 1 | 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, and what of it is sent.

    Attributes:
        span: where it lies in the model's vector.
        sent: its place in the vector that is sent.
        rank: r; 0: it is sent as it is.
    """

    span: Span
    sent: Span
    rank: int


@dataclass(frozen=True)
class Factors:
    """What rounds of one side send.

    Attributes:
        plan: of the vector that is sent. It has the buckets of the model's, in the same order, and the same tensors.
        pieces: by bucket.
    """

    side: Side
    plan: Plan
    pieces: tuple[tuple[Piece, ...], ...]

    def measured_segments(self, bucket: int) -> int:
        """All of a gradient's: the basis is orthonormal (O4)."""
        return self.plan.buckets[bucket].segment_count if bucket < self.plan.parameter_buckets else 0


def rank_of(span: Span, codec: CodecSpec) -> int:
    """0 where factors of the codec's rank are not smaller by at least `min_rate`, as with vectors; as torch's hook."""
    rank = int(codec.number("rank"))
    return rank if (span.rows + span.columns) * rank * codec.number("min_rate") < span.count else 0


def factors_of(plan: Plan, codec: CodecSpec, side: Side) -> Factors:
    """Of the parameters in `plan`, the model's; float buffers are sent as they are."""
    sent: list[Span] = []
    ranks: list[int] = []
    bounds: list[tuple[int, int]] = []
    start = 0
    for bucket in plan.buckets:
        first = start
        for span in plan.spans[bucket.spans.start : bucket.spans.stop]:
            rank = rank_of(span, codec) if bucket.index < plan.parameter_buckets else 0
            each = span.rows if side is Side.LEFT else span.columns
            rows, count = (rank, rank * each) if rank else (span.rows, span.count)
            sent.append(Span(span.name, span.tensor, start, count, rows))
            ranks.append(rank)
            start += aligned(count)
        bounds.append((first, start - first))
    values = values_per_segment(start)
    buckets = tuple(
        Bucket(bucket.index, *bound, bucket.spans, values, bucket.home)
        for bucket, bound in zip(plan.buckets, bounds, strict=True)
    )
    shorter = Plan(values, start, tuple(sent), buckets, plan.coded_buckets, plan.parameter_buckets)
    every = [Piece(*each) for each in zip(plan.spans, sent, ranks, strict=True)]
    pieces = tuple(tuple(every[bucket.spans.start : bucket.spans.stop]) for bucket in plan.buckets)
    return Factors(side, shorter, pieces)


class FactorLayouts:
    """Of rounds of low rank (`meshwire.layout.projections`)."""

    def phases(self, plan: Plan, codec: CodecSpec) -> tuple[LayoutPhase, ...]:
        """Even rounds, and odd ones."""
        made = (factors_of(plan, codec, side_of(number)) for number in range(2))
        return (LayoutPhase(tuple(EncodedLayout(each.plan, codec, values_codec(codec), each) for each in made)),)

    def builds_on(self, codec: CodecSpec, staleness: int) -> int:
        """The round that the basis was sent in."""
        return lag(staleness)

    def kept_bytes(self, phases: tuple[LayoutPhase, ...], codec: CodecSpec, staleness: int) -> int:
        """Bases of the rounds that can be on their way, the rounds that those are made of, and factors where they are
        computed and where they arrive. With s=0 own parts too, which otherwise are a part of the rounds."""
        layouts = phases[0].layouts
        encoded_bytes = max(layout.total_bytes for layout in layouts)
        values = max(layout.plan.total_values for layout in layouts)
        rounds = lag(staleness) + (0 if staleness else 2)
        return rounds * encoded_bytes + (staleness + 2 + 2) * VALUE_BYTES * values

    def sent_values(self, codec: CodecSpec, count: int) -> int:
        """One factor."""
        return int(codec.number("rank")) * math.isqrt(count)
