"""Opens what lies in a folder that a job's script may write: a script may have put anything in the place of anything.

Each part of a path is opened in the folder before it, so no link is followed even if it is planted in the middle of a
walk; and only regular files are opened, so nobody waits for the other end of a pipe. A hard link cannot be told from
the file itself and is opened: who may make one may copy the file as well.

Everything here blocks on the disk.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_KINDS = (
    (stat.S_ISLNK, "a link, and links are not followed there"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


@contextmanager
def folder_below(root: Path, parts: Sequence[str]) -> Iterator[int]:
    """A descriptor of a folder below `root`. Its owner made `root`, which may therefore be a link.

    Raises OSError naming the part that is missing, or no folder.
    """
    handle = os.open(root, _FOLDER)
    try:
        for part in parts:
            outer, handle = handle, open_folder(handle, part)
            os.close(outer)
        yield handle
    finally:
        os.close(handle)


def open_folder(folder: int, name: str) -> int:
    """A descriptor of a folder in the one that is open as `folder`. Raises OSError."""
    _check_name(name)
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):  # else it has become one in between
                raise _refused(name, found.st_mode, "folder") from error
        raise


def open_file(folder: int, name: str, mode: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file in the folder that is open as `folder`.

    Args:
        mode: for `os.open`; with O_CREAT a file that is missing is made, readable for this user only.

    Raises:
        OSError: it is missing, or no regular file.
    """
    _check_name(name)
    try:  # a device may do something when it is opened, so first it is looked at
        before = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        if not mode & os.O_CREAT:
            raise
    else:
        if not stat.S_ISREG(before.st_mode):
            raise _refused(name, before.st_mode, "file")
    handle = os.open(name, mode | _FILE, 0o600, dir_fd=folder)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):  # exchanged in between
            raise _refused(name, found.st_mode, "file")
        os.set_blocking(handle, True)  # a child may inherit it; of regular files the disk alone decides
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_below(root: Path, parts: Sequence[str], mode: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file below `root`, as `folder_below` and `open_file` find it. Raises OSError."""
    handle = -1
    try:
        with folder_below(root, parts[:-1]) as folder:
            handle = open_file(folder, parts[-1], mode)
    except BaseException:
        if handle >= 0:
            os.close(handle)
        raise
    return handle


def read_below(root: Path, parts: Sequence[str]) -> io.FileIO:
    """A regular file below `root` for reading, without a buffer. Raises OSError."""
    return os.fdopen(open_below(root, parts), "rb", buffering=0)


def _check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise OSError(errno.EINVAL, f"{name!r} is not the name of one file")


def _refused(name: str, mode: int, wanted: str) -> OSError:
    kind = next((kind for matches, kind in _KINDS if matches(mode)), "a device")
    if stat.S_ISREG(mode):
        kind = "a file"
    return OSError(errno.EPERM, f"{name!r} is no {wanted} but {kind}")
