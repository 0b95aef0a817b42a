"""Every mode of `everysetting.py` keeps its invariant while daemons are killed, come back, come in and are parted.

What daemons see of a mode runs here: the bound, late learners, periods and their first rounds, steps that add up, parts
that take turns, rounds that overlap, neighbours. What a learner makes of its own weights is no daemon's business (O8):
outer steps, Muon, signs, own weights that go on, of `diloco`, `sparseloco`, `muloco`, `sma` and `demo`. Their daemons
see `local` or `bsp`, but for the codecs that people may ask for meanwhile. Which invariant is proved of which mode, and
where: README.md.
"""

import itertools
from dataclasses import replace

import pytest

from meshwire import limits
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from tests.everysetting import MODES
from tests.sim.cluster import Cluster
from tests.sim.clusterfaults import WISHES, Schedule, random_schedule, run
from tests.sim.clusterstorms import harsh_schedule
from tests.tiers import mostly_long

QUICK = ("sma:2", "local:4,stream=2,random")
KILLS = ("kill", "power cut", "quick restart")
KINDS = (*KILLS, "restart", "partition", "kill learner")
COUNT = 8
PARTS = 4
BEGUN_S = 12.0  # faults come so much later at most, for their times count from the first round on


@pytest.fixture(autouse=True)
def _in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What learners show each other, where they do."""
    monkeypatch.setattr(limits, "GOSSIP_PIECE_BYTES", 100)


def under(schedule: Schedule, sync: SyncSettings) -> Schedule:
    """The same faults, of a cluster with this mode."""
    setting = schedule.setting
    unapplied_max = max(setting.unapplied_max, 2 * (sync.staleness + 1))
    return replace(schedule, setting=replace(setting, sync=sync, unapplied_max=unapplied_max))


def survived(first: int) -> Schedule:
    """Of the first seed from this one on in which somebody is killed, somebody comes in, and the network is parted.
    The first daemon lives on: with the last one the job would be over."""
    for seed in itertools.count(first):
        schedule = random_schedule(seed, KINDS, COUNT)
        ends = [fault for fault in schedule.faults if fault.kind in KILLS]
        sure = {fault for fault in ends if fault.one and fault.moment is None}
        faults = tuple(fault for fault in schedule.faults if fault in sure or fault not in ends)
        parted = any(fault.kind == "partition" and fault.moment is None for fault in faults)
        if schedule.setting.newcomers and sure and parted:
            return replace(schedule, faults=faults, calm_at_s=schedule.calm_at_s + BEGUN_S)
    raise AssertionError


def check_steps(cluster: Cluster) -> None:
    """R9, O6: a round has as many steps of each learner as the mode says of its number, whatever has happened."""
    sync = cluster.sync
    periods = {sync.period, *(wish.period for wish in WISHES if wish.period and sync.period)}
    syncs = [sync.model_copy(update={"period": period}) for period in periods]
    for (_, round_), steps in cluster.periods.items():
        assert steps in {each.steps_in(round_) for each in syncs}, f"round {round_} has {steps} local steps"


@pytest.mark.parametrize("part", [0, *mostly_long(range(1, PARTS), kept=0)])
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode in QUICK else pytest.mark.slow) for mode in MODES]
)
def test_each_mode_keeps_its_invariant_through_faults(mode: str, part: int) -> None:
    """R, V, G, J, X at every event. A round is the exact sum of those that are bound to it, each counted once, with
    ages within the bound; of parts, of those that its number says; in steps, of so many as its number says; where
    weights are mixed, W is symmetric and what is apart does not grow. Once failures stop, all that were killed or
    parted and all that came in run in one generation, and compute."""
    sync, seed = sync_settings(mode), len(MODES) * part + MODES.index(mode)
    for schedule in (random_schedule(seed), harsh_schedule(seed)):
        check_steps(run(under(schedule, sync)))
    cluster = run(under(survived(10 * seed), sync))
    check_steps(cluster)
    assert cluster.befallen["partition"], cluster.befallen
    assert any(cluster.befallen[kind] for kind in KILLS), cluster.befallen
    assert cluster.well(), "who was killed is back, and who asked is in"
    assert len(cluster.daemons) == cluster.setting.founders + 1
    assert all(daemon.computes for daemon in cluster.daemons)
