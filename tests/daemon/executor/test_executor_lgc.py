"""The executor with learned gradient compression: C1, G2, G6, V1, O4, P1, and what it is without latents."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtraind.contributions.error_feedback import Residual
from meshtraind.contributions.segments import Areas, RoundForms
from meshtraind.executor.projections import Projections
from meshtraind.projection.lgc.latents import Basis, Convolved
from meshtraind.projection.lgc.projection import LearnedGradients
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.exchange import Part
from meshwire.encoded_layout.by_round import RoundLayouts
from meshwire.encoded_layout.lgc import Chosen, lag
from tests.daemon.executorring import PLAN
from tests.daemon.lowrankring import LowRankRing, check_conserved, churn
from tests.daemon.shardedmesh import Wide, constant_offers, in_units, without_padding

CODECS = (
    "lgc:0.05,conv,latent=4,refresh=1,warmup=0,train=2+fp32",
    "lgc:0.1,refresh=1,warmup=0,train=3",
    "lgc:0.02,latent=2,refresh=3,warmup=2,train=2+fp32",
    "lgc:0.05,latent=1,refresh=2,warmup=0+fp32",
)

IN_FOUR_BITS = "lgc:0.1,latent=2,refresh=2,warmup=0,train=2+int4"


@settings(max_examples=8)
@given(codec=st.sampled_from(CODECS), staleness=st.integers(0, 2), seed=st.integers(0, 2**32), joins=st.booleans())
def test_nothing_is_lost_and_means_are_bit_equal(codec: str, staleness: int, seed: int, joins: bool) -> None:
    """P1, V1, C1, G6: over void rounds, rounds that run again, and members that come in; all hold the same bits."""
    coded = slice(PLAN.buckets[PLAN.coded_buckets].start)
    check_conserved(codec, staleness, seed, 10, coded, joins=joins)


@settings(max_examples=6)
@given(codec=st.sampled_from((*CODECS, IN_FOUR_BITS)), staleness=st.integers(0, 2), seed=st.integers(0, 2**32))
def test_members_are_lost_and_come_at_any_moment(codec: str, staleness: int, seed: int) -> None:
    """C1, G2, G6, G8: places and basis are functions of the history, whoever was in which generation."""
    churn(codec, staleness, seed, 8)


def chosen_of_round(codec: str, number: int) -> Chosen:
    chosen = RoundLayouts(PLAN, parse_codec(codec)).of(number).shorter
    assert isinstance(chosen, Chosen)
    return chosen


def largest(chosen: Chosen, values: Wide) -> list[int]:
    """Places in the vector of each block's largest magnitudes, by a way of its own."""
    places: list[int] = []
    for bucket in PLAN.buckets[: PLAN.coded_buckets]:
        for first in range(0, bucket.count, chosen.block_values):
            start = bucket.start + first
            block = np.abs(values[start : min(start + chosen.block_values, bucket.start + bucket.count)])
            places += [start + int(place) for place in np.argsort(-block, kind="stable")[: chosen.block_chosen]]
    return places


@pytest.mark.asyncio
@pytest.mark.parametrize("staleness", [0, 2])
async def test_without_latents_it_is_top_k_with_one_members_places(staleness: int) -> None:
    """Each block's largest of what the leader of `lag` rounds before still owed, and there the sum of all."""
    codec, members = "lgc:0.05,latent=1,refresh=1,warmup=0+fp32", 3
    rounds = without_padding(constant_offers(members, 0, 8, 5, poison=0.0))
    ring = LowRankRing(members, codec, staleness, 1, rounds)
    await ring.finish()
    owed = [np.zeros(PLAN.total_values) for _ in range(members)]
    told: dict[int, list[int]] = {}
    coded = PLAN.buckets[PLAN.coded_buckets].start
    large = np.concatenate([np.full(bucket.count, bucket.count >= 1024) for bucket in PLAN.buckets])[:coded]
    for number, made in rounds.items():
        chosen = chosen_of_round(codec, number)
        for rank, offer in enumerate(made):
            assert offer.values is not None
            owed[rank] += offer.values
        expected = np.zeros(PLAN.total_values)
        mean = ring.members[0].means[number][:coded]
        if (places := told.get(number - lag(staleness))) is not None:
            expected[places] = sum(each[places] for each in owed) / 6.0
            assert np.abs(mean - expected[:coded])[large].max() <= 1e-5 * np.abs(expected).max()
        else:
            places = list(np.flatnonzero(mean))
        for each in owed:
            each[places] = 0.0
        told[number] = largest(chosen, owed[number % members])
    ring.close()


