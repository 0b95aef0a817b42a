"""Pulls blobs from a peer, piece by piece, and serves pieces of blobs, outputs and logs."""

import asyncio
import logging
import os
import stat
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

from meshtraind.machine.memory_file import read_at
from meshtraind.runtime.disk_threads import DiskThreads
from meshtraind.runtime.open_below import folder_below, open_below
from meshtraind.runtime.tasks import TaskSet, told_elsewhere
from meshtraind.runtime.threads import Check, in_thread
from meshtraind.storage.blob_writer import BlobBusyError, BlobWriter
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.log_times import NOT_KNOWN, log_times
from meshtraind.transport.messenger import Messenger
from meshtraind.transport.requests import RequestFailed
from meshwire import limits
from meshwire.jobs.files import check_path
from meshwire.messages.job import BlobRef, Fetch, Fetched, OutputFile

log = logging.getLogger(__name__)

OUT, LOGS = "out", "logs"  # below a job's folder
RECORD_SUFFIX = ".error"  # beside a log, until its process has ended: the error that ends the script
PIECE_TIMEOUT_S = 60.0
PIECES_IN_FLIGHT = 4
PIECES_PER_PEER = limits.REQUESTS_PER_CONNECTION_MAX // 4  # of all jobs together; the rest is for who asks other things
BYTES_PER_PEER = 4 * limits.FETCH_BYTES_MAX  # what a message of another job may find queued in front of it
BUSY_TIMEOUT_S = 3600.0  # another job receives the same blob; its own timeouts end that sooner
BUSY_POLL_S = 0.2
LOG_POLL_S = 0.1
BLOB_READ_TIMEOUT_S = 50.0  # less than the peer waits, which then learns why
RESULT_READ_TIMEOUT_S = 8.0  # likewise

# Apart: a job may have mounted something in its output folder that no longer answers.
_BLOBS = DiskThreads("reads blobs", 4)
_RESULTS = DiskThreads("reads outputs and logs", 8)


class Pace(Protocol):
    """How fast a peer is asked for the pieces of a blob."""

    @property
    def pieces(self) -> int:
        """How many pieces may be asked for at once."""

    @property
    def piece_bytes(self) -> int:
        """How large the next piece may be, at most FETCH_BYTES_MAX."""

    def piece(self, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Entered when a piece may be asked for, left when it is here."""


class _Free:
    """No pace: the network says how fast it goes."""

    pieces = PIECES_IN_FLIGHT
    piece_bytes = limits.FETCH_BYTES_MAX

    def piece(self, _size_bytes: int) -> AbstractAsyncContextManager[None]:
        return nullcontext()


class FetchWindow:
    """How much is asked of one peer at once: enough to hide the network's delay, never all that it answers at once."""

    def __init__(self) -> None:
        self._pieces = 0
        self._bytes = 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def room_for(self, piece_bytes: int) -> AsyncIterator[None]:
        """Waits until a piece of at most FETCH_BYTES_MAX may be asked for. Whoever is in front has a deadline."""
        while self._pieces >= PIECES_PER_PEER or self._bytes + piece_bytes > BYTES_PER_PEER:
            await self._changed.wait()
        self._pieces += 1
        self._bytes += piece_bytes
        try:
            yield
        finally:
            self._pieces -= 1
            self._bytes -= piece_bytes
            self._changed.set()
            self._changed = asyncio.Event()


_windows: WeakKeyDictionary[Messenger, FetchWindow] = WeakKeyDictionary()


def window_of(peer: Messenger) -> FetchWindow:
    """The window of this connection, which all jobs share."""
    return _windows.setdefault(peer, FetchWindow())


async def fetch_blob(
    peer: Messenger,
    job: str,
    blob: BlobRef,
    store: BlobStore,
    on_bytes: Callable[[int], None] | None = None,
    pace: Pace | None = None,
) -> None:
    """Receives a blob into the store, from where it broke off, or waits until another job has received it.

    Args:
        on_bytes: called with the bytes that are here now and were not before; with 0 as a sign of life.
        pace: None: as fast as it goes.

    Raises:
        BlobError: the disk refuses, or the bytes are not what their name says.
        RequestFailed, ConnectionEnded, TimeoutError: the peer does not deliver.
    """
    count = on_bytes if on_bytes is not None else _count_nothing
    deadline_s = time.monotonic() + BUSY_TIMEOUT_S
    while not store.has(blob.sha256, blob.size_bytes):
        try:
            await _receive(peer, job, blob, store, count, pace or _Free())
            return
        except BlobBusyError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"waited {BUSY_TIMEOUT_S:.0f} s for another job to receive blob {blob.sha256.hex()[:12]}"
                ) from None
            count(0)
            await asyncio.sleep(BUSY_POLL_S)
    count(blob.size_bytes)


