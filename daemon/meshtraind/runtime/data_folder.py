"""DATA/format: which format the data folder has, and the way from that of an older meshtraind to today's.

One number stands for all that lies in the folder: pins, history, files of jobs, checkpoints. Whoever changes what is
written there, so that an older meshtraind would misread it or this one cannot read what is there, counts `FORMAT` on
and adds the step. A step may be cut off anywhere and is then done again, so doing it twice must be doing it once.

The databases carry the number as well, for versions from before the file: they look there, and refuse what is newer.

Everything here blocks on the disk, on an ordinary start for less than a millisecond.
"""

import contextlib
import logging
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

from meshtraind.learner.software import installed_software
from meshtraind.storage.checkpoint_store import CheckpointError, CheckpointStore
from meshwire import limits
from meshwire.frames.header import WIRE_VERSION
from meshwire.jobs.lifecycle import JOB_ID_PATTERN

log = logging.getLogger(__name__)

FORMAT = 2
BEFORE_THE_FILE = 1  # of wire versions up to 5
NAME = "format"
_FORM = re.compile(r"(?P<number>[1-9][0-9]{0,5}) written by (?P<writer>[ -~]{1,100})\n")


class FormatError(Exception):
    """The data folder is not one that this version can use; the message names it and what to do."""


def check(data_dir: Path) -> int:
    """The folder's format. Writes nothing.

    Raises:
        FormatError: it is of a newer meshtraind, or does not say what it is.
    """
    path = data_dir / NAME
    try:
        with path.open("rb") as file:
            text = file.read(limits.RUN_FILE_BYTES_MAX).decode("ascii", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return BEFORE_THE_FILE  # or there is no folder yet, and nothing to be brought to today's
    except OSError as error:
        raise FormatError(f"cannot read {path} ({error.strerror}): make it readable to the daemon's user") from error
    form = _FORM.fullmatch(text)
    if form is None:
        raise FormatError(f"{path} is damaged: restore it from a backup, or choose another --data-dir")
    number = int(form["number"])
    if number > FORMAT:
        raise FormatError(
            f"{data_dir} is of a newer meshtrain: {form['writer']} has written it in format {number}, and this one "
            f"knows formats up to {FORMAT}. Nothing was changed. Install the newer one again, or choose another "
            "--data-dir, where this device is a new one to its peers"
        )
    return number


def migrate(data_dir: Path) -> None:
    """Brings the folder to today's format, step by step; the caller holds its lock. Raises FormatError."""
    number = check(data_dir)
    if number == FORMAT:
        return
    used = (data_dir / "pins.db").exists()
    try:
        for step in range(number, FORMAT):
            _STEPS[step](data_dir)
        _write(data_dir / NAME, f"{FORMAT} written by {_writer()}\n")
    except (OSError, sqlite3.Error, CheckpointError) as error:
        raise FormatError(
            f"{data_dir} cannot be brought from format {number} to {FORMAT}: {error}. Nothing is lost: mend that, and "
            "start again"
        ) from error
    if used:
        log.info("%s was of format %d and is of format %d now, which older versions refuse", data_dir, number, FORMAT)


def _from_1(data_dir: Path) -> None:
    """Manifests of checkpoints are spelled anew, for what is sent of one is hashed as it is spelled today."""
    for name in ("pins.db", "jobs.db"):  # first: from now on older versions keep away
        _lock_out(data_dir / name, 2)
    for folder in sorted((data_dir / "jobs").glob("*")):
        if re.fullmatch(JOB_ID_PATTERN, folder.name):
            CheckpointStore(folder, folder.name, keep=1).respell()


_STEPS: dict[int, Callable[[Path], None]] = {1: _from_1}  # by the format that they begin from


def _lock_out(path: Path, number: int) -> None:
    if not path.exists():
        return
    with contextlib.closing(sqlite3.connect(path, timeout=5.0, isolation_level=None)) as database:
        (found,) = database.execute("PRAGMA user_version").fetchone()
        if 0 < found < number:  # 0: a start that was killed has made nothing in it
            database.execute(f"PRAGMA user_version = {number}")


def _writer() -> str:
    return f"meshtrain {installed_software().meshtrain} (wire version {WIRE_VERSION})"


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{NAME}.part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
