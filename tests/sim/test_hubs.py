"""Hubs in the cluster (H1 to H3): members without learners, which hold the history and a saved state of it."""

import itertools
import math
from random import Random

import pytest

from meshwire.membership.effects import MembershipPhase
from meshwire.messages.generation import Holding
from meshwire.sync_modes.mode import sync_settings
from tests.sim.cluster import Cluster, Setting
from tests.tiers import mostly_slow

AT_S = 6.0  # all goes well until then, and the hub has saved a state
PATIENCE_S = 2.0


def cluster_of(seed: int, founders: int = 3, hubs: int = 1, sync: str = "bsp") -> Cluster:
    cluster = Cluster(
        seed, Setting(founders=founders, hubs=hubs, sync=sync_settings(sync), patience_s=PATIENCE_S), recording=True
    )
    cluster.run_until(cluster.now_s + AT_S)
    return cluster


@pytest.mark.parametrize("sync", mostly_slow(["bsp", "ssp:2"]))
@pytest.mark.parametrize("hubs", [1, 2])
def test_a_hub_is_in_from_the_first_round_and_computes_in_none(sync: str, hubs: int) -> None:
    """H1, H2: it is never awaited, counts in no electorate and holds no samples; the first round has all laptops."""
    for seed in range(3):
        cluster = cluster_of(seed, 2 + hubs, hubs, sync)
        assert cluster.well(), cluster.story()
        assert cluster.least_complete > 3, cluster.story()
        for daemon in cluster.daemons:
            generation = daemon.machine.generation
            assert generation is not None
            assert (generation.number, generation.learning, generation.counted) == (2, (0, 1), (0, 1)), cluster.story()
            assert daemon.left_out == 0
            assert daemon.rounds is not None
            assert {rank for rank, _ in daemon.rounds.held().sizes} == {0, 1}
        assert all(daemon.processes.starts == (not daemon.is_hub) for daemon in cluster.daemons)
        cluster.check_end()


def test_a_hub_keeps_the_newest_state_and_no_more() -> None:
    """H3: at the checkpoints' cadence, of the very history, and one state lent for it at a time."""
    cluster = cluster_of(1)
    hub = cluster.daemons[2]
    newest = hub.checkpointer.newest
    assert newest is not None, cluster.story()
    assert hub.rounds is not None
    assert hub.rounds.path[newest.round] == bytes.fromhex(newest.manifest.chain)
    before = newest.round
    cluster.run_until(cluster.now_s + AT_S)
    assert hub.checkpointer.newest is not None
    assert hub.checkpointer.newest.round > before
    assert sum(len(daemon.disk.states.lent) for daemon in cluster.daemons[:2]) <= 2


@pytest.mark.parametrize("sync", mostly_slow(["bsp", "ssp:2"]))
def test_a_lost_hub_costs_no_round_and_comes_back(sync: str) -> None:
    """Nothing is rolled back, no learner is started again, and it is in again after it was."""
    for seed in range(3):
        cluster = cluster_of(seed, sync=sync)
        hub = cluster.daemons[2]
        before = cluster.least_complete
        cluster.kill(hub)
        cluster.run_until(cluster.now_s + 3.0)
        assert cluster.least_complete > before, cluster.story()
        assert not cluster.told_gone_back
        cluster.restart(2)
        cluster.recover()
        assert cluster.well(), cluster.story()
        assert not cluster.over
        assert [daemon.processes.starts for daemon in cluster.daemons] == [1, 1, 0]
        cluster.check_end()


def test_a_hub_is_no_majority() -> None:
    """G4: cut off with the hub, one laptop of three is not entitled; two without it are."""
    cluster = cluster_of(3, 4)
    for one, other in itertools.product((0, 3), (1, 2)):
        cluster.network.darken(one, other)
        cluster.network.darken(other, one)
    cluster.run_until(cluster.now_s + 3 * PATIENCE_S)
    generation = cluster.daemons[1].machine.generation
    assert generation is not None
    assert (generation.provisional, generation.ranks) == (False, (1, 2)), cluster.story()
    outvoted = cluster.daemons[0].machine.generation
    assert outvoted is not None
    assert outvoted.number == 2, cluster.story()


