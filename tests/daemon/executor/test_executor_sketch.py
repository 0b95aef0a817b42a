"""The executor with segments that are added encoded: C1, G2, G6, V1, O4, O9, and P1 over sums that cannot be told."""

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtraind.codecs.homomorphic import Recovered
from meshtraind.contributions.sketch import SketchPart
from meshwire.codecs.registry import parse_codec
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.frames.header import Header
from tests.daemon.executorring import NORM_BUCKETS, PLAN, FakeLink, Offer
from tests.daemon.shardedmesh import constant_offers, in_units
from tests.daemon.sketchring import SketchRing

CODECS = ("homomorphic:0.05", "homomorphic:0.0001")
PARAMETERS = slice(PLAN.buckets[NORM_BUCKETS].start)
WEIGHTS = (1.0, 1.0, 2.0)  # so that a mean is exact
SIZES = (1.0, 1 / 32, 2.0)  # by which all are multiplied, round by round
ALIKE = 7  # rounds in which all members have the same gradient


def dyadic_offers(rounds: int, seed: int, others: int) -> Mapping[int, list[Offer]]:
    """At first supports overlap, so that each member sends more and more; then they do not. One round is void."""
    numbers = np.random.default_rng(seed)
    made = {}
    for number in range(1, rounds + 1):
        rows = np.round(numbers.laplace(0, 0.05, (len(WEIGHTS), PLAN.total_values)).clip(-1, 1) * 2**10) / 2**10
        if number <= ALIKE:
            rows[:] = rows[0]
        void = frozenset({0}) if number == 4 else frozenset[int]()
        weights = [weight * SIZES[number % len(SIZES)] for weight in WEIGHTS]
        offers = [
            Offer((row * weight).astype(np.float32), weight, void) for row, weight in zip(rows, weights, strict=True)
        ]
        made[number] = offers + [Offer(None, 0.0)] * others
    return made


async def conserve(codec: str, staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    missed: list[Recovered] = []
    take_back = SketchPart.counted

    def counted(part: SketchPart) -> None:
        missed.extend(found for found in part._found.values() if not found.whole)
        take_back(part)

    monkeypatch.setattr(SketchPart, "counted", counted)
    rounds = dyadic_offers(ALIKE + 3, 5, 1)
    ring = SketchRing(3, codec, staleness, 5, rounds)
    async with asyncio.timeout(60):
        await ring.some(3000)
        await ring.change((0, 1, 2, 3))
        await ring.finish()
    applied, gradients = np.zeros(PLAN.total_values), np.zeros(PLAN.total_values)
    for number, made in rounds.items():
        if not any(offer.poisoned for offer in made):
            applied += sum(WEIGHTS) * ring.members[0].means[number].astype(np.float64)
            came = sum(offer.values.astype(np.float64) for offer in made if offer.values is not None)
            gradients += came / SIZES[number % len(SIZES)]
    owed = np.zeros(PLAN.total_values)
    for weight, member in zip(WEIGHTS, ring.members, strict=False):
        assert member.executor._feedback is not None
        owed += in_units(member.executor._feedback.worker, weight)
    assert not owed[PARAMETERS.stop :].any(), "O5: float buffers travel without residuals"
    assert ((applied + owed) == gradients)[PARAMETERS].all(), "P1: sent + residuals = gradients, to the last bit"
    assert missed, "or nothing was taken back"
    ring.close()


@pytest.mark.parametrize(("codec", "staleness"), [(CODECS[0], 0), (CODECS[1], 2)])
def test_nothing_is_lost_where_sums_cannot_be_told(codec: str, staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1, V1, G6: exactly, over void rounds, segments that fail, and rounds that run again."""
    asyncio.run(conserve(codec, staleness, monkeypatch))


@settings(max_examples=2)
@given(codec=st.sampled_from(CODECS), staleness=st.integers(0, 2), seed=st.integers(0, 2**32))
def test_members_are_lost_and_come_at_any_moment(codec: str, staleness: int, seed: int) -> None:
    """C1, G2, G6, G8, O9: all hold the same bits, whoever was in which generation."""

    async def churn() -> None:
        rounds = constant_offers(3, 1, 6, seed)
        await SketchRing(3, codec, staleness, seed, rounds).churn(600)

    asyncio.run(churn())


@pytest.mark.asyncio
async def test_bytes_are_those_of_the_formula_and_the_squared_norm_is_the_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P5: 2 (m-1) encoded vectors a round, all members together, as on a ring. O4: computed by each shard's owner."""
    sent_bytes = 0
    send = FakeLink.send_chunk

    def counted(link: FakeLink, header: Header, payload: memoryview | None) -> None:
        nonlocal sent_bytes
        sent_bytes += header.payload_bytes
        send(link, header, payload)

    monkeypatch.setattr(FakeLink, "send_chunk", counted)
    ring = SketchRing(3, CODECS[0], 0, 1, rounds := dyadic_offers(2, 2, 0))
    await ring.finish()
    assert sent_bytes == len(rounds) * 2 * 2 * EncodedLayout(PLAN, parse_codec(CODECS[0])).total_bytes
    for number in rounds:
        for bucket in PLAN.buckets[:NORM_BUCKETS]:
            mean = ring.members[2].means[number][bucket.start : bucket.start + bucket.count]
            (told,) = {member.done[number, bucket.index].squared_norm for member in ring.members}
            assert told == pytest.approx(np.square(mean, dtype=np.float64).sum(), rel=1e-12)
    ring.close()
