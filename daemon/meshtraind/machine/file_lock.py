"""A lock on a file that ends with the process that holds it, kill -9 or not, and that names who that is."""

import os
import sqlite3
import sys
from pathlib import Path

from meshtraind.machine.portable import portable

if sys.platform != "win32":
    import fcntl

TWIN_SUFFIX = ".held"


class LockHeldError(Exception):
    """Somebody else holds it. The text is what the holder has written: its process id."""


class FileLock:
    """Held from the constructor to `release`.

    The twin of flock is sqlite's own lock of a file beside it (`BEGIN EXCLUSIVE`; LockFileEx on Windows).

    Args:
        path: made when it is missing, for this user alone; who holds it writes its process id there.

    Raises:
        LockHeldError, OSError.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        self._database: sqlite3.Connection | None = None
        try:
            if sys.platform == "win32" or portable():
                self._database = _exclusive(path.with_name(path.name + TWIN_SUFFIX))
            else:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()}\n".encode())
        except BlockingIOError:
            self.release()
            raise LockHeldError(path.read_text().strip() or "unknown") from None
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets the next one have it; again: nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._database is not None:
            self._database.close()
            self._database = None


def _exclusive(path: Path) -> sqlite3.Connection:
    """Raises BlockingIOError where another holds it, OSError."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        database = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            database.execute("BEGIN EXCLUSIVE")
        except BaseException:
            database.close()
            raise
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            raise BlockingIOError(f"{path} is held") from None
        raise OSError(f"{path} cannot be locked: {error}") from error
    return database
