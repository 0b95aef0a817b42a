"""The sharded exchange of one bucket: any delivery order gives every rank the same mean (C2, W1, W3, V1, R4)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.codecs.registry import CodecSpec, Reduction
from meshwire.collectives.direct import ShardedStrategy
from meshwire.collectives.exchange import Part
from meshwire.collectives.strategy import topology_of
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.frames.header import Flags
from tests.wire.onebucket import SEGMENT_VALUES, announce, generations, make_plan
from tests.wire.partsmesh import Mesh, codecs_of

sharded_program = topology_of("sharded").program

SEGMENT_BYTES = 4 * SEGMENT_VALUES
FIXED, VARIABLE = codecs_of(Reduction.TWO_SIDED)
TOPOLOGIES = ["sharded", "star", "sharded:0,1,1,2,0,0", "sharded:2,3"]


@pytest.fixture(autouse=True, scope="module")
def two_segments_to_a_chunk() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwire.limits.CHUNK_BYTES", 2 * SEGMENT_BYTES)
        yield


@settings(max_examples=150)
@given(
    parts=generations(Part.DATA, Part.DATA, Part.NOTHING),
    segment_count=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    codec=st.sampled_from([FIXED, VARIABLE]),
    topology=st.sampled_from(TOPOLOGIES),
)
def test_every_rank_gets_the_same_weighted_mean(
    parts: dict[int, Part], segment_count: int, seed: int, codec: CodecSpec, topology: str
) -> None:
    """W3, O4, R4: whatever arrives when, and whoever owns how much."""
    mesh = Mesh(parts, segment_count, seed, codec, topology)
    mesh.run()
    mesh.check()


@settings(max_examples=100)
@given(
    parts=generations(*Part).filter(lambda parts: Part.POISON in parts.values()),
    segment_count=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    topology=st.sampled_from(TOPOLOGIES),
)
def test_poison_reaches_every_rank(parts: dict[int, Part], segment_count: int, seed: int, topology: str) -> None:
    """V1: the owner of each shard broadcasts poison."""
    mesh = Mesh(parts, segment_count, seed, FIXED, topology)
    mesh.run()
    mesh.check()


def announced(codec: CodecSpec = FIXED, **changes: object) -> tuple[int, int] | str:
    """What rank 1 of 3 says to a chunk of rank 0, its part of shard 1 if `changes` do not say otherwise."""
    layout = EncodedLayout(make_plan(9), codec)
    exchange = ShardedStrategy(layout, sharded_program((0, 1, 2), 1)).exchange(0)
    return announce(exchange, **{"first_segment": 3} | changes)


FINAL: dict[str, object] = {"step": 2, "first_segment": 0, "contributors": 0b111}
"""What rank 0 sends rank 1 in the copy half: its own shard."""
VECTOR_BYTES = EncodedLayout(make_plan(9), FIXED).total_bytes


def test_a_part_lands_behind_the_vector_and_a_final_run_in_it() -> None:
    assert announced() == (VECTOR_BYTES, 2 * SEGMENT_BYTES)
    second = announced(sender=2, step=1, contributors=0b100)
    assert second == (VECTOR_BYTES + 3 * SEGMENT_BYTES, 2 * SEGMENT_BYTES), "in a block of its own"
    assert announced(FIXED, **FINAL, squared_norm=2.5) == (0, 2 * SEGMENT_BYTES)


def test_segments_that_vary_take_no_more_than_their_place() -> None:
    assert announced(VARIABLE, payload_bytes=17) == (VECTOR_BYTES, 17)
    assert announced(VARIABLE) == (VECTOR_BYTES, 2 * SEGMENT_BYTES)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sender": 2}, "rank 2 has nothing to send"),
        ({"first_segment": 4}, "expected to begin at 3"),
        ({"segment_count": 1}, "1 segments in a chunk that all cut at 2"),
        ({"segment_count": 3}, "3 segments in a chunk that all cut at 2"),
        ({"contributors": 0b101}, "in the part of rank 0 alone"),
        ({"contributors": 0b010}, "in the part of rank 0 alone"),
        ({"payload_bytes": 7}, "payload of 7 bytes where 8192 were due"),
        ({"codec": VARIABLE, "payload_bytes": 0}, "payload of 0 bytes where 1 to 8192 were due"),
        ({"codec": VARIABLE, "payload_bytes": 8193}, "payload of 8193 bytes where 1 to 8192 were due"),
        ({"flags": Flags.POISON}, "where 0 were due"),
        ({"squared_norm": 2.5}, "squared norm 2.5 of what is not final"),
        (FINAL | {"flags": Flags.POISON, "payload_bytes": 0, "squared_norm": 2.5}, "squared norm 2.5"),
    ],
)
def test_a_chunk_that_breaks_the_program_is_refused(changes: dict[str, object], complaint: str) -> None:
    """W1: the header is checked before a byte of the payload is received."""
    answer = announced(**changes)  # type: ignore[arg-type]
    assert isinstance(answer, str)
    assert complaint in answer
