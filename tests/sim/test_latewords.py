"""Words that come late, behind a link that had stalled: what a member asked for before it was heard to compute (X3)."""

from collections.abc import Callable

import pytest

from meshwire.membership.effects import Message
from meshwire.messages.generation import AskIn, Wish
from meshwire.sync_modes.mode import sync_settings
from tests.sim.cluster import JOB, Cluster, Setting
from tests.sim.clusterfaults import Fault, befall

PATIENCE_S = 5.0
AT_S = 5.0  # all goes well until then
CUT_OFF_S = 8.0
STEP_S = 0.005


def until(cluster: Cluster, comes: Callable[[], bool]) -> None:
    """Time passes."""
    at_most_s = cluster.now_s + PATIENCE_S
    while not comes():
        assert cluster.now_s < at_most_s, cluster.story()
        cluster.run_until(cluster.now_s + STEP_S)


def running(cluster: Cluster) -> Cluster:
    """It has gone on for a while, and all is as it should be."""
    cluster.run_until(cluster.now_s + 20.0)
    assert cluster.well(), cluster.story()
    cluster.check_end()
    return cluster


def generation_of(cluster: Cluster) -> int:
    """The newest that device 0 has entered."""
    entered = cluster.daemons[0].generation
    assert entered is not None
    return entered.number


def test_who_hears_late_that_a_device_asked_in_hears_soon_that_it_computes() -> None:
    """Device 2 was cut off, and asks both others in; to device 1 its way stalls until it has loaded and computes. Its
    ask, which comes first, was a reason to let it rest, and its learner went on with samples that others were dealt."""
    cluster = Cluster(0, Setting(founders=3, sync=sync_settings("ssp:2"), patience_s=PATIENCE_S))
    cluster.run_until(AT_S)
    befall(cluster, Fault(AT_S, "partition", 2, 0, (2,), CUT_OFF_S))
    cluster.run_until(AT_S + CUT_OFF_S)
    late = cluster.daemons[2]
    until(cluster, lambda: late.left_out > 0)
    cluster.network.darken(2, 1)
    until(cluster, lambda: late.host.computes_now)
    number = generation_of(cluster)
    cluster.network.lighten(2, 1)
    running(cluster)
    assert generation_of(cluster) == number, "nobody has a reason for another one"
    assert [daemon.processes.starts for daemon in cluster.daemons] == [1, 1, 2]


@pytest.mark.parametrize("hears", [0, 1])
@pytest.mark.parametrize("word", ["asks in", "rests"])
def test_a_learner_that_computes_is_not_let_rest_for_a_word_of_before(hears: int, word: str) -> None:
    """Rank 0 proposes on the spot, before the next words of the same link are heard. Device 2 does not promise, says
    that it computes, and is listed as it was: no learner is lost, and none takes its own place."""
    cluster = Cluster(0, Setting(founders=3, sync=sync_settings("ssp:2"), patience_s=PATIENCE_S))
    cluster.run_until(AT_S)
    number, late, heard_by = generation_of(cluster), cluster.daemons[2], cluster.daemons[hears]
    linked = tuple(daemon.member.device for daemon in cluster.daemons[:2])
    asks = AskIn(job=JOB, member=late.member, linked=linked)
    body: Message = asks if word == "asks in" else Wish(job=JOB, kind="rest")
    heard_by.do(lambda: heard_by.driver.notice(late.member.device, body))
    running(cluster)
    assert number < generation_of(cluster) <= number + 2
    assert [daemon.processes.starts for daemon in cluster.daemons] == [1, 1, 1]
    assert [daemon.left_out for daemon in cluster.daemons] == [0, 0, 0]
