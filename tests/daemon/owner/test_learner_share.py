"""What learners take of this machine: niceness and cores (M3)."""

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.jobs.registry import JobRegistry
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


def test_a_job_counts_the_learners_of_all_its_daemons_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """M3: its own, and those of its linked members that compute on these cores; not those of other devices, which are
    linked, or in the job and away."""
    told: list[int] = []
    devices = [f"{n:064x}" for n in range(5)]
    beside, hub, elsewhere, stranger = (
        SimpleNamespace(rtt_s=0.1, computes_here=here) for here in (True, False, False, True)
    )
    registry = JobRegistry.__new__(JobRegistry)
    registry._node = cast(
        Any,
        SimpleNamespace(
            device=devices[0], links=dict(zip(devices[1:], (beside, hub, elsewhere, stranger), strict=True))
        ),
    )
    registry._sessions = {}
    registry._tasks = cast(Any, SimpleNamespace(spawn=lambda coroutine, _name: coroutine.close()))
    monkeypatch.setattr(registry, "_tell_members", lambda: None)
    monkeypatch.setattr(
        "meshtraind.session.session.JobSession", lambda *_, learners_here, **_named: told.append(learners_here)
    )
    job: Any = SimpleNamespace(
        members=[SimpleNamespace(device=device) for device in (*devices[:4], "f" * 64)],
        spec=SimpleNamespace(job="j"),
        remember=lambda: None,
    )
    registry._open_session(job, None, {})
    assert told == [2]
