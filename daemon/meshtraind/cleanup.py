"""What is deleted when a job is over: its copies of files, and blobs that are needed no more. Blocks on the disk.

Kept are out/, logs/ and traces of a job that began, and of one that did not succeed its checkpoints/.
"""

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from meshtraind.blobs import BlobStore, building_folder
from meshtraind.checkpoints import CHECKPOINTS

log = logging.getLogger(__name__)

SOURCE, DATA, STATE, RESUME = "src", "data", "state", "resume"  # below a job's folder


def clean_up(job: str, folder: Path, store: BlobStore, *, succeeded: bool) -> None:
    """Of a job that has ended: what it ran from is deleted, its results are kept. Raises BlobError."""
    remove_inputs(folder)
    if succeeded:
        _remove(folder / CHECKPOINTS)
    _let_go(job, store)


def discard(job: str, folder: Path, store: BlobStore) -> None:
    """Of a job that never began: everything is deleted. Raises BlobError."""
    _remove(folder)
    _let_go(job, store)


def clean_up_all(folders: Iterable[Path]) -> None:
    """At the start of a daemon: what its predecessor had no time to delete of these jobs."""
    for folder in folders:
        remove_inputs(folder)


def remove_inputs(folder: Path) -> None:
    """Deletes what a job's learner ran from."""
    for name in (SOURCE, DATA, STATE, RESUME):
        _remove(folder / name)
        _remove(building_folder(folder / name))


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
