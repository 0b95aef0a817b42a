"""How much of a disk jobs may take: the rest is its owner's.

Shares, so that a small disk keeps room and a large one is not held half empty. Pure, but for asking what is free.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from meshtraind.storage.blob_writer import BlobError, explained
from meshwire import limits
from meshwire.jobs.files import human_bytes

ShareOfDisk = Callable[[int], int]  # of a disk's bytes


def reserve_bytes(disk_bytes: int) -> int:
    """How much of a disk is left free for the machine's owner: 5 %, within bounds; of a disk that is too small for
    these a quarter."""
    share_bytes = max(disk_bytes // 20, limits.DISK_RESERVE_BYTES_MIN)
    return min(share_bytes, disk_bytes // 4, limits.DISK_RESERVE_BYTES_MAX)


def results_bytes_max(disk_bytes: int) -> int:
    """How much of a disk outputs, logs and checkpoints of jobs that have ended may take: a fifth, within bounds."""
    return min(disk_bytes // 5, limits.RESULTS_BYTES_MAX)


def short_bytes(folder: Path, needed_bytes: int, reserve: ShareOfDisk) -> int:
    """What is missing for `needed_bytes` beside the reserve; 0: it fits. Raises BlobError."""
    with explained("ask for the free space of", folder):
        usage = shutil.disk_usage(folder)
    return max(0, needed_bytes + reserve(usage.total) - usage.free)


def require(folder: Path, needed_bytes: int, reserve: ShareOfDisk) -> None:
    """Raises BlobError, with what to free, where `needed_bytes` do not fit beside the reserve."""
    missing_bytes = short_bytes(folder, needed_bytes, reserve)
    if missing_bytes == 0:
        return
    usage = shutil.disk_usage(folder)
    raise BlobError(
        f"not enough space in {folder}: {human_bytes(needed_bytes)} needed and {human_bytes(reserve(usage.total))} "
        f"kept in reserve, {human_bytes(usage.free)} free; free at least {human_bytes(missing_bytes)} there (results "
        f"of old jobs lie in {folder.parent / 'jobs'}), or start the daemon with --data-dir on another disk"
    )
