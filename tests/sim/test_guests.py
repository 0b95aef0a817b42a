"""Devices that a job takes in while it runs: all that there is room for come in, whoever is lost meanwhile."""

from functools import partial
from random import Random

import pytest

from tests.sim.cluster import Setting
from tests.sim.clusterguests import InvitingCluster, Stranger

SEEDS = 40
PARTS = 4


def test_linked_devices_are_asked_and_come_in() -> None:
    """J1: nobody has told them of the job."""
    cluster = InvitingCluster(1, Setting(founders=2), strangers=2, members_max=4)
    cluster.recover()
    known = [daemon.machine.generation for daemon in cluster.daemons]
    assert [len(generation.learning) for generation in known if generation is not None] == [4] * 4
    cluster.check_end()


def test_no_more_come_in_than_there_is_room_for() -> None:
    """J1: who is asked is decided by all members alike."""
    cluster = InvitingCluster(2, Setting(founders=2), strangers=3, members_max=3)
    cluster.recover()
    assert sum(isinstance(daemon, Stranger) and daemon.joins for daemon in cluster.daemons) == 1


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_whoever_is_lost_while_others_are_asked(part: int) -> None:
    """G7, J1: a member that asks, the device that is asked, or both, at any moment; they come back or stay away."""
    for seed in range(part, SEEDS, PARTS):
        random = Random(seed)
        founders = random.choice((2, 3))
        strangers = random.choice((1, 2))
        cluster = InvitingCluster(
            seed, Setting(founders=founders), strangers=strangers, members_max=founders + random.choice((1, 2))
        )
        number = random.randrange(1, founders + strangers)
        at_s = random.uniform(1.0, 8.0)
        if random.random() < 0.6:
            cluster.clock.at(at_s, lambda c=cluster, n=number: c.kill(c.daemons[n]))  # type: ignore[misc]
            cluster.clock.at(at_s + random.uniform(0.5, 10.0), partial(cluster.restart, number))
        else:
            cluster.clock.at(at_s, partial(cluster.sleep, number, random.uniform(0.5, 6.0)))
        cluster.run_until(at_s + 11.0)
        try:
            cluster.recover()
            cluster.check_end()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert not cluster.over, f"seed {seed}"
