"""How long the outputs, logs and checkpoints of jobs that have ended are kept: some months, and while there is room.

Everything here blocks on the disk: call it in a worker thread.
"""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshtraind.machine.facts import bytes_on_disk
from meshwire import limits
from meshwire.jobs.files import human_bytes

log = logging.getLogger(__name__)

DAY_S = 86_400.0


@dataclass(frozen=True)
class _Kept:
    ended_s: float
    folder: Path
    size_bytes: int


def expire(
    folders: Mapping[Path, float], now_s: float, bytes_max: int, may_delete: Callable[[str], bool]
) -> tuple[str, ...]:
    """Deletes the results of jobs that ended too long ago, and of the oldest until the rest has at most `bytes_max`.

    What cannot be deleted is named in the log, and tried again the next time.

    Args:
        folders: of jobs that have ended, named by their ids, with the Unix time of the end.
        may_delete: asked for each id at the last moment: a job may go on meanwhile.

    Returns:
        The ids of the jobs whose results are gone.
    """
    kept = sorted((_Kept(ended_s, folder, _size_bytes(folder)) for folder, ended_s in folders.items()), key=_order)
    total_bytes = sum(one.size_bytes for one in kept)
    gone = []
    for one in kept:
        if one.ended_s < now_s - limits.RESULTS_S_MAX:
            why = f"results are kept for {limits.RESULTS_S_MAX / DAY_S:.0f} days"
        elif total_bytes > bytes_max:
            why = f"results take {human_bytes(total_bytes)}, at most {human_bytes(bytes_max)} are kept, the newest"
        else:
            break
        if not may_delete(one.folder.name):
            continue
        try:
            shutil.rmtree(one.folder)
        except OSError as error:  # a job may have made folders that nobody may write
            log.warning("job %s: its results cannot be deleted: %s; delete them by hand", one.folder.name, error)
            continue
        days = (now_s - one.ended_s) / DAY_S
        log.info(
            "job %s: deleted its results, %s, %.0f days after its end: %s",
            *(one.folder.name, human_bytes(one.size_bytes), days, why),
        )
        total_bytes -= one.size_bytes
        gone.append(one.folder.name)
    return tuple(gone)


def remove(folder: Path) -> int:
    """Deletes what a job has left. Returns how many bytes it took on the disk. Raises OSError."""
    size_bytes = _size_bytes(folder)
    shutil.rmtree(folder)
    return size_bytes


def _order(one: _Kept) -> tuple[float, Path]:
    return one.ended_s, one.folder


def _size_bytes(folder: Path) -> int:
    """What it takes on the disk. What vanishes meanwhile takes nothing."""
    size_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size_bytes += bytes_on_disk(os.lstat(os.path.join(parent, name)))
            except FileNotFoundError:
                continue
    return size_bytes
