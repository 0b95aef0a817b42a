"""One training process: spawned, logged to a file, stopped with everything it started."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from meshtraind.below import open_below, read_below
from meshtraind.memory import SharedMemory
from meshwire.local import MEMORY_FD_VARIABLE

TRACEBACK_BYTES_MAX = 4096
TRACEBACK_START = "Traceback (most recent call last)"
LINES_WITHOUT_TRACEBACK = 10
MISSING_PACKAGE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
KILL_TIMEOUT_S = 10.0
STOP_GRACE_S = 5.0  # between SIGTERM and SIGKILL

log = logging.getLogger(__name__)

LAUNCH = Path(__file__).with_name("launch.py")

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


class Learner:
    """The process of one rank of one job.

    Args:
        script: relative to `folder`, the job's working directory.
        log: receives stdout and stderr.
        memory: inherited by descriptor; it survives the learner.
    """

    def __init__(self, folder: Path, script: str, args: tuple[str, ...], log: Path, memory: SharedMemory) -> None:
        self._folder = folder
        self._script = script
        self._args = args
        self._log = log
        self._memory = memory
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Started and not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self, environment: Mapping[str, str]) -> None:
        """Starts the process in a session of its own, so that its workers can be ended with it. Raises OSError."""
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        descriptor = open_below(*_below_jobs(self._log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-IS",  # the launcher needs nothing but the standard library
                str(LAUNCH),
                str(os.getpid()),
                sys.executable,
                "-u",
                self._script,
                *self._args,
                cwd=self._folder,
                env={**inherited, **environment, MEMORY_FD_VARIABLE: str(self._memory.descriptor)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                pass_fds=(self._memory.descriptor,),
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    async def wait(self) -> int:
        """Waits for the end without a deadline of its own: `stop` has one. Negative: killed by that signal."""
        assert self._process is not None
        code = await self._process.wait()
        self._signal(signal.SIGKILL)  # what it started and left behind
        return code

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


def explain_exit(code: int, log: Path, device: str) -> str:
    """Why a script ended, for a person: the traceback that its log ends with.

    Args:
        code: as `Learner.wait` returns it.
        device: the name of this device, where a missing package is to be installed.
    """
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    tail = _last_text(log, TRACEBACK_BYTES_MAX)
    start = tail.rfind(TRACEBACK_START)
    shown = tail[start:] if start >= 0 else "\n".join(tail.splitlines()[-LINES_WITHOUT_TRACEBACK:])
    text = f"the script {how}\n{shown}".rstrip()
    package = MISSING_PACKAGE.search(shown)
    if package:
        text += f"\nInstall {package[1]} into the Python environment of meshtraind on {device}."
    return text


def _below_jobs(log: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder of all jobs, and the way from there: JOB/logs/RANK.log, which an earlier process may have replaced."""
    return log.parents[2], log.parts[-3:]


def _last_text(log: Path, max_bytes: int) -> str:
    try:
        with read_below(*_below_jobs(log)) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - max_bytes))
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"(its log cannot be read: {error})"
