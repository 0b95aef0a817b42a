"""Every cluster of a test ends with it: what its daemons were doing is not left to whenever memory is collected."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.sim.cluster import Cluster


@pytest.fixture(autouse=True)
def every_cluster_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Cluster] = []
    init = Cluster.__init__

    def counted(self: Cluster, *args: Any, **options: Any) -> None:
        made[:] = [cluster for cluster in made if not cluster.ended]
        made.append(self)
        init(self, *args, **options)

    monkeypatch.setattr(Cluster, "__init__", counted)
    yield
    for cluster in made:
        cluster.end()
