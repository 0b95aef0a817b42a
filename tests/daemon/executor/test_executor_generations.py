"""The executor through changes of generation: G2, G4, G6, G8."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.churnring import ChurnRing, CopyingLink, offers_of
from tests.daemon.executorring import PLAN, Offer, offers, ring_mean, whole


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Several chunks to a shard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwire.limits.CHUNK_BYTES", 16 * 1024)
        yield


async def churn(members: int, codec: str, staleness: int, seed: int) -> None:
    await ChurnRing(members, codec, staleness, seed, offers_of(members + 1, 7, seed)).churn(150 * members)


@settings(max_examples=15)
@given(
    members=st.integers(2, 4),
    codec=st.sampled_from(["fp32", "fp16", "bf16"]),
    staleness=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_rounds_that_run_again_are_the_mean_of_who_is_left(members: int, codec: str, staleness: int, seed: int) -> None:
    """G6, G8: the very same parts, exchanged by the new ring; bit-equal on all, whatever the fence interrupted."""
    asyncio.run(churn(members, codec, staleness, seed))


async def anything(executor_turns: int = 50) -> None:
    """Slices of arithmetic get their turns."""
    for _ in range(executor_turns):
        await asyncio.sleep(0)


def full(members: int) -> dict[int, list[Offer]]:
    """Rounds to which everybody contributes, none poisoned."""
    return {number: offers(members, seed=number) for number in range(1, 4)}


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("staleness", [0, 2])
async def test_nothing_leaves_between_the_fence_and_the_word_to_go_on(staleness: int, codec: str) -> None:
    """G2: parts that become ready in the fence are kept; all of it is sent when all have entered."""
    ring = ChurnRing(2, codec, staleness, 1, full(2))
    made, rank0 = ring.rounds[1][0], ring.members[0]
    ring.contribute(0, made)
    assert rank0.link.queue
    queued = len(rank0.link.queue)
    ring.fence(0)
    ring.fence(1)
    for _ in PLAN.buckets[1:]:
        ring.contribute(0, made)
    while rank0.link.queue:
        ring.receive(0, 1)
        queued -= 1
    assert queued == 0, "what was not handed to the link is dropped"
    ring.generation += 1
    for rank in (0, 1):
        ring.enter(rank, 0)
    await anything()
    assert not rank0.link.queue
    rank0.executor.resume()
    assert {header.generation for header, _ in rank0.link.queue} == {ring.generation}
    ring.members[1].executor.resume()
    await ring.finish()


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("opened", [True, False])
async def test_a_member_that_lags_takes_a_served_round(opened: bool, staleness: int, codec: str) -> None:
    """G4: the bytes that others hold, decoded into the slot whenever it is the round's; the rest runs again."""
    ring = ChurnRing(3, codec, staleness, 1, full(3))
    lagging, source = ring.members[1], ring.members[0]
    ring.opening = "early" if opened else "late"
    ring.slow, ring.slow_holds = 1, 0.0  # a seal is missing
    while min(source.complete, ring.members[2].complete) < 1:
        await ring.act()
    assert lagging.opened == opened
    with pytest.raises(KeyError):
        lagging.executor.encoded(1)
    with pytest.raises(KeyError):
        source.executor.encoded(source.complete + 1)
    cut = await ring.change((0, 1, 2), disorder=0)
    assert lagging.complete == cut >= 1
    assert whole(lagging.executor, 1) == whole(source.executor, 1), "it can serve others now"
    ring.slow_holds = 0.5
    await ring.finish()
    assert lagging.means[1].tobytes() == ring_mean(ring.rounds[1], codec, staleness).tobytes()


@pytest.mark.asyncio
async def test_poison_is_served_as_poison() -> None:
    """V1: a void round has no bytes; whoever is served it gives its learner nothing, and the slot counts as full."""
    rounds = full(2)
    rounds[1][0] = replace(rounds[1][0], poisoned=frozenset({0, len(PLAN.buckets) - 1}))
    ring = ChurnRing(2, "fp32", 1, 1, rounds)
    ring.slow, ring.slow_holds = 1, 0.0
    while ring.members[0].complete < 1:
        await ring.act()
    bits = int.from_bytes(ring.members[0].executor.encoded(1).poisoned, "little")
    assert bits == 1 | 1 << len(PLAN.buckets) - 1
    await ring.change((0, 1), disorder=0)
    assert ring.members[1].executor.encoded(1).poisoned == ring.members[0].executor.encoded(1).poisoned
    ring.slow_holds = 0.5
    await ring.finish()


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
async def test_a_bucket_that_was_kept_is_contributed_as_it_was(codec: str) -> None:
    """G6, C1: whatever lies in the slot by then; what turned out to be poison stays poison."""
    rounds = full(2)
    ring = ChurnRing(2, codec, 1, 1, rounds)
    spoilt = rounds[1][0].values
    assert spoilt is not None
    spoilt[PLAN.buckets[1].start] = np.inf
    for _ in PLAN.buckets:
        ring.contribute(0, ring.rounds[1][0])
    ring.members[0].slots[1][:] = 1e9  # round 1's slot: finite, and nobody's gradient
    await ring.change((0, 1), disorder=0)
    spoilt[PLAN.buckets[1].start] = 0.0
    rounds[1][0] = replace(rounds[1][0], poisoned=frozenset({1}))
    await ring.finish()
    sound = slice(PLAN.buckets[2].start, PLAN.buckets[2].start + PLAN.buckets[2].count)
    expected = ring_mean(ring.rounds[1], codec, 1)[sound]
    assert ring.members[1].means[1][sound].tobytes() == expected.tobytes()


