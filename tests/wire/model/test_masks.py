"""Masks as typed, their split over the layers, and when they change (ALGORITHMS section 3, FedDST)."""

import math
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwire.codecs.registry import parse_codec
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.masks import MaskSettings, kept_of, mask_bytes, masks_of, parse_masks, split, travel_of
from meshwire.model.plan import aligned, plan_buckets
from meshwire.model.plans_by_round import RoundPlans
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import sync_settings

SETTINGS = st.builds(
    MaskSettings,
    sparsity=st.floats(0, 0.999),
    every=st.integers(1, 5) | st.integers(1, 10**7),
    move=st.floats(0, 0.9),
    until=st.none() | st.integers(1, 10**7),
)
# None so thin beside another that it would keep nothing.
SHAPES = st.lists(st.lists(st.sampled_from([0, *range(10, 16)]), max_size=3).map(tuple), max_size=8)


def tensor(name: str, shape: tuple[int, ...], kind: Literal["parameter", "frozen"] = "parameter") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="float32", kind=kind)


@given(SETTINGS)
def test_the_text_of_settings_is_parsed_to_the_same(settings: MaskSettings) -> None:
    assert parse_masks(settings.text()) == settings


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "-0.1", "nan", "x", "0.8,", "0.8,5", "0.8,foo=1", "0.8,every=0", "0.8,every=1.5", "0.8,until=0"),
        *("0.8,every=1,every=2", "0.8,move=1", "0.8,move=nan", "0.8,move", "0.8,sparsity=0.5", "0.8,every=99999999"),
    ],
)
def test_what_is_illegal_is_refused_with_what_is_legal(text: str) -> None:
    with pytest.raises(ValueError, match=r"--masks .*: use SPARSITY\[,every=ROUNDS"):
        parse_masks(text)


@given(SHAPES, st.floats(0, 0.9))
@example([(10, 10, 11), (10, 14, 14), (10, 14, 14)], 0.0001)
def test_exactly_the_sparsity_is_left_out_of_the_tensors_with_two_dimensions(
    shapes: list[tuple[int, ...]], sparsity: float
) -> None:
    """Check of ALGORITHMS 3: mask sparsity exact. Vectors and empty tensors are whole."""
    sizes = [math.prod(shape) for shape in shapes]
    layers = [index for index, shape in enumerate(shapes) if len(shape) > 1 and sizes[index]]
    kept = split(shapes, sparsity)
    assert set(kept) <= set(layers)
    assert all(0 < count < sizes[index] for index, count in kept.items())
    left_out = sum(sizes[index] - count for index, count in kept.items())
    total = sum(sizes[index] for index in layers)
    assert total - left_out == round(total * (1 - sparsity))


@given(SHAPES)
def test_nothing_is_masked_at_sparsity_0(shapes: list[tuple[int, ...]]) -> None:
    assert split(shapes, 0.0) == {}


def test_layers_keep_in_proportion_to_the_sum_of_their_dimensions() -> None:
    """RigL, section 3, ERK; those whose share is more than they have are whole: ResNet's first layer at 90 %."""
    shapes = [(64, 3, 7, 7), (64,), (64, 64, 3, 3), (512, 512, 3, 3), (1000, 512)]
    kept = split(shapes, 0.8)
    assert set(kept) == {2, 3, 4}
    assert kept[2] / 134 == pytest.approx(kept[3] / 1030, rel=1e-4) == pytest.approx(kept[4] / 1512, rel=1e-4)


def test_a_tensor_that_would_keep_nothing_is_named() -> None:
    with pytest.raises(ValueError, match=r"keep none of the 4 values of a tensor of shape \(2, 2\)"):
        split([(2, 2), (100_000, 2)], 0.999)


@given(SETTINGS, st.integers(1, 10**7))
def test_masks_change_in_every_nth_round_until_they_stay(settings: MaskSettings, number: int) -> None:
    due = number % settings.every == 0 and (settings.until is None or number < settings.until)
    assert settings.changes_in(number) == (due and settings.sparsity > 0 and settings.move > 0)


