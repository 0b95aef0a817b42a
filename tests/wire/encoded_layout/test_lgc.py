"""Where latents and announcements lie, in which rounds, and how many bytes they take (C1, P5)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire import limits
from meshwire.codecs.registry import FP16, FP32, parse_codec
from meshwire.encoded_layout.by_round import RoundLayouts
from meshwire.encoded_layout.lgc import BLOCK_CHOSEN_MAX, BLOCK_VALUES_MAX, Chosen, block_values, chosen_of
from meshwire.encoded_layout.lgc_autoencoder import Architecture
from meshwire.encoded_layout.projections import builds_on
from meshwire.model.plan import plan_buckets
from tests.wire.encoded_layout.test_powersgd import RESNET18, SHAPES, manifest


@given(
    SHAPES,
    st.floats(0.005, 1),
    st.integers(1, 16),
    st.integers(1, 64),
    st.booleans(),
)
def test_every_block_has_its_place(
    shapes: tuple[tuple[int, ...], ...], ratio: float, latent: int, refresh: int, learnt: bool
) -> None:
    """Buckets tile both vectors; latents and announcements never share a segment; blocks have room for their places."""
    codec = parse_codec(f"lgc:{ratio:.17g},latent={latent},refresh={refresh}")
    plan = plan_buckets(manifest(shapes, buffers=3), 1 << 14)  # of any tensors, also those that it is not for
    chosen = chosen_of(plan, codec, learnt=learnt)
    sent = chosen.plan
    assert chosen.block_chosen == math.ceil(ratio * chosen.block_values) <= BLOCK_CHOSEN_MAX <= chosen.block_values
    assert len(sent.buckets) == len(plan.buckets)
    end = 0
    for bucket, of_model in zip(sent.buckets, plan.buckets, strict=True):
        assert bucket.start == end
        assert bucket.segment_values <= sent.segment_values
        end += bucket.count
        if bucket.index >= plan.coded_buckets:
            assert bucket.count == of_model.count
            continue
        blocks = chosen.blocks(bucket.index)
        assert (blocks - 1) * chosen.block_values < of_model.count <= blocks * chosen.block_values
        assert of_model.count - (blocks - 1) * chosen.block_values >= chosen.block_chosen
        start, count = chosen.announced(bucket.index)
        assert start - bucket.start == chosen.latent_segments[bucket.index] * bucket.segment_values
        assert blocks * chosen.latents <= start - bucket.start
        assert start + count <= end
        announced = [block for number in range(refresh) for block in chosen.announced_blocks(bucket.index, number)]
        assert sorted(announced) == list(range(blocks)), "each once"
        assert chosen.measured_segments(bucket.index) == chosen.latent_segments[bucket.index]
    assert sent.total_values == end


@given(st.floats(0.005, 1))
def test_blocks_are_as_large_as_they_can_be(ratio: float) -> None:
    size = block_values(ratio)
    assert math.ceil(ratio * size) <= BLOCK_CHOSEN_MAX
    assert size == BLOCK_VALUES_MAX or math.ceil(ratio * 2 * size) > BLOCK_CHOSEN_MAX


def test_the_bytes_of_a_resnet() -> None:
    """P5, besides alignment and exponents: 2 bytes for each latent, each announced place and each value as it is."""
    codec = parse_codec("lgc:0.01,latent=4,refresh=2,warmup=0,train=5")
    plan = plan_buckets(manifest(RESNET18), codec=codec)
    blocks = sum(-(-bucket.count // 1024) for bucket in plan.buckets[: plan.coded_buckets])
    half = sum(math.ceil(math.ceil(bucket.count / 1024) / 2) for bucket in plan.buckets[: plan.coded_buckets])
    whole = sum(bucket.count for bucket in plan.buckets[plan.coded_buckets :])
    layouts = RoundLayouts(plan, codec)
    for number, latents in ((1, 11), (5, 11), (6, 3), (1000, 3)):
        layout = layouts.of(number)
        values = blocks * latents + half * 11 + plan.coded_buckets + 3 * 11 + whole
        segments = sum(bucket.segment_count for bucket in layout.plan.buckets)
        more = layout.total_bytes - 2 * values - 4 * segments
        assert 0 <= more <= 2 * 16 * (segments + plan.coded_buckets)
    assert 4 * sum(math.prod(shape) for shape in RESNET18) / layouts.of(6).total_bytes > 200


def test_an_autoencoder_takes_its_weights_more() -> None:
    """P5: they stand where the rows of a basis would, in all rounds that announce."""
    plan = plan_buckets(manifest(RESNET18))
    linear, conv = (chosen_of(plan, parse_codec(f"lgc:0.01,{each}"), learnt=True) for each in ("linear", "conv"))
    weights = Architecture(3).weight_count
    assert (linear.learnt_count, conv.learnt_count) == (3 * 11, weights)
    assert conv.announced(0)[1] - linear.announced(0)[1] == weights - 3 * 11
    assert conv.announced(1)[1] == linear.announced(1)[1]
    assert not chosen_of(plan, parse_codec("lgc:latent=1,conv"), learnt=True).learnt_count


def test_rounds_are_dense_then_learnt_from_then_latents() -> None:
    codec = parse_codec("lgc:warmup=3,train=2+fp32")
    layouts = RoundLayouts(plan_buckets(manifest(RESNET18, buffers=4), codec=codec), codec)
    dense, learning, learnt = layouts.all
    assert [layouts.of(number) for number in range(1, 8)] == [dense] * 3 + [learning] * 2 + [learnt] * 2
    assert [number for number in range(1, 9) if layouts.ends_with(number)] == [3, 5]
    assert isinstance(learning.shorter, Chosen)
    assert isinstance(learnt.shorter, Chosen)
    assert (dense.shorter, learning.shorter.latents, learnt.shorter.latents) == (None, 11, 3)
    coded = dense.plan.coded_buckets
    assert set(dense.codecs[:coded]) == {FP16}
    assert set(learnt.codecs) == {FP32}
    for same in ("lgc:latent=1,warmup=0", "lgc:train=0,warmup=0"):
        assert len(RoundLayouts(plan_buckets(manifest(RESNET18)), parse_codec(same)).all) == 1


def test_in_four_bits_travel_values_alone() -> None:
    """What a leader announces is read to the last digit, and vectors have no feedback: fp16, as float buffers are.
    Values are rounded by chance, for on the ring they are rounded at every hop."""
    codec = parse_codec("lgc:warmup=3,train=2+int4")
    dense, *projected = RoundLayouts(plan_buckets(manifest(RESNET18, buffers=4), codec=codec), codec).all
    assert set(dense.codecs) == {FP16}
    for layout in projected:
        chosen = layout.shorter
        assert isinstance(chosen, Chosen)
        for bucket in layout.plan.buckets:
            values = chosen.latent_segments[bucket.index] if bucket.index < layout.plan.coded_buckets else 0
            found = [str(layout.codec_of(bucket.index, segment)) for segment in range(bucket.segment_count)]
            assert found == ["int4:sr"] * values + ["fp16"] * (bucket.segment_count - values)
            assert values or bucket.index >= layout.plan.coded_buckets
            taken = layout.chunk_segments(bucket.index) * FP16.segment_bytes_max(bucket.segment_values)
            assert values == bucket.segment_count or taken <= limits.CHUNK_BYTES * 9 / 8
    assert projected[0].total_bytes < RoundLayouts(projected[0].plan, FP16).of(1).total_bytes * 0.55


def test_what_it_keeps_is_counted() -> None:
    """M1, J1: places of the rounds on their way and of those that they were announced in."""
    codec = parse_codec("lgc:refresh=4")
    plan = plan_buckets(manifest(RESNET18), codec=codec)
    layouts = RoundLayouts(plan, codec)
    assert [builds_on(codec, bound) for bound in (0, 1, 3)] == [4, 5, 7]
    places = 4 * 11 * sum(-(-bucket.count // 1024) for bucket in plan.buckets[: plan.coded_buckets])
    sent = max(layout.plan.total_values for layout in layouts.all[1:])
    own = max(layout.total_bytes for layout in layouts.all[1:])
    assert layouts.transform_bytes(0) == (2 + 2) * places + 8 * sent + 2 * own
    assert layouts.transform_bytes(2) == (4 + 3) * places + 8 * sent


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("lgc:0.001", "ratio is '0.001'; it must be a number from 0.005 to 1"),
        ("lgc:latent=0", "latent is '0'"),
        ("lgc:refresh=0", "refresh is '0'"),
        ("lgc+int8", "values is 'int8'; it must be one of fp16, fp32, int4"),
    ],
)
def test_what_is_illegal_is_named(typed: str, said: str) -> None:
    with pytest.raises(ValueError, match="codec lgc") as raised:
        parse_codec(typed)
    assert said in str(raised.value)
