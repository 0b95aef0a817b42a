"""Many daemons in one cluster, up to all that a job takes: what a round costs each of them, and what a loss does."""

import pytest

from meshwire import limits
from meshwire.membership.effects import MembershipPhase
from meshwire.sync_modes.mode import sync_settings
from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterdaemon import Daemon
from tests.sim.clustertraffic import Traffic
from tests.tiers import mostly_slow

PEERS = mostly_slow([20, limits.MEMBERS_MAX])
SAYS_MAX = 5  # of one peer to each other one in a round of half a second: bind, seal, a call or null, a report
CHANGE_SAYS_MAX = 2  # on average, in a change of generation: entered, and what a proposal brings
STEP_S = 0.5


def cluster_of(founders: int) -> Cluster:
    setting = Setting(
        founders=founders,
        sync=sync_settings("ssp:2"),
        total=founders * 20,
        batch=1,
        patience_s=limits.PATIENCE_S,
        step_s=(STEP_S,) * founders,
    )
    return Cluster(1, setting)


def run_a_round(cluster: Cluster, within_s: float) -> None:
    before, end_s = cluster.least_complete, cluster.now_s + within_s
    while cluster.least_complete == before:
        assert cluster.now_s < end_s, cluster.story()
        cluster.run_until(cluster.now_s + 0.05)


def goes_on(daemon: Daemon, members: int) -> bool:
    generation = daemon.machine.generation
    return (
        daemon.machine.phase is MembershipPhase.RUNNING and generation is not None and len(generation.ranks) == members
    )


@pytest.mark.parametrize("peers", PEERS)
def test_a_round_and_a_loss_cost_each_peer_a_few_messages_to_each_other_one(peers: int) -> None:
    """W2, R3: whatever one peer says in a round it says to each other one a bounded number of times; G2: so it is with
    a loss. Neither takes longer than with a few peers."""
    cluster = cluster_of(peers)
    traffic = cluster.network.watcher = Traffic()
    run_a_round(cluster, 2 * STEP_S)
    assert traffic.messages["Bind"] >= peers * (peers - 1)
    assert max(traffic.control_by_node.values()) <= SAYS_MAX * (peers - 1), traffic.messages

    traffic = cluster.network.watcher = Traffic()
    lost, killed_s = cluster.daemons[peers // 2], cluster.now_s
    cluster.kill(lost)
    others = [daemon for daemon in cluster.daemons if daemon is not lost]
    while not all(goes_on(daemon, peers - 1) for daemon in others):
        assert cluster.now_s < killed_s + 1.0, cluster.story()
        cluster.run_until(cluster.now_s + 0.05)
    change = sum(traffic.messages[kind] for kind in ("Propose", "Promised", "Refused", "Enter", "Entered", "Where"))
    assert (peers - 1) * (peers - 2) <= change <= CHANGE_SAYS_MAX * (peers - 1) * (peers - 2), traffic.messages
    run_a_round(cluster, 2 * STEP_S)
