"""What a loss costs: how soon the others go on, and who has to load the model anew. Over random delays."""

from collections.abc import Callable, Collection
from random import Random

import pytest

from meshwire import limits
from meshwire.membership.effects import MembershipPhase
from meshwire.sync_modes.mode import sync_settings
from tests.sim.cluster import Cluster, Setting
from tests.tiers import mostly_slow

PATIENCE_S = 5.0
AT_S = 5.0  # all goes well until then


def cluster_of(seed: int, founders: int) -> Cluster:
    """It has run for a while."""
    cluster = Cluster(seed, Setting(founders=founders, sync=sync_settings("ssp:2"), patience_s=PATIENCE_S))
    cluster.run_until(AT_S)
    return cluster


def goes_on(cluster: Cluster, number: int, lost: Collection[int] = ()) -> bool:
    """Do all others run in this generation?"""
    others = [daemon.machine for daemon in cluster.daemons if daemon.number not in lost]
    return all(
        machine.phase is MembershipPhase.RUNNING
        and machine.generation is not None
        and machine.generation.number == number
        for machine in others
    )


def check_undisturbed(cluster: Cluster, lost: Collection[int] = ()) -> None:
    """None of the others was left out, or has started a learner again (G4)."""
    for daemon in cluster.daemons:
        if daemon.number not in lost:
            assert (daemon.left_out, daemon.processes.starts) == (0, 1), f"{daemon.name}:\n{cluster.story()}"


@pytest.mark.parametrize("founders", mostly_slow([2, 6, 3, 4], 2))
@pytest.mark.parametrize("lost", mostly_slow([0, 1]))
def test_a_closed_socket_costs_less_than_a_second(founders: int, lost: int) -> None:
    """From the crash to the next generation, whoever it is, and nobody else loads anything (G4)."""
    for seed in range(5):
        cluster = cluster_of(seed, founders)
        cluster.kill(cluster.daemons[lost])
        cluster.run_until(AT_S + 1.0)
        assert goes_on(cluster, 3, [lost]), cluster.story()
        check_undisturbed(cluster, [lost])


@pytest.mark.parametrize("founders", mostly_slow([3, 2, 5]))
def test_silence_costs_patience_and_less_than_two_seconds(founders: int) -> None:
    """Each notices it on its own, within a quarter of the patience."""
    for seed in range(5):
        cluster = cluster_of(seed, founders)
        cluster.kill(cluster.daemons[1], silent=True)
        cluster.run_until(AT_S + PATIENCE_S)
        assert goes_on(cluster, 2, [1]), cluster.story()
        cluster.run_until(AT_S + 1.25 * PATIENCE_S + 0.75)
        assert goes_on(cluster, 3, [1]), cluster.story()
        check_undisturbed(cluster, [1])


LOST: dict[str, Callable[[Cluster], None]] = {
    "killed": lambda cluster: cluster.kill(cluster.daemons[1]),
    "power cut": lambda cluster: cluster.kill(cluster.daemons[0], silent=True),
    "link reset": lambda cluster: cluster.network.reset(0, 1),
}


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("rtt_s", [0.6, 2.0])
def test_the_least_patience_settles_at_any_round_trip_of_now(rtt_s: float, how: str) -> None:
    """G7: it was 1 ms when the job began. By timeouts of then the next rank would propose before it can have heard of
    the first one's proposal, for ever, as soon as a message takes as long as the patience."""
    least_s = limits.PATIENCE_S_MIN
    delays_s = tuple(rtt_s / 2 * spread for spread in (0.6, 1.0, 1.0, 1.4))
    for seed in range(3):
        setting = Setting(
            4, sync=sync_settings("ssp:2"), patience_s=least_s, delays_s=delays_s, rtt_s=0.001, measured_s=rtt_s
        )
        cluster = Cluster(seed, setting)
        at_s, before = cluster.now_s + AT_S, cluster.generations
        cluster.run_until(at_s)
        LOST[how](cluster)
        cluster.run_until(at_s + 1.5 * least_s + 8 * rtt_s)
        assert cluster.generations == before + 1, f"one change, of the first proposal:\n{cluster.story()}"
        cluster.recover()
        check_undisturbed(cluster, [] if how == "link reset" else [0, 1])


def test_survivors_of_crashes_never_load() -> None:
    """A returning peer resets nobody: only those that crashed load the model (G4)."""
    for seed in range(4):
        random = Random(seed)
        founders = random.randint(3, 6)
        cluster = cluster_of(seed, founders)
        crashed = random.sample(range(1, founders), random.randint(1, founders - 2))
        for number in crashed:
            cluster.run_until(cluster.now_s + random.uniform(0.0, 2.0))
            cluster.kill(cluster.daemons[number])
        for number in crashed:
            cluster.run_until(cluster.now_s + random.uniform(0.0, 4.0))
            cluster.restart(number)
        cluster.recover()
        assert cluster.well(), cluster.story()
        check_undisturbed(cluster, crashed)


@pytest.mark.parametrize("founders", [2, 3])
def test_learners_that_all_die_before_round_1_begin_the_job_once_more(founders: int) -> None:
    """J3: as long as no round is complete, nothing is lost by that. They are killed at any moment of the first step,
    with what was in memory, and again as they prepare."""
    began_anew = 0
    for seed in range(6):
        random = Random(seed)
        cluster = Cluster(seed, Setting(founders=founders, sync=sync_settings("ssp:2"), patience_s=PATIENCE_S))
        for _ in range(1 + seed % 3):
            cluster.run_until(cluster.now_s + random.uniform(0.05, 0.45))
            for daemon in cluster.daemons:
                daemon.maker.memory.kept.dirty = True
                daemon.do(daemon.processes.kill)
        cluster.run_until(cluster.now_s + 0.3)
        began_anew += cluster.befallen["gone back"]
        cluster.recover()
        assert cluster.well(), cluster.story()
        cluster.check_end()
    assert began_anew > founders


@pytest.mark.slow
def test_a_hiccup_costs_nobody_its_history() -> None:
    """G6: a link that comes back within the grace leads to the same members in a new generation."""
    kept = 0
    for seed in range(20):
        cluster = cluster_of(seed, 4)
        cluster.network.reset(1, 3)
        cluster.recover()
        assert cluster.well(), cluster.story()
        assert not goes_on(cluster, 2)
        kept += not any(daemon.left_out for daemon in cluster.daemons)  # links come back after 0.1 to 0.5 s
    assert kept > 5, "the grace is 0.3 s"
