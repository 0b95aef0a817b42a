"""What a job's script has left on the disk is served as files or not at all, and never makes the daemon wait."""

import asyncio
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import meshtraind.runtime.open_below
import meshtraind.storage.fetch
from meshtraind.learner.process import LearnerProcess
from meshtraind.learner.shared_memory import SharedMemory
from meshtraind.rounds.trace import Trace
from meshtraind.runtime.disk_threads import DiskThreads
from meshtraind.runtime.open_below import open_below
from meshtraind.runtime.tasks import TaskSet
from meshtraind.runtime.threads import Check, Stopped
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.checkpoint_store import CheckpointError, CheckpointStore
from meshtraind.storage.cleanup import remove_inputs
from meshtraind.storage.fetch import list_outputs, serve
from meshtraind.storage.resume_file import NAME, load_all
from meshtraind.storage.state_transfer import lend, store_state
from meshtraind.transport.connection import RequestFailed
from meshwire import limits
from meshwire.checkpoints.manifest import unit_file
from meshwire.jobs.files import check_path
from meshwire.messages.job import BlobRef, Fetch, Fetched
from tests.daemon.waiting import until

JOB = "1kx3m9q2v7bd"
SECRET = b"-----BEGIN PRIVATE KEY-----"
SPEC = cast(
    Any,
    SimpleNamespace(script="train.py", args=(), independent=False, engine="mesh", as_module=False, learners=1),
)
PROMPT_S = 5.0  # what a hanging read would exceed


class Pipes:
    """Named pipes; whoever waits at one goes on when the test is over."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def make(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        self._stack.callback(self._release, path)

    def _release(self, path: Path) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    with ExitStack() as stack:
        yield Pipes(stack)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job's folder in a data folder with a key, whose rank 0 has written `model.pt` and `runs/a.txt`."""
    (tmp_path / "data/identity").mkdir(parents=True, mode=0o700)
    (tmp_path / "data/identity/device.pem").write_bytes(SECRET)
    folder = tmp_path / "data/jobs" / JOB
    (folder / "out/0/runs").mkdir(parents=True)
    (folder / "out/0/model.pt").write_bytes(b"weights")
    (folder / "out/0/runs/a.txt").write_bytes(b"a")
    (folder / "logs").mkdir()
    (folder / "logs/0.log").write_bytes(b"hello\n")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "data/blobs")


async def output(job: Path, store: BlobStore, path: str, offset_bytes: int = 0) -> bytes:
    body = Fetch(job=JOB, what="output", path=path, offset_bytes=offset_bytes, max_bytes=100)
    async with asyncio.timeout(PROMPT_S):
        return (await serve(body, store, job, ended=lambda: True)).data


async def read_log(job: Path, store: BlobStore) -> Fetched:
    body = Fetch(job=JOB, what="log", offset_bytes=0, max_bytes=100)
    async with asyncio.timeout(PROMPT_S):
        return await serve(body, store, job, ended=lambda: True)


async def listed(job: Path) -> list[str]:
    async with asyncio.timeout(PROMPT_S):
        return [file.path for file in await list_outputs(job, 0)]


@pytest.mark.asyncio
async def test_files_are_listed_and_served(job: Path, store: BlobStore) -> None:
    assert await listed(job) == ["model.pt", "runs/a.txt"]
    assert await output(job, store, "model.pt") == b"weights"
    assert await output(job, store, "model.pt", 3) == b"ghts"
    assert await output(job, store, "runs/a.txt") == b"a"
    assert (await read_log(job, store)).data == b"hello\n"


@pytest.mark.asyncio
async def test_an_offset_behind_the_end_is_answered_with_nothing(job: Path, store: BlobStore) -> None:
    for offset_bytes in (7, 8, limits.DATA_BYTES_MAX):
        assert await output(job, store, "model.pt", offset_bytes) == b""


def pipe(path: Path, pipes: Pipes) -> None:
    pipes.make(path)


def unix_socket(path: Path, _pipes: Pipes) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        at = os.open(path.parent, os.O_RDONLY)
        try:  # the path of a socket must be short
            bound.bind(f"/proc/self/fd/{at}/{path.name}")
        finally:
            os.close(at)