def test_laptops_that_come_back_one_after_the_other_go_on_from_the_hub() -> None:
    """J3: who returns has nothing yet when the last that held the model is lost: all go back to the hub's state."""
    for seed in range(4):
        cluster = cluster_of(seed)
        first, second, hub = cluster.daemons
        cluster.kill(first)
        cluster.run_until(cluster.now_s + 1.0)
        cluster.restart(0)
        while cluster.daemons[0].generation is None:
            cluster.run_until(cluster.now_s + 0.05)
        saved = hub.checkpointer.newest
        assert saved is not None
        cluster.kill(second)
        cluster.recover()
        assert not cluster.over, cluster.story()
        assert cluster.daemons[0].rounds is not None
        assert cluster.least_complete > saved.round
        assert cluster.befallen["gone back"] or not cluster.told_gone_back
        cluster.check_end()


def test_a_job_that_hubs_alone_are_left_of_lies_down_at_once() -> None:
    """H3: nobody is waited for in memory: it begins again from the hub's disk when a laptop comes (J5)."""
    cluster = cluster_of(2)
    cluster.kill(cluster.daemons[0])
    cluster.kill(cluster.daemons[1])
    cluster.run_until(cluster.now_s + 2 * PATIENCE_S)
    assert cluster.failed == "no base is left anywhere", cluster.story()
    generation = cluster.daemons[2].machine.generation
    assert generation is not None
    assert (generation.provisional, generation.counted) == (False, (2,)), cluster.story()


def test_laptops_that_are_silent_may_go_on_elsewhere() -> None:
    """H3: not known to be gone: the hub waits 6 patience, and lays down what yields to them."""
    cluster = cluster_of(2)
    cluster.kill(cluster.daemons[0], silent=True)
    cluster.kill(cluster.daemons[1], silent=True)
    cluster.run_until(cluster.now_s + 5 * PATIENCE_S)
    assert cluster.failed is None, cluster.story()
    cluster.run_until(cluster.now_s + 4 * PATIENCE_S)
    assert cluster.failed == "no base is left anywhere", cluster.story()
    generation = cluster.daemons[2].machine.generation
    assert generation is not None
    assert (generation.provisional, generation.counted) == (True, (0, 1)), cluster.story()


@pytest.mark.parametrize("before", [False, True], ids=["a setting of the job", "one silent before"])
def test_hubs_alone_wait_no_longer_whoever_is_away(before: bool) -> None:
    """H3: 6 patience, not as long as a part waits that could train (`partition_wait`), nor the day that is waited for
    who may have the model (J3): the hub has nothing to lose."""
    setting = Setting(founders=4, hubs=1, patience_s=PATIENCE_S, partition_wait_s=None if before else math.inf)
    cluster = Cluster(2, setting, recording=True)
    cluster.run_until(cluster.now_s + AT_S)
    if before:
        cluster.kill(cluster.daemons[0], silent=True)
        cluster.run_until(cluster.now_s + 4 * PATIENCE_S)
        assert cluster.least_complete > 0
        assert cluster.daemons[3].generation is not None
        assert cluster.daemons[3].generation.ranks == (1, 2, 3), cluster.story()
    for daemon in cluster.daemons[:3]:
        cluster.kill(daemon, silent=True)
    cluster.run_until(cluster.now_s + 5 * PATIENCE_S)
    assert cluster.failed is None, cluster.story()
    cluster.run_until(cluster.now_s + 4 * PATIENCE_S)
    assert cluster.failed == "no base is left anywhere", cluster.story()


def test_hubs_have_no_vote_before_the_first_round() -> None:
    """G4, H1: in generation 1 two laptops count and no hub. Cut off with both hubs, the one of the higher rank is not
    entitled; the other one is, alone."""
    setting = Setting(founders=4, hubs=2, patience_s=PATIENCE_S, begun=False)
    cluster = Cluster(5, setting, recording=True)
    for other in (1, 2, 3):
        cluster.network.darken(0, other)
        cluster.network.darken(other, 0)
    cluster.run_until(cluster.now_s + 4 * PATIENCE_S)
    alone, cut_off = (daemon.machine.generation for daemon in cluster.daemons[:2])
    assert alone is not None
    assert (alone.ranks, alone.provisional, alone.counted) == ((0,), False, (0,)), cluster.story()
    assert cut_off is not None
    assert (cut_off.number, cut_off.counted) == (1, (0, 1)), cluster.story()


