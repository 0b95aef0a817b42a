"""One training process: spawned, logged to a file, stopped with everything it started."""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from meshtraind.learner.script_error import RECORD_BYTES_MAX, ScriptError
from meshtraind.learner.shared_memory import SharedMemory
from meshtraind.machine.control_pipe import ASK_TO_END, CONTROL_VARIABLE
from meshtraind.machine.process_tree import ProcessTree
from meshtraind.runtime.open_below import open_below, read_below
from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.fetch import RECORD_SUFFIX
from meshtraind.storage.log_times import LOOK_S, LogClock, below_jobs
from meshwire.memory_layout.kept_state import KEPT_FD_VARIABLE
from meshwire.memory_layout.shared_slots import MEMORY_FD_VARIABLE
from meshwire.messages.job import JobSpec

KILL_TIMEOUT_S = 10.0
STOP_GRACE_S = 5.0  # between SIGTERM and SIGKILL

log = logging.getLogger(__name__)

LAUNCH = Path(__file__).with_name("launch.py")
SCRIPT_RUN = Path(__file__).with_name("script_run.py")
SEVERAL = Path(__file__).parent.parent / "crew" / "run.py"

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
    # What Python and its libraries look for on Windows, where a process without SYSTEMROOT has no sockets
    "SYSTEMROOT",
    "COMSPEC",
    "PATHEXT",
    "TEMP",
    "TMP",
    "USERPROFILE",
    "APPDATA",
    "LOCALAPPDATA",
)


class LearnerProcess:
    """The process of one rank of one job; with several learners on a device the one that speaks for them (R6).

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
        self._clock: LogClock | None = None
        self._memory = memory
        self._python = python
        self._process: asyncio.subprocess.Process | None = None
        self._tree = ProcessTree()

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self, environment: Mapping[str, str], niceness: int, said: str = "") -> None:
        """Starts the process so that its workers can be ended with it. Raises OSError.

        Args:
            niceness: how far it yields to the daemon.
            said: a line for the log, before what the script prints.
        """
        self._record.unlink(missing_ok=True)
        memory = {MEMORY_FD_VARIABLE: self._memory.file, KEPT_FD_VARIABLE: self._memory.kept.file}
        passed = {name: file for name, file in memory.items() if file is not None}
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        descriptor = open_below(*below_jobs(self._log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._clock = await asyncio.to_thread(LogClock, self._log)
            if said:
                os.write(descriptor, f"meshtrain: {said}\n".encode())
            self._process = await asyncio.create_subprocess_exec(
                *self._launcher(niceness),
                *self._several(),
                str(self._python),
                "-u",
                str(SCRIPT_RUN),
                str(self._record.absolute()),
                "alone" if self._spec.independent or self._spec.engine == "torchrun" else "",
                "module" if self._spec.as_module else "",
                self._spec.script,
                *self._spec.args,
                cwd=self._folder,
                env={
                    **inherited,
                    **environment,
                    **{name: file.told for name, file in passed.items()},
                    **self._tree.environment,
                    **({} if self._tree.takes_signals else {CONTROL_VARIABLE: "stdin"}),
                },
                stdin=asyncio.subprocess.DEVNULL if self._tree.takes_signals else asyncio.subprocess.PIPE,
                stdout=descriptor,
                stderr=descriptor,
                pass_fds=[number for file in passed.values() for number in file.inherited],
                **self._tree.options,
            )
            if not self._tree.takes_signals:
                self._tree.yield_more(self._process.pid, niceness)
        finally:
            os.close(descriptor)

    def _launcher(self, niceness: int) -> list[str]:
        """The words before the command, for a process that is to yield and to end with this one; no words where that
        is done from here and by the control pipe."""
        if not self._tree.takes_signals:
            return []
        # The launcher needs nothing but the standard library.
        return [sys.executable, "-IS", str(LAUNCH), str(os.getpid()), str(niceness)]

    def _several(self) -> list[str]:
        """The words before those of a learner that start several of them."""
        learners = self._spec.learners
        return [] if learners == 1 else [sys.executable, "-I", "-u", str(SEVERAL), str(learners)]

    def yield_more(self, niceness: int) -> None:
        """Yields so far to the daemon from now on, with all that it has started. The system lets nobody but an
        administrator have a process yield less: that stays as it is until the next one."""
        if not self.running:
            return
        assert self._process is not None
        self._tree.yield_more(self._process.pid, niceness)

    async def wait(self) -> int:
        """Waits for the end without a deadline of its own: `stop` has one. Negative: killed by that signal."""
        assert self._process is not None
        assert self._clock is not None
        tasks = TaskSet(f"log {self._log.stem}")
        tasks.spawn(self._watch_log(self._clock), "times")
        try:
            code = await self._process.wait()
            await self._tree.end(self._process.pid)  # what it started and left behind
        finally:
            await tasks.close()
        await asyncio.to_thread(self._clock.look, time.time(), last=True)
        return code

    async def _watch_log(self, clock: LogClock) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(clock.look, time.time())

    async def exited(self) -> None:
        """Waits until the process itself has ended, whatever it has left behind."""
        assert self._process is not None
        await self._process.wait()

    def error(self) -> ScriptError | None:
        """The exception by which the script of a process that has ended did so; None if it has told of none."""
        try:
            with read_below(*below_jobs(self._record)) as file:
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
            self._ask_to_end(self._process)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), STOP_GRACE_S)
        await self._tree.end(self._process.pid)
        try:
            await asyncio.wait_for(asyncio.shield(self._process.wait()), KILL_TIMEOUT_S)
        except TimeoutError:  # the kernel cannot end it now, e.g. in the middle of a read from a dead disk
            log.error("process %d has not ended %.0f s after SIGKILL; left alone", self._process.pid, KILL_TIMEOUT_S)

    def _ask_to_end(self, process: asyncio.subprocess.Process) -> None:
        if self._tree.takes_signals:
            self._tree.signal(process.pid, "TERM")
            self._tree.signal(process.pid, "CONT")
        elif process.stdin is not None:
            process.stdin.write(ASK_TO_END)