def device(path: Path, _pipes: Pipes) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


def link_to_a_file(path: Path, _pipes: Pipes) -> None:
    path.symlink_to(path.parents[4] / "identity/device.pem")


@pytest.mark.parametrize("plant", [pipe, unix_socket, device, link_to_a_file])
@pytest.mark.asyncio
async def test_what_is_no_regular_file_is_neither_listed_nor_served_nor_waited_for(
    job: Path, store: BlobStore, pipes: Pipes, plant: Callable[[Path, Pipes], None]
) -> None:
    plant(job / "out/0/x", pipes)
    with pytest.raises(RequestFailed, match=r"cannot read the output of job .*'x' is no file but a"):
        await output(job, store, "x")
    assert await listed(job) == ["model.pt", "runs/a.txt"]
    assert await output(job, store, "model.pt") == b"weights", "others are served as ever"


@pytest.mark.parametrize("where", ["out/0/x", "out/0", "out", "."])
@pytest.mark.asyncio
async def test_no_link_to_a_folder_is_followed_wherever_it_was_planted(job: Path, store: BlobStore, where: str) -> None:
    """Once such a link served the private key of the device."""
    elsewhere = job.parents[1] / "identity"
    for depth in ("0/out/0", "out/0"):  # so that what is asked for lies behind each of the links
        (elsewhere / depth).mkdir(parents=True, exist_ok=True)
        (elsewhere / depth / "device.pem").write_bytes(SECRET)
    (elsewhere / "0").joinpath("device.pem").write_bytes(SECRET)
    planted = job / where
    if planted.exists():
        planted.rename(job.parent / "before")
    planted.symlink_to(elsewhere)
    path = "x/device.pem" if where == "out/0/x" else "device.pem"
    with pytest.raises(RequestFailed, match="no folder but a link"):
        await output(job, store, path)
    if where == "out/0/x":
        assert await listed(job) == ["model.pt", "runs/a.txt"]
    else:
        with pytest.raises(RequestFailed, match="no folder but a link"):
            await listed(job)