async def _receive(
    peer: Messenger, job: str, blob: BlobRef, store: BlobStore, on_bytes: Callable[[int], None], pace: Pace
) -> None:
    with ExitStack() as stack:
        # Entered in the thread: a writer that was made for a caller who was cancelled meanwhile is closed all the same.
        writer = await in_thread(
            lambda check: stack.enter_context(store.writer(blob.sha256, blob.size_bytes, on_block=check)),
            lambda: on_bytes(0),
        )
        on_bytes(writer.offset)
        next_bytes = writer.offset
        pieces: deque[tuple[asyncio.Task[Fetched], int]] = deque()
        tasks = TaskSet(f"fetch {blob.sha256.hex()[:12]}", on_error=told_elsewhere)
        try:
            while writer.offset < blob.size_bytes:
                while next_bytes < blob.size_bytes and len(pieces) < pace.pieces:
                    piece_bytes = min(pace.piece_bytes, blob.size_bytes - next_bytes)
                    piece = _fetch_piece(peer, job, blob, next_bytes, piece_bytes, pace)
                    pieces.append((tasks.spawn(piece, f"from {next_bytes}"), piece_bytes))
                    next_bytes += piece_bytes
                task, piece_bytes = pieces.popleft()
                data = memoryview((await task).data)
                if data.nbytes < piece_bytes:
                    raise RequestFailed(f"the peer's blob {blob.sha256.hex()[:12]} ends after {writer.offset} bytes")
                await in_thread(partial(_append, writer, data))
                on_bytes(data.nbytes)
        finally:
            await tasks.close()
        await in_thread(lambda _check: writer.finish())


def _append(writer: BlobWriter, data: memoryview, _check: Check) -> None:
    writer.write(data)


def _count_nothing(_size_bytes: int) -> None:
    """The progress of who does not show any."""


async def _fetch_piece(
    peer: Messenger, job: str, blob: BlobRef, offset_bytes: int, size_bytes: int, pace: Pace
) -> Fetched:
    wanted = Fetch(job=job, what="blob", sha256=blob.sha256, offset_bytes=offset_bytes, max_bytes=size_bytes)
    async with pace.piece(size_bytes), window_of(peer).room_for(size_bytes):
        reply = await peer.request(wanted, timeout_s=PIECE_TIMEOUT_S, name=f"blob {blob.sha256.hex()[:12]}")
    if not isinstance(reply, Fetched):
        raise RequestFailed("the peer answered a fetch with something else")
    return reply


async def serve(body: Fetch, store: BlobStore, job_folder: Path, *, ended: Callable[[], bool]) -> Fetched:
    """Answers one piece from this device's disk.

    Args:
        ended: whether the job has ended, so that no log will grow any more.

    Raises:
        RequestFailed: no such file.
    """
    try:
        if body.what == "blob":
            if body.sha256 is None:
                raise RequestFailed("a blob is asked for by its sha256")
            name = body.sha256.hex()
            blob = partial(_read_piece, store.path, (name[:2], name), body, True)
            return await _BLOBS.run(blob, timeout_s=BLOB_READ_TIMEOUT_S, name=f"reading blob {name[:12]}")
        if body.what == "log":
            return await _serve_log(body, job_folder, ended)
        path = body.path or ""
        if (wrong := check_path(path)) is not None:
            raise RequestFailed(f"output path {path!r} {wrong}")
        parts = (job_folder.name, OUT, str(body.rank), *path.split("/"))
        output = partial(_read_piece, job_folder.parent, parts, body, True)
        return await _RESULTS.run(output, timeout_s=RESULT_READ_TIMEOUT_S, name=f"reading {path}")
    except OSError as error:
        raise RequestFailed(f"cannot read the {body.what} of job {body.job}: {error.strerror or error}") from error


