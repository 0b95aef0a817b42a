"""The whole cluster: what is promised of the machines together, and that a rule that is left out is missed.

Every invariant is checked at every event by the cluster itself (`cluster.py`, `clusterhistory.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwire import proposing
from meshwire.messages.generation import Standing
from meshwire.roundlearner import Decision, Learner, Phase
from meshwire.supply import Supply
from meshwire.syncmode import sync_settings
from tests.sim.brokenrules import no_freeze
from tests.sim.cluster import Cluster, Setting, main
from tests.sim.clusterdaemon import Daemon
from tests.sim.clusterfaults import Schedule, failure, random_schedule, run, shrunk
from tests.sim.clusterscenarios import FOLDER, SCENARIOS, transcript

SEEDS = 130
PARTS = 5


@pytest.mark.parametrize("part", range(PARTS))
def test_every_schedule_keeps_the_rules_and_recovers(part: int) -> None:
    """R, V, G, J, X at every event; once failures stop, all run in one generation and compute, within the deadline."""
    clusters = [run(random_schedule(seed)) for seed in range(part, SEEDS, PARTS)]
    assert sum(cluster.over for cluster in clusters) < 0.3 * len(clusters), "most jobs are not lost"
    assert sum(cluster.check_end() for cluster in clusters) > len(clusters), "epochs end"


def test_a_seed_repeats_to_the_letter() -> None:
    transcripts = [run(random_schedule(11), recording=True).transcript for _ in range(2)]
    assert transcripts[0] == transcripts[1]


@pytest.mark.parametrize("name", SCENARIOS)
def test_transcripts_are_as_written(name: str) -> None:
    """If the change is meant: `python -m tests.sim.clusterscenarios` writes them anew; read the difference."""
    assert transcript(name) == (FOLDER / f"{name}.txt").read_text("utf-8")


# The same with one rule left out.


Broken = Callable[[pytest.MonkeyPatch], None]


def no_chain_check(patch: pytest.MonkeyPatch) -> None:
    """G4: by the count of rounds alone."""

    def by_count(standing: Standing, history: Standing) -> bool:
        return standing.generation is not None and standing.complete <= history.complete

    patch.setattr(proposing, "lies_on", by_count)


def restart_resumes(patch: pytest.MonkeyPatch) -> None:
    """G1: a daemon that lost what it held takes up its generation, with its old incarnation."""

    def restart(self: Cluster, number: int) -> None:
        old = self.daemons[number]
        if not old.alive:
            generation = old.machine.generation
            daemon = self.daemons[number] = Daemon(self, number, old.member.incarnation, generation)
            self.network.add(daemon)
            if generation is not None:
                daemon.found()

    patch.setattr(Cluster, "restart", restart)


def nulls_without_bound(patch: pytest.MonkeyPatch) -> None:
    """R4: a computing learner is passed over however old its gradient becomes."""
    may_null = Learner.may_null

    def unbounded(self: Learner, decided: int, complete: int) -> Decision:
        if self.phase is Phase.COMPUTING and not self.settings.lockstep:
            return decided < complete + self.settings.staleness + 1, "no bound"
        return may_null(self, decided, complete)

    patch.setattr(Learner, "may_null", unbounded)


def blocks_not_returned(patch: pytest.MonkeyPatch) -> None:
    """X3: what a rank held that computes no more is lost."""
    patch.setattr(Supply, "put_back", lambda *_: None)


@pytest.mark.parametrize(
    ("broken", "schedule"),
    [
        (no_freeze, random_schedule(38)),
        (restart_resumes, random_schedule(7)),
        (nulls_without_bound, random_schedule(9, ("hang", "pause", "kill learner"), 3)),
        (blocks_not_returned, random_schedule(0)),
    ],
)
def test_a_rule_that_is_left_out_is_missed(monkeypatch: pytest.MonkeyPatch, broken: Broken, schedule: Schedule) -> None:
    """The invariants see it, in a schedule in which they hold with the rule."""
    assert failure(schedule) is None
    broken(monkeypatch)
    assert failure(schedule) is not None


def run_with_another_history() -> Cluster:
    """One of four holds as many rounds as the others, and another newest one, when a learner is lost."""
    cluster = Cluster(1, Setting(founders=4, sync=sync_settings("ssp:2"), delays_s=(0.001, 0.002)))
    cluster.run_until(2.1)
    rounds = cluster.daemons[2].rounds
    assert rounds is not None
    rounds.history._chains[-1] = bytes([1]) * 16
    cluster.daemons[1].life.kill()
    cluster.recover()
    cluster.check_end()
    return cluster


def test_without_the_chain_check_histories_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """G4: only who holds another history loads anew; by the count of rounds alone it would go on with it.

    No schedule of honest daemons gets so far: who is passed over hears of it before it is proposed to.
    """
    cluster = run_with_another_history()
    assert [daemon.life.starts for daemon in cluster.daemons] == [1, 2, 2, 1]
    no_chain_check(monkeypatch)
    with pytest.raises(AssertionError):
        run_with_another_history()


def test_a_failing_seed_is_shrunk_to_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Faults that change nothing are dropped, and the command tells the rest as a transcript."""
    blocks_not_returned(monkeypatch)
    numbers = (number for number in range(200) if len(random_schedule(number).faults) > 2)
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
