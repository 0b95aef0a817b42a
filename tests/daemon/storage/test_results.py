"""Results of jobs that have ended are kept for months, and while there is room; people are told when they are gone."""

import asyncio
import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.jobs.queries import JobQueries
from meshtraind.jobs.routing import JobRouter
from meshtraind.owner.live_settings import LiveSettings
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.job_history import JobHistory
from meshtraind.storage.job_record import summary_of
from meshtraind.storage.results import expire
from meshtraind.transport.connection import RequestFailed
from meshwire import limits
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.job import Fetch, ListOutputs
from meshwire.messages.local import GetJobs
from tests.daemon.fakedaemon import Endpoint, known_jobs, run, summary
from tests.daemon.linkusers import DialsNobody
from tests.daemon.storage.test_job_history import record

DAY_S = 86_400.0
NOW_S = 2e9
KIB_16 = bytes(16 * 1024)


def make(jobs: Path, id_: str, size: bytes = KIB_16) -> Path:
    for name in ("out/0/deep/er/model.pt", "logs/0.log"):
        path = jobs / id_ / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(size)
    return jobs / id_


def left(jobs: Path) -> set[str]:
    return {path.name for path in jobs.iterdir()}


def test_results_expire_by_age_and_the_oldest_first_beyond_the_quota(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folders = {make(tmp_path, f"job{days}"): NOW_S - days * DAY_S for days in (1, 30, 89, 91, 200)}
    assert expire(folders, NOW_S, 10**9, lambda _id: True) == ("job200", "job91")
    assert left(tmp_path) == {"job1", "job30", "job89"}
    assert "job job200: deleted its results, 32.0 KiB, 200 days after its end: results are kept for 90" in caplog.text
    folders = {folder: ended_s for folder, ended_s in folders.items() if folder.exists()}
    assert expire(folders, NOW_S, 70 * 1024, lambda _id: True) == ("job89",)
    assert "results take 96.0 KiB, at most 70.0 KiB are kept, the newest" in caplog.text
    assert expire(folders, NOW_S, 0, lambda id_: id_ != "job30") == ("job1",), "it goes on again"
    assert left(tmp_path) == {"job30"}


def test_links_in_results_are_not_followed(tmp_path: Path) -> None:
    precious = make(tmp_path / "elsewhere", "mine")
    folder = make(tmp_path / "jobs", "job")
    (folder / "out" / "0" / "link").symlink_to(precious)
    expire({folder: 0.0}, NOW_S, 10**9, lambda _id: True)
    assert left(tmp_path / "jobs") == set()
    assert (precious / "logs" / "0.log").exists()


@pytest.mark.asyncio
async def test_a_daemon_deletes_what_has_expired_says_so_and_leaves_all_else_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never those of a job that has not ended, nor a folder that is no job's; a new history is no reason either."""
    now_s = time.time()
    old_s = now_s - limits.RESULTS_S_MAX - DAY_S
    history = JobHistory(tmp_path / "jobs.db", now_s)
    old, young, running = record(1), record(2), record(3, JobState.RUNNING)
    device = old.members[0]
    for job, ended_s in ((old, old_s), (young, now_s - DAY_S), (running, None)):
        history.put(job.model_copy(update={"started_s": old_s, "ended_s": ended_s}))
    jobs = tmp_path / "jobs"
    unknown, forgotten = record(4).id, record(5).id
    for name in (old.id, young.id, running.id, unknown, forgotten, "backup"):
        os.utime(make(jobs, name), (old_s, old_s) if name != unknown else None)
    node: Any = SimpleNamespace(
        device=device, name="anna", history=history, links={}, job_folder=lambda id_: jobs / id_,
        blobs=BlobStore(tmp_path / "blobs"), data_dir=tmp_path, settings=LiveSettings(tmp_path),
    )  # fmt: skip
    board = JobRouter(node, DialsNobody())
    board.housekeeper.keep_clean()
    try:
        async with asyncio.timeout(10):
            while (jobs / old.id).exists() or history.find(old.id).spec.get("expired_s") is None:
                await asyncio.sleep(0.01)
        assert left(jobs) == {young.id, running.id, unknown, "backup"}
        assert [summary_of(job).expired_at_s is None for job in history.newest()] == [True, True, False]
        questions = JobQueries(node, board.registry, board.admission)
        gone = f"the results and logs of job {old.id} on this device are gone: they were deleted on 20.*90 days"
        with pytest.raises(RequestFailed, match=gone):
            await questions.outputs(ListOutputs(job=old.id), forward=False)
        for what in ("log", "output"):
            wanted = Fetch(job=old.id, what=cast(Any, what), path="model.pt", offset_bytes=0, max_bytes=1)
            with pytest.raises(RequestFailed, match=gone):
                await questions.fetch(wanted, forward=False)
        assert len((await questions.outputs(ListOutputs(job=young.id), forward=False)).files) == 1

        asked: list[bool] = []
        disk_usage = shutil.disk_usage

        def watched(path: Path) -> object:
            asked.append(threading.current_thread() is threading.main_thread())
            return disk_usage(path)

        monkeypatch.setattr("meshtraind.jobs.housekeeping.shutil.disk_usage", watched)
        monkeypatch.setattr("meshtraind.jobs.housekeeping.results_bytes_max", lambda _disk_bytes: 0)
        await board.housekeeper.expire_results()
        assert asked == [False], "the loop does not wait for a disk"
        assert left(jobs) == {running.id, "backup"}
    finally:
        await board.close()
        history.close()


@pytest.mark.asyncio
async def test_a_person_is_rid_of_what_one_job_has_left_and_of_nothing_else(tmp_path: Path) -> None:
    """`meshtrain rm`: of jobs that have ended; what they were stays known."""
    now_s = time.time()
    history = JobHistory(tmp_path / "jobs.db", now_s)
    old, young, running = record(1), record(2), record(3, JobState.RUNNING)
    jobs = tmp_path / "jobs"
    for job, ended_s in ((old, now_s - DAY_S), (young, now_s - DAY_S), (running, None)):
        history.put(job.model_copy(update={"started_s": 1.0, "ended_s": ended_s}))
        make(jobs, job.id)
    stranger = make(jobs, record(4).id)
    node: Any = SimpleNamespace(
        device=old.members[0], name="anna", history=history, links={}, job_folder=lambda id_: jobs / id_,
        blobs=BlobStore(tmp_path / "blobs"), data_dir=tmp_path, settings=LiveSettings(tmp_path),
    )  # fmt: skip
    router = JobRouter(node, DialsNobody())
    lives: dict[str, Any] = {running.id: SimpleNamespace(ended=False)}
    router.registry._jobs.update(lives)
    try:
        assert await router.housekeeper.remove(old.id) >= 2 * len(KIB_16)
        assert left(jobs) == {young.id, running.id, stranger.name}
        gone = {job.id: summary_of(job).expired_at_s for job in history.newest()}
        assert gone[young.id] is gone[running.id] is None
        assert (gone[old.id] or 0) >= now_s
        with pytest.raises(RequestFailed, match=f"nothing of job {old.id} lies on this device"):
            await router.housekeeper.remove(old.id)
        with pytest.raises(RequestFailed, match=f"job {running.id} has not ended .* meshtrain cancel {running.id}"):
            await router.housekeeper.remove(running.id)
        assert left(jobs) == {young.id, running.id, stranger.name}
        await router.housekeeper.remove(stranger.name)  # the history has forgotten it
        assert left(jobs) == {young.id, running.id}
    finally:
        router.registry._jobs.clear()
        await router.close()
        history.close()


@pytest.mark.usefixtures("plain_environment")
def test_the_list_of_jobs_says_what_has_expired(endpoint: Endpoint) -> None:
    gone = summary(JobState.SUCCEEDED).model_copy(update={"expired_at_s": NOW_S})
    endpoint.answers[GetJobs] = known_jobs(gone)
    shown = run("jobs")
    assert "succeeded, deleted" in shown.stdout, shown.stderr
    assert json.loads(run("jobs", "--json").stdout)[0]["expired_at_s"] == NOW_S