@pytest.mark.asyncio
async def test_what_hops_round_to_four_bits_is_right_on_average() -> None:
    """P1: what a member's own encoding leaves out it owes; what a sum loses at a hop nobody does. So that is rounded by
    chance: after 9 rounds of the same gradients the sum of all means is off 3 times as much as after one, no more."""
    members, errors = 3, []
    (made,) = without_padding(constant_offers(members, 0, 1, 5, poison=0.0)).values()
    for rounds in (1, 9):
        ring = LowRankRing(
            members, "lgc:1,latent=1,refresh=1,warmup=0+int4", 0, 1, dict.fromkeys(range(1, rounds + 1), made)
        )
        await ring.finish()
        error = np.zeros(PLAN.total_values)
        for number in range(1, rounds + 1):
            error += sum(offer.weight for offer in made) * ring.members[0].means[number]
            error -= sum(offer.values.astype(np.float64) for offer in made if offer.values is not None)
        for rank, member in enumerate(ring.members):
            assert member.executor._feedback is not None
            error += in_units(member.executor._feedback.worker, rank + 1.0)
        errors.append(float(np.sqrt(np.mean(error[: PLAN.buckets[PLAN.coded_buckets].start] ** 2))))
        ring.close()
    assert 0 < errors[0] < errors[1] < 3.3 * errors[0], errors


@pytest.mark.asyncio
async def test_a_round_is_led_by_one_of_those_that_compute() -> None:
    """C1: a member that only forwards has nothing to say, and a round that it led would say nothing."""
    codec = "lgc:0.05,latent=1,refresh=1,warmup=0+fp32"
    ring = LowRankRing(3, codec, 0, 1, without_padding(constant_offers(3, 0, 1, 5, poison=0.0)))
    led: list[list[int]] = [[], [], []]
    for rank, member in enumerate(ring.members):
        member.executor.fence()
        member.executor.enter(7, (0, 1, 2), {}, 0, learning=(0, 2))
        gradients = member.executor._projections.projected
        assert isinstance(gradients, LearnedGradients)
        for number in range(1, 9):
            chosen = chosen_of_round(codec, number)
            out = np.zeros(chosen.announced(0)[1], np.float32)
            bucket = PLAN.buckets[0]
            gradients.lead(chosen, number, 0, np.ones(bucket.count, np.float32), out)
            if out.any():
                led[rank].append(number)
    assert led == [[2, 4, 6, 8], [], [1, 3, 5, 7]]
    ring.close()


@pytest.mark.asyncio
async def test_bases_are_bit_equal_and_norms_those_of_the_means() -> None:
    """C1; O4: latents have the length of what they stand for, and what is announced has none."""
    codec = "lgc:0.05,refresh=1,warmup=1,train=3+fp32"
    ring = LowRankRing(3, codec, 0, 1, without_padding(constant_offers(3, 0, 8, 9, poison=0.0)))
    rows: dict[int, set[bytes]] = {}
    for rank in ring.ranks:
        transform = ring.members[rank].executor._projections.projected
        assert isinstance(transform, LearnedGradients)
        make = transform._make_map

        def noted(number: int, chosen: Chosen, make: Callable[[int, Chosen], Basis | Convolved] = make) -> Basis:
            basis = make(number, chosen)
            assert isinstance(basis, Basis)
            rows.setdefault(number, set()).add(basis.rows.tobytes())
            return basis

        transform._make_map = noted  # type: ignore[method-assign]
    await ring.finish()
    assert sorted(rows) == [5, 6, 7, 8]
    assert all(len(of_round) == 1 for of_round in rows.values())
    assert len(set.union(*rows.values())) == 4, "it follows what is seen"
    for bucket in PLAN.buckets[: PLAN.coded_buckets]:
        if bucket.count < 1024:
            continue  # some of such a bucket is padding, for which latents stand as well
        mean = ring.members[1].means[8][bucket.start : bucket.start + bucket.count]
        squares = np.square(mean, dtype=np.float64).sum()
        assert ring.members[1].done[8, bucket.index].squared_norm == pytest.approx(squares, rel=0.02)
    ring.close()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_a_number_is_poison_and_changes_no_residual(bad: float) -> None:
    """V1: wherever it is, chosen or not."""
    values = np.zeros(PLAN.total_values, np.float32)
    values[3] = bad
    forms = RoundForms(PLAN, parse_codec("lgc:warmup=0"))
    residual = Residual(PLAN.total_values)
    form = forms.of(1)
    transform = Projections(forms, {}, 1, 0, 1, residual).of[form]
    areas = Areas(form.layout.total_bytes)
    part = transform.part(form, areas, np.empty(form.layout.plan.segment_values, np.float32), 1, 1.0)
    assert part.keep(0, values) is Part.POISON
    assert not residual.values.any()
