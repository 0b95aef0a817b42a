"""What learners take of this machine: niceness and cores (M3)."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from meshtraind.learner.environment import learner_threads
from meshtraind.learner.process import LearnerProcess
from meshtraind.learner.shared_memory import SharedMemory
from tests.daemon.storage.test_served_files import SPEC

TIMEOUT_S = 20.0


@pytest.mark.parametrize(
    ("cores", "learners", "percent", "threads"),
    [(8, 1, 100, 8), (8, 1, 50, 4), (8, 2, 50, 2), (8, 1, 1, 1), (2, 3, 100, 1), (None, 1, 100, 1)],
)
def test_learners_share_the_part_of_the_cores_that_is_left_to_them(
    cores: int | None, learners: int, percent: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M3."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert learner_threads(learners, percent) == threads


@pytest.mark.asyncio
async def test_a_learner_yields_as_far_as_was_set_and_further_at_once(tmp_path: Path) -> None:
    """M3: with every process that the script has started; never less than before, which the system does not allow."""
    folder = tmp_path / "jobs/job/source"
    (tmp_path / "jobs/job/logs").mkdir(parents=True)
    folder.mkdir()
    (folder / SPEC.script).write_text(
        "import subprocess, sys, time\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(worker.pid, flush=True)\ntime.sleep(60)\n"
    )
    log = tmp_path / "jobs/job/logs/0.log"
    memory = SharedMemory()
    learner = LearnerProcess(folder, SPEC, log, memory, Path(sys.executable))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        await learner.start({}, 3)
        async with asyncio.timeout(TIMEOUT_S):
            while not log.exists() or not log.read_text().endswith("\n"):
                await asyncio.sleep(0.01)
        worker = int(log.read_text())
        assert os.getpriority(os.PRIO_PROCESS, worker) == min(19, own + 3)
        learner.yield_more(7)
        assert os.getpriority(os.PRIO_PROCESS, worker) == min(19, own + 7)
        learner.yield_more(4)
        assert os.getpriority(os.PRIO_PROCESS, worker) == min(19, own + 7)
    finally:
        await learner.stop(now=True)
        memory.close()
    learner.yield_more(9)  # it has ended
