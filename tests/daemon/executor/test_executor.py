"""The executor: every member gets the same means and norms, to the bit, in whatever order things happen."""

import asyncio
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Codec, Values
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.exchange import Part
from meshwire.encoded_layout.encoded import EncodedLayout
from tests.daemon.executorring import NORM_BUCKETS, PLAN, SEGMENTS, Offer, Opening, Ring, offers, ring_mean
from tests.tiers import mostly_slow

ROUNDS = 8
TOLERANCE = {"fp32": 1e-6, "fp16": 3e-3, "bf16": 3e-2}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks to a shard."""
    monkeypatch.setattr("meshwire.limits.CHUNK_BYTES", 16 * 1024)


def schedule(members: int, seed: int) -> dict[int, list[Offer]]:
    """Rounds in which everybody takes part, and rounds that some members null."""
    rounds: dict[int, list[Offer]] = {}
    for number in range(1, ROUNDS + 1):
        numbers = np.random.default_rng([seed, number])
        absent = numbers.permutation(members)[: numbers.integers(0, members)] if number % 2 else ()
        rounds[number] = offers(members, seed=number, absent=[int(rank) for rank in absent])
    return rounds


def bucket_run(bucket: int) -> slice:
    return slice(PLAN.buckets[bucket].start, PLAN.buckets[bucket].start + PLAN.buckets[bucket].count)


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", mostly_slow(["fp32", "fp16", "bf16"]))
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("members", [1, 2, 3, 4])
async def test_all_ranks_hold_the_same_weighted_mean(members: int, staleness: int, codec: str) -> None:
    """DESIGN 5.6, W3, M1, O4: rounds in flight at once, slots overwritten as soon as they may be, nulls, late decoding.

    Bit-equal to the sum in ring order on all ranks, so is the squared norm, and both are near to what they stand for.
    """
    ring = Ring(members, codec, staleness, seed=members)
    rounds = schedule(members, seed=members)
    await ring.play(rounds)
    for number, made in rounds.items():
        expected = ring_mean(made, codec, staleness)
        weight = sum(offer.weight for offer in made)
        contributors = sum(1 << rank for rank, offer in enumerate(made) if offer.values is not None)
        exact = sum(offer.values.astype(np.float64) for offer in made if offer.values is not None) / weight
        assert np.abs(expected - exact).max() <= TOLERANCE[codec] * np.abs(exact).max()
        for member in ring.members:
            assert member.means[number].tobytes() == expected.tobytes()
            for bucket in range(len(PLAN.buckets)):
                done = member.done[number, bucket]
                assert done == ring.members[0].done[number, bucket]
                assert (done.poisoned, done.contributors, done.weight) == (False, contributors, weight)
                squares = np.square(expected[bucket_run(bucket)], dtype=np.float64).sum()
                assert done.squared_norm == pytest.approx(squares if bucket < NORM_BUCKETS else 0.0, rel=1e-9)
    assert [member.decoded for member in ring.members] == [list(range(1, ROUNDS + 1))] * members


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["fp32", "fp16"])
@pytest.mark.parametrize("opening", ["early", "late", "any"])
async def test_each_final_segment_is_decoded_once(
    opening: Opening, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M1: whether the slot is opened before anything of a round arrives, after all of it, or in the middle."""
    decoded: Counter[int] = Counter()

    def counting(name: str) -> Codec:
        made = codec_named(name)
        decode_into = made.decode_into

        def count(payload: memoryview, out: Values) -> None:
            decoded[out.__array_interface__["data"][0]] += 1
            decode_into(payload, out)

        monkeypatch.setattr(made, "decode_into", count)
        return made

    monkeypatch.setattr("meshtraind.contributions.segments.codec_named", counting)
    ring = Ring(3, codec, staleness=2, seed=1)
    await ring.play({number: offers(3, seed=number) for number in range(1, 5)}, opening)
    for member in ring.members:
        base = member.result.__array_interface__["data"][0]
        counts = [
            decoded[base + 4 * bucket.segment_bounds(index)[0]]
            for bucket in PLAN.buckets
            for index in range(bucket.segment_count)
        ]
        assert counts == [4] * SEGMENTS


