"""The executor with codecs that go to each shard's owner and back: C1, C2, G2, G4, G6, V1, and error feedback."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtraind.codecs.base import CodecError
from meshwire.codecs.registry import parse_codec
from tests.daemon.churnring import offers_of
from tests.daemon.executorring import NORM_BUCKETS, PLAN, whole
from tests.daemon.shardedmesh import ShardedMesh, constant_offers
from tests.tiers import mostly_slow

CODECS = (
    "int8",
    "int4:sr",
    "onebit",
    "onebit:warmup=3",
    "topk:0.05",
    "threshold:rms=2",
    "terngrad",
    "topk:0.05,gather",
    "topk:0.05,senders",
    "threshold:rms=2,gather",
    "dgc:0.05,ramp=4",
    "dgc:0.05,ramp=4,gather",
)
Over = tuple[str, str | None]  # a codec, and the topology that it goes over
OWNERS = (None, "star:1", "sharded:0,0,2")
SIZES = (1.0, 1 / 32, 3.0)  # of rounds: what is left out follows their weights
WITH_FEEDBACK = ("int8", "onebit", "topk:0.05", "topk:0.05,decay=0.75", "topk:0.05,gather")


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Several chunks to a shard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwire.limits.CHUNK_BYTES", 4 * 1024)
        yield


async def churn(members: int, codec: Over, staleness: int, seed: int) -> None:
    rounds = offers_of(members + 1, 5, seed)
    await ShardedMesh(members, codec[0], staleness, seed, rounds, codec[1]).churn(300 * members)


def with_topologies(codecs: tuple[str, ...]) -> st.SearchStrategy[Over]:
    """With all that own shards in different ways."""
    gathers = parse_codec("topk:gather").reduction
    legal = {each: [None] if parse_codec(each).reduction is gathers else OWNERS for each in codecs}
    return st.sampled_from([(codec, topology) for codec, those in legal.items() for topology in those])


CHURNED = {
    "members": st.integers(2, 4),
    "codec": with_topologies(CODECS),
    "staleness": st.integers(0, 2),
    "seed": st.integers(0, 2**32),
}


@settings(max_examples=4)
@given(**CHURNED)
def test_rounds_that_run_again_have_the_same_parts_and_the_same_mean_everywhere(
    members: int, codec: Over, staleness: int, seed: int
) -> None:
    """C1, G6, G8: the bytes of a part are those of before a fence, and the means are bit-equal on all."""
    asyncio.run(churn(members, codec, staleness, seed))


@pytest.mark.long
@settings(max_examples=8)
@given(**CHURNED)
def test_many_rounds_that_run_again(members: int, codec: Over, staleness: int, seed: int) -> None:
    """The same, for longer."""
    asyncio.run(churn(members, codec, staleness, seed))


async def conserve(of: Over, staleness: int, seed: int, joins: bool) -> None:
    """Three contribute to every round; a fourth joins that only owns shards, or the same three go on."""
    rounds = constant_offers(3, 1, 8, seed, sizes=SIZES)
    codec, topology = of
    mesh = ShardedMesh(3, codec, staleness, seed, rounds, topology)
    async with asyncio.timeout(60):
        await mesh.some(4000)
        await mesh.change((0, 1, 2, 3) if joins else (0, 1, 2))
        await mesh.finish()
    weight, decay = 6.0, parse_codec(codec).decay
    applied, gradients = np.zeros(PLAN.total_values), np.zeros(PLAN.total_values)
    for number, made in rounds.items():
        if not any(offer.poisoned for offer in made):
            applied = decay * applied + weight * mesh.members[0].means[number].astype(np.float64)
            came = sum(offer.values.astype(np.float64) for offer in made if offer.values is not None)
            gradients = decay * gradients + came / SIZES[number % len(SIZES)]
    parameters = slice(PLAN.buckets[NORM_BUCKETS].start)
    error = np.abs(applied + mesh.owed(weight) - gradients)[parameters]
    assert error.max() <= 1e-5 * np.abs(gradients).max() + 1e-3, "P1: sent + residual = gradients"
    assert np.abs(applied - gradients)[parameters].max() > 100 * error.max(), "or the codec leaves nothing out"
    mesh.close()


CONSERVED = {
    "codec": with_topologies(WITH_FEEDBACK),
    "staleness": st.integers(0, 2),
    "seed": st.integers(0, 2**32),
    "joins": st.booleans(),
}


@settings(max_examples=3)
@given(**CONSERVED)
def test_nothing_is_lost_at_workers_and_owners(codec: Over, staleness: int, seed: int, joins: bool) -> None:
    """P1, V1, C1: over void rounds, rounds that run again, and shards whose owner changes. With a decay each round
    counts as often as it would at a single member, the geometric P1, wherever the rest lay in between."""
    asyncio.run(conserve(codec, staleness, seed, joins))


@pytest.mark.long
@settings(max_examples=8)
@given(**CONSERVED)
def test_nothing_is_lost_over_many_changes(codec: Over, staleness: int, seed: int, joins: bool) -> None:
    """The same, for longer."""
    asyncio.run(conserve(codec, staleness, seed, joins))


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", mostly_slow(CODECS, quick=4))
async def test_buffers_lose_nothing_but_the_rounding_of_a_cast(codec: str) -> None:
    """O5: their differences are from a base that has moved by what was sent alone, so nothing may be owed: whatever a
    codec leaves out of gradients, every round moves them by the mean, and those that did not change not at all."""
    bucket = PLAN.buckets[NORM_BUCKETS]
    run, still = slice(bucket.start, bucket.start + bucket.count), slice(bucket.start, bucket.start + 100)
    rounds = constant_offers(3, 0, 4, 1, poison=0)
    for made in rounds.values():
        for offer in made:
            assert offer.values is not None
            offer.values[still] = 0.0
    mesh = ShardedMesh(3, codec, 1, 1, rounds)
    await mesh.finish()
    for number, made in rounds.items():
        mean = sum(offer.values[run].astype(np.float64) for offer in made if offer.values is not None) / 6.0
        got = mesh.members[0].means[number]
        assert np.abs(got[run] - mean).max() <= 2.0**-9 * np.abs(mean).max()
        assert not got[still].any()
    mesh.close()


@pytest.mark.asyncio
async def test_a_part_that_cannot_be_decoded_is_told_with_its_sender() -> None:
    mesh = ShardedMesh(3, "topk:0.05", 0, 1, constant_offers(3, 0, 1, 1, poison=0))
    wire, victim = mesh.wires[2, 0], mesh.members[0].executor
    while not wire.queue:
        await mesh.act()
    header, payload = wire.queue[0]
    place = victim.chunk_announced(2, header)
    assert isinstance(place, memoryview)
    assert payload is not None
    place[:] = b"\x63" + payload[1:]  # the form of its indices
    victim.chunk_received(header)
    wire.left()
    with pytest.raises(AssertionError):
        await mesh.finish()
    assert "the part of rank 2: topk:0.05: indices in the unknown form 99" in mesh.broken[0]
    mesh.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["int8", "terngrad", "topk:0.05", "topk:0.05,gather"])
async def test_a_member_alone_has_what_a_joiner_would_be_served(codec: str) -> None:
    """C2: m=1 encodes as an owner does, so the base is made of bytes that others can be given."""
    mesh = ShardedMesh(1, codec, 1, 1, constant_offers(1, 1, 4, 1, poison=0))
    while mesh.members[0].complete < 1:
        await mesh.act()
    held = memoryview(whole(mesh.members[0].executor, 1))
    mesh.opening = "late"
    await mesh.change((0, 1))
    await mesh.finish()
    served = np.full(PLAN.total_values, np.nan, np.float32)
    for segments in mesh.forms.of(1).segments:
        for segment in segments:
            length = segment.codec.length_of(held, segment.count)
            segment.codec.decode_into(held[:length], served[segment.start : segment.start + segment.count])
            held = held[length:]
    assert not held
    assert served.tobytes() == mesh.members[0].means[1].tobytes()
    mesh.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["int8", "onebit", "topk:0.05", "threshold:rms=2", "topk:0.05,gather"])
@pytest.mark.parametrize("staleness", mostly_slow([2, 0]))
@pytest.mark.parametrize("opened", mostly_slow([True, False]))
async def test_a_member_that_lags_takes_a_served_round(opened: bool, staleness: int, codec: str) -> None:
    """G4: the runs back to back; decoded into the slot whenever it is the round's, and served on as they are."""
    mesh = ShardedMesh(3, codec, staleness, 1, constant_offers(3, 0, 3, 1, poison=0))
    lagging, source = mesh.members[1], mesh.members[0]
    mesh.opening = "early" if opened else "late"
    mesh.slow, mesh.slow_holds = 1, 0.0  # a seal is missing
    while min(source.complete, mesh.members[2].complete) < 1:
        await mesh.act()
    assert lagging.opened == opened
    cut = await mesh.change((0, 1, 2), disorder=0)
    assert lagging.complete == cut >= 1
    assert whole(lagging.executor, 1) == whole(source.executor, 1), "it can serve others now"
    mesh.slow_holds = 0.5
    await mesh.finish()
    assert lagging.means[1].tobytes() == source.means[1].tobytes()
    mesh.close()


@pytest.mark.asyncio
async def test_broken_bytes_of_a_served_round_are_refused() -> None:
    """G4: what the source says is walked segment by segment before anything of it counts."""
    mesh = ShardedMesh(2, "topk:0.05", 0, 1, constant_offers(2, 0, 2, 1, poison=0))
    mesh.slow, mesh.slow_holds = 1, 0.0
    while mesh.members[0].complete < 1:
        await mesh.act()
    held, lagging = mesh.members[0].executor.encoded(1), mesh.members[1].executor
    for rank in (0, 1):
        mesh.fence(rank)
    sound = held.read(0, held.size_bytes)
    for wrong in (sound[:-1], sound + b"\x00", b""):
        lagging.place_for(1, len(wrong), 0b11)[:] = wrong
        with pytest.raises(CodecError):
            lagging.take_served(1, held.poisoned, 0b11, [1.0, 2.0])
    with pytest.raises(CodecError, match="bytes at the source"):
        lagging.place_for(1, 1 << 30, 0b11)
    mesh.close()