@pytest.mark.asyncio
@pytest.mark.parametrize("staleness", [0, 2])
async def test_who_is_left_alone_goes_on_alone(staleness: int) -> None:
    """A world of one: its rounds in flight are its own parts."""
    ring = ChurnRing(3, "fp32", staleness, 1, full(3))
    await ring.some(60)
    ring.kill(0)
    ring.kill(2)
    cut = await ring.change((1,))
    await ring.finish()
    assert ring.completed_in[cut + 1] == (1,)


@pytest.mark.asyncio
@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_newcomer_enters_at_a_cut(staleness: int) -> None:
    """J1: it takes part in the first round after the cut, under a rank that the job has not had."""
    ring = ChurnRing(2, "fp16", staleness, 2, full(3))
    while max(member.complete for member in ring.members) < 1:
        await ring.act()
    cut = await ring.change((0, 1, 2), disorder=0)
    await ring.finish()
    assert min(ring.members[2].means) == cut + 1
    assert ring.members[2].done[cut + 1, 0].contributors == 0b111


@pytest.mark.asyncio
async def test_a_learner_that_is_started_anew_is_given_the_same_round_again() -> None:
    """J3: the slot may have been opened for the learner of before, and filled."""
    ring = ChurnRing(2, "fp32", 1, 1, full(2))
    member = ring.members[0]
    while not (member.complete >= 1 and member.decoded and member.opened == 1):
        await ring.act()
    first = member.result.copy()
    member.result[:] = np.nan
    member.decoded.clear()
    member.executor.open_result(1)
    while not member.decoded:
        await asyncio.sleep(0)
    assert member.decoded == [1]
    assert member.result.tobytes() == first.tobytes()


@pytest.mark.asyncio
@pytest.mark.parametrize("contributed", [True, False])
async def test_a_chunk_that_is_half_received_at_the_fence_lands_nowhere(contributed: bool) -> None:
    """G8: its bytes fall on memory that is nobody's, and its end is not taken for that of a new one."""
    ring = ChurnRing(2, "fp32", 0, 1, full(2))
    sender, receiver = ring.members
    ring.contribute(0, ring.rounds[1][0])
    if contributed:
        ring.contribute(1, ring.rounds[1][1])
    header, payload = sender.link.queue[0]
    place = receiver.executor.chunk_announced(0, header)
    assert isinstance(place, memoryview)
    assert payload is not None
    ring.landing[0, 1] = place
    await ring.change((0, 1), disorder=0)
    while (0, 1) in ring.landing:
        ring.receive(0, 1)
    assert place == b"\x7e" * len(payload)
    await ring.finish()


@pytest.mark.asyncio
@pytest.mark.parametrize("staleness", [0, 1])
async def test_what_a_link_still_sends_from_is_not_written_again(staleness: int) -> None:
    """G8: a member that was left out may get the last bytes of a complete round much later, and they are the right
    ones: its history may be kept (G4)."""
    ring = ChurnRing(2, "fp32", staleness, 1, full(2))
    last = len(PLAN.buckets) - 1
    queue = ring.members[0].link.queue
    while ring.members[0].received < 1:
        for rank in (0, 1):
            if ring.members[rank].round == 1:
                ring.contribute(rank, ring.rounds[1][rank])
        if ring.members[1].link.queue:
            ring.receive(1, 0)
        if queue and (queue[0][0].step, queue[0][0].bucket) != (1, last):
            ring.receive(0, 1)
    ring._hold(ring.members[0])
    assert queue
    assert await ring.change((0,), disorder=0) == 1
    ring.alive = {0}
    await ring.finish()
    assert isinstance(ring.members[0].link, CopyingLink)
    for (_, payload), copy in zip(queue, ring.members[0].link.copies, strict=True):
        assert payload is not None
        assert bytes(payload) == copy