@pytest.mark.asyncio
async def test_a_slot_opened_late_is_filled_in_slices() -> None:
    """A round that has arrived whole is decoded while the loop takes its turns, never within the call."""
    ring = Ring(2, staleness=2, seed=3)
    made = offers(2, seed=1)
    ring.rounds = {1: made}
    member = ring.members[0]
    while member.received < 1:
        for rank in range(2):
            if (offer := ring._next_offer(ring.members[rank])) is not None:
                ring.contribute(rank, offer)
            if ring.members[rank].link.queue:
                ring.deliver(rank)
        await asyncio.sleep(0)
    assert np.isnan(member.result).all()
    member.executor.open_result(1)
    assert np.isnan(member.result).all()
    async with asyncio.timeout(10):
        while not member.decoded:
            await asyncio.sleep(0)
    assert member.result.tobytes() == ring_mean(made, "fp32", 2).tobytes()


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["fp32", "fp16"])
@pytest.mark.parametrize("staleness", [0, 2])
async def test_memory_is_used_again_and_given_back(staleness: int, codec: str) -> None:
    """M1: no more areas than rounds that can be in memory, two to a round if s > 0; none survives `close`."""
    ring = Ring(3, codec, staleness, seed=4)
    last = 6 * (staleness + 1)
    await ring.play({number: offers(3, seed=number % 3) for number in range(1, last)})
    for rank, offer in enumerate(offers(3, seed=last)):
        ring.rounds = {last: [offer] * 3}
        ring.contribute(rank, offer)  # a round is on its way when all ends
    while senders := [rank for rank in range(3) if ring.members[rank].link.queue]:
        ring.deliver(senders[0])
    encoded_bytes = EncodedLayout(PLAN, parse_codec(codec)).total_bytes
    references: list[weakref.ref[object]] = []
    for member in ring.members:
        areas = 2 if staleness else 1
        assert member.executor.round_bytes(3) == areas * encoded_bytes
        assert len(member.memory) <= 3 * (staleness + 1) * areas  # the round table's bound
        references += [weakref.ref(area) for area in member.memory.values()]
        references += [weakref.ref(array) for array in (member.result, *member.slots)]
        member.memory.clear()
    ring.close()
    executors = [member.executor for member in ring.members]
    ring.members.clear()
    assert len(executors) == 3
    del member
    assert [reference() for reference in references if reference() is not None] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_poisoned_bucket_is_poison_everywhere(staleness: int, codec: str) -> None:
    """V1, V2: the round is told to be void on all ranks, with everybody's weight, and the next ones are sound."""
    ring = Ring(3, codec, staleness, seed=5)
    rounds = {number: offers(3, seed=number) for number in range(1, 5)}
    rounds[2][1] = replace(rounds[2][1], poisoned=frozenset({1, NORM_BUCKETS}))
    await ring.play(rounds)
    for member in ring.members:
        for (number, bucket), done in member.done.items():
            assert done.poisoned == (number == 2 and bucket in (1, NORM_BUCKETS))
            assert (done.contributors, done.weight) == (0b111, 6.0)
            if done.poisoned:
                assert done.squared_norm == 0
        for number in (1, 3, 4):
            assert member.means[number].tobytes() == ring_mean(rounds[number], codec, staleness).tobytes()
        assert member.decoded == [1, 2, 3, 4]


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["fp32", "fp16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_a_value_that_cannot_be_kept_is_poison(value: float, codec: str) -> None:
    """V1: a learner looks for NaN itself; what it missed its daemon finds when it encodes the part to keep it."""
    ring = Ring(2, codec, staleness=2, seed=6)
    rounds = {number: offers(2, seed=number) for number in range(1, 4)}
    spoilt = rounds[2][0].values
    assert spoilt is not None
    spoilt[PLAN.buckets[1].start + 17] = value
    await ring.play(rounds)
    for member in ring.members:
        assert [key for key, done in member.done.items() if done.poisoned] == [(2, 1)]
        assert member.means[3].tobytes() == ring_mean(rounds[3], codec, 2).tobytes()


@pytest.mark.asyncio
@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_sum_that_overflows_is_poison_everywhere(staleness: int) -> None:
    """V1: finite parts can have an infinite sum; its owner finds it and all members void the round."""
    ring = Ring(2, "fp32", staleness, seed=7)
    huge = Offer(np.full(PLAN.total_values, 3e38, np.float32), 1.0)
    await ring.play({1: [huge, huge]})
    for member in ring.members:
        assert {done.poisoned for done in member.done.values()} == {True}
        assert {done.squared_norm for done in member.done.values()} == {0.0}


@pytest.mark.asyncio
async def test_squared_norms_of_large_values_do_not_overflow() -> None:
    """O4: they are computed in float64."""
    ring = Ring(2, "fp32", seed=8)
    large = Offer(np.full(PLAN.total_values, 1e30, np.float32), 1.0)
    await ring.play({1: [large, large]})
    squared = ring.members[1].done[1, 0].squared_norm
    assert squared == pytest.approx(PLAN.buckets[0].count * float(np.float32(1e30)) ** 2, rel=1e-9)


@pytest.mark.asyncio
@pytest.mark.parametrize("staleness", [0, 2])
async def test_chunks_of_rounds_that_cannot_be_are_refused(staleness: int) -> None:
    """G3: this daemon's part bounds what the others hold, and that bounds what they send."""
    ring = Ring(2, staleness=staleness, seed=9)
    ring.rounds = {1: offers(2, seed=1)}
    ring.contribute(0, ring.rounds[1][0])
    header, _ = ring.members[0].link.queue[0]
    newest = 2 * (staleness + 1)
    for number in (0, newest + 1):
        answer = ring.members[1].executor.chunk_announced(0, replace(header, round=number))
        assert isinstance(answer, str)
        assert "complete" in answer
    assert isinstance(ring.members[1].executor.chunk_announced(0, replace(header, round=newest)), memoryview)


async def with_broken_result(ring: Ring) -> None:
    """Round 1, of which rank 0 receives a result that no encoder makes."""
    ring.rounds = {1: offers(2, seed=1)}
    victim = ring.members[0]
    for rank in range(2):
        for _ in PLAN.buckets:
            ring.contribute(rank, ring.rounds[1][rank])
    while not ring.broken and victim.received < 1:
        for rank in range(2):
            queue = ring.members[rank].link.queue
            if rank == 1 and queue and queue[0][0].step == 1 and queue[0][0].bucket == 0:
                header, payload = queue.popleft()
                assert payload is not None
                queue.appendleft((header, memoryview(b"\xff" * len(payload))))
            if queue:
                ring.deliver(rank)
        await asyncio.sleep(0)


@pytest.mark.asyncio
@pytest.mark.parametrize("opened", [True, False])
async def test_a_broken_payload_is_told_when_it_is_decoded(opened: bool) -> None:
    """DESIGN section 8, G10: at arrival, whoever has the slot: it is not passed on, and who has sent it is named."""
    ring = Ring(2, staleness=2, seed=10)
    victim = ring.members[0]
    if opened:
        victim.executor.open_result(1)
    async with asyncio.timeout(10):
        await with_broken_result(ring)
    assert ring.broken[0].startswith("1: round 1, bucket 0: fp32: a value is infinite or not a number")
    assert victim.decoded == []


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["powersgd:2,half,warmup=0", "lgc:0.1,warmup=0+fp32"])
async def test_a_broken_payload_that_later_rounds_build_on_is_told_at_once(codec: str) -> None:
    """DESIGN section 8: else it would be found in the middle of another round, where nobody asks whose it was."""
    ring = Ring(2, codec, staleness=2, seed=10)
    async with asyncio.timeout(10):
        await with_broken_result(ring)
    assert ring.broken[0].startswith("1: round 1, bucket 0: fp32: a value is infinite or not a number")


@pytest.mark.asyncio
async def test_a_round_is_forgotten_while_it_waits_to_be_decoded() -> None:
    """A learner that is gone applies nothing: its rounds' memory goes to others at once."""
    ring = Ring(1, staleness=2, seed=11)
    made = offers(1, seed=1)[0]
    executor = ring.members[0].executor
    ring.rounds = {1: [made]}
    for _ in PLAN.buckets:
        ring.contribute(0, made)
    async with asyncio.timeout(10):
        while ring.members[0].received < 1:
            await asyncio.sleep(0)
    executor.open_result(1)
    executor.forget(1)
    assert made.values is not None
    executor.contribute(2, 0, Part.DATA, made.weight, made.values)  # takes the memory of round 1
    for _ in range(3):
        await asyncio.sleep(0)
    assert np.isnan(ring.members[0].result).all()
    assert ring.members[0].decoded == []
