import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import topology_of
from meshwire.collectives.topology import bucket_shards
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import (
    ALIGNMENT_VALUES,
    BUCKET_BYTES,
    BUCKET_VALUES_MIN,
    SEGMENT_VALUES_MIN,
    SELECTED_VALUES_MIN,
    VECTOR_BUCKETS_MIN,
    Plan,
    plan_buckets,
)

ring_program = topology_of("ring").program


def spec(name: str, *shape: int, kind: str = "parameter", dtype: str = "float32") -> TensorSpec:
    return TensorSpec.load({"name": name, "shape": shape, "dtype": dtype, "kind": kind})


def model(*tensors: TensorSpec) -> ModelManifest:
    return ModelManifest(tensors=tensors, optimizer="SGD")


def gpt(layers: int = 4, width: int = 144, vocabulary: int = 100, context: int = 64) -> ModelManifest:
    """Linear weights are (out, in); about one million parameters."""
    tensors = [spec("token", vocabulary, width), spec("position", context, width)]
    for layer in range(layers):
        for name, wide, narrow in (("qkv", 3, 1), ("project", 1, 1), ("expand", 4, 1), ("contract", 1, 4)):
            tensors.append(spec(f"{layer}.{name}.norm", width))
            tensors.append(spec(f"{layer}.{name}.weight", wide * width, narrow * width))
            tensors.append(spec(f"{layer}.{name}.bias", wide * width))
    return model(*tensors, spec("head", vocabulary, width))


def resnet18() -> ModelManifest:
    """11,689,512 parameters and the statistics of BatchNorm."""
    tensors: list[TensorSpec] = []

    def convolution(name: str, channels_in: int, channels_out: int, size: int) -> None:
        tensors.append(spec(name, channels_out, channels_in, size, size))
        tensors.extend(spec(f"{name}.{part}", channels_out) for part in ("scale", "shift"))
        tensors.extend(spec(f"{name}.{part}", channels_out, kind="buffer") for part in ("mean", "variance"))
        tensors.append(spec(f"{name}.batches", kind="buffer", dtype="int64"))

    convolution("stem", 3, 64, 7)
    channels = 64
    for block, out in enumerate((64, 64, 128, 128, 256, 256, 512, 512)):
        convolution(f"{block}.1", channels, out, 3)
        convolution(f"{block}.2", out, out, 3)
        if channels != out:
            convolution(f"{block}.shortcut", channels, out, 1)
        channels = out
    return model(*tensors, spec("head.weight", 1000, 512), spec("head.bias", 1000))


def test_parameters_lie_in_reverse_order_before_the_float_buffers() -> None:
    """WFBP: the order in which a backward pass produces gradients, by a static rule."""
    plan = plan_buckets(
        model(
            spec("a", 3),
            spec("mean", 5, kind="buffer"),
            spec("steps", kind="buffer", dtype="int64"),
            spec("frozen", 7, kind="frozen"),
            spec("empty", 0),
            spec("b", 20, 2, dtype="bfloat16"),
            spec("variance", 5, kind="buffer"),
        )
    )
    assert [(span.name, span.tensor, span.start, span.count) for span in plan.spans] == [
        ("b", 5, 0, 40),
        ("a", 0, 48, 3),
        ("mean", 1, 64, 5),
        ("variance", 6, 80, 5),
    ]
    assert [(bucket.start, bucket.count, bucket.spans) for bucket in plan.buckets] == [
        (0, 64, range(2)),
        (64, 32, range(2, 4)),
    ]
    assert plan.total_values == 96


SIZES = st.lists(
    st.tuples(st.integers(0, 200_000) | st.integers(0, 100), st.sampled_from(["parameter", "frozen", "buffer"])),
    max_size=40,
)


@settings(max_examples=100)
@given(SIZES, st.sampled_from([1024, 64 * 1024, 4 * limits.MIB]))
def test_buckets_and_segments_tile_the_vector(sizes: list[tuple[int, str]], bucket_bytes: int) -> None:
    """C1: every value lies in one segment of one bucket; buckets are runs of whole, aligned tensors."""
    tensors = [spec("first", 17), *(spec(str(i), count, kind=kind) for i, (count, kind) in enumerate(sizes))]
    manifest = model(*tensors)
    plan = plan_buckets(manifest, bucket_bytes)
    travelling = {index for index, tensor in enumerate(tensors) if tensor.in_vector}
    assert {span.tensor for span in plan.spans} == travelling
    end = span_end = 0
    for bucket in plan.buckets:
        assert bucket.start == end
        spans = [plan.spans[i] for i in bucket.spans]
        assert bucket.spans.start == span_end
        assert spans
        assert spans[0].start == bucket.start
        for span, following in zip(spans, [*spans[1:], None], strict=True):
            assert span.start % ALIGNMENT_VALUES == 0
            after = following.start if following else bucket.start + bucket.count
            assert 0 <= after - span.start - span.count < ALIGNMENT_VALUES
        assert len({tensors[span.tensor].kind for span in spans}) == 1
        if tensors[spans[0].tensor].kind == "parameter" and len(spans) > 1:
            assert bucket.count * 4 <= bucket_bytes
        bounds = [bucket.segment_bounds(i) for i in range(bucket.segment_count)]
        for start, count in bounds:
            assert start == end
            assert 0 < count <= plan.segment_values
            end += count
        assert all(count == plan.segment_values for _, count in bounds[:-1])
        span_end = bucket.spans.stop
        with pytest.raises(IndexError):
            bucket.segment_bounds(bucket.segment_count)
    assert end == plan.total_values
    assert span_end == len(plan.spans)
    assert SEGMENT_VALUES_MIN <= plan.segment_values <= limits.SEGMENT_VALUES_MAX
    assert plan.segment_values & (plan.segment_values - 1) == 0


