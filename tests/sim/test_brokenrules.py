"""Each rule is needed: left out, it is missed, in a schedule of faults in which all invariants hold with it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from meshwire.sync_modes.mode import sync_settings
from tests.sim import brokenrules
from tests.sim.cluster import Cluster, Setting, main
from tests.sim.clusterfaults import Schedule, failure, random_schedule, shrunk
from tests.sim.clustermoments import Moment

Broken = Callable[[pytest.MonkeyPatch], None]


SEEDS = 150  # at most, until one needs the rule
FEW: dict[Broken, tuple[Sequence[str], int]] = {  # kinds of faults and their count, where all need it too seldom
    brokenrules.calls_remembered: (("kill", "kill learner"), 6)
}


@pytest.mark.parametrize(
    ("broken", "seed"),
    [
        (brokenrules.no_freeze, 56),
        (brokenrules.restart_resumes, 16),
        (brokenrules.nulls_without_bound, 9),
        (brokenrules.blocks_not_returned, 0),
        (brokenrules.binds_not_told_again, 0),
        (brokenrules.parts_not_told_again, 0),
        (brokenrules.nulls_not_told_again, 0),
        (brokenrules.laggards_not_served, 5),
        (brokenrules.rounds_not_forgotten, 24),
        (brokenrules.freed_too_early, 147),
        (brokenrules.calls_remembered, 541),
        (brokenrules.rest_not_owed, 8331),
    ],
)
def test_a_rule_that_is_left_out_is_missed(broken: Broken, seed: int) -> None:
    """By a random schedule, in which all invariants hold with it; `seed`: where one is near."""
    kinds, count = FEW.get(broken, ((), 0))
    schedules = (random_schedule(number, kinds, count) for number in range(seed, seed + SEEDS))
    with pytest.MonkeyPatch.context() as patch:
        broken(patch)
        missed = next(schedule for schedule in schedules if failure(schedule) is not None)
    assert failure(missed) is None


# Of another history there are two guards: who was left out brings none (G7), so honest daemons never come with one; and
# chains are compared all the same (G4). So what the second is good for shows only without the first.


def returns(seed: int) -> Schedule:
    """Laptops whose WiFi goes just when they alone hold a round, and which come back."""
    schedule = random_schedule(seed, ("offline", "offline", "kill learner"), 3)
    timed = [
        replace(fault, moment=Moment.COMPLETES, after_s=0.0) if fault.kind == "offline" else fault
        for fault in schedule.faults
    ]
    return replace(schedule, faults=tuple(timed))


def test_by_the_count_of_rounds_alone_histories_mix() -> None:
    """G4: who applied an uncommitted round and was left out may bring it, if its chain is looked at.

    By the count it is taken for one of those that were completed without it. (That it brings none is needed for its
    ledger, which has followed no generation in between.)
    """

    def breaks(schedule: Schedule, *broken: Broken) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            for leave_out in (brokenrules.history_brought, *broken):
                leave_out(patch)
            return failure(schedule) is not None

    schedules = (returns(seed) for seed in range(64, 64 + SEEDS))
    assert any(breaks(schedule, brokenrules.no_chain_check) and not breaks(schedule) for schedule in schedules)


def run_with_another_history() -> Cluster:
    """One of four holds as many rounds as the others, and another newest one, when a learner is lost."""
    cluster = Cluster(1, Setting(founders=4, sync=sync_settings("ssp:2"), delays_s=(0.001, 0.002)))
    cluster.run_until(2.1)
    rounds = cluster.daemons[2].rounds
    assert rounds is not None
    rounds.history._chains[-1] = bytes([1]) * 16
    cluster.daemons[1].processes.kill()
    cluster.recover()
    cluster.check_end()
    return cluster


def test_with_another_chain_a_member_loads_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """G4: only who holds another history loads anew; by the count of rounds alone it would go on with it."""
    cluster = run_with_another_history()
    assert [daemon.processes.starts for daemon in cluster.daemons] == [1, 2, 2, 1]
    brokenrules.no_chain_check(monkeypatch)
    with pytest.raises(AssertionError):
        run_with_another_history()


@pytest.mark.slow
def test_a_failing_seed_is_shrunk_to_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Faults that change nothing are dropped, and the command tells the rest as a transcript."""
    brokenrules.blocks_not_returned(monkeypatch)
    numbers = (number for number in range(200) if 2 < len(random_schedule(number).faults) < 7)
    seed = next(number for number in numbers if failure(random_schedule(number)))
    schedule = random_schedule(seed)
    shorter = shrunk(schedule)
    assert failure(shorter) == failure(schedule)
    assert len(shorter.faults) < len(schedule.faults)
    for position in range(len(shorter.faults)):
        fewer = shorter.faults[:position] + shorter.faults[position + 1 :]
        assert failure(replace(shorter, faults=fewer)) != failure(schedule), "each is needed"
    assert main(["--seed", str(seed)]) == 1
    assert "AssertionError" in capsys.readouterr().out
