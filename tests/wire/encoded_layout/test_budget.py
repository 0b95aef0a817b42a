"""A budget of bytes shared out among segments: never more than the budget, never too little for one value."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.codecs.registry import parse_codec
from meshwire.codecs.sparsifiers import chosen_bytes_max, kept_within
from meshwire.encoded_layout.budget import Budget, budget_of
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import Plan, plan_buckets

SIZES = st.lists(st.integers(1, 30_000), min_size=1, max_size=12)


def plan_of(sizes: list[int], buffer_values: int = 0) -> Plan:
    kinds = [("parameter", size) for size in sizes] + [("buffer", buffer_values)] * bool(buffer_values)
    tensors = [
        TensorSpec(name=f"tensor{index}", shape=(size,), dtype="float32", kind=kind)
        for index, (kind, size) in enumerate(kinds)
    ]
    return plan_buckets(ModelManifest(tensors=tuple(tensors), optimizer="SGD"), 1 << 16)


def least(plan: Plan, text: str) -> int:
    with pytest.raises(ValueError, match=r"a budget of 100B is too small .* Choose budget=") as refused:
        budget_of(plan, EncodedLayout(plan, parse_codec(f"{text},budget=100")))
    return int(str(refused.value).split(" bytes. Choose")[0].split()[-1])


@given(SIZES, st.integers(0, 3000), st.integers(0, 10**6), st.integers(0, 2**32))
def test_shares_of_all_segments_and_the_buffers_are_the_budget(
    sizes: list[int], buffers: int, more: int, seed: int
) -> None:
    """So any of them, in any order, stay within it; and each has enough for a value."""
    plan = plan_of([100, *sizes, 20_000], buffers)
    text = random.Random(seed).choice(["topk:0.5", "sidco:0.1", "threshold:1", "topk:1..0.01/5"])
    size_bytes = least(plan, text) + more
    layout = EncodedLayout(plan, parse_codec(f"{text},budget={size_bytes}"))
    budget = budget_of(plan, layout)
    assert isinstance(budget, Budget)
    shares = []
    for bucket in plan.buckets[: plan.parameter_buckets]:
        for start, count in map(bucket.segment_bounds, range(bucket.segment_count)):
            shares.append(budget.share_bytes(start, count))
            assert kept_within(budget.codec, count, shares[-1]) >= 1
    buffer_bytes = sum(layout.span(b.index, 0, b.segment_count)[1] for b in plan.buckets[plan.parameter_buckets :])
    assert sum(shares) + buffer_bytes == size_bytes
    with pytest.raises(ValueError, match="Choose budget="):
        budget_of(plan, EncodedLayout(plan, parse_codec(f"{text},budget={max(size_bytes - more - 1, 100)}")))


@given(st.integers(1, 65536), st.integers(0, 300_000), st.sampled_from(["topk+fp16", "topk+fp32", "topk+int8"]))
def test_as_many_values_are_kept_as_surely_fit(count: int, size_bytes: int, text: str) -> None:
    spec = parse_codec(text)
    kept = kept_within(spec, count, size_bytes)
    assert kept <= count
    assert not kept or chosen_bytes_max(spec, kept, count) <= size_bytes
    assert kept == count or chosen_bytes_max(spec, kept + 1, count) > size_bytes
    assert kept_within(spec, count, size_bytes + 1) >= kept


def test_a_codec_without_a_budget_has_none() -> None:
    plan = plan_of([100])
    assert budget_of(plan, EncodedLayout(plan, parse_codec("topk:0.1"))) is None
    assert budget_of(plan, EncodedLayout(plan, parse_codec("fp16"))) is None
