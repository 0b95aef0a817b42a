"""Opens what lies in a folder that a job's script may write: a script may have put anything in the place of anything.

Each part of a path is opened in the folder before it, so no link is followed even if it is planted in the middle of a
walk; and only regular files are opened, so nobody waits for the other end of a pipe. A hard link cannot be told from
the file itself and is opened: who may make one may copy the file as well.

Windows opens no folder as a file. There each part is looked at before the walk goes on, and the file again when it is
open: a script that exchanges a folder for a link in between, which needs a right of its own there, is followed.

Everything here blocks on the disk.
"""

import errno
import io
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshtraind.machine.portable import portable

if sys.platform == "win32":
    _FOLDER = _FILE = NO_FOLLOW = 0  # nobody uses them
else:
    NO_FOLLOW = os.O_NOFOLLOW
    _FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    _FILE = NO_FOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Windows: bytes as they are, and for no child to inherit.
_FILE_BY_PATH = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0) | getattr(os, "O_NONBLOCK", 0)

Folder = int | str  # a descriptor; where folders have none, the path, which was looked at

_KINDS = (
    (stat.S_ISLNK, "a link, and links are not followed there"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


@contextmanager
def folder_below(root: Path, parts: Sequence[str]) -> Iterator[Folder]:
    """A folder below `root`, opened. Its owner made `root`, which may therefore be a link.

    Raises OSError naming the part that is missing, or no folder.
    """
    if sys.platform == "win32" or portable():
        path = str(root)
        os.stat(path)
        for part in parts:
            path = _folder_by_path(path, part)
        yield path
        return
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
        return os.open(name, _FOLDER | NO_FOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):  # else it has become one in between
                raise _refused(name, found.st_mode, "folder") from error
        raise


def _folder_by_path(folder: str, name: str) -> str:
    _check_name(name)
    path = os.path.join(folder, name)
    found = os.lstat(path)
    # A junction of Windows is a folder that leads elsewhere.
    if not stat.S_ISDIR(found.st_mode) or getattr(found, "st_reparse_tag", False):
        raise _refused(name, found.st_mode, "folder")
    return path


def open_file(folder: Folder, name: str, mode: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file in the folder that is open as `folder`.

    Args:
        mode: for `os.open`; with O_CREAT a file that is missing is made, readable for this user only.

    Raises:
        OSError: it is missing, or no regular file.
    """
    _check_name(name)
    if sys.platform == "win32" or isinstance(folder, str):
        return _file_by_path(os.path.join(str(folder), name), name, mode)
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


def _file_by_path(path: str, name: str, mode: int) -> int:
    try:
        before = os.lstat(path)
    except FileNotFoundError:
        if not mode & os.O_CREAT:
            raise
    else:
        if not stat.S_ISREG(before.st_mode):
            raise _refused(name, before.st_mode, "file")
    handle = os.open(path, mode | _FILE_BY_PATH, 0o600)
    try:
        there, found = os.lstat(path), os.fstat(handle)
        if not stat.S_ISREG(there.st_mode) or not os.path.samestat(there, found):  # exchanged in between
            raise _refused(name, there.st_mode, "file")
        if sys.platform != "win32":
            os.set_blocking(handle, True)
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
    if name in ("", ".", "..") or "/" in name or "\0" in name or os.sep in name:
        raise OSError(errno.EINVAL, f"{name!r} is not the name of one file")


def _refused(name: str, mode: int, wanted: str) -> OSError:
    kind = next((kind for matches, kind in _KINDS if matches(mode)), "a device")
    if stat.S_ISREG(mode):
        kind = "a file"
    if stat.S_ISDIR(mode) and wanted == "folder":
        kind = "a junction, which leads elsewhere"
    return OSError(errno.EPERM, f"{name!r} is no {wanted} but {kind}")
