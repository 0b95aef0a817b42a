"""A child with all that it starts: begun apart from this process's terminal, made to yield, ended together.

POSIX has sessions, whose processes a signal reaches at once. The twin marks the child by a variable of its environment,
which what it starts inherits, and finds them by it; a process that empties its environment is no longer found, as one
that makes a session of its own is not there.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from typing import Any

import psutil

from meshtraind.machine.portable import portable

MARK_VARIABLE = "MESHTRAIN_TREE"
LOOKS_MAX = 50  # for what is left: what is ended may have started something meanwhile, or take its time
LOOK_S = 0.02
CLOCK_TICK_S = 1.0  # a process's beginning is known as closely as this
KERNEL = (0, 2)  # parents of Linux's own threads, which have no environment
BACKGROUND_NICENESS = 10  # from here on Windows lets it compute only when nobody else does


class ProcessTree:
    """One child's. `options` and `environment` go into the call that starts it."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16) if portable() else None
        self._began_s = time.time() - CLOCK_TICK_S

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `subprocess.Popen`."""
        if self._mark is None:
            return {"start_new_session": True}
        if sys.platform == "win32":
            return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
        return {}

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the child."""
        return {} if self._mark is None else {MARK_VARIABLE: self._mark}

    async def end(self, pid: int) -> None:
        """Ends all at once. Nothing when they have ended."""
        if self._mark is None:
            self.signal(pid, "KILL")
        else:
            await asyncio.to_thread(self._end_marked)

    def signal(self, pid: int, name: str) -> None:
        """Sends a POSIX signal ("TERM", "CONT", "KILL") to all; not for twins."""
        assert self._mark is None
        if sys.platform != "win32":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, getattr(signal, f"SIG{name}"))

    @property
    def takes_signals(self) -> bool:
        """Whether it can be asked to end by a signal, and the kernel ends it with this process (on Linux). Else there
        must be a control pipe (`control_pipe.py`)."""
        return self._mark is None

    def yield_more(self, pid: int, niceness: int) -> None:
        """Has all yield so far to this process. The system lets nobody but an administrator have a process yield less:
        that stays as it is."""
        if sys.platform == "win32" or self._mark is not None:
            with contextlib.suppress(psutil.Error):
                _yield(psutil.Process(pid), niceness)  # before it has done much, and then what it has started
            for process in self._look()[0]:
                with contextlib.suppress(psutil.Error):
                    _yield(process, niceness)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            own, theirs = os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PGRP, pid)
            if own + niceness > theirs:
                os.setpriority(os.PRIO_PGRP, pid, own + niceness)

    def _look(self) -> tuple[list[psutil.Process], bool]:
        """Those that live and have the mark; and whether another one may have it: the kernel shows no environment of a
        process that it is about to replace."""
        found, unsure = [], False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                variables = process.environ()
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if variables.get(MARK_VARIABLE) == self._mark:
                    found.append(process)
                elif not variables and process.create_time() > self._began_s and process.ppid() not in KERNEL:
                    unsure = True
        return found, unsure

    def _end_marked(self) -> None:
        for _ in range(LOOKS_MAX):
            found, unsure = self._look()
            if not found and not unsure:
                return
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(LOOK_S)


def end_as(code: int) -> None:
    """Ends this process as a child of it has ended: by its exit code, or by the signal (negative) that killed it."""
    if sys.platform == "win32" or code >= 0:
        sys.exit(code)
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def _yield(process: psutil.Process, niceness: int) -> None:
    if sys.platform == "win32":
        idle = niceness >= BACKGROUND_NICENESS
        process.nice(psutil.IDLE_PRIORITY_CLASS if idle else psutil.BELOW_NORMAL_PRIORITY_CLASS)
    elif (wanted := min(19, psutil.Process().nice() + niceness)) > process.nice():
        process.nice(wanted)
