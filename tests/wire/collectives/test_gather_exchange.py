"""The gather of one bucket: any delivery order gives every rank the same mean (C2, W1, W3, V1, R4)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.codecs.registry import CodecSpec, Reduction
from meshwire.collectives.exchange import Part
from meshwire.collectives.strategy import collective_for
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.frames.header import Flags
from tests.wire.onebucket import SEGMENT_VALUES, announce, generations, make_plan
from tests.wire.partsmesh import Mesh, codecs_of

SEGMENT_BYTES = 4 * SEGMENT_VALUES
FIXED, VARIABLE = codecs_of(Reduction.GATHER)


@pytest.fixture(autouse=True, scope="module")
def two_segments_to_a_chunk() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwire.limits.CHUNK_BYTES", 2 * SEGMENT_BYTES)
        yield


@settings(max_examples=150)
@given(
    parts=generations(Part.DATA, Part.DATA, Part.NOTHING) | generations(*Part),
    segment_count=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    codec=st.sampled_from([FIXED, VARIABLE]),
)
def test_every_rank_gets_the_same_weighted_mean(
    parts: dict[int, Part], segment_count: int, seed: int, codec: CodecSpec
) -> None:
    """W3, O4, R4, V1: whatever arrives when; poison of one is seen by all."""
    mesh = Mesh(parts, segment_count, seed, codec)
    mesh.run()
    mesh.check()
    for rank in mesh.ranks.values():
        assert rank.area_bytes == (len(parts) - 1) * mesh.layout.total_bytes, "the others' parts, and no mean"


@settings(max_examples=100)
@given(
    parts=generations(Part.DATA, Part.DATA, Part.NOTHING) | generations(*Part),
    segment_count=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_codecs_that_add_up_have_the_mean_in_one_latency(parts: dict[int, Part], segment_count: int, seed: int) -> None:
    """W3, O4, R4, V1: all-to-all, where everybody keeps the mean and not the parts."""
    linear, _ = codecs_of(Reduction.LINEAR)
    mesh = Mesh(parts, segment_count, seed, linear, "gather")
    mesh.run()
    mesh.check()
    for rank in mesh.ranks.values():
        assert rank.area_bytes == len(parts) * mesh.layout.total_bytes, "the mean, and the others' parts"


def announced(codec: CodecSpec = FIXED, **changes: object) -> tuple[int, int] | str:
    """What rank 1 of 3 says to a chunk of rank 0, the beginning of its part if `changes` do not say otherwise."""
    exchange = collective_for(codec).topology.strategy(EncodedLayout(make_plan(9), codec), (0, 1, 2), 1).exchange(0)
    return announce(exchange, **changes)


def test_each_part_lands_in_a_block_of_its_own() -> None:
    assert announced() == (0, 2 * SEGMENT_BYTES)
    vector_bytes = EncodedLayout(make_plan(9), FIXED).total_bytes
    assert announced(sender=2, step=1, contributors=0b100) == (vector_bytes, 2 * SEGMENT_BYTES)
    assert announced(VARIABLE, payload_bytes=17) == (0, 17)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sender": 2}, "rank 2 has nothing to send"),
        ({"step": 2}, "program step 2 of 2"),
        ({"first_segment": 2}, "expected to begin at 0"),
        ({"segment_count": 1}, "1 segments in a chunk that all cut at 2"),
        ({"contributors": 0b011}, "in the part of rank 0 alone"),
        ({"contributors": 0b100}, "in the part of rank 0 alone"),
        ({"weight": 0.0}, "does not suit contributors"),
        ({"payload_bytes": 7}, "payload of 7 bytes where 8192 were due"),
        ({"codec": VARIABLE, "payload_bytes": 0}, "payload of 0 bytes where 1 to 8192 were due"),
        ({"codec": VARIABLE, "payload_bytes": 8193}, "payload of 8193 bytes where 1 to 8192 were due"),
        ({"flags": Flags.POISON}, "where 0 were due"),
        ({"squared_norm": 2.5}, "squared norm 2.5 of what is not final"),
    ],
)
def test_a_chunk_that_breaks_the_program_is_refused(changes: dict[str, object], complaint: str) -> None:
    """W1: the header is checked before a byte of the payload is received."""
    answer = announced(**changes)  # type: ignore[arg-type]
    assert isinstance(answer, str)
    assert complaint in answer
