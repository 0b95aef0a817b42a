"""DATA/run: the lock that makes one daemon per data folder, and what its clients need to find and convince it."""

import fcntl
import hashlib
import json
import os
import secrets
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

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
        socket_path: in the runtime folder, for a data folder's path may be too long for a socket's.

    Raises:
        RunDirError: another daemon holds the folder, or it cannot be written.
    """

    def __init__(self, data_dir: Path) -> None:
        data_dir = Path(os.path.realpath(data_dir))  # one folder has one socket, however it is written
        self.token = secrets.token_hex(TOKEN_BYTES)
        self._path = data_dir / "run"
        self._described = self._path / "daemon.json"
        self._token_path = self._path / "token"
        self._lock = -1
        try:
            self.notes = protect_data(data_dir)
            self._take_lock()
            self.socket_path = _runtime_folder() / f"{hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]}.sock"
            self.socket_path.unlink(missing_ok=True)  # of a daemon that was killed; the lock says that it is gone
            _write_private(self._token_path, self.token)
        except OSError as error:
            self._release()
            raise RunDirError(
                f"the data folder {data_dir} cannot be used: {error.strerror or error}; "
                "make it writable for your user, or choose another with --data-dir"
            ) from error
        except PrivacyError as error:
            raise RunDirError(str(error)) from error
        except BaseException:
            self._release()
            raise
        if len(os.fsencode(self.socket_path)) > SOCKET_PATH_BYTES_MAX:
            self._release()
            raise RunDirError(
                f"{self.socket_path} is too long for a socket ({SOCKET_PATH_BYTES_MAX} bytes): set XDG_RUNTIME_DIR "
                "to a folder with a shorter path"
            )

    def _take_lock(self) -> None:
        lock = self._path / "lock"
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read_text().strip() or "unknown"
            raise RunDirError(
                f"meshtraind runs on {self._path.parent} already (process {holder}): "
                "use it, stop it with `meshtrain down`, or choose another --data-dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"{os.getpid()}\n".encode())

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
            path.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _runtime_folder() -> Path:
    """A folder of this user alone, for sockets."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "meshtrain" if base else Path(tempfile.gettempdir()) / f"meshtrain-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat(follow_symlinks=False)
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunDirError(
            f"{folder} does not belong to your user alone: remove it, or set XDG_RUNTIME_DIR to a folder that does"
        )
    return folder


def _write_private(path: Path, text: str) -> None:
    """Replaces a file in one step, readable for this user only."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    new.replace(path)
