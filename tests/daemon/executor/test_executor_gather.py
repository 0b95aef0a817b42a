"""The executor with codecs whose parts go to everybody: C2, O4, V1. With all others in `test_executor_sharded.py`."""

from collections.abc import Iterator

import numpy as np
import pytest

from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.memory_layout.footprint import retained_bytes
from tests.daemon.executorring import NORM_BUCKETS, PLAN, Offer, whole
from tests.daemon.shardedmesh import ShardedMesh, constant_offers

CODEC, SENDERS = "topk:0.05,gather", "topk:0.05,senders"


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Several chunks to a bucket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwire.limits.CHUNK_BYTES", 4 * 1024)
        yield


@pytest.mark.asyncio
@pytest.mark.parametrize(("codec", "staleness"), [(CODEC, 0), (CODEC, 2), (SENDERS, 0)])
async def test_the_mean_is_that_of_the_parts_and_all_compute_its_norm(codec: str, staleness: int) -> None:
    """O4: the norm is not sent, for it follows from the parts; buffers do not count in it. Of senders: what a value's
    mean is over, and at most the median norm, by a plain reference."""
    rounds = constant_offers(3, 0, 4, 1, poison=0)
    rounds[2][1] = Offer(None, 0.0)
    for rank in range(3):
        louder = rounds[3][rank].values
        assert louder is not None
        louder *= 1 + 9 * (rank == 1)
    mesh = ShardedMesh(3, codec, staleness, 1, rounds)
    norms: dict[tuple[int, int], set[float]] = {}
    for _ in range(3):
        await mesh.some(300)
    await mesh.finish()
    for number, made in rounds.items():
        contributors = [rank for rank in range(3) if made[rank].values is not None]
        assert mesh.members[0].means[number].tobytes() == mesh.gathered(number, contributors).tobytes()
    for member in mesh.current():
        for key, done in member.done.items():
            norms.setdefault(key, set()).add(done.squared_norm)
    assert len(norms) == 4 * len(PLAN.buckets)
    for (number, bucket), told in norms.items():
        (norm,) = told
        run = PLAN.buckets[bucket]
        values = mesh.members[0].means[number][run.start : run.start + run.count].astype(np.float64)
        assert norm == pytest.approx(values @ values if bucket < NORM_BUCKETS else 0.0, rel=1e-12)
    mesh.close()


@pytest.mark.asyncio
async def test_parts_whose_sum_is_not_finite_are_poison_to_all() -> None:
    """V1: nobody says so, each finds it."""
    huge = np.zeros(PLAN.total_values, np.float32)
    huge[70_010] = 3e38
    plain = np.ones(PLAN.total_values, np.float32)
    rounds = {1: [Offer(huge, 1.0), Offer(huge, 1.0), Offer(plain, 1.0)], 2: [Offer(plain, 1.0)] * 3}
    mesh = ShardedMesh(3, "topk:1,gather+fp32", 0, 1, rounds)
    mesh.opening = "early"
    while any(member.complete < 2 for member in mesh.members):
        await mesh.act()
    where = next(bucket.index for bucket in PLAN.buckets if bucket.start <= 70_010 < bucket.start + bucket.count)
    for member in mesh.members:
        for bucket in PLAN.buckets:
            assert member.done[1, bucket.index].poisoned == (bucket.index == where)
            assert not member.done[2, bucket.index].poisoned
    mesh.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_round_is_what_its_contributors_have_sent(staleness: int) -> None:
    """C2: served as the ordered list of their messages; M1: of so many members at most."""
    rounds = constant_offers(3, 1, 2, 1, poison=0)
    mesh = ShardedMesh(4, CODEC, staleness, 1, rounds)
    while any(member.complete < 1 for member in mesh.members):
        await mesh.act()
    held = {whole(member.executor, 1) for member in mesh.members}
    assert len(held) == 1, "also with the one that has sent nothing"
    for member in mesh.members:
        memory = member.executor._memory
        areas = [memory.rounds[1].area, *(own.area for own in memory.own.values())]
        kept = {id(area.obj) for area in areas if area is not None}
        assert {id(payload.obj) for payload in member.executor.encoded(1).payloads} <= kept, "M1: served without a copy"
    pieces = {rank: [part for key, part in mesh.parts.items() if key[:2] == (rank, 1)] for rank in range(3)}
    (served,) = held
    assert len(served) == sum(len(piece) for parts in pieces.values() for piece in parts)
    assert served.startswith(mesh.parts[0, 1, 0, 0])
    codec, encoded_bytes = parse_codec(CODEC), EncodedLayout(PLAN, parse_codec(CODEC)).total_bytes
    assert mesh.members[0].executor.round_bytes(4) == 4 * encoded_bytes
    assert retained_bytes(encoded_bytes, staleness, collective_for(codec), 4) == (staleness + 2) * 4 * encoded_bytes
    mesh.close()