@pytest.mark.asyncio
async def test_a_folder_that_is_exchanged_for_a_link_in_the_middle_of_a_walk_leads_nowhere_else(
    job: Path, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = job.parents[1] / "identity"
    opened = meshtraind.runtime.open_below.open_folder

    def swap_after(folder: int, name: str) -> int:
        handle = opened(folder, name)
        if name == "runs":
            (job / "out/0/runs").rename(job / "was runs")
            (job / "out/0/runs").symlink_to(secrets)
        return handle

    (job / "out/0/runs/device.pem").write_bytes(b"a file of the job's own")
    with monkeypatch.context() as patch:
        patch.setattr(meshtraind.runtime.open_below, "open_folder", swap_after)
        assert await output(job, store, "runs/device.pem") == b"a file of the job's own"
    with pytest.raises(RequestFailed, match="'runs' is no folder but a link"):
        await output(job, store, "runs/device.pem")

    opened_file = os.open

    def swap_before(path: str | Path, flags: int, *args: int, dir_fd: int | None = None) -> int:
        if path == "model.pt":  # it was looked at, and is opened now
            os.unlink(path, dir_fd=dir_fd)
            os.symlink(secrets / "device.pem", path, dir_fd=dir_fd)
        return opened_file(path, flags, *args, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", swap_before)
        with pytest.raises(RequestFailed):
            await output(job, store, "model.pt")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b"])
def test_a_part_of_a_path_is_one_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").touch()
    with pytest.raises(OSError, match="not the name of one file"):
        open_below(tmp_path, (name,))
    with pytest.raises(OSError, match="not the name of one file"):
        open_below(tmp_path, (name, "b"))


@pytest.mark.asyncio
async def test_names_and_depths_that_no_peer_can_hold_are_left_out(job: Path) -> None:
    root = job / "out/0"
    for name in ("two\nlines", "back\\slash", os.fsdecode(b"\xff"), "end."):
        (root / name).touch()
    inside = root
    for _ in range(limits.FOLDER_DEPTH_MAX + 5):
        inside /= "d"
        inside.mkdir()
        (inside / "f").touch()
    names = await listed(job)
    assert len(names) == 2 + limits.FOLDER_DEPTH_MAX - 1
    assert max(name.count("/") for name in names) == limits.FOLDER_DEPTH_MAX - 1


@pytest.mark.asyncio
async def test_listing_looks_at_a_bounded_number_of_entries(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        (job / "out/0" / f"link{number}").symlink_to("nowhere")
    looked = 0
    checked = check_path

    def counted(path: str) -> str | None:
        nonlocal looked
        looked += 1
        return checked(path)

    monkeypatch.setattr(limits, "OUTPUT_ENTRIES_MAX", 10)
    monkeypatch.setattr(meshtraind.storage.fetch, "check_path", counted)
    await listed(job)
    assert looked == 10


@pytest.mark.asyncio
async def test_a_folder_that_cannot_be_read_hides_no_other(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = meshtraind.runtime.open_below.open_folder

    def refuse(folder: int, name: str) -> int:
        if name == "runs":
            raise PermissionError(13, "Permission denied")
        return opened(folder, name)

    monkeypatch.setattr(meshtraind.runtime.open_below, "open_folder", refuse)
    assert await listed(job) == ["model.pt"]


@pytest.mark.asyncio
async def test_a_job_that_has_written_nothing_has_no_outputs(tmp_path: Path, store: BlobStore) -> None:
    assert await list_outputs(tmp_path / "data/jobs" / JOB, 0) == ()
    assert (await read_log(tmp_path / "data/jobs" / JOB, store)).data == b""


# Logs


@pytest.mark.asyncio
async def test_a_log_that_was_replaced_is_neither_served_nor_waited_for(
    job: Path, store: BlobStore, pipes: Pipes
) -> None:
    log = job / "logs/0.log"
    log.unlink()
    pipes.make(log)
    with pytest.raises(RequestFailed, match=r"'0.log' is no file but a pipe"):
        await read_log(job, store)
    memory = SharedMemory()
    try:
        with pytest.raises(OSError, match=r"'0.log' is no file but a pipe"):
            await LearnerProcess(job, SPEC, log, memory, Path(sys.executable)).start({}, 5)
    finally:
        memory.close()
    log.unlink()
    log.symlink_to(job.parents[1] / "identity/device.pem")
    with pytest.raises(RequestFailed, match=r"'0.log' is no file but a link"):
        await read_log(job, store)


def test_what_a_script_tells_of_its_error_is_read_from_a_file_only(
    job: Path, pipes: Pipes, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon reads it at the script's end, and would wait for ever for the other end of a pipe."""
    memory = SharedMemory()
    try:
        pipes.make(job / "logs/0.error")
        assert LearnerProcess(job, SPEC, job / "logs/0.log", memory, Path(sys.executable)).error() is None
        assert "no file but a pipe" in caplog.text
        (job / "logs/0.error").unlink()
        (job / "logs/0.error").symlink_to(job.parents[1] / "identity/device.pem")
        assert LearnerProcess(job, SPEC, job / "logs/0.log", memory, Path(sys.executable)).error() is None
        assert "no file but a link" in caplog.text
    finally:
        memory.close()


def test_a_trace_is_written_into_no_other_file(job: Path, pipes: Pipes, caplog: pytest.LogCaptureFixture) -> None:
    (job / "trace.jsonl").symlink_to(job.parents[1] / "identity/device.pem")
    Trace(job / "trace.jsonl").close()
    pipes.make(job / "trace2.jsonl")
    Trace(job / "trace2.jsonl").close()
    assert (job.parents[1] / "identity/device.pem").read_bytes() == SECRET
    assert "no file but a link" in caplog.text
    assert "no file but a pipe" in caplog.text


def test_a_job_file_that_was_replaced_does_not_stop_the_daemon_from_starting(
    job: Path, pipes: Pipes, caplog: pytest.LogCaptureFixture
) -> None:
    pipes.make(job / NAME)
    assert load_all([job]) == {}
    assert "no file but a pipe" in caplog.text


# Blobs and states


@pytest.mark.asyncio
async def test_a_blob_that_was_replaced_is_not_served(job: Path, store: BlobStore, pipes: Pipes) -> None:
    for number, plant in enumerate((pipe, link_to_a_file)):
        sha256 = hashlib.sha256(bytes([number])).digest()
        place = store.blob_path(sha256)
        place.parent.mkdir()
        plant(place, pipes)
        body = Fetch(job=JOB, what="blob", sha256=sha256, offset_bytes=0, max_bytes=100)
        async with asyncio.timeout(PROMPT_S):
            with pytest.raises(RequestFailed, match="no file but a"):
                await serve(body, store, job, ended=lambda: True)
        with pytest.raises(BlobError, match="no file but a"):
            store.open(sha256)
    sha256 = hashlib.sha256(SECRET).digest()
    folder = store.blob_path(sha256).parent
    folder.symlink_to(job.parents[1] / "identity")
    (job.parents[1] / "identity" / sha256.hex()).write_bytes(SECRET)
    body = Fetch(job=JOB, what="blob", sha256=sha256, offset_bytes=0, max_bytes=100)
    with pytest.raises(RequestFailed, match="no folder but a link"):
        await serve(body, store, job, ended=lambda: True)


@pytest.mark.parametrize("plant", [pipe, link_to_a_file])
def test_a_state_that_was_replaced_is_not_given_to_others(
    job: Path, store: BlobStore, pipes: Pipes, plant: Callable[[Path, Pipes], None]
) -> None:
    folder = job / "state/saved-1"
    folder.mkdir(parents=True)
    plant(folder / unit_file(0), pipes)
    with pytest.raises(BlobError, match="no file but a"):
        store_state(JOB, folder, (0,), store)
    secret = BlobRef(sha256=hashlib.sha256(SECRET).digest(), size_bytes=len(SECRET))
    with pytest.raises(BlobError, match="exchanged"):
        lend(JOB, folder / unit_file(0), secret, store)
    assert not store.has(secret.sha256, secret.size_bytes)
    assert not os.path.lexists(store.blob_path(secret.sha256))


def test_checkpoints_behind_a_link_are_not_found(job: Path, tmp_path: Path) -> None:
    store = CheckpointStore(job, JOB, keep=1)
    assert store.listed() == ()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "5").mkdir(parents=True)
    store.path.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="no folder but a link"):
        store.listed()
    store.path.unlink()
    store.path.mkdir()
    (store.path / "5").symlink_to(elsewhere / "5")
    (rejected,) = store.listed()
    assert "no folder but a link" in rejected.reason  # type: ignore[union-attr]


@pytest.mark.parametrize("deep", [False, True])
def test_what_cannot_be_deleted_is_named_and_hinders_nothing(
    job: Path, caplog: pytest.LogCaptureFixture, deep: bool
) -> None:
    """A link in the place of the job's folder is not followed, and a tree may be deeper than Python calls go."""
    (job / "data").mkdir()
    if deep:
        at = os.open(job, os.O_RDONLY)
        for name in ("src", *["d"] * sys.getrecursionlimit()):
            os.mkdir(name, dir_fd=at)
            inner = os.open(name, os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = inner
        os.close(at)
    else:
        (job / "src").symlink_to(job.parents[1] / "identity")
    remove_inputs(job)
    assert f"cannot delete {job / 'src'}" in caplog.text
    assert not (job / "data").exists()
    assert (job.parents[1] / "identity/device.pem").read_bytes() == SECRET
    subprocess.run(["rm", "-rf", job / "src"], check=True)  # which pytest could not either


def test_what_a_killed_daemon_has_not_read_of_its_script_goes_with_the_rest(tmp_path: Path) -> None:
    """The log stays. A link in the place of the logs is not followed."""
    job, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    for folder in (job / "logs", elsewhere):
        folder.mkdir(parents=True)
        for name in ("0.log", "0.error"):
            (folder / name).touch()
    remove_inputs(job)
    assert [path.name for path in (job / "logs").iterdir()] == ["0.log"]
    (job / "logs" / "0.log").unlink()
    (job / "logs").rmdir()
    (job / "logs").symlink_to(elsewhere)
    remove_inputs(job)
    assert (elsewhere / "0.error").exists()


# Disks that hang


@pytest.mark.asyncio
async def test_a_disk_that_hangs_is_named_in_time_and_holds_up_nothing_else(
    job: Path, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()

    def hang(*_path: object) -> int:
        hangs.wait(30)
        raise OSError("it has been unplugged")

    monkeypatch.setattr(meshtraind.storage.fetch, "RESULT_READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(meshtraind.storage.fetch, "_RESULTS", DiskThreads("hangs", 2))
    with monkeypatch.context() as patch:
        patch.setattr(meshtraind.storage.fetch, "open_below", hang)
        asked = [output(job, store, "model.pt") for _ in range(5)]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(answer, RequestFailed), answer
            assert "reading model.pt took longer than 0.05 s: the disk that it lies on hangs" in str(answer)
        with pytest.raises(RequestFailed, match="hangs"):
            await listed(job)
    async with asyncio.timeout(PROMPT_S):
        assert await asyncio.to_thread(lambda: 5) == 5, "the daemon's other threads are free"
    sha256 = hashlib.sha256(b"b").digest()
    with store.writer(sha256, 1) as writer:
        writer.write(memoryview(b"b"))
        writer.finish()
    body = Fetch(job=JOB, what="blob", sha256=sha256, offset_bytes=0, max_bytes=100)
    assert (await serve(body, store, job, ended=lambda: True)).data == b"b"
    hangs.set()


@pytest.mark.asyncio
async def test_threads_of_a_disk_go_on_with_who_waits() -> None:
    threads = DiskThreads("test", 2)
    gates = [threading.Event() for _ in range(6)]
    began: list[int] = []

    def work(number: int) -> Callable[[Check], int]:
        def run(check: Check) -> int:
            began.append(number)
            assert gates[number].wait(PROMPT_S)
            check()
            return number

        return run

    tasks = TaskSet("test")
    runs = [tasks.spawn(threads.run(work(n), timeout_s=30, name="work"), str(n)) for n in range(6)]
    await until(lambda: len(began) == 2)
    runs[0].cancel()
    runs[5].cancel()
    with pytest.raises(asyncio.CancelledError):
        await runs[0]
    assert len(began) == 2, "no more than two at once"
    for gate in gates:
        gate.set()
    assert [await one for one in runs[1:5]] == [1, 2, 3, 4]
    assert sorted(began) == [0, 1, 2, 3, 4], "what nobody waits for any more is not begun"
    await tasks.close()

    def fail(_check: Check) -> None:
        raise TimeoutError("the disk's own")

    with pytest.raises(TimeoutError, match="the disk's own"):
        await threads.run(fail, timeout_s=30, name="work")


@pytest.mark.asyncio
async def test_work_that_nobody_waits_for_is_told_so() -> None:
    stopped = threading.Event()

    def work(check: Check) -> None:
        try:
            while True:
                check()
                time.sleep(0.001)
        except Stopped:
            stopped.set()
            raise

    with pytest.raises(TimeoutError, match=r"reading took longer than 0.02 s"):
        await DiskThreads("test", 1).run(work, timeout_s=0.02, name="reading")
    await until(stopped.is_set)


def test_the_end_of_the_process_does_not_wait_for_a_disk_that_hangs() -> None:
    """What SIGTERM needs: neither the event loop nor the interpreter joins these threads."""
    code = (
        "import asyncio, time\n"
        "from meshtraind.runtime.disk_threads import DiskThreads\n"
        "async def main():\n"
        "    asyncio.ensure_future(DiskThreads('x', 1).run(lambda _: time.sleep(60), timeout_s=60, name='x'))\n"
        "    await asyncio.sleep(0.05)\n"
        "asyncio.run(main())\n"
    )
    root = Path(meshtraind.storage.fetch.__file__).parents[2]
    paths = os.pathsep.join(str(root / part) for part in ("daemon", "protocol"))
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, timeout=30, check=True)
