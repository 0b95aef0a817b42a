"""What a daemon keeps of a job does not grow with its rounds, be it that its learner computes or that none is left."""

from functools import partial

import pytest

from meshwire.messages.learner import RoundDone
from meshwire.rounds.schedule import LearnerSchedule
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterfaults import Fault, befall
from tests.sim.clustergrowth import grown, kept

WARM_S, LONG_S = 10.0, 50.0


def grown_with_rounds(sync: SyncSettings) -> dict[str, dict[str, int]]:
    """By daemon: peer2 only forwards from the beginning, the others compute, and peer1 has given a state before."""
    cluster = Cluster(1, Setting(founders=3, sync=sync))
    forwards = cluster.daemons[2]
    cluster.clock.at(1.0, partial(befall, cluster, Fault(1.0, "learner gone", 2, 2)))
    cluster.clock.at(2.0, partial(befall, cluster, Fault(2.0, "kill learner", 0, 0)))
    cluster.run_until(WARM_S)
    before, first = [kept(daemon) for daemon in cluster.daemons], cluster.least_complete
    cluster.run_until(LONG_S)
    rounds = cluster.least_complete - first
    assert rounds > 40
    assert [daemon.computes for daemon in cluster.daemons] == [True, True, False]
    assert forwards.learner is None
    pairs = zip(cluster.daemons, before, strict=True)
    return {daemon.name: more for daemon, was in pairs if (more := grown(was, kept(daemon), rounds))}


@pytest.mark.parametrize("sync", [sync_settings("bsp"), sync_settings("ssp:2")], ids=["bsp", "ssp:2"])
def test_nothing_is_kept_for_every_round(sync: SyncSettings) -> None:
    """R5, G5: a member that only forwards keeps nothing for a learner that will not come."""
    assert grown_with_rounds(sync) == {}


def test_what_keeps_a_little_of_every_round_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list, and the rounds that a peer without a learner once kept for it."""
    complete = LearnerSchedule.complete

    def hoards(self: LearnerSchedule, done: RoundDone) -> None:
        complete(self, done)
        self.__dict__.setdefault("_hoard", []).append(done.round)

    monkeypatch.setattr(LearnerSchedule, "complete", hoards)
    monkeypatch.setattr(LearnerSchedule, "forget", lambda *_: None)
    monkeypatch.setattr(Cluster, "check", lambda *_: None)
    found = grown_with_rounds(sync_settings("bsp"))
    assert {"LearnerSchedule._hoard", "LearnerSchedule._complete"} <= {*found["peer2"]}
    assert {*found["peer0"]} == {*found["peer1"]} == {"LearnerSchedule._hoard"}
