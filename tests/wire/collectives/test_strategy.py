"""Every codec has a topology to be exchanged over, and every rank enough memory for it (C2)."""

import pytest

from meshwire.codecs.registry import SEGMENT_FAMILIES, Reduction, parse_codec
from meshwire.collectives.strategy import TOPOLOGIES, collective_for
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
    topology = collective_for(parse_codec(name)).topology
    strategies = [topology.strategy(layout, ranks, rank) for rank in ranks]
    for bucket in PLAN.buckets:
        finished = sorted(segment for strategy in strategies for segment in strategy.owned(bucket.index))
        times = len(ranks) if layout.reduction is Reduction.GATHER else 1
        assert finished == sorted([*range(bucket.segment_count)] * times)
        assert all(not strategy.exchange(bucket.index).complete for strategy in strategies)
    extra = [strategy.area_bytes - layout.total_bytes for strategy in strategies]
    if layout.reduction in (Reduction.LINEAR, Reduction.SKETCH):
        assert not any(extra)
    elif layout.reduction is Reduction.GATHER:
        assert {strategy.area_bytes for strategy in strategies} == {(len(ranks) - 1) * layout.total_bytes}
    else:
        assert sum(extra) == (len(ranks) - 1) * layout.total_bytes


@pytest.mark.parametrize("name", CODECS)
def test_what_leaves_something_out_is_not_for_buffers(name: str) -> None:
    """O5: error feedback would send again what the next difference from the base holds anystrategy."""
    codec = parse_codec(name)
    layout = EncodedLayout(PLAN, codec)
    assert set(layout.codecs[: PLAN.parameter_buckets]) == {codec}
    of_buffers = layout.codecs[PLAN.parameter_buckets]
    assert not of_buffers.error_feedback
    others = {Reduction.LINEAR: codec, Reduction.SKETCH: parse_codec("fp16")}
    assert of_buffers == others.get(codec.reduction, parse_codec("threshold:rms=0+fp16"))


@pytest.mark.parametrize(
    ("codec", "topology", "complaint"),
    [
        ("fp32", "star", "there is no such topology; there are ring, tree, butterfly, sharded, gather"),
        ("int8", "tree", r"is not for --codec int8: use sharded \(or --codec fp32 or fp16\)"),
        ("topk:gather", "sharded", "is not for --codec topk:gather: use gather$"),
        ("homomorphic", "butterfly", "use ring"),
        ("fp16", "gather", "use ring or tree or butterfly$"),
    ],
)
def test_a_topology_that_does_not_suit_the_codec_is_refused(codec: str, topology: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        collective_for(parse_codec(codec), topology)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 8, 13])
def test_what_a_round_takes_and_sends_is_said_before(topology: str, members: int) -> None:
    """M1, C2: `area_vectors` is about the largest area of any rank, `sent_vectors` what the busiest one sends."""
    codec = parse_codec({"sharded": "int8", "gather": "topk:gather"}.get(topology, "fp16"))
    collective = collective_for(codec, topology)
    layout = EncodedLayout(PLAN, codec)
    strategies = [collective.topology.strategy(layout, tuple(range(members)), rank) for rank in range(members)]
    areas = [strategy.area_bytes / layout.total_bytes for strategy in strategies]
    most = collective.topology.area_vectors(members)
    assert max(areas) <= most + 0.25
    assert members == 1 or max(areas) > most - 1
    segments = sum(bucket.segment_count for bucket in PLAN.buckets)
    sent = [
        sum(shards[shard].segment_count for shards in strategy.shards for shard in strategy.program.sends()) / segments
        for strategy in strategies
    ]
    assert max(sent) == pytest.approx(collective.topology.sent_vectors(members), rel=0.05)
