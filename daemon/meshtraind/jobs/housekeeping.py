"""Deletes what jobs have left behind: files of past jobs at the daemon's start, results that have expired, and those
that a person wants to be rid of."""

import asyncio
import logging
import re
import shutil
import time
from pathlib import Path

from meshtraind.jobs.admission import Admission
from meshtraind.jobs.registry import JobRegistry
from meshtraind.peers.node import Node
from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.cleanup import clean_up_all
from meshtraind.storage.disk_space import results_bytes_max
from meshtraind.storage.job_history import HistoryError, UnknownJobError
from meshtraind.storage.results import expire, remove
from meshtraind.transport.connection import RequestFailed
from meshwire import limits
from meshwire.jobs.lifecycle import JOB_ID_PATTERN

log = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 3600.0


class Housekeeper:
    """Keeps the data folder clean while the daemon runs.

    Args:
        past: folders of jobs that earlier daemons have left; what only running jobs need is deleted from them at once.
    """

    def __init__(
        self, node: Node, registry: JobRegistry, admission: Admission, tasks: TaskSet, past: list[Path]
    ) -> None:
        self._node = node
        self._registry = registry
        self._admission = admission
        self._tasks = tasks
        self._cleaned = tasks.spawn(asyncio.to_thread(clean_up_all, past), "remove files of past jobs")

    def keep_clean(self) -> None:
        """Starts to delete, until `close`, what has expired."""
        self._tasks.spawn(self._clean_up_regularly(), "delete what has expired")

    async def _clean_up_regularly(self) -> None:
        await self._cleaned
        while True:
            try:
                await self.expire_results()
                await asyncio.to_thread(self._node.blobs.trim)
                await self._admission.environments.trim()
            except (OSError, BlobError) as error:
                log.warning("what has expired could not be deleted: %s", error)
            await asyncio.sleep(EXPIRY_INTERVAL_S)

    async def expire_results(self) -> None:
        """Deletes results of jobs that ended too long ago, or for which there is no room any more."""
        jobs, now_s = self._node.job_folder(""), time.time()
        here, disk_bytes = await asyncio.to_thread(_on_disk, jobs)
        known = {folder: self._ended_s(folder, changed_s, now_s) for folder, changed_s in here.items()}
        folders = {folder: ended_s for folder, ended_s in known.items() if ended_s is not None}
        if not folders:
            return
        bytes_max = results_bytes_max(disk_bytes)
        for id_ in await asyncio.to_thread(expire, folders, now_s, bytes_max, self._is_over):
            self._note_gone(id_, now_s)

    async def remove(self, id_: str) -> int:
        """Deletes what a job has left here, at a person's word; what it was stays known. Returns how many bytes it took
        on the disk. Raises RequestFailed."""
        if not self._is_over(id_) or self._registry.session(id_) is not None or self._admission.comes_back(id_):
            raise RequestFailed(f"job {id_} has not ended on this device: meshtrain cancel {id_} ends it")
        folder = self._node.job_folder(id_)
        try:
            size_bytes = await asyncio.to_thread(remove, folder)
        except FileNotFoundError:
            raise RequestFailed(f"nothing of job {id_} lies on this device") from None
        except OSError as error:  # a job may have made folders that nobody may write
            where = error.filename or folder
            raise RequestFailed(f"{where} cannot be deleted: {error.strerror or error}; delete it by hand") from error
        self._note_gone(id_, time.time())
        log.info("job %s: its results were deleted at a person's word", id_)
        return size_bytes

    def _note_gone(self, id_: str, now_s: float) -> None:
        job = self._registry.jobs.get(id_)
        if job is not None:
            job.expire(now_s)
            return
        try:
            self._node.history.expire(id_, now_s)
        except HistoryError as error:
            log.info("job %s: that its results are gone is not recorded: %s", id_, error)

    def _is_over(self, id_: str) -> bool:
        job = self._registry.jobs.get(id_)
        return job is None or job.ended

    def _ended_s(self, folder: Path, changed_s: float, now_s: float) -> float | None:
        """When the job whose folder lies here has ended, Unix time; None where it may go on."""
        id_ = folder.name
        if (job := self._registry.jobs.get(id_)) is not None:
            return job.ended_at_s if self._registry.session(id_) is None else None
        try:
            ended_s = self._node.history.find(id_).ended_s
        except UnknownJobError:
            ended_s = changed_s  # the history is new, or has forgotten it
        except HistoryError as error:
            log.warning("the results of job %s are kept: %s", id_, error)
            return None
        if self._admission.may_return(id_) and ended_s is not None and ended_s > now_s - limits.RESULTS_S_MAX:
            return None
        return ended_s


def _on_disk(jobs: Path) -> tuple[dict[Path, float], int]:
    """Folders of jobs with the Unix time of their last change, and the size of their disk in bytes; in a thread, for a
    disk may take its time. Raises OSError."""
    folders = [folder for folder in jobs.glob("*") if re.fullmatch(JOB_ID_PATTERN, folder.name)]
    return {folder: folder.stat().st_mtime for folder in folders}, shutil.disk_usage(jobs).total
