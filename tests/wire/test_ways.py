"""Every codec has a way to be exchanged, and every rank enough memory for it (C2)."""

import pytest

from meshwire.codecs.registry import FP32, SEGMENT_FAMILIES, CodecSpec, Reduction, parse_codec
from meshwire.codecs.spec import Family
from meshwire.collectives.strategy import way_of
from meshwire.layout.encoded import EncodedLayout
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import plan_buckets

SIZES = (70_000, 5, 300_000, 1_000, 129)
MANIFEST = ModelManifest(
    tensors=(
        *(TensorSpec(name=f"w{at}", shape=(n,), dtype="float32", kind="parameter") for at, n in enumerate(SIZES)),
        TensorSpec(name="running_mean", shape=(90_000,), dtype="float32", kind="buffer"),
    ),
    optimizer="SGD",
)
PLAN = plan_buckets(MANIFEST, 1 << 18)


CODECS = [*SEGMENT_FAMILIES, "topk:gather"]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("ranks", [(3,), (0, 1), (0, 2, 3, 9, 63)])
def test_each_segment_is_finished_by_one_rank_or_by_all(name: str, ranks: tuple[int, ...]) -> None:
    """W3, C2: by exactly one, or of a gather by each; on a ring the area is the vector, of a sharded exchange it holds
    the others' parts too, of a gather nothing else."""
    layout = EncodedLayout(PLAN, parse_codec(name))
    ways = [way_of(layout, ranks, rank) for rank in ranks]
    for bucket in PLAN.buckets:
        finished = sorted(segment for way in ways for segment in way.owned(bucket.index))
        times = len(ranks) if layout.reduction is Reduction.GATHER else 1
        assert finished == sorted([*range(bucket.segment_count)] * times)
        assert all(not way.exchange(bucket.index).complete for way in ways)
    extra = [way.area_bytes - layout.total_bytes for way in ways]
    if layout.reduction in (Reduction.LINEAR, Reduction.SKETCH):
        assert not any(extra)
    elif layout.reduction is Reduction.GATHER:
        assert {way.area_bytes for way in ways} == {(len(ranks) - 1) * layout.total_bytes}
    else:
        assert sum(extra) == (len(ranks) - 1) * layout.total_bytes


@pytest.mark.parametrize("name", CODECS)
def test_what_leaves_something_out_is_not_for_buffers(name: str) -> None:
    """O5: error feedback would send again what the next difference from the base holds anyway."""
    codec = parse_codec(name)
    layout = EncodedLayout(PLAN, codec)
    assert set(layout.codecs[: PLAN.parameter_buckets]) == {codec}
    of_buffers = layout.codecs[PLAN.parameter_buckets]
    assert not of_buffers.error_feedback
    others = {Reduction.LINEAR: codec, Reduction.SKETCH: parse_codec("fp16")}
    assert of_buffers == others.get(codec.reduction, parse_codec("threshold:rms=0+fp16"))


def test_a_codec_without_a_way_is_refused_by_its_kind() -> None:
    integers = Family("integers", Reduction.INTEGER_SUM, FP32.family.segment_bytes_max, "", "")
    with pytest.raises(ValueError, match="no exchange is built for integer-sum codecs"):
        way_of(EncodedLayout(PLAN, CodecSpec(integers, ())), (0, 1), 0)
