"""One training process: spawned, logged to a file, stopped with everything it started."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from meshtraind.learner.script_error import RECORD_BYTES_MAX, ScriptError
from meshtraind.learner.shared_memory import SharedMemory
from meshtraind.runtime.open_below import open_below, read_below
from meshtraind.storage.fetch import RECORD_SUFFIX
from meshwire.memory_layout.kept_state import KEPT_FD_VARIABLE
from meshwire.memory_layout.shared_slots import MEMORY_FD_VARIABLE
from meshwire.messages.job import JobSpec

KILL_TIMEOUT_S = 10.0
STOP_GRACE_S = 5.0  # between SIGTERM and SIGKILL

log = logging.getLogger(__name__)

LAUNCH = Path(__file__).with_name("launch.py")
SCRIPT_RUN = Path(__file__).with_name("script_run.py")

# What the learner inherits of the daemon's environment; everything else might hold the owner's secrets.
INHERITED = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES",
)


class LearnerProcess:
    """The process of one rank of one job.

    Args:
        folder: the job's working directory, with the script in it.
        log: receives stdout and stderr.
        memory: inherited by descriptor; it survives the learner.
        python: the interpreter that runs the script.
    """

    def __init__(self, folder: Path, spec: JobSpec, log: Path, memory: SharedMemory, python: Path) -> None:
        self._folder = folder
        self._spec = spec
        self._record = log.with_suffix(RECORD_SUFFIX)
        self._log = log
        self._memory = memory
        self._python = python
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self, environment: Mapping[str, str], niceness: int, said: str = "") -> None:
        """Starts the process in a session of its own, so that its workers can be ended with it. Raises OSError.

        Args:
            niceness: how far it yields to the daemon.
            said: a line for the log, before what the script prints.
        """
        self._record.unlink(missing_ok=True)
        descriptors = {MEMORY_FD_VARIABLE: self._memory.descriptor, KEPT_FD_VARIABLE: self._memory.kept.descriptor}
        passed = {name: number for name, number in descriptors.items() if number is not None}
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        descriptor = open_below(*_below_jobs(self._log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            if said:
                os.write(descriptor, f"meshtrain: {said}\n".encode())
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-IS",  # the launcher needs nothing but the standard library
                str(LAUNCH),
                str(os.getpid()),
                str(niceness),
                str(self._python),
                "-u",
                str(SCRIPT_RUN),
                str(self._record.absolute()),
                "alone" if self._spec.independent or self._spec.engine == "torchrun" else "",
                self._spec.script,
                *self._spec.args,
                cwd=self._folder,
                env={**inherited, **environment, **{name: str(number) for name, number in passed.items()}},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                pass_fds=tuple(passed.values()),
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    def yield_more(self, niceness: int) -> None:
        """Yields so far to the daemon from now on, with all that it has started. The system lets nobody but an
        administrator have a process yield less: that stays as it is until the next one."""
        if not self.running:
            return
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            own, theirs = os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PGRP, self._process.pid)
            if own + niceness > theirs:
                os.setpriority(os.PRIO_PGRP, self._process.pid, own + niceness)

    async def wait(self) -> int:
        """Waits for the end without a deadline of its own: `stop` has one. Negative: killed by that signal."""
        assert self._process is not None
        code = await self._process.wait()
        self._signal(signal.SIGKILL)  # what it started and left behind
        return code

    async def exited(self) -> None:
        """Waits until the process itself has ended, whatever it has left behind."""
        assert self._process is not None
        await self._process.wait()

    def error(self) -> ScriptError | None:
        """The exception by which the script of a process that has ended did so; None if it has told of none."""
        try:
            with read_below(*_below_jobs(self._record)) as file:
                record = file.read(RECORD_BYTES_MAX)
            self._record.unlink()
        except FileNotFoundError:
            return None
        except OSError as problem:
            log.warning("what the script has told of its error cannot be read: %s", problem)
            return None
        return ScriptError.unpack(record)

    async def stop(self, *, now: bool) -> None:
        """Asks the process to end, then makes it. Returns when it has ended."""
        if not self.running:
            return
        assert self._process is not None
        if not now:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), STOP_GRACE_S)
        self._signal(signal.SIGKILL)
        try:
            await asyncio.wait_for(asyncio.shield(self._process.wait()), KILL_TIMEOUT_S)
        except TimeoutError:  # the kernel cannot end it now, e.g. in the middle of a read from a dead disk
            log.error("process %d has not ended %.0f s after SIGKILL; left alone", self._process.pid, KILL_TIMEOUT_S)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _below_jobs(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder of all jobs, and the way from there: JOB/logs/RANK.log, which an earlier process may have replaced."""
    return path.parents[2], path.parts[-3:]
