"""Executors of a codec that builds on earlier results, on a ring, while members are lost and come. As `shardedmesh`."""

from meshwire.codecs.registry import parse_codec
from meshwire.layout.projections import builds_on
from tests.daemon.churnring import ChurnRing
from tests.daemon.executorring import Member, Offer


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
