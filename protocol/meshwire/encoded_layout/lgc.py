"""Values at places that all members share, and a few latents in their stead: where both lie in a shorter vector.

Learned gradient compression (Abrahamyan et al. 2021, arXiv 2103.08870): buckets are cut into blocks, and in each block
the same number of values is chosen, by one member for all. So parts add up place by place, as on any ring. Later,
latents travel in the place of those values: fewer numbers that a linear map makes of them, whose basis was learnt.

A round's leader announces, in the same vector, to which all others add zeros, the places of a part of the blocks (each
block once in `refresh` rounds) and the rows of the basis. They hold from `lag` rounds later on until they are announced
anew. So all of it follows from the results of a few rounds, whoever was in which generation (C1).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwire.codecs.registry import CodecSpec, values_codec
from meshwire.encoded_layout.encoded import EncodedLayout, LayoutPhase
from meshwire.encoded_layout.lgc_autoencoder import Architecture
from meshwire.model.plan import ALIGNMENT_VALUES, VALUE_BYTES, Bucket, Plan, Span, aligned, values_per_segment

BLOCK_CHOSEN_MAX = 16  # they are ordered, and one small basis is for all blocks
BLOCK_VALUES_MAX = 1024
PIECE_BLOCKS = 256  # are encoded at a time: their first latents lie together, then their second ones ..
PLACE_MIDDLE = BLOCK_VALUES_MAX // 2
PLACE_BYTES = 4  # of one in memory


def block_values(ratio: float) -> int:
    """How many values a block has: a power of two, with BLOCK_CHOSEN_MAX chosen ones at most."""
    size = BLOCK_VALUES_MAX
    while math.ceil(ratio * size) > BLOCK_CHOSEN_MAX:
        size //= 2
    return size


def lag(staleness: int) -> int:
    """How many rounds after an announcement it first holds: whoever binds has then applied that round (R1)."""
    return staleness + 1


@dataclass(frozen=True)
class Chosen:
    """What rounds of one phase send.

    Attributes:
        model: the plan of the model's vector.
        block_values: of a block; the last one of a bucket may be shorter, but not than `block_chosen`.
        block_chosen: how many of them are chosen.
        latents: how many numbers travel for those of a block.
        rows: of the basis, or latents of the autoencoder; 0: nothing is learnt.
        learnt_count: numbers that say what was learnt.
        convolves: by an autoencoder.
        refresh: in how many rounds the places of all blocks are announced once.
        plan: of the vector that is sent. It has the model's buckets. In those that hold chosen values latents come
            first, in segments of their own, and what is announced behind them. The others lie there as they are.
        latent_segments: how many of a bucket's segments are not of what is announced.
    """

    model: Plan
    block_values: int
    block_chosen: int
    latents: int
    rows: int
    learnt_count: int
    convolves: bool
    refresh: int
    plan: Plan
    latent_segments: tuple[int, ...]

    @property
    def precursors(self) -> Mapping[int, int]:
        """None: what is added depends on earlier rounds alone."""
        return {}

    def measured_segments(self, bucket: int) -> int:
        """What is announced counts in no norm. The basis is orthonormal, so latents have that of what they stand for
        (O4)."""
        return self.latent_segments[bucket] if bucket < self.model.parameter_buckets else 0

    def blocks(self, bucket: int) -> int:
        """Of a bucket that holds chosen values."""
        return _blocks(self.model.buckets[bucket], self.block_values)

    def announced_blocks(self, bucket: int, number: int) -> range:
        """Those whose places a round announces."""
        return range(number % self.refresh, self.blocks(bucket), self.refresh)

    def announced(self, bucket: int) -> tuple[int, int]:
        """(start, count) in the vector that is sent of what a round announces in a bucket: one 1, places, and in the
        first bucket the basis."""
        of = self.plan.buckets[bucket]
        start = of.start + self.latent_segments[bucket] * of.segment_values
        return start, 1 + self.announced_places(bucket) + (0 if bucket else self.learnt_count)

    def announced_places(self, bucket: int) -> int:
        """For how many there is room; rounds may announce fewer."""
        return -(-self.blocks(bucket) // self.refresh) * self.block_chosen


def chosen_of(plan: Plan, codec: CodecSpec, *, learnt: bool) -> Chosen:
    """Of the values in `plan`, the model's. `learnt`: latents travel, and not the values themselves."""
    size, refresh = block_values(codec.number("ratio")), int(codec.number("refresh"))
    chosen = math.ceil(codec.number("ratio") * size)
    rows = -(-chosen // int(codec.number("latent")))
    rows = rows if rows < chosen else 0
    latents = rows if learnt and rows else chosen
    convolves = codec.choice("map") == "conv"
    learnt_count = 0
    if rows:
        learnt_count = Architecture(rows).weight_count if convolves else rows * chosen
    counts = [_blocks(bucket, size) * latents for bucket in plan.buckets[: plan.coded_buckets]]
    most = values_per_segment(sum(counts) + sum(bucket.count for bucket in plan.buckets[plan.coded_buckets :]))
    buckets: list[Bucket] = []
    segments: list[int] = []
    start = 0
    for bucket in plan.buckets:
        count, values = bucket.count, most
        if bucket.index < plan.coded_buckets:
            sent = counts[bucket.index]
            pieces = max(1, -(-sent // most))
            values = max(ALIGNMENT_VALUES, aligned(-(-sent // pieces)))
            segments.append(pieces)
            announced = 1 + -(-_blocks(bucket, size) // refresh) * chosen + (0 if bucket.index else learnt_count)
            count = pieces * values + aligned(announced)
        else:
            segments.append(-(-count // values))
        buckets.append(Bucket(bucket.index, start, count, bucket.spans, values, bucket.home))
        start += count
    # Tensors are cut up, and have no places of their own.
    spans = tuple(Span(span.name, span.tensor, 0, 0, 1) for span in plan.spans)
    longest = max(bucket.segment_values for bucket in buckets)
    sent_plan = Plan(longest, start, spans, tuple(buckets), plan.coded_buckets, plan.parameter_buckets)
    return Chosen(plan, size, chosen, latents, rows, learnt_count, convolves, refresh, sent_plan, tuple(segments))


def _blocks(bucket: Bucket, size: int) -> int:
    return -(-bucket.count // size)


class SharedPlaces:
    """Of rounds with places that all members share (`meshwire.encoded_layout.projections`)."""

    def phases(self, plan: Plan, codec: CodecSpec) -> tuple[LayoutPhase, ...]:
        """While the basis is learnt, and after that."""
        values = values_codec(codec)
        learning, learnt = (chosen_of(plan, codec, learnt=each) for each in (False, True))
        end = LayoutPhase((EncodedLayout(learnt.plan, codec, values, learnt),))
        rounds = int(codec.number("train"))
        if learnt.latents == learning.latents or not rounds:
            return (end,)
        return LayoutPhase((EncodedLayout(learning.plan, codec, values, learning),), codec.warmup + rounds), end

    def builds_on(self, codec: CodecSpec, staleness: int) -> int:
        """All rounds in which some block's places were announced."""
        return lag(staleness) + int(codec.number("refresh")) - 1

    def kept_bytes(self, phases: tuple[LayoutPhase, ...], codec: CodecSpec, staleness: int) -> int:
        """Places of the rounds that can be on their way, those that these were announced in, and what is sent where it
        is computed and where it arrives. With s=0 own parts too, which otherwise are a part of the rounds."""
        layouts = [layout for phase in phases for layout in phase.layouts]
        chosen = layouts[0].shorter
        assert isinstance(chosen, Chosen)
        places = sum(map(chosen.blocks, range(chosen.model.coded_buckets))) * chosen.block_chosen
        rounds = staleness + 2 + -(-(self.builds_on(codec, staleness) + staleness + 2) // chosen.refresh)
        own_bytes = 0 if staleness else 2 * max(layout.total_bytes for layout in layouts)
        if chosen.convolves:  # what own parts had at their places, until their rounds are complete
            own_bytes += (staleness + 1) * VALUE_BYTES * places
        return (
            rounds * PLACE_BYTES * places
            + 2 * VALUE_BYTES * max(each.plan.total_values for each in layouts)
            + own_bytes
        )

    def sent_values(self, codec: CodecSpec, count: int) -> int:
        """Latents and announced places of one bucket."""
        size = block_values(codec.number("ratio"))
        chosen = math.ceil(codec.number("ratio") * size)
        rows = -(-chosen // int(codec.number("latent")))
        blocks = -(-count // size)
        return blocks * rows + -(-blocks // int(codec.number("refresh"))) * chosen
