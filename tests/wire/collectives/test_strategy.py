"""Every codec has a topology to be exchanged over, and every rank enough memory for it (C2)."""

import pytest

from meshwire import limits
from meshwire.codecs.registry import SEGMENT_FAMILIES, Reduction, parse_codec
from meshwire.collectives.strategy import TOPOLOGIES, collective_for, topology_of
from meshwire.encoded_layout.encoded import EncodedLayout
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
        (
            "fp32",
            "moon",
            "no such topology; there are ring, tree, butterfly, grid, sharded, star, hierarchical, gather$",
        ),
        ("int8", "tree", r"is not for --codec int8: use sharded or star \(or --codec fp32 or fp16\)"),
        ("int8", "hierarchical:2", "--topology hierarchical:2 is not for --codec int8: use sharded or star"),
        ("fp32", "hierarchical", "behind hierarchical: stand ranks, 0 to 63: the ranks at which another group begins"),
        ("fp32", "star:1,2", "behind star: stand ranks, 0 to 63: the rank in the middle, star:2; else the lowest"),
        ("fp32", "star:64", "behind star: stand ranks"),
        ("fp32", "star:", "behind star: stand ranks"),
        ("fp32", "star:-1", "behind star: stand ranks"),
        ("fp32", "star:\u0663", "behind star: stand ranks"),  # a digit, in Arabic: no other screen would show it so
        ("fp32", "hierarchical:1000000000", "behind hierarchical: stand ranks"),
        ("fp32", "sharded:" + "1," * 64 + "1", "behind sharded: stand ranks"),
        *(
            ("fp32", f"grid:{sides}", f"grid:{sides}: behind grid: stand sides of 2 and more, of 64 members at most")
            for sides in ("", "x", "4x", "4,3", "1x4", "9x8", "2x100", "-2x2", "\u0663x2")
        ),
        ("int8", "grid:2x2", "--topology grid:2x2 is not for --codec int8: use sharded or star"),
        ("fp32", "ring:1", "--topology ring:1: there is nothing to be said of a ring behind a colon"),
        (
            "powersgd",
            "gather",
            "use ring or tree or butterfly or grid or sharded or star or hierarchical .or --codec fp32",
        ),
        ("topk:gather", "sharded", "is not for --codec topk:gather: use gather .or --codec fp32 or fp16.$"),
        ("homomorphic", "butterfly", "use ring"),
    ],
)
def test_a_topology_that_does_not_suit_the_codec_is_refused(codec: str, topology: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        collective_for(parse_codec(codec), topology)


def test_a_topology_is_typed_and_told_alike() -> None:
    for typed in (*TOPOLOGIES, "star:2", "sharded:0,0,13", "hierarchical:3,5", "grid:5", "grid:4x3", "grid:2x2x2"):
        if typed != "hierarchical":
            assert str(topology_of(typed)) == typed
    assert str(topology_of("sharded:00,7")) == "sharded:0,7"
    most = "sharded:" + ",".join(["63"] * limits.MEMBERS_MAX)
    assert str(topology_of(most)) == most
    assert len(most) <= limits.TOPOLOGY_CHARS_MAX


@pytest.mark.parametrize(
    ("codec", "topology"),
    [
        *(("fp16", each) for each in TOPOLOGIES if each != "hierarchical"),
        ("fp16", "grid:3x2"),
        ("fp16", "sharded:0,0,1"),
        ("fp16", "hierarchical:2"),
        ("fp16", "hierarchical:1,2,6"),
        ("int8", "sharded"),
        ("int8", "sharded:1,1,0"),
        ("int8", "star:2"),
        ("topk:gather", "gather"),
        ("homomorphic", "ring"),
    ],
)
@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 8, 13])
def test_what_a_round_takes_and_sends_is_said_before(codec: str, topology: str, members: int) -> None:
    """M1, C2: `area_vectors` is about the largest area of any rank, `sent_vectors` what the busiest one sends."""
    collective = collective_for(parse_codec(codec), topology)
    layout = EncodedLayout(PLAN, parse_codec(codec))
    strategies = [collective.topology.strategy(layout, tuple(range(members)), rank) for rank in range(members)]
    areas = [strategy.area_bytes / layout.total_bytes for strategy in strategies]
    most = collective.topology.area_vectors(collective.reduction, members)
    assert max(areas) <= most + 0.25
    assert members == 1 or max(areas) > most - 1
    segments = sum(bucket.segment_count for bucket in PLAN.buckets)
    sent = [
        sum(shards[shard].segment_count for shards in strategy.shards for shard in strategy.program.sends()) / segments
        for strategy in strategies
    ]
    assert max(sent) == pytest.approx(collective.topology.sent_vectors(members), rel=0.05)
