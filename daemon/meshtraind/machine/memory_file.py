"""Memory that this process and one child map: a file without a name where there is one, else a file in a folder.

The twin has a name until it is closed. What a killed process leaves is removed when the next one makes such a file.
"""

import contextlib
import os
import secrets
import sys
import tempfile
from pathlib import Path

import psutil

from meshtraind.machine.portable import portable
from meshwire.memory_layout.shared_slots import FILE_PREFIX

if sys.platform != "win32":
    import fcntl

SUFFIX = ".memory"


class MemoryFile:
    """A file of no bytes, which who maps it makes as large as it needs.

    Args:
        name: for who looks at this machine's files.

    Attributes:
        descriptor: here; -1 once it is closed.
        grows: it can be made larger again and again. macOS sizes shared memory once.

    Raises:
        OSError: the system refuses.
    """

    def __init__(self, name: str) -> None:
        self._path: Path | None = None
        self.grows = True
        if portable():
            self._path, self.descriptor = _named_file(name)
        elif sys.platform == "linux":
            self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            self.descriptor, self.grows = _shared_memory_object(), False

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that the child must inherit."""
        return () if self._path is not None else (self.descriptor,)

    @property
    def told(self) -> str:
        """By what the child finds it: the inherited descriptor's number, or where it lies."""
        return str(self.descriptor) if self._path is None else f"{FILE_PREFIX}{self._path}"

    def seal(self) -> None:
        """From now on it keeps its size: a child that shrank it would kill this process with SIGBUS. Windows refuses
        to shrink what is mapped; where neither can be (macOS, a twin on Linux), the child is trusted with it."""
        if self._path is None and sys.platform == "linux":
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def size_bytes(self) -> int:
        """How large it is now. Raises OSError."""
        return os.fstat(self.descriptor).st_size

    def read(self, size_bytes: int, offset: int) -> bytes:
        """Reads a part. Raises OSError."""
        return read_at(self.descriptor, size_bytes, offset)

    def close(self) -> None:
        """The memory goes back when the last process that maps it has ended; again: nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self._path is not None:
            with contextlib.suppress(OSError):  # Windows removes nothing that is mapped; the next one does it
                self._path.unlink(missing_ok=True)


def memory_found(told: str) -> int:
    """A descriptor of the memory that another process has told this one of (`MemoryFile.told`). Raises OSError,
    ValueError."""
    if not told.startswith(FILE_PREFIX):
        return int(told)
    kind = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
    return os.open(told.removeprefix(FILE_PREFIX), os.O_RDWR | kind)


def read_at(descriptor: int, size_bytes: int, offset: int) -> bytes:
    """A part of a file, by a descriptor that nobody else reads by meanwhile. Raises OSError."""
    if sys.platform == "win32" or portable():
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size_bytes)
    return os.pread(descriptor, size_bytes, offset)


def _named_file(name: str) -> tuple[Path, int]:
    folder = private_folder()
    for left in folder.glob(f"*{SUFFIX}"):
        owner = left.name.partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            with contextlib.suppress(OSError):  # its learner has not ended yet
                left.unlink(missing_ok=True)
    path = folder / f"{os.getpid()}-{name}-{secrets.token_hex(8)}{SUFFIX}"
    # Windows: bytes as they are, for no child to inherit, and not written to the disk as long as there is memory.
    kind = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0) | getattr(os, "O_SHORT_LIVED", 0)
    return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | kind, 0o600)


def private_folder() -> Path:
    """A folder of this user alone that the system may empty when it starts, for sockets and memory. Raises OSError."""
    if sys.platform == "win32":
        folder = Path(tempfile.gettempdir()) / "meshtrain"  # in the user's profile, whose rights it has
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "meshtrain" if base else Path(tempfile.gettempdir()) / f"meshtrain-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat(follow_symlinks=False)
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} does not belong to your user alone: remove it, or set XDG_RUNTIME_DIR to a folder that does"
        )
    return folder


def _shared_memory_object() -> int:
    import _posixshmem

    name = f"/mt-{secrets.token_hex(8)}"
    descriptor: int = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    _posixshmem.shm_unlink(name)
    return descriptor