@pytest.mark.parametrize("manifest", [gpt(), resnet18()], ids=["gpt", "resnet18"])
def test_buckets_are_small_so_that_little_is_exposed(manifest: ModelManifest) -> None:
    """WFBP: what is exchanged after the backward pass is the last bucket, and what of the one before it is not through.

    None is large, but for a single larger tensor, so neither is.
    """
    plan = plan_buckets(manifest)
    parameters = [b for b in plan.buckets if manifest.tensors[plan.spans[b.spans.start].tensor].kind == "parameter"]
    most = min(sum(bucket.count for bucket in parameters) // VECTOR_BUCKETS_MIN, BUCKET_BYTES // 4)
    assert len(parameters) >= VECTOR_BUCKETS_MIN
    for bucket in parameters:
        assert bucket.count <= most or len(bucket.spans) == 1
    assert sum(bucket.segment_count for bucket in plan.buckets) >= 256


def test_a_tensor_larger_than_a_bucket_has_one_of_its_own() -> None:
    plan = plan_buckets(model(spec("a", 100), spec("big", 3 * limits.MIB), spec("b", 100), spec("c", 100)))
    assert [[plan.spans[i].name for i in bucket.spans] for bucket in plan.buckets] == [["c", "b"], ["big"], ["a"]]


def test_a_tiny_model_is_one_bucket() -> None:
    """Latency rules there: a second bucket would only cost a second round trip's frames."""
    assert len(plan_buckets(model(spec("w", BUCKET_VALUES_MIN - 16), spec("b", 1))).buckets) == 1
    assert len(plan_buckets(model(spec("w", BUCKET_VALUES_MIN), spec("b", 1))).buckets) == 2


def test_large_models_have_full_segments() -> None:
    """C1: 64 Ki values."""
    assert plan_buckets(gpt(layers=12, width=768, vocabulary=50_000)).segment_values == 64 * 1024


def test_codecs_that_select_choose_from_many_values() -> None:
    """C1: from a thousand, the example CNN with DGC is unstable."""
    small = model(spec("w", 400, 250))
    for text in ("topk", "dgc", "sidco", "threshold", "cocktail", "dct", "homomorphic"):
        assert plan_buckets(small, codec=parse_codec(text)).segment_values == SELECTED_VALUES_MIN, text
    for text in ("fp16", "int4", "randomk", "terngrad"):
        assert plan_buckets(small, codec=parse_codec(text)).segment_values == SEGMENT_VALUES_MIN, text


def test_too_many_buckets_are_refused() -> None:
    tensors = [spec(str(i), 256) for i in range(limits.BUCKETS_MAX + 2)]
    with pytest.raises(ValueError, match="make them larger"):
        plan_buckets(model(*tensors), bucket_bytes=1024)


def test_the_digest_tells_plans_apart() -> None:
    manifest = gpt()
    assert plan_buckets(manifest).digest() == plan_buckets(manifest).digest()
    digests = {plan_buckets(gpt(width=width), size).digest() for width in (144, 160) for size in (2**17, 2**20)}
    assert len(digests) == 4


def payload_bytes(plan: Plan, codec: str, members: int, rank: int) -> int:
    layout = EncodedLayout(plan, parse_codec(codec))
    total = 0
    for bucket in plan.buckets:
        shards = bucket_shards(bucket.segment_count, members, bucket.index)
        for shard in ring_program(tuple(range(members)), rank).sends():
            total += layout.span(bucket.index, shards[shard].first_segment, shards[shard].segment_count)[1]
    return total


@pytest.mark.parametrize("codec", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("members", range(2, 9))
@pytest.mark.parametrize("manifest", [gpt(), resnet18()], ids=["gpt", "resnet18"])
def test_every_rank_sends_what_a_ring_sends(manifest: ModelManifest, members: int, codec: str) -> None:
    """Each rank's payload over a whole plan is at most 1.05 x 2(m-1)/m x N, N the bytes of the model's own values."""
    plan = plan_buckets(manifest)
    values = sum(tensor.count for tensor in manifest.tensors if tensor.kind == "parameter")
    bound = 1.05 * 2 * (members - 1) / members * parse_codec(codec).segment_bytes_max(values)
    for rank in range(members):
        assert payload_bytes(plan, codec, members, rank) <= bound
