"""What is deleted when a job is over: its copies of files, and blobs that are needed no more. Blocks on the disk.

Kept are out/, logs/, the course and traces of a job that began, and its checkpoints/; of one that succeeded only those
of histories that were given up.
"""

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from meshtraind.storage.blobs import BlobStore, building_folder
from meshtraind.storage.checkpoint_store import CHECKPOINTS, names_among
from meshtraind.storage.fetch import LOGS, RECORD_SUFFIX

log = logging.getLogger(__name__)

SOURCE, DATA, STATE, RESUME = "src", "data", "state", "resume"  # below a job's folder


def clean_up(job: str, folder: Path, store: BlobStore, *, succeeded: bool) -> None:
    """Deletes what an ended job ran from, and keeps its results. Raises BlobError."""
    remove_inputs(folder)
    if succeeded:
        _remove_kept_histories(folder / CHECKPOINTS)
    _let_go(job, store)


def discard(job: str, folder: Path, store: BlobStore) -> None:
    """Deletes everything of a job that never began. Raises BlobError."""
    _remove(folder)
    _let_go(job, store)


def clean_up_all(folders: Iterable[Path]) -> None:
    """Deletes, when a daemon starts, what its predecessor had no time to delete of these jobs."""
    for folder in folders:
        remove_inputs(folder)


def remove_inputs(folder: Path) -> None:
    """Deletes what a job's learner ran from."""
    for name in (SOURCE, DATA, STATE, RESUME):
        _remove(folder / name)
        _remove(building_folder(folder / name))
    logs = folder / LOGS
    for record in logs.glob(f"*{RECORD_SUFFIX}") if not logs.is_symlink() else ():  # a daemon that was killed read none
        try:
            record.unlink()
        except OSError as error:
            log.warning("cannot delete %s: %s; delete it by hand", record, error)


def _remove_kept_histories(folder: Path) -> None:
    """Deletes the checkpoints of a job whose result is there, but not those of histories that were given up: these are
    nowhere else, and a person was told their names."""
    entries = os.listdir(folder) if folder.is_dir() and not folder.is_symlink() else []
    given_up = {str(name) for name in names_among(entries) if name.given_up}
    if not given_up:
        _remove(folder)
    for entry in entries:
        if entry not in given_up:
            _remove(folder / entry)


def _let_go(job: str, store: BlobStore) -> None:
    store.release(job)
    store.trim()


def _remove(folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError) as error:
        # A job may have made folders that nobody may write, or a thousand in each other; there a person has to help.
        log.warning("cannot delete %s: %s; delete it by hand", folder, error)
