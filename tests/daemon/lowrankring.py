"""Executors of a codec that builds on earlier results, on a ring, while members are lost and come. As `shardedmesh`."""

import asyncio

import numpy as np

from meshwire.codecs.registry import parse_codec
from meshwire.encoded_layout.projections import builds_on
from tests.daemon.churnring import ChurnRing
from tests.daemon.executorring import PLAN, Member, Offer
from tests.daemon.shardedmesh import Wide, constant_offers, in_units

SIZES = (1.0, 1 / 32, 3.0)  # of rounds: what is left out follows their weights


class LowRankRing(ChurnRing):
    """A ring whose generations change."""

    def first(self, rank: int) -> int | None:
        return 1 if self.generation == 2 else None

    def newcomer(self, rank: int, cut: int) -> None:
        """J1, R5: it has loaded the state of after the last round that is built on what it has not got, and is in none
        of those before."""
        super().newcomer(rank, cut)
        member = self.members[rank]
        loaded = cut + builds_on(parse_codec(self.codec), self.staleness)
        member.applied = member.opened = self.entered_at[rank] = loaded
        self.rounds = {
            number: [
                Offer(None, 0.0) if at == rank and cut < number <= loaded else offer for at, offer in enumerate(made)
            ]
            for number, made in self.rounds.items()
        }

    def _next_offer(self, member: Member) -> Offer | None:
        """J1: it loads no state of after rounds that it has not got, so it has them before it computes."""
        offer = super()._next_offer(member)
        loaded = self.entered_at[self.members.index(member)]
        return None if offer is not None and offer.values is not None and member.complete < loaded else offer

    def check(self) -> None:
        self.check_alike()


def churn(codec: str, staleness: int, seed: int, rounds: int) -> None:
    """Three members, of which some are lost and come at any moment; all hold the same bits (C1, G2, G6, G8)."""

    async def some_rounds() -> None:
        await LowRankRing(3, codec, staleness, seed, constant_offers(3, 1, rounds, seed)).churn(600)

    asyncio.run(some_rounds())


def check_conserved(codec: str, staleness: int, seed: int, rounds: int, measured: slice, *, joins: bool) -> Wide:
    """P1: what was sent and what is owed make up the gradients, over void rounds, rounds that run again, and a member
    that comes in.

    Args:
        measured: where the codec leaves something out.

    Returns what all three members owe, in units of gradients.
    """
    return asyncio.run(_check_conserved(codec, staleness, seed, rounds, measured, joins=joins))


async def _check_conserved(codec: str, staleness: int, seed: int, rounds: int, measured: slice, *, joins: bool) -> Wide:
    offers = constant_offers(3, 1, rounds, seed, sizes=SIZES)
    ring = LowRankRing(3, codec, staleness, seed, offers)
    async with asyncio.timeout(60):
        await ring.some(3000)
        await ring.change((0, 1, 2, 3) if joins else (0, 1, 2))
        await ring.finish()
    applied, gradients, owed = (np.zeros(PLAN.total_values) for _ in range(3))
    for number, made in offers.items():
        if not any(offer.poisoned for offer in made):
            applied += 6.0 * ring.members[0].means[number]
            came = sum(offer.values.astype(np.float64) for offer in made if offer.values is not None)
            gradients += came / SIZES[number % len(SIZES)]
    for rank, member in enumerate(ring.members[:3]):
        assert member.executor._feedback is not None
        while member.executor._projections.projected.settle_one():
            pass
        owed += in_units(member.executor._feedback.worker, rank + 1.0)
    for span in PLAN.spans:  # padding is nobody's
        end = span.start + span.count
        for each in (applied, owed, gradients):
            each[end : end + -span.count % 16] = 0
    exact = parse_codec(codec).choice("values") == "fp32" and not parse_codec(codec).warmup
    error = np.abs(applied + owed - gradients)[measured]
    assert error.max() <= (1e-5 if exact else 2e-3) * np.abs(gradients).max(), "P1: sent + residuals = gradients"
    assert np.abs(owed).max() > 100 * error.max(), "or the codec leaves nothing out"
    ring.close()
    return owed
