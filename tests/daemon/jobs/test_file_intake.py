"""A job's files arrive whole, at once and only once; what nobody needs any more is deleted."""

import asyncio
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from meshtraind.jobs.file_intake import Intake
from meshtraind.jobs.spec import ingest
from meshtraind.runtime.threads import in_thread
from meshtraind.storage.blob_writer import COPY_BYTES
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.cleanup import clean_up, clean_up_all, discard
from meshtraind.storage.fetch import PIECES_PER_PEER, fetch_blob, serve
from meshtraind.transport.connection import Connection, RequestFailed
from meshwire import limits
from meshwire.jobs.files import FileEntry, FileManifest
from meshwire.message_base import Wire
from meshwire.messages.job import BlobRef, Fetch, JobSpec
from meshwire.sync_modes.mode import SyncSettings
from tests.daemon.waiting import until

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
    monkeypatch.setattr("meshtraind.storage.fetch.BUSY_TIMEOUT_S", 0.0)
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
    clean_up(JOB, make(tmp_path / "jobs" / "1"), store, succeeded=False)
    assert left(tmp_path / "jobs" / "1") == kept
    assert not store.has(unit.sha256, unit.size_bytes)
    clean_up_all([make(tmp_path / "jobs" / "2")])
    assert left(tmp_path / "jobs" / "2") == kept
    discard(JOB, tmp_path / "jobs" / "2", store)
    assert not (tmp_path / "jobs" / "2").exists()
    assert (elsewhere / "mine").exists()


def make_spec(store: BlobStore, files: dict[str, bytes]) -> JobSpec:
    """A job of these files, whose blobs are put into the store."""
    entries = []
    for path, content in files.items():
        ref = put(store, content)
        entries.append(FileEntry(path=path, size_bytes=ref.size_bytes, sha256=ref.sha256, executable=False))
    return JobSpec(
        job=JOB,
        name="test",
        submitter="a" * 64,
        created_at_s=0.0,
        script="train.py",
        args=(),
        env=(),
        files=put(store, FileManifest(entries=tuple(entries)).pack()),
        data=None,
        sync=SyncSettings(),
        codec="fp32",
        on_nan="stop",
        seed=1,
        bucket_bytes=1024,
        hash_every=1,
        trace=False,
    )


@pytest.mark.asyncio
async def test_many_small_files_are_fetched_together_but_within_what_a_peer_answers(
    store: BlobStore, peer: Peer, tmp_path: Path
) -> None:
    """A data set of 60,000 images does not wait 60,000 times for the network."""
    files = {"train.py": b"print()", "empty": b""} | {f"{n}.png": n.to_bytes(8) for n in range(200)}
    spec = make_spec(peer.store, files)
    seen: list[tuple[int, int]] = []
    intake = Intake(spec, tmp_path / "job", store, peer.connection, lambda *now: seen.append(now))
    async with asyncio.timeout(30):
        await intake.run()
    for name, content in files.items():
        assert (tmp_path / "job" / "src" / name).read_bytes() == content
    assert stat.S_IMODE((tmp_path / "job").stat().st_mode) == 0o700, "what a job holds is its user's alone"
    assert 1 < peer.answering_most <= PIECES_PER_PEER
    total_bytes = sum(map(len, files.values()))  # what travels, and nothing else
    assert seen[-1] == (total_bytes, total_bytes)
    assert store.trim(0) == 0, "the blobs of a live job are kept"
    store.release(JOB)
    store.trim(0)
    assert not store.has(spec.files.sha256, spec.files.size_bytes)


@pytest.mark.asyncio
async def test_who_comes_later_asks_for_one_piece_at_a_time(store: BlobStore, peer: Peer, tmp_path: Path) -> None:
    """The others train already, over the same network."""
    spec = make_spec(peer.store, {"train.py": b"print()"} | {f"{n}.png": n.to_bytes(8) for n in range(10)})
    async with asyncio.timeout(30):
        await Intake(spec, tmp_path / "job", store, peer.connection, lambda *_: None, begins=False).run()
    assert peer.answering_most == 1


@pytest.mark.asyncio
async def test_one_window_bounds_what_all_jobs_ask_of_a_peer(store: BlobStore, peer: Peer) -> None:
    """More than REQUESTS_PER_CONNECTION_MAX requests at once would be refused."""
    refs = [put(peer.store, bytes([n]) * (limits.FETCH_BYTES_MAX if n % 2 else 10)) for n in range(60)]
    peer.open.clear()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for ref in refs:
            tasks.create_task(fetch_blob(peer.connection, JOB, ref, store))
        await until(lambda: peer.answering >= 4)
        peer.open.set()
    assert all(store.has(ref.sha256, ref.size_bytes) for ref in refs)
    assert 4 <= peer.answering_most <= PIECES_PER_PEER


