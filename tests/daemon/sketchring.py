"""Executors whose segments are added encoded, on a ring, while members are lost and come. As `shardedmesh`."""

from tests.daemon.churnring import ChurnRing


class SketchRing(ChurnRing):
    """A ring whose generations change."""

    def check(self) -> None:
        self.check_alike()
