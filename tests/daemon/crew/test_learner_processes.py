"""R6: the processes of a device's learners end together, whoever ends first, and none outlives the one that has started
them."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from meshtraind.crew.processes import LearnerCommand, LearnerProcesses
from meshtraind.learner.process import SCRIPT_RUN, SEVERAL, LearnerProcess
from meshtraind.learner.shared_memory import SharedMemory
from meshwire.jobs.script_log import ERROR_BEGINS, ERROR_ENDS
from meshwire.memory_layout.shared_slots import (
    ENDPOINT_VARIABLE,
    JOB_VARIABLE,
    MEMORY_FD_VARIABLE,
    PORTABLE_VARIABLE,
    TOKEN_VARIABLE,
)

JOB = "1kx3m9q2v7bd"
WAIT_S = 20.0
TOLD = {ENDPOINT_VARIABLE: "unix:/nowhere", TOKEN_VARIABLE: "t", JOB_VARIABLE: JOB}

# Which of the learners a script is: the first has the daemon's memory, whose descriptor was inherited.
SCRIPT = """
import os, sys, time
first = "MESHTRAIN_KEPT_FD" in os.environ
place = "first" if first else "other"
open(f"{place}.{os.getpid()}", "w").close()
def until_all_are_there():
    while sum(name.startswith(("first.", "other.")) for name in os.listdir()) < int(sys.argv[1]):
        time.sleep(0.01)
until_all_are_there()
"""


class Started:
    """A device's learners, started as a daemon does."""

    def __init__(self, folder: Path, text: str, learners: int = 2) -> None:
        self.folder = folder / "jobs" / "one"
        (self.folder / "logs").mkdir(parents=True)
        self.log = self.folder / "logs" / "rank0.log"
        self.log.touch()
        (self.folder / "train.py").write_text(SCRIPT + text)
        fields: dict[str, Any] = {"script": "train.py", "args": (str(learners),), "independent": False}
        spec = cast(Any, SimpleNamespace(**fields, engine="mesh", as_module=False, learners=learners))
        self.memory = SharedMemory()
        self.process = LearnerProcess(self.folder, spec, self.log, self.memory, Path(sys.executable))

    async def __aenter__(self) -> "Started":
        await self.process.start(TOLD, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.process.stop(now=True)
        await self.process.wait()
        self.memory.close()

    def pids(self, place: str = "") -> list[int]:
        return [int(path.suffix[1:]) for path in self.folder.glob(f"{place or '[fo]*'}.[0-9]*")]

    async def all_there(self, learners: int = 2) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.pids()) < learners:
                await asyncio.sleep(0.02)


async def none_left(pids: list[int]) -> None:
    async with asyncio.timeout(WAIT_S):
        while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_learners_that_all_end_well_are_one_that_has(tmp_path: Path) -> None:
    """Each has memory of its own, and what another than the first prints says whose it is."""
    text = "print(place, 'of', os.environ['MESHTRAIN_JOB_ID'], flush=True)\nfirst or os.write(1, b'unfinished')\n"
    async with Started(tmp_path, text, 3) as started:
        assert await started.process.wait() == 0
        lines = started.log.read_text().splitlines()
        assert started.process.error() is None
    assert f"[learner 2] other of {JOB}" in lines
    assert f"[learner 3] other of {JOB}" in lines
    assert f"first of {JOB}" in "\n".join(lines)
    assert "[learner 3] unfinished" in lines
    assert [path.name for path in started.log.parent.iterdir() if ".error" in path.name] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("asked", [False, True])
async def test_who_ends_well_is_told_unless_it_was_asked_to_end(tmp_path: Path, asked: bool) -> None:
    """The others have their last words then, whatever the first has left undone."""
    processes = LearnerProcesses(LearnerCommand((sys.executable, "-c", "pass"), tmp_path / "record", ()))
    ended: list[int] = []
    for _ in range(2):
        await processes.start({}, ())
    if asked:
        processes.asked_to_end()
    assert await processes.wait(ended.append) == 0
    assert sorted(ended) == ([] if asked else [0, 1])


@pytest.mark.asyncio
async def test_the_first_that_fails_ends_the_others_and_its_error_is_the_devices(tmp_path: Path) -> None:
    """With its place, its line, and one frame in the log."""
    text = "if first:\n    time.sleep(60)\nraise ValueError('no such file')\n"
    async with Started(tmp_path, text) as started:
        async with asyncio.timeout(WAIT_S):
            assert await started.process.wait() == 1
        await none_left(started.pids())
        error = started.process.error()
        lines = started.log.read_text().splitlines()
    assert error is not None
    assert error.text().startswith("train.py, line 12: learner 2 of this device: ValueError: no such file")
    assert (lines.count(ERROR_BEGINS), lines.count(ERROR_ENDS)) == (1, 1)
    assert "[learner 2] ValueError: no such file" in lines


@pytest.mark.asyncio
async def test_one_that_is_killed_ends_the_others_and_the_device_is_killed_by_that_signal(tmp_path: Path) -> None:
    """J3: which is nobody's error."""
    async with Started(tmp_path, "time.sleep(60)\n") as started:
        await started.all_there()
        os.kill(started.pids("other")[0], signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            assert await started.process.wait() == -signal.SIGKILL
        await none_left(started.pids())
        assert started.process.error() is None
    assert (
        "learner 2 of this device was killed by signal 9, and the others are ended with it" in started.log.read_text()
    )


@pytest.mark.asyncio
async def test_all_have_their_last_words(tmp_path: Path) -> None:
    """One that has ended first does not cut the other's short."""
    text = """
import signal
class Stopped(Exception): pass
def stopped(*_): raise Stopped
signal.signal(signal.SIGTERM, stopped)
open(f"ready{place}", "w").close()
try:
    time.sleep(60)
finally:
    if first:
        while not os.path.exists("saved by other"):
            time.sleep(0.01)
        time.sleep(0.1)
    open(f"saved by {place}", "w").close()
"""
    async with Started(tmp_path, text) as started:
        async with asyncio.timeout(WAIT_S):
            while len(list(started.folder.glob("ready*"))) < 2:
                await asyncio.sleep(0.02)
        await started.process.stop(now=False)
        await none_left(started.pids())
    assert len(list(started.folder.glob("saved by *"))) == 2


@contextlib.contextmanager
def without_a_daemon(folder: Path, text: str, variables: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """The process that starts learners, in no session that a daemon would end."""
    memory = SharedMemory()
    (folder / "train.py").write_text(SCRIPT + text)
    words = [sys.executable, "-I", "-u", str(SEVERAL), "2", sys.executable, "-u", str(SCRIPT_RUN)]
    process = subprocess.Popen(
        [*words, str(folder / "rank0.error"), "", "", "train.py", "2"],
        cwd=folder,
        env={**os.environ, **TOLD, **variables, MEMORY_FD_VARIABLE: memory.file.told},
        pass_fds=memory.file.inherited,
        stdin=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        memory.close()


@pytest.mark.parametrize("portable", ["", "1"])
def test_killing_the_process_that_has_started_them_leaves_none(tmp_path: Path, portable: str) -> None:
    """Though nobody ends its session, and they do not talk to it."""
    variables = {PORTABLE_VARIABLE: portable}
    text = "while True:\n    time.sleep(0.01)\n"
    with without_a_daemon(tmp_path, text, variables) as process:
        deadline_s = time.monotonic() + WAIT_S
        while len(pids := [int(path.suffix[1:]) for path in tmp_path.glob("other.[0-9]*")]) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        asyncio.run(none_left(pids))
