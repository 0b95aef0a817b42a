"""DATA/run: the lock that makes one daemon per data folder, and what its clients need to find and convince it."""

import hashlib
import json
import os
import secrets
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from meshtraind.machine.file_lock import FileLock, LockHeldError
from meshtraind.machine.memory_file import private_folder
from meshtraind.machine.portable import portable
from meshtraind.runtime.privacy import PrivacyError, protect_data

SOCKET_PATH_BYTES_MAX = 107  # sun_path on Linux, without its end
TOKEN_BYTES = 32


class RunDirError(Exception):
    """The data folder cannot be used; the text names it and says what to do."""


class RunDir:
    """Held while the daemon runs.

    Args:
        data_dir: made when it is missing; from then on this user's alone, with all that lies in it.

    Attributes:
        token: what clients show; new at every start.
        notes: what a person should know about who could look into the folder until now.
        socket_path: in the runtime folder, for a data folder's path may be too long for a socket's. None: clients come
            by loopback TCP.

    Raises:
        RunDirError: another daemon holds the folder, or it cannot be written.
    """

    def __init__(self, data_dir: Path) -> None:
        data_dir = Path(os.path.realpath(data_dir))  # one folder has one socket, however it is written
        self.token = secrets.token_hex(TOKEN_BYTES)
        self._path = data_dir / "run"
        self._described = self._path / "daemon.json"
        self._token_path = self._path / "token"
        self.socket_path: Path | None = None
        try:
            with ExitStack() as held:
                self.notes = protect_data(data_dir)
                held.callback(self._taken_lock().release)
                if not portable():
                    self.socket_path = _socket_path(data_dir)
                    self.socket_path.unlink(missing_ok=True)  # a killed daemon's; the lock says that it is gone
                _write_private(self._token_path, self.token)
                self._held = held.pop_all()
        except OSError as error:
            raise RunDirError(
                f"the data folder {data_dir} cannot be used: {error.strerror or error}; "
                "make it writable for your user, or choose another with --data-dir"
            ) from error
        except PrivacyError as error:
            raise RunDirError(str(error)) from error

    def _taken_lock(self) -> FileLock:
        try:
            return FileLock(self._path / "lock")
        except LockHeldError as held:
            raise RunDirError(
                f"meshtraind runs on {self._path.parent} already (process {held}): "
                "use it, stop it with `meshtrain down`, or choose another --data-dir"
            ) from None

    def announce(self, *, listen: str, endpoint: str) -> None:
        """Writes daemon.json, by which clients find the daemon: it answers now."""
        described = {
            "pid": os.getpid(),
            "listen": listen,
            "endpoint": endpoint,
            "token_file": str(self._token_path),
            "started_at_s": time.time(),
        }
        _write_private(self._described, json.dumps(described, indent=2) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for path in (self._described, self._token_path, self.socket_path):
            if path is not None:
                path.unlink(missing_ok=True)
        self._held.close()


def _socket_path(data_dir: Path) -> Path:
    """In a folder of this user alone."""
    try:
        folder = private_folder()
    except PermissionError as error:
        if error.errno is not None:  # the system's refusal, not ours
            raise
        raise RunDirError(str(error)) from None
    path = folder / f"{hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]}.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise RunDirError(
            f"{path} is too long for a socket ({SOCKET_PATH_BYTES_MAX} bytes): set XDG_RUNTIME_DIR to a folder with a "
            "shorter path"
        )
    return path


def _write_private(path: Path, text: str) -> None:
    """Replaces a file in one step, readable for this user only."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    new.replace(path)