@pytest.mark.asyncio
async def test_an_intake_that_is_given_up_while_it_writes_stops_and_leaves_nothing(
    store: BlobStore, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that has ended is not written out to its end; the submitter hears of progress meanwhile."""
    monkeypatch.setattr("meshtraind.runtime.threads.POLL_S", 0.01)
    spec = make_spec(peer.store, {"train.py": b"print()", "b": b"b"})
    made = BlobStore.materialise

    def endless(*args: object, **_options: object) -> None:
        on_bytes = cast(Callable[[int], None], args[-1])
        while True:  # a tree that takes long
            on_bytes(1)
            written.set()
            time.sleep(0.001)

    told: list[int] = []
    written = threading.Event()

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        told.append(done_bytes)
        if written.is_set() and told[-3:] == [total_bytes] * 3:
            raise RequestFailed("the job has ended")

    monkeypatch.setattr(BlobStore, "materialise", endless)
    with pytest.raises(RequestFailed, match="has ended"):
        async with asyncio.timeout(10):
            await Intake(spec, tmp_path / "job", store, peer.connection, on_progress).run()
    assert told == sorted(told)
    monkeypatch.setattr(BlobStore, "materialise", made)

    def give_up(*_now: int) -> None:
        raise RequestFailed("the job has ended")

    assert not list(tmp_path.glob("job/*"))
    with pytest.raises(RequestFailed, match="has ended"):
        await Intake(spec, tmp_path / "job", BlobStore(tmp_path / "empty"), peer.connection, give_up).run()
    assert not list(tmp_path.glob("job/*"))


@pytest.mark.asyncio
async def test_copying_stops_when_its_submission_is_given_up(store: BlobStore, tmp_path: Path) -> None:
    """`meshtrain down` does not wait for a large data folder."""
    content = bytes(4 * COPY_BYTES)
    (tmp_path / "big").write_bytes(content)
    entry = FileEntry(path="big", size_bytes=len(content), sha256=hashlib.sha256(content).digest(), executable=False)
    (tmp_path / "manifest").write_bytes(FileManifest(entries=(entry,)).pack())
    blocks = 0

    def work(check: Callable[[], None]) -> None:
        def slow() -> None:
            nonlocal blocks
            blocks += 1
            begun.set()
            if blocks == 2:
                assert go_on.wait(10)
            check()

        ingest(tmp_path, tmp_path / "manifest", store, 2**30, owner="one", emit=lambda _event: None, check=slow)

    begun, go_on = threading.Event(), threading.Event()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        copying = tasks.create_task(in_thread(work))
        await until(begun.is_set)
        copying.cancel()
        await asyncio.sleep(0)
        go_on.set()
    assert copying.cancelled()
    assert blocks == 2
    ingest(tmp_path, tmp_path / "manifest", store, 2**30, owner="one", emit=lambda _event: None, check=lambda: None)
    assert store.has(entry.sha256, entry.size_bytes)


@pytest.mark.asyncio
async def test_a_job_sees_its_data_where_the_script_looks_for_them(
    store: BlobStore, peer: Peer, tmp_path: Path
) -> None:
    """By the working directory and by the script's own folder; under another name too. A second job fetches nothing."""
    content = b"to be or not to be"
    ref = put(peer.store, content)
    entry = FileEntry(path="input.txt", size_bytes=ref.size_bytes, sha256=ref.sha256, executable=False)
    data = put(peer.store, FileManifest(entries=(entry,)).pack())
    spec = make_spec(peer.store, {"train.py": b"print()", "sets/readme": b"mine"})
    for number, data_path in enumerate(("data", "sets/a b", "deep/er/data")):
        seen: list[tuple[int, int]] = []
        folder = tmp_path / str(number)
        job = spec.model_copy(update={"data": data, "data_path": data_path})
        await Intake(job, folder, store, peer.connection, lambda *now: seen.append(now)).run()  # noqa: B023
        assert (folder / "src" / data_path / "input.txt").read_bytes() == content
        assert (folder / "data" / "input.txt").read_bytes() == content, "mt.data_dir()"
        travelled = sum(map(len, (content, b"print()", b"mine")))
        assert seen[-1] == ((travelled, travelled) if number == 0 else (0, 0))
        assert os.path.samefile(folder / "data" / "input.txt", store.blob_path(ref.sha256))
        clean_up(JOB, folder, store, succeeded=True)
        assert store.has(ref.sha256, ref.size_bytes)


@pytest.mark.parametrize(
    ("data_path", "said"),
    [
        ("train.py", "ships 'train.py' twice"),
        ("train.py/data", "ships 'train.py/data' twice"),
        ("sets", "ships 'sets' twice"),
        ("../../outside", r"has a part '\.\.'"),
        ("/tmp/outside", "is absolute"),
    ],
)
@pytest.mark.asyncio
async def test_a_place_for_data_that_is_taken_or_outside_is_refused(
    store: BlobStore, peer: Peer, tmp_path: Path, data_path: str, said: str
) -> None:
    spec = make_spec(peer.store, {"train.py": b"print()", "sets/readme": b"mine"})
    job = spec.model_copy(update={"data": spec.files, "data_path": data_path})
    with pytest.raises(RequestFailed, match=said):
        await Intake(job, tmp_path / "jobs" / "1", store, peer.connection, lambda *_: None).run()
    assert not (tmp_path / "outside").exists()
