"""Where the factors of matrices lie, and which rounds they are made of (C1, R1)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.codecs.registry import FP16, FP32, parse_codec, values_codec
from meshwire.encoded_layout.by_round import RoundLayouts
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.encoded_layout.powersgd import Factors, Side, both_factors_of, factors_of, lag, rank_of, side_of
from meshwire.encoded_layout.projections import builds_on
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import aligned, plan_buckets

RESNET18 = (  # 11.7 M values: convolutions as out x in x height x width, and what has one dimension
    *((64, 3, 7, 7), *[(64, 64, 3, 3)] * 4, (128, 64, 3, 3), *[(128, 128, 3, 3)] * 3, (128, 64, 1, 1)),
    *((256, 128, 3, 3), *[(256, 256, 3, 3)] * 3, (256, 128, 1, 1), (512, 256, 3, 3), *[(512, 512, 3, 3)] * 3),
    *((512, 256, 1, 1), (1000, 512), (1000,), *[(512,)] * 10, *[(256,)] * 10, *[(128,)] * 10, *[(64,)] * 10),
)


def manifest(shapes: tuple[tuple[int, ...], ...], buffers: int = 0) -> ModelManifest:
    named = [
        TensorSpec(name=f"w{at}", shape=shape, dtype="float32", kind="parameter") for at, shape in enumerate(shapes)
    ]
    mean = TensorSpec(name="mean", shape=(buffers, 2), dtype="float32", kind="buffer")
    return ModelManifest(tensors=(*named, *([mean] if buffers else [])), optimizer="SGD")


SHAPES = st.lists(st.lists(st.integers(1, 40), max_size=4).map(tuple), min_size=1, max_size=12).map(tuple)


@given(SHAPES, st.integers(1, 5), st.sampled_from([1.0, 2.0, 8.0]), st.sampled_from(Side))
def test_every_tensor_has_its_place(
    shapes: tuple[tuple[int, ...], ...], rank: int, min_rate: float, side: Side
) -> None:
    """Buckets tile both vectors and hold the same tensors; nothing overlaps, and what is sent has its exact size."""
    codec = parse_codec(f"powersgd:{rank},min_rate={min_rate:g}")
    plan = plan_buckets(manifest(shapes, buffers=3), 1 << 14)
    factors = factors_of(plan, codec, side)
    sent = factors.plan
    assert [bucket.spans for bucket in sent.buckets] == [bucket.spans for bucket in plan.buckets]
    assert [bucket.start for bucket in sent.buckets] == [0, *(each.start + each.count for each in sent.buckets)][:-1]
    assert sent.total_values == sent.buckets[-1].start + sent.buckets[-1].count
    pieces = [piece for of_bucket in factors.pieces for piece in of_bucket]
    assert [piece.span for piece in pieces] == list(plan.spans)
    end = 0
    for piece in pieces:
        rows = piece.span.rows if side is Side.LEFT else piece.span.columns
        assert piece.sent.count == (piece.rank * rows if piece.rank else piece.span.count) <= piece.span.count
        assert piece.sent.start >= end
        end = piece.sent.start + piece.sent.count
        assert piece.rank in (0, rank)
        assert not piece.rank or rank * min_rate * (piece.span.rows + piece.span.columns) < piece.span.count
    assert not pieces[-1].rank, "float buffers are sent as they are"


@given(SHAPES, st.integers(1, 5))
def test_left_factors_lie_behind_all_else_in_precursors(shapes: tuple[tuple[int, ...], ...], rank: int) -> None:
    """Both factors in a round: the buckets of right factors as they are alone, and one more for each with matrices."""
    codec = parse_codec(f"powersgd:{rank},min_rate=1")
    plan = plan_buckets(manifest(shapes, buffers=3), 1 << 14)
    right, both = factors_of(plan, codec, Side.RIGHT), both_factors_of(plan, codec)
    sent, model = both.plan, range(len(plan.buckets))
    assert both.pieces == right.pieces
    assert [(each.start, each.count) for each in sent.buckets[: len(model)]] == [
        (each.start, each.count) for each in right.plan.buckets
    ]
    with_matrices = [bucket for bucket in model if any(piece.rank for piece in both.pieces[bucket])]
    assert both.precursors == dict(zip(with_matrices, range(len(model), len(sent.buckets)), strict=True))
    end = right.plan.total_values
    for bucket, precursor in both.precursors.items():
        matrices = [piece for piece in both.pieces[bucket] if piece.rank]
        assert sent.buckets[precursor].start == end
        for piece, left in zip(matrices, both.lefts[precursor], strict=True):
            assert (left.start, left.count, left.rows) == (end, piece.rank * piece.span.rows, piece.rank)
            end = left.start + aligned(left.count)
        assert sent.buckets[precursor].start + sent.buckets[precursor].count == end
        assert both.measured_segments(bucket) == sent.buckets[bucket].segment_count
        assert not both.measured_segments(precursor), "O4: a mean has the norm of its right factor"
    assert end == sent.total_values
    assert {each.segment_values for each in sent.buckets} == {sent.segment_values}
    layout = EncodedLayout(sent, codec, values_codec(codec), both)
    assert (list(layout.model_buckets), layout.precursors) == (list(model), both.precursors)
    assert {layout.precursors[bucket]: bucket for bucket in layout.precursors} == layout.followers


@given(st.integers(0, 1000))
def test_a_basis_is_of_the_other_side_and_applied_by_who_binds(staleness: int) -> None:
    """R1: who binds round k has applied k-1-s at least."""
    number = 5000
    source = number - lag(staleness)
    assert side_of(source) is not side_of(number)
    assert source <= number - 1 - staleness < source + 2, "and no older than it must be"


def test_the_bytes_of_a_resnet() -> None:
    """P5, besides alignment: both factors in a round, or half of that, the two in turn."""
    codec = parse_codec("powersgd:4,half,warmup=0")
    plan = plan_buckets(manifest(RESNET18))
    layouts = RoundLayouts(plan, codec)
    dense = sum(4 * rank_of(span, codec) == 0 and span.count for span in plan.spans)
    left = sum(4 * span.rows for span in plan.spans if rank_of(span, codec))
    right = sum(4 * span.columns for span in plan.spans if rank_of(span, codec))
    odd, even = layouts.of(1).total_bytes, layouts.of(2).total_bytes
    assert 0 <= odd - 4 * (left + dense) <= 4 * 16 * len(plan.spans)
    assert 0 <= even - 4 * (right + dense) <= 4 * 16 * len(plan.spans)
    assert 4 * sum(math.prod(shape) for shape in RESNET18) / ((odd + even) / 2) > 136
    whole = RoundLayouts(plan, parse_codec("powersgd:4,warmup=0"))
    both = whole.of(1).total_bytes
    assert both == whole.of(2).total_bytes
    assert 0 <= both - 4 * (left + right + dense) <= 2 * 4 * 16 * len(plan.spans)
    assert 4 * sum(math.prod(shape) for shape in RESNET18) / both > 72


def test_rounds_are_dense_then_odd_and_even() -> None:
    codec = parse_codec("powersgd:4,half,warmup=3+fp16")
    layouts = RoundLayouts(plan_buckets(manifest(RESNET18, buffers=4)), codec)
    dense, right, left = layouts.all
    assert [layouts.of(number) for number in range(1, 8)] == [dense, dense, dense, right, left, right, left]
    assert dense.shorter is None
    assert isinstance(left.shorter, Factors)
    assert isinstance(right.shorter, Factors)
    assert (left.shorter.side, right.shorter.side) == (Side.LEFT, Side.RIGHT)
    assert set(dense.codecs) == set(left.codecs) == set(right.codecs) == {FP16}
    assert set(RoundLayouts(left.plan, parse_codec("powersgd:half,warmup=0")).of(1).codecs) == {FP32}
    dense, both = RoundLayouts(plan_buckets(manifest(RESNET18, buffers=4)), parse_codec("powersgd:warmup=3+fp16")).all
    assert dense.shorter is None
    assert set(both.codecs) == {FP16}


def test_what_it_keeps_is_counted() -> None:
    """M1: the bases of s+2 rounds, the rounds that they are made of, and two vectors of factors."""
    plan = plan_buckets(manifest(RESNET18))
    codec = parse_codec("powersgd:4,half")
    layouts = RoundLayouts(plan, codec)
    factors = max(layout.total_bytes for layout in layouts.all if layout.shorter)
    assert layouts.transform_bytes(0) == (1 + 2) * factors + 4 * factors
    assert layouts.transform_bytes(2) == 3 * factors + 6 * factors
    both = RoundLayouts(plan, parse_codec("powersgd:4"))
    of_both = max(layout.total_bytes for layout in both.all if layout.shorter)
    assert both.transform_bytes(0) == (1 + 2) * of_both + 5 * of_both, "and what is to be taken out of residuals"
    assert RoundLayouts(plan, parse_codec("int8")).transform_bytes(2) == 0
    assert [builds_on(codec, bound) for bound in (0, 1, 2, 3)] == [1, 3, 3, 5]
    assert builds_on(parse_codec("powersgd:4"), 0) == 1
    assert builds_on(parse_codec("topk"), 3) == 0


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("powersgd:0", "rank is '0'; it must be a whole number from 1 to 64"),
        ("powersgd:min_rate=0.5", "min_rate is '0.5'; it must be a number from 1 to 1000"),
        ("powersgd+int8", "values is 'int8'; it must be one of fp32, fp16"),
        ("powersgd:warmup=-1", "warmup is '-1'"),
        ("powersgd:iteration=third", "iteration is 'third'; it must be one of full, half"),
    ],
)
def test_what_is_illegal_is_named(typed: str, said: str) -> None:
    with pytest.raises(ValueError, match="codec powersgd") as raised:
        parse_codec(typed)
    assert said in str(raised.value)
