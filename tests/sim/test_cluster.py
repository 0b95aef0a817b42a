"""The whole cluster: what is promised of the machines together, over random schedules of faults.

Every invariant is checked at every event by the cluster itself (`cluster.py`, `clusterhistory.py`).
"""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from meshwire.messages.generation import Where
from meshwire.messages.job import GivenUp
from meshwire.sync_modes.mode import sync_settings
from tests.sim.cluster import LATE_S, Cluster, Setting
from tests.sim.clusterfaults import Fault, befall, random_schedule, run
from tests.sim.clusterreplay import replay
from tests.sim.clusterscenarios import FOLDER, SCENARIOS, transcript
from tests.sim.clusterwitness import Left

SEEDS = 200
PARTS = 10
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "part",
    [
        0,
        *(pytest.param(part, marks=pytest.mark.slow if part < 2 else pytest.mark.long) for part in range(1, PARTS)),
    ],
)
def test_every_schedule_keeps_the_rules_and_recovers(part: int) -> None:
    """R, V, G, J, X at every event; once failures stop, all run in one generation and compute, within the deadline."""
    clusters = [run(random_schedule(seed)) for seed in range(part, SEEDS, PARTS)]
    assert sum(cluster.over for cluster in clusters) < 0.3 * len(clusters), "most jobs are not lost"
    assert sum(cluster.check_end() for cluster in clusters) > len(clusters), "epochs end"


def test_first_batches_follow_speeds_that_were_measured_before_the_job() -> None:
    """X4a: one of three is a third as fast, and no round waits for it, from the first one on."""
    setting = Setting(3, sync=sync_settings("bsp", shares="speed"), total=4000, batch=14, speeds=(30.0, 30.0, 10.0))
    cluster = Cluster(1, setting)
    batches = [daemon.rounds.job_rounds.batch for daemon in cluster.daemons if daemon.rounds is not None]
    assert batches == [18, 18, 6]


def test_a_seed_repeats_to_the_letter() -> None:
    transcripts = [run(random_schedule(11), recording=True).transcript for _ in range(2)]
    assert transcripts[0] == transcripts[1]


@pytest.mark.parametrize("name", SCENARIOS)
def test_transcripts_are_as_written(name: str) -> None:
    """If the change is meant: `python -m tests.sim.clusterscenarios` writes them anew; read the difference."""
    assert transcript(name) == (FOLDER / f"{name}.txt").read_text("utf-8")


def test_a_base_is_given_up_only_for_one_that_is_there_or_was_lately() -> None:
    """G4, the check itself: whoever had it and has gone on to a sister round since counts for as long as it takes to
    hear of that, and no longer."""
    cluster = Cluster(1, Setting(founders=2))
    cluster.run_until(3.0)
    one, two = cluster.daemons
    assert one.rounds is not None
    assert one.machine.generation is not None
    chain_ = one.rounds.history.chain
    sister = b"sister".ljust(16)
    cluster.histories._nodes[sister] = replace(cluster.histories._nodes[chain_], before=chain_)
    generation = one.machine.generation.model_copy(update={"number": 2, "root": 2})
    cluster._cuts[generation.hash64()] = one.rounds.history.complete + 1, sister
    kept = Where(job=generation.job, generation=generation, ancestors=(), samples=0, based=True)
    cluster.leaves_base(two, kept)
    cluster.run_until(cluster.now_s + 1.5)
    assert one.rounds.history.chain != chain_
    cluster.leaves_base(two, kept)
    cluster.run_until(cluster.now_s + cluster.timeouts.silence_s + LATE_S)
    with pytest.raises(AssertionError, match="of which nobody has one"):
        cluster.leaves_base(two, kept)
    cluster.end()


def test_no_round_is_given_up_in_silence_but_one_that_others_have_told_of() -> None:
    """J3, the check itself: of two, one went back to a state that was saved and said what is lost. The other, which
    held the same rounds, loads that state and need not say it again."""
    cluster = Cluster(1, Setting(founders=2))
    cluster.run_until(6.0)
    one, two = cluster.daemons
    assert one.rounds is not None
    history = one.rounds.history
    left = Left(history.chain, history.complete, history.complete - 4, 0, apart=True)
    two.losses.leave(left)
    with pytest.raises(AssertionError, match="gives up 4 rounds in silence"):
        two.losses.settle()
    lost = cluster.histories.rounds(history.chain)[-4:]
    samples = round(sum(done.weight for done in lost))
    one.losses.leave(replace(left, apart=False))
    one.losses.told(GivenUp(first=lost[0].round, last=lost[-1].round, samples=samples, made_by=(0, 1), kept=(0,)))
    two.losses.leave(left)
    two.losses.settle()
    cluster.end()


@pytest.mark.parametrize(("side", "daemons"), [((2, 3), 2), pytest.param((3,), 1, marks=pytest.mark.long)])
def test_who_went_on_alone_tells_what_it_gives_up(side: tuple[int, ...], daemons: int) -> None:
    """G4: after two minutes apart hundreds of rounds; every member of the side says the same."""
    cluster = Cluster(1, Setting(founders=4))
    cluster.clock.at(2.1, partial(befall, cluster, Fault(2.1, "partition", side[0], 0, side, 120.0)))
    cluster.run_until(150.0)
    assert len(cluster.told_lost) == daemons
    assert {kept for _, kept in cluster.told_lost} == {4 - len(side)}
    assert all(rounds > 150 for rounds, _ in cluster.told_lost), cluster.told_lost
    assert len({rounds for rounds, _ in cluster.told_lost}) == 1


@pytest.mark.long
def test_many_seeds_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """The same whether in one process or, as the command, in several."""
    assert replay(["--seeds", "0", "12"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("12 seeds, 0 failed, ")
    command = [sys.executable, "-m", "tests.sim.cluster", "--seeds", "0", "12", "--processes", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == told