@given(SETTINGS, st.integers(1, 10**6), st.integers(1, 10**7))
def test_the_part_that_moves_falls_by_a_cosine(settings: MaskSettings, kept: int, number: int) -> None:
    """RigL, section 3: alpha/2 (1 + cos(pi t / T_end)). Without an end it stays."""
    moved = settings.moved(number, kept)
    if not settings.changes_in(number):
        assert moved == 0
    elif settings.until is None:
        assert moved == int(settings.move * kept)
    else:
        exact = settings.move / 2 * (1 + math.cos(math.pi * number / settings.until)) * kept
        assert exact - 1 - 1e-6 <= moved <= exact + 1e-6


@given(SHAPES.filter(lambda shapes: any(0 not in shape for shape in shapes)), st.floats(0, 0.9), SETTINGS)
def test_what_travels_is_what_is_kept_and_all_where_masks_change(
    shapes: list[tuple[int, ...]], sparsity: float, drawn: MaskSettings
) -> None:
    """T1, T3: bytes == sum of what is kept, to the value; frozen tensors do not travel."""
    masks = drawn.model_copy(update={"sparsity": sparsity})
    tensors = [tensor(f"p{n}", shape) for n, shape in enumerate(shapes)]
    tensors.append(tensor("frozen", (8, 9), "frozen"))
    kept = kept_of(tensors, masks)
    travel = travel_of(tensors, masks)
    assert (travel is None) == (not kept)
    manifest = ModelManifest(tensors=tuple(tensors), optimizer="", travel=travel)
    plans = RoundPlans(plan_buckets(manifest))
    for number in {1, 2, masks.every, masks.every + 1, 7 * masks.every, masks.until or 1}:
        plan = plans.of(number)
        for span in plan.spans:
            whole = tensors[span.tensor].count
            assert span.count == (whole if masks.changes_in(number) else kept.get(span.tensor, whole))
        sent = sum(bucket.count for bucket in plan.buckets)
        assert sent == sum(aligned(span.count) for span in plan.spans)
        assert EncodedLayout(plan, parse_codec("fp32")).total_bytes == 4 * sent


@pytest.mark.parametrize(
    ("sync", "codec"),
    [
        ("ssp:2", "fp32"),
        ("demo", None),
        ("sparseloco:8", None),
        ("muloco:8", None),
        ("bsp", "powersgd"),
        ("bsp", "dgc"),
        ("bsp", "onebit:momentum,9"),
        ("sma:4", "fp32"),
        ("local:4,gossip=2", "fp32"),
    ],
)
def test_what_masks_do_not_go_with_is_refused_by_name(sync: str, codec: str | None) -> None:
    settings = sync_settings(sync)
    with pytest.raises(ValueError, match=f"--masks with --(sync {sync}|codec {codec}).*use"):
        masks_of("0.8", settings, codec_of(settings, codec))


@pytest.mark.parametrize(("sync", "codec"), [("bsp", "fp16"), ("bsp", "topk:0.1+int8"), ("diloco:8", "int8")])
def test_what_masks_go_with(sync: str, codec: str) -> None:
    settings = sync_settings(sync)
    assert masks_of("0.8", settings, codec_of(settings, codec)) == MaskSettings(sparsity=0.8)
    assert masks_of(None, settings, codec_of(settings, codec)) is None


def test_memory_of_masks_is_8_bytes_a_kept_weight_and_with_a_period_sums_of_gradients() -> None:
    """M1."""
    tensors = [tensor("w", (100, 10))]
    masks = MaskSettings(sparsity=0.75)
    assert mask_bytes(tensors, None, sync_settings("bsp")) == 0
    assert mask_bytes(tensors, masks, sync_settings("bsp")) == 8 * 250
    assert mask_bytes(tensors, masks, sync_settings("local:4")) == 8 * 250 + 4 * 1000
    assert mask_bytes(tensors, masks.model_copy(update={"move": 0.0}), sync_settings("local:4")) == 8 * 250
