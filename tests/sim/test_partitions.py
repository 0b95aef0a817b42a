"""A network cut in two: who goes on, who waits, whose rounds are kept, and what waiting costs (G4)."""

import itertools
from functools import partial

import pytest

from meshwire.sync_modes.mode import sync_settings
from tests.sim import cuts
from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterfaults import Fault, befall

AT_S = 5.0


def cut_off(founders: int, side: tuple[int, ...], for_s: float, **setting: object) -> Cluster:
    """These devices hear nothing of the others for so long; then a minute and a half pass."""
    cluster = Cluster(1, Setting(founders=founders, patience_s=5.0, **setting))  # type: ignore[arg-type]
    cluster.run_until(AT_S)
    befall(cluster, Fault(AT_S, "partition", side[0], 0, side, for_s))
    cluster.run_until(AT_S + for_s + 90.0)
    assert cluster.well(), cluster.story()
    cluster.check_end()
    return cluster


def test_a_lone_laptop_resets_no_healthy_majority() -> None:
    """G4: it trains alone for minutes and has more samples than the four, of which one is slow; they keep what they
    have made, and only it loads."""
    cluster = cut_off(5, (4,), 180.0, step_s=(0.5, 0.5, 0.5, 8.0, 0.1), sync=sync_settings("bsp"), total=400)
    assert [daemon.left_out for daemon in cluster.daemons] == [0, 0, 0, 0, 1]
    assert [daemon.processes.starts for daemon in cluster.daemons] == [1, 1, 1, 1, 2]
    ((rounds, for_so_many),) = cluster.told_lost
    assert rounds > 1000
    assert for_so_many == 4


def test_of_two_laptops_one_goes_on_and_one_waits() -> None:
    """G4: an outage of 8 s: not both train on, so nothing is given up; rank 1 loads the model again."""
    cluster = cut_off(2, (1,), 8.0)
    assert [daemon.left_out for daemon in cluster.daemons] == [0, 1]
    assert [daemon.processes.starts for daemon in cluster.daemons] == [1, 2]
    assert [rounds for rounds, _ in cluster.told_lost] in ([], [0])


def test_who_is_wrongly_taken_for_gone_costs_one_history_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """G1, G4: a firewall refused the dial, and both go on as if they were alone: that is outside what is promised. When
    they meet, one history is given up and told, and they go on together."""
    cluster = Cluster(1, Setting(founders=2, patience_s=5.0))
    monkeypatch.setattr(cluster.line, "went_on", lambda *_: None)
    monkeypatch.setattr(cluster.line, "check", lambda *_: None)
    cluster.run_until(AT_S)
    befall(cluster, Fault(AT_S, "partition", 1, 0, (1,), 60.0))
    cluster.run_until(AT_S + 7.0)
    one, other = cluster.daemons
    other.do(partial(other.driver.gone, one.member.device, one.member.incarnation))
    cluster.run_until(AT_S + 59.0)
    assert [d.generation.provisional for d in cluster.daemons if d.generation is not None] == [False, False]
    cluster.run_until(AT_S + 150.0)
    assert cluster.well(), cluster.story()
    ((rounds, _),) = cluster.told_lost
    assert rounds > 50
    assert sum(daemon.left_out for daemon in cluster.daemons) == 1


def test_a_lid_that_is_closed_for_minutes_costs_no_rounds() -> None:
    """G4: rank 0 could go on by itself when it wakes; but it looks for rank 1, which went on provisionally."""
    cluster = Cluster(1, Setting(founders=2, patience_s=5.0))
    cluster.run_until(AT_S)
    cluster.sleep(0, 180.0)
    cluster.run_until(AT_S + 250.0)
    assert cluster.well(), cluster.story()
    assert cluster.told_lost == []
    assert [daemon.left_out for daemon in cluster.daemons] == [1, 0]
    assert cluster.least_complete > 250
    cluster.check_end()


@pytest.mark.parametrize(("members", "every"), [(3, 17), pytest.param(4, 307, marks=pytest.mark.slow)])
def test_no_two_parts_go_on_apart_wherever_the_network_is_cut(members: int, every: int) -> None:
    """G4: at every instant between promise and enter, and cut another way after it; all come together again. All of the
    cuts: `python -m tests.sim.cuts`."""
    for one in itertools.islice(cuts.all_runs(members), 0, None, every):
        cuts.run(*one)