async def _serve_log(body: Fetch, job_folder: Path, ended: Callable[[], bool]) -> Fetched:
    """Waits up to `wait_s` for bytes behind the offset; the end is the job's end."""
    until_s = time.monotonic() + body.wait_s
    while True:
        over = ended()  # asked before reading: what is written until then is read
        read = partial(_read_log, job_folder, body, NOT_KNOWN if over else time.time())
        piece = await _RESULTS.run(read, timeout_s=RESULT_READ_TIMEOUT_S, name="reading the log")
        at_end = body.offset_bytes + len(piece.data) >= piece.total_bytes
        if piece.data or over or time.monotonic() >= until_s:
            return piece.model_copy(update={"end": over and at_end})
        await asyncio.sleep(LOG_POLL_S)


def _read_log(job_folder: Path, body: Fetch, now_s: float, check: Check) -> Fetched:
    way = (job_folder.name, LOGS, f"{body.rank}.log")
    try:
        piece = _read_piece(job_folder.parent, way, body, False, check)
    except FileNotFoundError:
        return Fetched(data=b"", total_bytes=0, end=False)
    if not body.times or not piece.data:
        return piece
    times = log_times(job_folder.parent, way, body.offset_bytes, body.offset_bytes + len(piece.data), now_s)
    data = piece.data
    if len(times) == limits.LOG_TIMES_MAX:  # what follows the last one has others
        data, times = data[: times[-1][0] - body.offset_bytes], times[:-1]
    return piece.model_copy(update={"data": data, "times": times})


def _read_piece(root: Path, parts: Sequence[str], body: Fetch, ends: bool, _check: Check) -> Fetched:
    descriptor = open_below(root, parts)
    try:
        total_bytes = os.fstat(descriptor).st_size
        behind = body.offset_bytes >= total_bytes  # perhaps by more than a system call takes
        data = b"" if behind else read_at(descriptor, body.max_bytes, body.offset_bytes)
    finally:
        os.close(descriptor)
    return Fetched(data=data, total_bytes=total_bytes, end=ends and body.offset_bytes + len(data) >= total_bytes)


def log_path(job_folder: Path, rank: int) -> Path:
    """The file to which a rank's output to the terminal goes."""
    return job_folder / LOGS / f"{rank}.log"


def output_folder(job_folder: Path, rank: int) -> Path:
    """The folder in which a rank's script leaves its results."""
    return job_folder / OUT / str(rank)


async def list_outputs(job_folder: Path, rank: int) -> tuple[OutputFile, ...]:
    """Regular files below a rank's output folder, whose names every device can hold.

    Raises RequestFailed when the folder cannot be read.
    """
    name = f"listing the outputs of rank {rank}"
    try:
        return await _RESULTS.run(partial(_list_outputs, job_folder, rank), timeout_s=RESULT_READ_TIMEOUT_S, name=name)
    except OSError as error:
        raise RequestFailed(f"{name} of job {job_folder.name}: {error.strerror or error}") from error


def _list_outputs(job_folder: Path, rank: int, check: Check) -> tuple[OutputFile, ...]:
    """What links lead to is not listed, as it is not served."""
    top = (job_folder.name, OUT, str(rank))
    found: list[OutputFile] = []
    pending: list[tuple[str, ...]] = [()]
    seen = 0
    while pending:
        check()
        parts = pending.pop()
        try:
            with folder_below(job_folder.parent, (*top, *parts)) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    if seen >= limits.OUTPUT_ENTRIES_MAX or len(found) >= limits.OUTPUTS_LISTED_MAX:
                        return _sorted(found)
                    seen += 1
                    path = "/".join((*parts, entry.name))
                    if check_path(path) is not None:
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        pending.append((*parts, entry.name))
                    elif stat.S_ISREG(status.st_mode):
                        changed_ns = min(max(0, status.st_mtime_ns), 2**63 - 1)
                        found.append(OutputFile(rank=rank, path=path, size_bytes=status.st_size, changed_ns=changed_ns))
        except FileNotFoundError:
            continue  # nothing was written yet, or it was deleted meanwhile
        except OSError as error:
            if not parts:
                raise
            log.info("job %s: outputs in %s are not listed: %s", job_folder.name, "/".join(parts), error)
    return _sorted(found)


def _sorted(found: list[OutputFile]) -> tuple[OutputFile, ...]:
    return tuple(sorted(found, key=lambda file: file.path))
