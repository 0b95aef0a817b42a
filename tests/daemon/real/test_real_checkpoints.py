"""Checkpoints of real daemons and learners: written while a job trains, and gone on from after all were killed."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshtraind.storage.checkpoint_store import Checkpoint, CheckpointStore
from tests.bench import chaosjob
from tests.daemon import realjobs as jobs
from tests.lab.chaosmesh import ChaosMesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
EVERY = 20


def written(mesh: ChaosMesh, job: str) -> dict[str, dict[int, Checkpoint]]:
    """The checkpoints of each daemon, by round."""
    found = {}
    for name in mesh.names:
        store = CheckpointStore(mesh.folder / name / "jobs" / job, job, keep=3)
        found[name] = {one.round: one for one in store.listed() if isinstance(one, Checkpoint)}
    return found


def on_two_peers(mesh: ChaosMesh, job: str) -> list[int]:
    """Rounds after which exactly two have saved."""
    by_name = written(mesh, job)
    rounds = [round_ for saved in by_name.values() for round_ in saved]
    return sorted({round_ for round_ in rounds if rounds.count(round_) == 2})


def test_a_job_goes_on_after_all_daemons_were_killed(tmp_path: Path) -> None:
    """G5, J1, J5, X1: two members save the same bits after the same rounds; as soon as two of three daemons are up,
    the job goes on from them by itself, with rounds, samples and replicas as if nothing had been, and the third returns
    to it. A damaged one is named, and the one before it used."""
    with ChaosMesh(3, patience_s=2.0) as mesh:
        first = chaosjob.ChaosJob(mesh, tmp_path, samples=240, batch=8, step_s=0.005, checkpoint_every=f"{EVERY}r")
        deadline_s = time.monotonic() + 60
        while len(on_two_peers(mesh, first.id)) < 2:
            assert time.monotonic() < deadline_s, {name: daemon.log_tail() for name, daemon in mesh.daemons.items()}
            time.sleep(0.05)
        for daemon in mesh.daemons.values():
            daemon.kill()
        before, newest = on_two_peers(mesh, first.id)[-2:]
        assert before % EVERY == newest % EVERY == 0
        saved = [one[newest] for one in written(mesh, first.id).values() if newest in one]
        assert saved[0].manifest.units == saved[1].manifest.units
        assert saved[0].manifest.deal == saved[1].manifest.deal
        later = [saved[round_] for saved in written(mesh, first.id).values() for round_ in saved if round_ > before]
        for one in later:
            unit = one.unit_path(0)
            unit.write_bytes(bytes(unit.stat().st_size))
        lived = {record.pid for record in first.records()}
        anna, *majority = mesh.daemons.values()
        for daemon in majority:
            daemon.start()
        for daemon in majority:
            daemon.wait()
        bert = majority[0]
        jobs.wait_for(bert, first.id, lambda seen: seen.state == "running" and seen.rounds > before + 10, "rounds")
        anna.start()
        anna.wait()
        jobs.wait_for(bert, first.id, lambda seen: seen.learning == (0, 1, 2), "the one that came up last")
        first.finish()
        for daemon in mesh.daemons.values():
            summary = jobs.ended(daemon, first.id)
            assert (summary.state, summary.replicas_equal) == ("succeeded", True), summary.error
        log = bert.log_path.read_text()
        assert f"the checkpoint after round {newest} on" in log
        assert f"goes on from the checkpoint of job {first.id} after round {before}" in log
        records = [record for record in first.records() if record.pid not in lived]
        last = max(record.epoch for record in records)
        assert last * 10 > before, "10 rounds are an epoch"
        for record in records:
            assert record.missing == 0, record
            if record.epoch == last:
                assert record.most == last, record
        assert min(record.epoch for record in records) >= before // 10 - 1, "epochs that are over are rehearsed"


def until(mesh: ChaosMesh, condition: Callable[[], object], what: str) -> None:
    """Waits for what a condition says."""
    deadline_s = time.monotonic() + 60
    while not condition():
        logs = {name: daemon.log_tail() for name, daemon in mesh.daemons.items()}
        assert time.monotonic() < deadline_s, f"waited for {what}: {logs}"
        time.sleep(0.02)


@pytest.mark.long
def test_all_scripts_are_killed_before_they_have_loaded_and_the_power_is_cut_once_more(tmp_path: Path) -> None:
    """J3, J5, G9: a job that has begun again is half a second old. It goes on from its checkpoint all the same; and the
    first time, when it has none yet, from its start."""
    with ChaosMesh(2, patience_s=2.0) as mesh:
        anna, bert = mesh.daemons.values()
        held = tmp_path / "held"  # while it exists no script comes to mt.prepare
        wait = f"while os.path.exists({str(held)!r}): time.sleep(0.01)"
        job = chaosjob.ChaosJob(
            mesh, tmp_path, samples=240, batch=8, step_s=0.005, checkpoint_every="200r", broken_start=wait
        )
        jobs.wait_for(anna, job.id, lambda seen: seen.rounds > 2, "rounds")

        def others(killed: set[int]) -> bool:
            return all({one.pid for one in daemon.learners()} - killed for daemon in (anna, bert))

        for cuts in (1, 2):
            for daemon in (anna, bert):
                daemon.kill()
            saved = on_two_peers(mesh, job.id)
            assert len(saved) == cuts - 1
            held.touch()
            for daemon in (anna, bert):
                daemon.start()
            for daemon in (anna, bert):
                daemon.wait()
            until(mesh, lambda: anna.learners() and bert.learners(), "the scripts")
            killed = {one.pid for daemon in (anna, bert) for one in daemon.learners()}
            for daemon in (anna, bert):
                assert daemon.kill_learner()
            until(mesh, lambda: others(killed), "scripts in the place of those that were killed")  # noqa: B023
            held.unlink()
            if cuts == 1:
                until(mesh, lambda: on_two_peers(mesh, job.id), "a checkpoint of both")
        assert sum(one.log_path.read_text().count("nothing of it was saved") for one in (anna, bert)) == 1
        jobs.wait_for(anna, job.id, lambda seen: seen.rounds > saved[-1] + 10, "rounds")
        job.finish()
        for daemon in (anna, bert):
            summary = jobs.ended(daemon, job.id)
            assert (summary.state, summary.replicas_equal) == ("succeeded", True), summary.error
        assert all(record.missing == 0 for record in job.records()), "X1"


def test_all_scripts_are_killed_within_their_periods_and_nothing_is_given_up(tmp_path: Path) -> None:
    """J3, R9: local steps are lost, and dealt again; the base is in memory of all, and nobody needs a checkpoint."""
    with ChaosMesh(2, patience_s=2.0) as mesh:
        anna, bert = mesh.daemons.values()
        job = chaosjob.ChaosJob(mesh, tmp_path, samples=240, batch=8, counts=False, step_s=0.05, sync="local:4")
        jobs.wait_for(anna, job.id, lambda seen: seen.rounds > 5, "rounds")
        first = {one.pid for one in anna.learners()}
        assert anna.kill_learner()
        until(mesh, lambda: {one.pid for one in anna.learners()} - first, "its next script")
        assert bert.kill_learner(), "while that one still imports what it needs"
        killed = jobs.summary(anna, job.id).rounds
        jobs.wait_for(anna, job.id, lambda seen: seen.state == "running" and seen.rounds > killed + 5, "rounds")
        job.finish()
        for daemon in (anna, bert):
            summary = jobs.ended(daemon, job.id)
            assert (summary.state, summary.replicas_equal) == ("succeeded", True), summary.error
            assert summary.given_up == ()
            assert "saved" not in daemon.log_path.read_text()


def test_a_job_of_which_no_base_is_left_anywhere_begins_again(tmp_path: Path) -> None:
    """J3, J5: of a script that moves its model the base lies in the learners alone. All are killed before the first
    checkpoint: the job begins from its start, as after a power cut, under its id."""
    with ChaosMesh(2, patience_s=2.0) as mesh:
        anna, bert = mesh.daemons.values()
        moves = "model.tally.data = model.tally.data.clone()"
        job = chaosjob.ChaosJob(
            mesh, tmp_path, samples=240, batch=8, step_s=0.005, counts=False, broken_step=moves, sync="local:2"
        )
        jobs.wait_for(anna, job.id, lambda seen: seen.rounds > 20, "rounds")
        for daemon in (anna, bert):
            assert daemon.kill_learner()
        starts = "nothing of it was saved: it begins from its start"
        until(mesh, lambda: any(starts in one.log_path.read_text() for one in (anna, bert)), "the job to begin again")
        jobs.wait_for(anna, job.id, lambda seen: seen.state == "running" and seen.rounds > 20, "rounds")
        job.finish()
        for daemon in (anna, bert):
            summary = jobs.ended(daemon, job.id)
            assert (summary.state, summary.replicas_equal) == ("succeeded", True), summary.error
