"""Weights that are mixed within a period (R9, `,gossip=G`): all invariants hold through faults of every kind.

A simulated learner shows on which base it stands, in which turn, and checks that of each neighbour that it is told of.
"""

from dataclasses import replace

import pytest

from meshwire import limits
from meshwire.sync_modes.mode import sync_settings
from tests.sim.clusterexchange import MIXED_BYTES
from tests.sim.clusterfaults import Schedule, random_schedule, run
from tests.sim.clusterstorms import harsh_schedule
from tests.tiers import mostly_long, mostly_slow

QUICK, SEEDS = 2, 60
PARTS, PARTS_SLOW = SEEDS // QUICK, 3


@pytest.fixture(autouse=True)
def _in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them, the last one shorter."""
    monkeypatch.setattr(limits, "GOSSIP_PIECE_BYTES", 100)
    assert MIXED_BYTES == 250


def mixing(schedule: Schedule, sync: str) -> Schedule:
    setting = replace(schedule.setting, sync=sync_settings(sync))
    return replace(schedule, setting=replace(setting, unapplied_max=max(setting.unapplied_max, 4)))


@pytest.mark.parametrize("part", [*mostly_slow(range(PARTS_SLOW)), *mostly_long(range(PARTS_SLOW, PARTS), kept=0)])
def test_who_mixes_stands_on_the_same_base_whatever_befalls_all(part: int) -> None:
    """R, V, G, J, X at every event, as without. Once failures stop, all run in one generation and compute."""
    mixed = 0
    for seed in range(part * QUICK, (part + 1) * QUICK):
        mixed += run(mixing(random_schedule(seed), "local:4,gossip=1")).befallen["mixed"]
        mixed += run(mixing(harsh_schedule(seed), "diloco:6,gossip=2,over=ring")).befallen["mixed"]
    assert mixed > 20
