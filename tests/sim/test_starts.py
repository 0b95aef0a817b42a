"""What befalls a cluster while its learners prepare: all that are left begin together, from the start of one (G9)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from meshwire.sync_modes.mode import sync_settings
from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterdaemon import Daemon
from tests.sim.clusterfaults import Fault, Schedule, befall, random_fault, random_setting, run
from tests.tiers import mostly_long, mostly_slow

KINDS = (
    *("kill", "restart", "quick restart", "power cut", "leave"),
    *("kill learner", "kill learner", "kill learner", "kill all learners"),
    *("reset", "half open", "partition", "stall", "deaf", "sleep"),
)
WITHIN_S = (2.0, 6.0)
CALM_AT_S = 8.0


def start_schedule(seed: int) -> Schedule:
    """Faults from the moment on in which the first generation was committed."""
    random = Random(f"start {seed}")
    setting = random_setting(random, (2, 3, 3, 4, 5))
    loads_s = random.choice([(0.1, 1.0), (0.1, 1.0, 6.0)])
    setting = replace(setting, begun=False, start_s=(0.3, 1.0, 3.0), load_s=loads_s)
    devices = setting.founders + setting.newcomers
    times_s = sorted(random.uniform(0.1, random.choice(WITHIN_S)) for _ in range(random.choice([1, 2, 3, 5, 8])))
    faults = tuple(random_fault(random, at_s, random.choice(KINDS), devices) for at_s in times_s)
    return Schedule(seed, setting, faults, CALM_AT_S)


@pytest.mark.parametrize("seed", [*mostly_slow(range(30), 6), *mostly_long(range(30, 60), kept=0)])
def test_starts_with_faults(seed: int) -> None:
    """Each learner has a start of its own, and those that compute in a generation have that of one (G9)."""
    run(start_schedule(seed))


def lose_learner(daemon: Daemon) -> None:
    """With its memory, as on a GPU."""
    daemon.do(daemon.host.distrust_memory)
    daemon.do(daemon.processes.kill)


def all_begin(cluster: Cluster) -> None:
    """In a while, and each base is of one start: `Cluster.contributes` looks."""
    cluster.run_until(cluster.now_s + 60.0)
    assert all(daemon.computes for daemon in cluster.daemons), cluster.story()
    assert cluster.least_complete > 10
    cluster.check_end()
    cluster.end()


def begun(founders: int, befall: Callable[[Cluster], None] | None = None) -> Cluster:
    """A cluster whose learners prepare at different times, when it has begun."""
    setting = Setting(founders=founders, sync=sync_settings("bsp"), begun=False, start_s=(0.5, 1.0, 2.0))
    cluster = Cluster(3, setting)
    if befall is not None:
        befall(cluster)
    cluster.run_until(20.0)
    assert all(daemon.computes for daemon in cluster.daemons if daemon.alive), cluster.story()
    return cluster


def test_all_begin_in_one_generation_and_each_is_in_the_first_round() -> None:
    """G9: however late its learner has prepared, nobody nulls it; and none of their samples comes back."""
    cluster = begun(5)
    generation = cluster.daemons[0].machine.generation
    assert generation is not None
    assert (generation.number, generation.learning) == (2, (0, 1, 2, 3, 4)), cluster.story()
    for daemon in cluster.daemons:
        assert daemon.rounds is not None
        assert daemon.rounds.shipped.contributions >= daemon.rounds.shipped.complete, daemon.name
    cluster.end()


def test_a_giver_that_is_lost_costs_nobody_its_process_who_has_loaded_its_start() -> None:
    """G9: what it gave is what all others start from, too."""

    loaded: list[int] = []

    def lose(cluster: Cluster) -> None:
        others = cluster.daemons[1:]
        while not loaded:
            cluster.run_until(cluster.now_s + 0.01)
            loaded.extend(one.number for one in others if one.handler.ready)
        cluster.kill(cluster.daemons[0])

    cluster = begun(4, lose)
    assert len(loaded) == 1
    assert cluster.daemons[loaded[0]].processes.starts == 1, cluster.story()
    cluster.end()


def test_a_learner_that_is_killed_before_the_first_round_is_waited_for() -> None:
    """G9, J3: it is started again at once."""

    def kill(cluster: Cluster) -> None:
        cluster.run_until(0.6)
        cluster.daemons[2].do(cluster.daemons[2].processes.kill)

    cluster = begun(3, kill)
    generation = cluster.daemons[0].machine.generation
    assert generation is not None
    assert generation.learning == (0, 1, 2), cluster.story()
    assert cluster.daemons[2].processes.starts == 2
    assert all(daemon.left_out == 0 for daemon in cluster.daemons)
    cluster.end()


def test_what_a_giver_has_lent_is_given_to_nobody_who_begins_from_another_start() -> None:
    """G9: all learners are lost while a state that one has given is on its way. Its next learner gives another one."""
    setting = Setting(founders=3, sync=sync_settings("bsp"), begun=False, start_s=(0.3,), load_s=(0.1, 3.0))
    cluster = Cluster(3, setting)
    while cluster.daemons[0].donor.newest is None:
        cluster.run_until(cluster.now_s + 0.01)
    assert not any(daemon.handler.ready for daemon in cluster.daemons[1:])
    for daemon in cluster.daemons:
        lose_learner(daemon)
    all_begin(cluster)


def test_a_giver_whose_learner_is_lost_gives_no_other_start_before_all_have_gone_on() -> None:
    """G9: one has loaded what it gave. Its next learner is there before another generation is, for a link that may
    come back is waited for; it loads what the one has."""
    setting = Setting(founders=3, sync=sync_settings("bsp"), begun=False, start_s=(0.3,), load_s=(0.1,), patience_s=5.0)
    cluster = Cluster(3, setting)
    one, other, third = cluster.daemons
    cluster.run_until(0.1)
    cluster.start_s = (5.0,)
    third.do(third.processes.kill)
    cluster.run_until(0.2)
    cluster.start_s = (0.05,)
    while not other.handler.ready:
        cluster.run_until(cluster.now_s + 0.01)
    cluster.network.darken(0, 2)
    cluster.network.reset(0, 2)
    cluster.run_until(cluster.now_s + 0.05)
    before = one.generation
    lose_learner(one)
    cluster.run_until(cluster.now_s + 0.15)
    assert one.handler.attached
    assert one.generation is before
    assert not one.handler.ready, cluster.story()
    cluster.network.lighten(0, 2)
    all_begin(cluster)
    assert other.processes.starts == 1


def test_a_start_that_came_after_the_promise_is_not_found_in_memory() -> None:
    """G9, J3: a learner has loaded the start behind its daemon's promise, and has ended before the generation in which
    all begin from another one, which the giver goes on in before it can ask for the next."""
    setting = Setting(
        founders=3, sync=sync_settings("bsp"), begun=False, start_s=(0.3,), load_s=(0.3,), patience_s=30.0
    )
    setting = replace(setting, delays_s=(0.05,))

    def until_ready(befall: Callable[[Cluster], None]) -> Cluster:
        cluster = Cluster(3, setting)
        cluster.run_until(0.1)
        cluster.start_s = (20.0,)
        cluster.daemons[2].do(cluster.daemons[2].processes.kill)
        cluster.run_until(0.35)
        befall(cluster)
        while not cluster.daemons[1].handler.ready:
            cluster.run_until(cluster.now_s + 0.001)
        return cluster

    cluster = until_ready(lambda _: None)
    ready_s = cluster.now_s
    cluster.end()

    def lose(cluster: Cluster) -> None:
        cluster.run_until(ready_s - 0.08)
        cluster.start_s = (0.1,)
        lose_learner(cluster.daemons[0])

    cluster = until_ready(lose)
    giver, one, _ = cluster.daemons
    assert one.driver.fenced, cluster.story()
    cluster.start_s = (20.0,)
    one.do(one.processes.kill)
    before = giver.generation
    while giver.generation is before:
        cluster.run_until(cluster.now_s + 0.001)
    cluster.network.darken(1, 0)  # what it says comes when the giver waits for the third one's link
    while giver.machine._state.missing != (1,):
        cluster.run_until(cluster.now_s + 0.005)
    cluster.network.darken(0, 2)
    cluster.network.reset(0, 2)
    cluster.run_until(cluster.now_s + 0.1)
    cluster.network.lighten(1, 0)
    cluster.run_until(cluster.now_s + 0.7)
    assert giver.handler.ready, cluster.story()
    cluster.network.lighten(0, 2)
    cluster.start_s = (0.3,)
    all_begin(cluster)


CUTS = list(product([(0,), (2, 3), (0, 1), (1, 2, 3), (4,)], [0.05, 0.35, 0.7, 1.1, 1.6], [3.0, 30.0]))


@pytest.mark.parametrize(
    ("side", "at_s", "for_s"), mostly_long([*CUTS[::7], *(cut for at, cut in enumerate(CUTS) if at % 7)], 8), ids=str
)
def test_parts_that_begin_apart_are_not_counted_as_one(side: tuple[int, ...], at_s: float, for_s: float) -> None:
    """G4, G9: their chains are equal at round 0, their starts are not. Whose history yields loads the other's base."""
    founders = 5 if 4 in side else 4
    setting = Setting(founders=founders, sync=sync_settings("bsp"), begun=False, start_s=(0.3, 1.0), load_s=(0.1, 0.6))
    cluster = Cluster(7, replace(setting, partition_wait_s=1.0))
    cluster.run_until(at_s)
    befall(cluster, Fault(at_s, "partition", side[0], 0, side, for_s))
    cluster.run_until(at_s + for_s)
    all_begin(cluster)


@pytest.mark.parametrize("tenths", [(20, 23, 29), pytest.param(range(20, 80, 3), marks=pytest.mark.long)], ids=str)
def test_two_parts_that_have_begun_apart_go_on_with_one_start_however_early_they_meet(tenths: Sequence[int]) -> None:
    """G4, G9: neither is entitled. They meet while they prepare, ready, in round 1 and later."""
    starts = set()
    for each in tenths:
        setting = Setting(founders=5, sync=sync_settings("bsp"), begun=False, start_s=(0.3, 1.0), load_s=(0.1, 0.6))
        cluster = Cluster(7, replace(setting, partition_wait_s=0.5))
        cluster.run_until(0.05)
        for_s = each / 10
        befall(cluster, Fault(0.05, "partition", 0, 0, (0, 1), for_s))
        befall(cluster, Fault(0.05, "partition", 4, 0, (4,), 40.0))
        cluster.run_until(0.05 + for_s)
        starts.add(tuple(daemon.generation.learning for daemon in cluster.daemons if daemon.generation is not None))
        all_begin(cluster)
    assert len(starts) > 2
