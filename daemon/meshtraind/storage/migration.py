"""Brings a data folder that an older meshtraind has written to today's format.

A step may be cut off anywhere and is then done again, so doing it twice must be doing it once. The databases carry the
number as well, for versions from before DATA/format: they look there, and refuse what is newer.

Everything here blocks on the disk; where nothing is to be done, for less than a millisecond.
"""

import contextlib
import logging
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

from meshtraind.runtime.data_folder import FORMAT, FormatError, read_format, write_format
from meshtraind.storage.checkpoint_store import CheckpointError, CheckpointStore
from meshtraind.trust.pins import upgrade
from meshwire.jobs.lifecycle import JOB_ID_PATTERN

log = logging.getLogger(__name__)


def migrate(data_dir: Path, meshtrain: str) -> None:
    """Brings the folder to today's format, step by step; the caller holds its lock.

    Args:
        meshtrain: the version that is installed here, which the folder then names as its writer.

    Raises:
        FormatError: it is of a newer format, or a step failed.
    """
    number = read_format(data_dir)
    if number == FORMAT:
        return
    used = (data_dir / "pins.db").exists()
    try:
        for step in range(number, FORMAT):
            _STEPS[step](data_dir)
        write_format(data_dir, meshtrain)
    except (OSError, sqlite3.Error, CheckpointError) as error:
        raise FormatError(
            f"{data_dir} cannot be brought from format {number} to {FORMAT}: {error}. Nothing is lost: mend that, and "
            "start again"
        ) from error
    if used:
        log.info("%s was of format %d and is of format %d now, which older versions refuse", data_dir, number, FORMAT)


def _spell_anew(data_dir: Path) -> None:
    """Spells the manifests of checkpoints anew, for what is sent of one is hashed as it is spelled today."""
    for name in ("pins.db", "jobs.db"):  # first: from now on older versions keep away
        _lock_out(data_dir / name)
    for folder in sorted((data_dir / "jobs").glob("*")):
        if re.fullmatch(JOB_ID_PATTERN, folder.name):
            CheckpointStore(folder, folder.name, keep=1).respell()


def _begin_introductions(data_dir: Path) -> None:
    """Before them trust was between two devices, and stays so until the person says otherwise (K3)."""
    for name in ("pins.db", "jobs.db"):
        _lock_out(data_dir / name)
    upgrade(data_dir / "pins.db")


# By the format that they begin from.
_STEPS: dict[int, Callable[[Path], None]] = {
    1: _spell_anew,
    2: _spell_anew,
    3: _begin_introductions,
    4: _spell_anew,
}


def _lock_out(path: Path) -> None:
    if not path.exists():
        return
    with contextlib.closing(sqlite3.connect(path, timeout=5.0, isolation_level=None)) as database:
        (found,) = database.execute("PRAGMA user_version").fetchone()
        if 0 < found < FORMAT:  # 0: a start that was killed has made nothing in it
            database.execute(f"PRAGMA user_version = {FORMAT}")
