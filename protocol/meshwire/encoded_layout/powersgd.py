"""Low rank: matrices travel as their two factors, and where the factors lie in a shorter vector.

A matrix M (rows x columns) is near to L^T R, with r rows in both factors. If the rows of one of them, the *basis*, are
orthonormal and known to all, the best other one is a product with M, which is linear: so members' parts of it are
summed like gradients. A mean's squared norm is then that of the other factor (O4).

A round of the *full* iteration is PowerSGD (Vogels et al. 2019, arXiv 1905.13727, algorithm 1). The basis that the
round before has left gives the left factors, L = R M^T. When their sum is here, all make the same orthonormal basis of
it, and this gives the right factors, R = L M, which the round sends, and leaves as the next one's basis. So a bucket
travels twice in a round: the left factors in a bucket of their own, its *precursor*, behind all others.

A round of the *half* iteration sends one factor alone, odd rounds the left one, even ones the right one, on the basis
that an earlier round has sent: half the bytes and one way there and back, analysed as ACP-SGD (arXiv 2306.08881). It is
the one for a bound above 0, where nobody waits for a sum in the middle of a round.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from meshwire.codecs.registry import CodecSpec, values_codec
from meshwire.encoded_layout.encoded import EncodedLayout, LayoutPhase
from meshwire.model.plan import VALUE_BYTES, Bucket, Plan, Span, aligned, values_per_segment


class Side(Enum):
    """Which factor a bucket sends beside tensors that are sent as they are."""

    LEFT = "left"  # r x rows
    RIGHT = "right"  # r x columns


def side_of(number: int) -> Side:
    """The factor that travels in this round, where each round is half a power iteration."""
    return Side.LEFT if number % 2 else Side.RIGHT


def lag(staleness: int) -> int:
    """How many rounds ago the basis was sent with which a round begins.

    More than the bound s, so that whoever computes on a base not older than s has applied that round when it binds
    (R1); and odd, for half an iteration begins with the other side's.
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
    """What rounds send.

    Attributes:
        side: of the factors in the buckets that the model has, too.
        plan: of the vector that is sent. It has the buckets of the model's, in the same order, and the same tensors;
            behind them the precursors.
        pieces: by bucket of the model's.
        precursors: by bucket of the model's: the one in which the left factors travel that its basis is made of. None
            of a bucket without matrices, and none in half an iteration.
        lefts: by precursor: the left factors' places, of the matrices in `pieces` in their order.
    """

    side: Side
    plan: Plan
    pieces: tuple[tuple[Piece, ...], ...]
    precursors: Mapping[int, int] = field(default_factory=dict)
    lefts: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)

    def measured_segments(self, bucket: int) -> int:
        """All of a gradient's: the basis is orthonormal (O4). None of a precursor's."""
        return self.plan.buckets[bucket].segment_count if bucket < self.plan.parameter_buckets else 0


def rank_of(span: Span, codec: CodecSpec) -> int:
    """0 where factors of the codec's rank are not smaller by at least `min_rate`, as with vectors; as torch's hook."""
    rank = int(codec.number("rank"))
    return rank if (span.rows + span.columns) * rank * codec.number("min_rate") < span.count else 0


def factors_of(plan: Plan, codec: CodecSpec, side: Side) -> Factors:
    """Of rounds that send one factor of the parameters in `plan`, the model's; float buffers are sent as they are."""
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


def both_factors_of(plan: Plan, codec: CodecSpec) -> Factors:
    """Of rounds that send both factors: right ones as `factors_of`, and behind these the left ones they depend on."""
    right = factors_of(plan, codec, Side.RIGHT)
    start, spans, buckets = right.plan.total_values, list(right.plan.spans), list(right.plan.buckets)
    precursors: dict[int, int] = {}
    lefts: dict[int, tuple[Span, ...]] = {}
    for bucket, pieces in enumerate(right.pieces):
        first_span, first = len(spans), start
        for piece in pieces:
            if piece.rank:
                count = piece.rank * piece.span.rows
                spans.append(Span(piece.span.name, piece.span.tensor, start, count, piece.rank))
                start += aligned(count)
        if start > first:
            index = precursors[bucket] = len(buckets)
            lefts[index] = tuple(spans[first_span:])
            buckets.append(Bucket(index, first, start - first, range(first_span, len(spans)), 1, index))
    values = values_per_segment(start)
    cut = tuple(replace(bucket, segment_values=values) for bucket in buckets)
    both = replace(right.plan, segment_values=values, total_values=start, spans=tuple(spans), buckets=cut)
    return replace(right, plan=both, precursors=precursors, lefts=lefts)


class FactorLayouts:
    """Of rounds of low rank (`meshwire.encoded_layout.projections`)."""

    def phases(self, plan: Plan, codec: CodecSpec) -> tuple[LayoutPhase, ...]:
        """All rounds; of half iterations even ones, and odd ones."""
        halves = (factors_of(plan, codec, side_of(number)) for number in range(2))
        made = (both_factors_of(plan, codec),) if codec.two_phases else halves
        return (LayoutPhase(tuple(EncodedLayout(each.plan, codec, values_codec(codec), each) for each in made)),)

    def builds_on(self, codec: CodecSpec, staleness: int) -> int:
        """The round that the basis was sent in."""
        return lag(staleness)

    def kept_bytes(self, phases: tuple[LayoutPhase, ...], codec: CodecSpec, staleness: int) -> int:
        """Bases of the rounds that can be on their way, the rounds that those are made of, and factors where they are
        computed and where they arrive. With s=0 own parts too, which otherwise are a part of the rounds; with both
        factors, also what these are to be taken out of residuals for."""
        layouts = phases[0].layouts
        encoded_bytes = max(layout.total_bytes for layout in layouts)
        values = max(layout.plan.total_values for layout in layouts)
        rounds = lag(staleness) + (0 if staleness else 2)
        return rounds * encoded_bytes + (staleness + 2 + 2 + codec.two_phases) * VALUE_BYTES * values

    def sent_values(self, codec: CodecSpec, count: int) -> int:
        """How many values of the factors a square matrix of `count` values sends in a round: of one, or of both."""
        return (1 + codec.two_phases) * int(codec.number("rank")) * math.isqrt(count)
