"""What systems do differently, for commands and learners: each call has a twin that runs everywhere.

The daemon's is `machine/` there, whose README has the table of all of it.
"""

import contextlib
import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwire.memory_layout.shared_slots import FILE_PREFIX, PORTABLE_VARIABLE

if sys.platform != "win32":
    import fcntl

TWIN_SUFFIX = ".held"  # beside a lock: what its twin locks, as the daemon does
MARK_VARIABLE = "MESHTRAIN_TREE"
LOOKS_MAX, LOOK_S = 50, 0.02  # for who has the mark: what is ended may have started something meanwhile
CLOCK_TICK_S = 1.0  # a process's beginning is known as closely as this
KERNEL = (0, 2)  # parents of Linux's own threads, which have no environment


def portable() -> bool:
    """Whether the twins are used: on Windows, and where the variable says so."""
    return sys.platform == "win32" or os.environ.get(PORTABLE_VARIABLE, "") not in ("", "0")


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """A connection to a Unix socket, which only a daemon with such an endpoint names. Raises OSError."""
    if sys.platform == "win32":
        raise OSError(f"this system has no Unix sockets, and the daemon says that it listens at {path}")
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(timeout_s)  # a daemon that hangs takes nobody from its queue
    try:
        stream.connect(path)
    except BaseException:
        stream.close()
        raise
    return stream


def send_some(stream: socket.socket, views: Sequence[memoryview]) -> int:
    """Sends at least a byte of what lies back to back in the views, of which none is empty. Returns how many.

    Raises OSError."""
    if sys.platform == "win32" or portable():
        return stream.send(views[0])
    return stream.sendmsg(views)


def memory_descriptor(told: str) -> int:
    """The memory that the daemon has made for this process: a descriptor that was inherited, or of the file that it
    names. Raises OSError, ValueError."""
    if not told.startswith(FILE_PREFIX):
        return int(told)
    kind = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
    return os.open(told.removeprefix(FILE_PREFIX), os.O_RDWR | kind)


def memory_part_bytes() -> int:
    """A part of such a file may be mapped that begins at a multiple of this: a page, on Windows 16 of them."""
    import mmap

    return 65536 if portable() else mmap.ALLOCATIONGRANULARITY


def detached() -> dict[str, Any]:
    """Arguments of `Popen` for a process that outlives the terminal, and for which ctrl-C there is not meant."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def loopback_interface() -> str:
    """The name of the interface that this machine talks to itself by: lo, lo0, or a sentence on Windows."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == "127.0.0.1" for entry in entries):
            return name
    return "lo"


class OwnedTree:
    """A child and all that it starts, ended together: a session, or processes that a variable marks."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16) if portable() else None
        self._began_s = time.time() - CLOCK_TICK_S

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the child."""
        return {} if self._mark is None else {MARK_VARIABLE: self._mark}

    def end(self, process: "subprocess.Popen[bytes]") -> None:
        """Ends all of it, and waits for the child."""
        if self._mark is None and sys.platform != "win32":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
            for _ in range(LOOKS_MAX):
                if not self._end_marked():
                    break
                time.sleep(LOOK_S)
        process.wait()

    def _end_marked(self) -> bool:
        """Ends who has the mark. Returns whether to look again: there was one, or one whose environment is not shown,
        as that of a process is not that the kernel is about to replace."""
        import psutil

        again = False
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                variables = each.environ()
                if each.status() == psutil.STATUS_ZOMBIE:
                    continue
                if variables.get(MARK_VARIABLE) == self._mark:
                    again = True
                    each.kill()
                elif not variables and each.create_time() > self._began_s and each.ppid() not in KERNEL:
                    again = True
        return again


class FolderLock:
    """A lock on a file, held until `release` or the end of this process and of the children that inherit it.

    The twin, sqlite's lock of a file beside it, ends with this process alone.

    Attributes:
        inherited: descriptors for `pass_fds` of the children that hold it too.
    """

    def __init__(self, path: Path, *, shared: bool = False, make: bool = False) -> None:
        """Raises BlockingIOError where another holds it, OSError.

        Args:
            shared: others may hold it so, too; on a twin nobody may.
            make: the file is new, and appears when it is held; else it is there, and no link.
        """
        self._descriptor, self.inherited = -1, list[int]()
        self._database: sqlite3.Connection | None = None
        if sys.platform == "win32" or portable():
            self._path = path.absolute()
            if self._path in _held:  # sqlite would let go of a second handle only together with the first
                raise BlockingIOError(f"this process holds {path}")
            self._database = _exclusive(path.with_name(path.name + TWIN_SUFFIX))
            _held.add(self._path)
            if make:
                path.touch(0o600)
        else:
            hidden = path.with_name(f"{path.name}.new")
            kind = os.O_CREAT | os.O_EXCL if make else os.O_NOFOLLOW
            self._descriptor = os.open(hidden if make else path, os.O_RDWR | os.O_CLOEXEC | kind, 0o600)
            self.inherited.append(self._descriptor)
            try:
                fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if make:
                    hidden.rename(path)
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Lets the next one have it, unless a child holds it; again: nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._database is not None:
            self._database.close()
            self._database = None
            _held.discard(self._path)


_held: set[Path] = set()  # twins that this process has


def _exclusive(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        database.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        database.close()
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            raise BlockingIOError(f"{path} is held") from None
        raise OSError(f"{path} cannot be locked: {error}") from error
    return database


def is_own(path: Path) -> bool:
    """Whether a file is this user's; where users have no numbers, what may be reached is. Raises OSError."""
    return sys.platform == "win32" or path.lstat().st_uid == os.getuid()
