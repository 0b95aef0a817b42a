"""The data folder and all in it are this user's alone, whatever modes they had before: keys, results, people's data."""

import os
import stat
from pathlib import Path

from meshtraind.machine.facts import has_modes

FOLDERS = ("run", "jobs", "blobs")  # of the data folder; `identity.py` and `pins.py` refuse what others could change
FILES = ("jobs.db", "jobs.db-wal", "jobs.db-shm", "daemon.log", "daemon.log.1", "config.toml")
MARKS = {"run", "identity"}  # what every data folder has had since its first start
BEFORE_THE_FIRST_START = {"daemon.log", "daemon.log.1"}  # of `meshtrain up`

FOLDER_MODE, FILE_MODE = 0o700, 0o600
OF_OTHERS = 0o077


class PrivacyError(Exception):
    """A folder cannot be made this user's alone; the text says what to do."""


def make_private(folder: Path) -> bool:
    """Makes a folder that only this user may enter, or takes everybody else's rights from the one that is there.

    Returns whether others had any. Raises OSError, PrivacyError.
    """
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    return _narrow(folder, FOLDER_MODE)


def protect_data(data_dir: Path) -> tuple[str, ...]:
    """Makes a data folder, or narrows an old one, all the folders of its jobs included. Blocking.

    Returns:
        A sentence for a person if others could look into it until now.

    Raises:
        PrivacyError: it is somebody else's, or holds other things, which may be meant for others.
        OSError: it cannot be made.
    """
    if data_dir.is_dir():
        _check_ours(data_dir)
    mode = stat.S_IMODE(data_dir.stat().st_mode) if data_dir.is_dir() else FOLDER_MODE
    was_open = make_private(data_dir)
    for name in FOLDERS:
        make_private(data_dir / name)
    for folder in (data_dir / "jobs").iterdir():
        if folder.is_dir() and not folder.is_symlink():  # a link that a person made leads to a folder of theirs
            _narrow(folder, FOLDER_MODE)
    for name in FILES:
        if os.path.lexists(data_dir / name):
            _narrow(data_dir / name, FILE_MODE)
    return (f"others than you could look into {data_dir} (mode {mode:03o}); now only you can",) if was_open else ()


def _check_ours(data_dir: Path) -> None:
    """Raises PrivacyError where taking others' rights could break what is not meshtrain's, such as /tmp or a home."""
    mode = data_dir.stat().st_mode
    if not has_modes() or not mode & OF_OTHERS:
        return
    names = set(os.listdir(data_dir))
    if mode & stat.S_ISVTX or (names - BEFORE_THE_FIRST_START and not names & MARKS):
        raise PrivacyError(
            f"{data_dir} is no folder of meshtrain's own, and others than you may use it (mode "
            f"{stat.S_IMODE(mode):03o}): choose a new one for the data, such as --data-dir {data_dir / 'meshtrain'}"
        )


def _narrow(path: Path, mode: int) -> bool:
    if not has_modes() or not path.stat().st_mode & OF_OTHERS:
        return False
    try:
        path.chmod(mode)
    except PermissionError as error:
        raise PrivacyError(
            f"{path} belongs to another user, and others than you may use it: choose another --data-dir"
        ) from error
    if path.stat().st_mode & OF_OTHERS:
        raise PrivacyError(
            f"{path} stays open to others than you: its file system keeps no modes; choose a --data-dir on another one"
        )
    return True