@pytest.mark.parametrize("seed", mostly_slow(list(range(24)), 6))
def test_kills_at_any_moment(seed: int) -> None:
    """The cluster's invariants hold at every event, whoever is killed, the hub or a laptop, from the job's beginning
    on; and all is well again afterwards."""
    random = Random(seed)
    setting = Setting(
        founders=4,
        hubs=1 + seed % 2,
        sync=sync_settings(random.choice(["bsp", "ssp:2", "local:2"])),
        patience_s=PATIENCE_S,
        begun=seed % 3 > 0,
    )
    cluster = Cluster(seed, setting, recording=True)
    for _ in range(4):
        cluster.run_until(cluster.now_s + random.uniform(0.1, 4.0))
        number = random.randrange(4)
        if random.random() < 0.3:
            cluster.daemons[number].processes.kill()
        else:
            cluster.kill(cluster.daemons[number])
            cluster.run_until(cluster.now_s + random.uniform(0.05, 2.0))
            cluster.restart(number)
        if cluster.over:
            break
    cluster.recover()
    assert cluster.failed in (None, "no base is left anywhere"), cluster.story()
    if not cluster.over:
        phases = {daemon.machine.phase for daemon in cluster.daemons}
        assert phases == {MembershipPhase.RUNNING}, cluster.story()
    cluster.check_end()


@pytest.mark.parametrize("leaves", [False, True], ids=["down", "leave"])
def test_the_last_laptop_leaves_its_newest_state_on_the_hub(leaves: bool) -> None:
    """H3: `meshtrain down` or `leave` beside a hub ends nothing and loses next to nothing: the hub has saved what was
    complete when it was asked, and lays the job down at once, to go on with any laptop of it."""
    for seed in range(3):
        cluster = cluster_of(seed)
        first, second, hub = cluster.daemons
        cluster.kill(second)
        cluster.run_until(cluster.now_s + 3.0)
        assert hub.checkpointer.newest is not None
        while cluster.least_complete < hub.checkpointer.newest.round + 3:  # which a laptop may have, and no disk
            cluster.run_until(cluster.now_s + 0.1)
        at, before_s = cluster.least_complete, cluster.now_s
        first.do(first.wish_leave if leaves else first.stop)
        cluster.run_until(cluster.now_s + 3 * PATIENCE_S)
        assert cluster.failed == "no base is left anywhere", cluster.story()
        assert cluster.now_s < before_s + 2 * PATIENCE_S
        assert hub.checkpointer.newest.round >= at, cluster.story()
        generation = hub.machine.generation
        assert generation is not None
        assert (generation.ranks, generation.provisional, generation.counted) == ((2,), False, (2,)), cluster.story()


def test_a_laptop_beside_one_that_only_forwards_does_not_leave() -> None:
    """H3: its script is started no more, so the job would fail with the model on a hub: the model stays here."""
    cluster = cluster_of(1)
    first, second, _ = cluster.daemons
    second.processes.give_up()
    cluster.run_until(cluster.now_s + 2.0)
    assert first.generation is not None
    assert (first.generation.ranks, first.generation.learning) == ((0, 1, 2), (0,)), cluster.story()
    first.do(first.wish_leave)
    cluster.run_until(cluster.now_s + 2.0)
    assert first.alive, cluster.story()
    assert cluster.failed is None, cluster.story()


def test_a_hub_holds_what_it_has_saved_and_no_beginning() -> None:
    """H3: at the job's beginning it has nothing that others could begin from: that would take a learner."""
    cluster = Cluster(3, Setting(founders=3, hubs=1, patience_s=PATIENCE_S, begun=False), recording=True)
    cluster.run_until(cluster.now_s + 0.1)
    assert cluster.daemons[2].host.holding() == Holding()
    cluster.recover()
    holding = cluster.daemons[2].host.holding()
    assert (holding.base, holding.loads_after, holding.begins, holding.prepared) == (False, None, False, None)


def test_a_laptop_that_is_not_the_last_is_not_waited_for() -> None:
    """H3: nobody saves anything when others go on training."""
    cluster = cluster_of(1)
    hub = cluster.daemons[2]
    saved = len(hub.disk.checkpoints.there)
    first = cluster.daemons[0]
    first.do(first.wish_leave)
    cluster.run_until(cluster.now_s + 0.5)
    assert not first.alive, cluster.story()
    assert len(hub.disk.checkpoints.there) == saved
    cluster.recover()
    cluster.check_end()
