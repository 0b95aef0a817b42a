"""What befalls a cluster while its learners prepare: all that are left begin together, from the start of one (G9)."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from meshwire.sync_modes.mode import sync_settings
from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterfaults import Schedule, random_fault, random_setting, run
from tests.tiers import mostly_slow

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


@pytest.mark.parametrize("seed", mostly_slow(range(60), 6))
def test_starts_with_faults(seed: int) -> None:
    """Each learner has a start of its own, and those that compute in a generation have that of one (G9)."""
    run(start_schedule(seed))


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
