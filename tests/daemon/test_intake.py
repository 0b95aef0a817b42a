"""A job's files arrive whole, at once and only once; what nobody needs any more is deleted."""

import asyncio
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from meshtraind.blobs import BlobStore
from meshtraind.cleanup import clean_up, clean_up_all, discard
from meshtraind.connection import Connection
from meshtraind.fetch import fetch_blob, serve
from meshwire.messages.job import BlobRef, Fetch
from meshwire.wiretypes import Wire

JOB = "0" * 12
CONTENT = bytes(range(256)) * 4096  # several pieces
BLOB = BlobRef(sha256=hashlib.sha256(CONTENT).digest(), size_bytes=len(CONTENT))


class Peer:
    """The other end of a link, which serves its own store."""

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.asked = 0
        self.answering = 0
        self.answering_most = 0
        self.open = asyncio.Event()
        self.open.set()

    async def request(self, body: Wire, *, timeout_s: float, name: str) -> Wire:
        assert isinstance(body, Fetch)
        self.asked += 1
        self.answering += 1
        self.answering_most = max(self.answering_most, self.answering)
        try:
            await self.open.wait()
            return await serve(body, self.store, self.store.path, ended=lambda: True)
        finally:
            self.answering -= 1

    @property
    def connection(self) -> Connection:
        return cast(Connection, self)


def put(store: BlobStore, content: bytes) -> BlobRef:
    sha256 = hashlib.sha256(content).digest()
    with store.writer(sha256, len(content)) as writer:
        writer.write(memoryview(content))
        writer.finish()
    return BlobRef(sha256=sha256, size_bytes=len(content))


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "here")


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    return Peer(BlobStore(tmp_path / "there"))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_a_fetch_that_is_cancelled_while_it_opens_its_blob_leaves_it_free(
    store: BlobStore, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(peer.store, CONTENT)
    opening, go_on = threading.Event(), threading.Event()
    made = BlobStore.writer

    def slow(*args: object, **options: object) -> object:
        opening.set()
        assert go_on.wait(10)
        return made(*args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(BlobStore, "writer", slow)
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            fetching = tasks.create_task(fetch_blob(peer.connection, JOB, BLOB, store))
            await until(opening.is_set)
            fetching.cancel()
            await asyncio.sleep(0)
            go_on.set()
    await fetch_blob(peer.connection, JOB, BLOB, store)
    assert store.has(BLOB.sha256, BLOB.size_bytes)


@pytest.mark.asyncio
async def test_two_jobs_that_want_one_blob_receive_it_once(store: BlobStore, peer: Peer) -> None:
    """A job's files and a start state's units: shipped once, cached by content."""
    put(peer.store, CONTENT)
    counted = [0, 0]

    def count(job: int) -> Callable[[int], None]:
        def add(size_bytes: int) -> None:
            counted[job] += size_bytes

        return add

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for job in range(2):
            tasks.create_task(fetch_blob(peer.connection, JOB, BLOB, store, count(job)))
    assert counted == [len(CONTENT)] * 2
    assert peer.asked == 4


@pytest.mark.asyncio
async def test_waiting_for_a_busy_blob_has_a_deadline(
    store: BlobStore, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshtraind.fetch.BUSY_TIMEOUT_S", 0.0)
    with store.writer(BLOB.sha256, BLOB.size_bytes), pytest.raises(TimeoutError, match="for another job to receive"):
        await fetch_blob(peer.connection, JOB, BLOB, store)


def test_a_job_that_ended_leaves_its_results_alone(store: BlobStore, tmp_path: Path) -> None:
    """Disks do not fill up with copies of data: only out/, logs/ and the trace are kept."""
    kept = {"out/0/model.pt", "logs/0.log", "trace.jsonl"}
    inputs = {"src/train.py", "data/a/b.bin", "state/0.safetensors", ".data.building/a"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()

    def make(folder: Path) -> Path:
        for name in kept | inputs:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        (folder / "data" / "link").symlink_to(elsewhere)
        return folder

    def left(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}

    unit = put(store, b"a unit of the start state")
    store.hold(JOB, [unit.sha256], passing=True)
    clean_up(JOB, make(tmp_path / "jobs" / "1"), store)
    assert left(tmp_path / "jobs" / "1") == kept
    assert not store.has(unit.sha256, unit.size_bytes)
    clean_up_all([make(tmp_path / "jobs" / "2")])
    assert left(tmp_path / "jobs" / "2") == kept
    discard(JOB, tmp_path / "jobs" / "2", store)
    assert not (tmp_path / "jobs" / "2").exists()
    assert (elsewhere / "mine").exists()
