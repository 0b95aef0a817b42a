"""A real hub without torch: the laptops send to it, and when all of them have died the job goes on from its disk."""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from meshtraind.storage.checkpoint_store import Checkpoint, CheckpointStore
from tests.daemon import realjobs as jobs
from tests.lab.chaosmesh import ChaosMesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

AS_A_HUB = "import os, sys; os.execv(sys.argv[1], [*sys.argv[1:], '--hub'])"
NO_TORCH = "raise ImportError('a hub has no torch')\n"
HUB = "cleo"


class Machine:
    """The hub's, on which whoever imports torch fails; all others have nothing of their own."""

    def __init__(self, folder: Path) -> None:
        self._is_hub = folder.name == HUB
        self._modules = folder / "without"
        if self._is_hub:
            self._modules.mkdir()
            (self._modules / "torch.py").write_text(NO_TORCH)

    @property
    def prefix(self) -> Sequence[str]:
        return (sys.executable, "-c", AS_A_HUB) if self._is_hub else ()

    @property
    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(self._modules)} if self._is_hub else {}

    def close(self) -> None:
        """The folder is removed with the mesh."""


def test_a_job_whose_laptops_have_all_died_goes_on_from_the_hub(tmp_path: Path) -> None:
    """H1 to H3, J5: both laptops are killed and lose what they have saved. Started again, they go on from the newest
    state of the hub, in a star at it, with equal replicas."""
    with ChaosMesh(3, patience_s=1.0, machine=Machine) as mesh:
        anna, bert, hub = mesh.daemons.values()
        stop = tmp_path / "stop"
        script = jobs.UNTIL_STOPPED.replace("mt.log(loss=loss)", "mt.log(loss=loss); time.sleep(0.01)")
        job = jobs.submit(anna, tmp_path, script, args=(str(stop),), checkpoint_every="20r")
        assert [(one.name, one.hub) for one in job.members] == [("anna", False), ("bert", False), (HUB, True)]
        assert any("(--topology star:2)" in note for note in job.notes), job.notes
        store = CheckpointStore(mesh.folder / HUB / "jobs" / job.job, job.job, keep=3)

        def saved() -> list[int]:
            return sorted(one.round for one in store.listed() if isinstance(one, Checkpoint))

        seen = jobs.wait_for(bert, job.job, lambda _now: bool(saved()), "a state on the hub")
        assert (seen.present, seen.learning) == ((0, 1, 2), (0, 1))
        for daemon in (anna, bert):
            daemon.kill()
        for name in ("anna", "bert"):
            shutil.rmtree(mesh.folder / name / "jobs" / job.job / "checkpoints", ignore_errors=True)
        deadline_s = time.monotonic() + jobs.TIMEOUT_S
        while "running -> lost" not in hub.log_path.read_text():
            assert time.monotonic() < deadline_s, hub.log_tail()
            time.sleep(0.05)
        newest = saved()[-1]
        for daemon in (anna, bert):
            daemon.start()
        for daemon in (anna, bert):
            daemon.wait()
        jobs.wait_for(bert, job.job, lambda now: now.learning == (0, 1) and now.rounds > newest + 5, "more rounds")
        stop.touch()
        for daemon in (anna, bert, hub):
            summary = jobs.ended(daemon, job.job)
            assert summary.state == "succeeded", (daemon.name, summary.error, daemon.log_tail())
        assert jobs.summary(anna, job.job).replicas_equal
        logs = "".join(daemon.log_path.read_text() for daemon in (anna, bert, hub))
        assert f"goes on from the checkpoint of job {job.job} after round {newest}" in logs
        assert "of 2 ends with" in jobs.read(anna, job.job, "log", 0)
        assert jobs.read(anna, job.job, "log", 2) == "", "no script has run on the hub"
