"""A device that wakes up while a job runs joins it without being told (`submit --peers N:MAX`; G7, J1, X3)."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwire.messages.job import JobSummary
from tests.bench.chaosjob import ChaosJob, repeated
from tests.daemon import realjobs as jobs
from tests.lab.chaosmesh import ChaosMesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FOUNDERS = ("anna", "bert")
NEWCOMER = "cleo"


def until(mesh: ChaosMesh, job: ChaosJob, condition: Callable[[JobSummary], bool], what: str) -> JobSummary:
    """What anna says of the job when `condition` holds; it must not fail meanwhile."""
    deadline_s = time.monotonic() + jobs.TIMEOUT_S
    while True:
        seen = job.summary(mesh.daemons["anna"])
        if seen is not None:
            assert seen.state != "failed", seen.error
            if condition(seen):
                return seen
        tails = {name: daemon.log_tail() for name, daemon in mesh.daemons.items()}
        assert time.monotonic() < deadline_s, f"waited for {what}: {tails}"
        time.sleep(0.05)


@pytest.mark.long
def test_a_device_that_wakes_up_joins_a_running_job(tmp_path: Path) -> None:
    """It gets the next rank and the state of the others, which train on; every sample of every epoch is in one round of
    the history that all three end with, bit for bit."""
    with ChaosMesh(3) as mesh:
        cleo = mesh.daemons[NEWCOMER]
        cleo.kill()
        while mesh.linked("anna") != {"bert"}:
            time.sleep(0.05)
        job = ChaosJob(mesh, tmp_path, samples=96, step_s=0.04, hash_every=2, peers=2, peers_max=3)
        assert job.names == FOUNDERS
        before = until(mesh, job, lambda seen: seen.rounds >= 10, "rounds of two")
        assert (len(before.members), before.learning) == (2, (0, 1))

        cleo.start()
        cleo.wait()
        joined = until(mesh, job, lambda seen: seen.learning == (0, 1, 2), "three to compute")
        assert [member.name for member in joined.members] == [*FOUNDERS, NEWCOMER]
        assert joined.returned == (), "it was never lost"
        job.names = (*FOUNDERS, NEWCOMER)
        until(mesh, job, lambda seen: seen.rounds > joined.rounds + 10, "rounds of three")
        job.finish()
        for name in job.names:
            ended = jobs.ended(mesh.daemons[name], job.id)
            assert ended.state == "succeeded", ended.error
            assert ended.replicas_equal is True

        records = job.records()
        assert repeated(records) == []
        last = {record.rank: record for record in records}
        assert sorted(last) == [0, 1, 2]
        assert len({(record.digest, record.epoch) for record in last.values()}) == 1
        for record in last.values():
            assert (record.most, record.missing) == (record.epoch, 0)
        assert min(record.epoch for record in records if record.rank == 2) > 0, "epochs that are over are rehearsed"
