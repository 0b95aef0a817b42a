"""Rounds that are taken in within the next period (R9, `,tau=T`): all invariants hold through faults of every kind.

A step of the simulated learners is a period; in its middle they wait for the round of the one before.
"""

from dataclasses import replace

import pytest

from meshwire.sync_modes.mode import sync_settings
from tests.sim.clusterfaults import Schedule, random_schedule, run
from tests.sim.clusterstorms import harsh_schedule
from tests.tiers import mostly_long, mostly_slow

QUICK, SEEDS = 2, 60
PARTS, PARTS_SLOW = SEEDS // QUICK, 10


def overlapping(schedule: Schedule) -> Schedule:
    setting = schedule.setting
    sync = sync_settings("local:4,stream=2,tau=1")
    return replace(schedule, setting=replace(setting, sync=sync, unapplied_max=max(setting.unapplied_max, 4)))


@pytest.mark.parametrize("part", [*mostly_slow(range(PARTS_SLOW)), *mostly_long(range(PARTS_SLOW, PARTS), kept=0)])
def test_who_waits_within_a_period_is_waited_for_by_nobody_for_ever(part: int) -> None:
    """R, V, G, J, X at every event; a round that was begun is complete, or nobody waits for it any more. Once failures
    stop, all run in one generation and compute."""
    for seed in range(part * QUICK, (part + 1) * QUICK):
        run(overlapping(random_schedule(seed)))
        run(overlapping(harsh_schedule(seed)))
