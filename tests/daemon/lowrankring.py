"""Executors of a low-rank codec on a ring, while members are lost and come. As `shardedmesh`, for what is linear."""

from meshwire.lowrank import lag
from tests.daemon.churnring import ChurnRing


class LowRankRing(ChurnRing):
    """A ring whose generations change. Members that come in later only forward."""

    def first(self, rank: int) -> int | None:
        return 1 if self.generation == 2 else None

    def newcomer(self, rank: int, cut: int) -> None:
        """J1: it has loaded the state of after the last round that is built on what it has not got."""
        super().newcomer(rank, cut)
        member = self.members[rank]
        member.applied = member.opened = self.entered_at[rank] = cut + lag(self.staleness)

    def check(self) -> None:
        self.check_alike()
