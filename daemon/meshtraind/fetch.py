"""Pulls blobs from a peer, piece by piece, and serves pieces of blobs, outputs and logs."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

from meshtraind.blobs import BlobStore
from meshtraind.blobwriter import BlobBusyError, BlobWriter
from meshtraind.connection import Connection, RequestError
from meshtraind.fetchwindow import window_of
from meshtraind.tasks import TaskSet, told_elsewhere
from meshtraind.threads import Check, in_thread
from meshwire import limits
from meshwire.files import check_path
from meshwire.messages.job import BlobRef, Fetch, Fetched, OutputFile

PIECE_TIMEOUT_S = 60.0
PIECES_IN_FLIGHT = 4
BUSY_TIMEOUT_S = 3600.0  # another job receives the same blob; its own timeouts end that sooner
BUSY_POLL_S = 0.2
LOG_POLL_S = 0.1


class Pace(Protocol):
    """How fast a peer is asked."""

    @property
    def pieces(self) -> int:
        """That may be asked for at once."""

    @property
    def piece_bytes(self) -> int:
        """Of the next one, at most FETCH_BYTES_MAX."""

    def piece(self, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Entered when it may be asked for, left when it is here."""


class _Free:
    """The network sets the pace."""

    pieces = PIECES_IN_FLIGHT
    piece_bytes = limits.FETCH_BYTES_MAX

    def piece(self, _size_bytes: int) -> AbstractAsyncContextManager[None]:
        return nullcontext()


async def fetch_blob(
    peer: Connection,
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
        RequestError, ConnectionLost, TimeoutError: the peer does not deliver.
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
    peer: Connection, job: str, blob: BlobRef, store: BlobStore, on_bytes: Callable[[int], None], pace: Pace
) -> None:
    with ExitStack() as stack:
        # Entered in the thread: a writer that was made for a caller who was cancelled meanwhile is closed all the same.
        writer = await in_thread(
            lambda check: stack.enter_context(store.writer(blob.sha256, blob.size_bytes, on_block=check)),
            lambda: on_bytes(0),
        )
        on_bytes(writer.offset)
        next_bytes = writer.offset
        pieces: deque[asyncio.Task[Fetched]] = deque()
        tasks = TaskSet(f"fetch {blob.sha256.hex()[:12]}", on_error=told_elsewhere)
        try:
            while writer.offset < blob.size_bytes:
                while next_bytes < blob.size_bytes and len(pieces) < pace.pieces:
                    piece_bytes = min(pace.piece_bytes, blob.size_bytes - next_bytes)
                    piece = _fetch_piece(peer, job, blob, next_bytes, piece_bytes, pace)
                    pieces.append(tasks.spawn(piece, f"from {next_bytes}"))
                    next_bytes += piece_bytes
                data = memoryview((await pieces.popleft()).data)
                if not data:
                    raise RequestError(f"the peer's blob {blob.sha256.hex()[:12]} ends after {writer.offset} bytes")
                await in_thread(partial(_append, writer, data))
                on_bytes(data.nbytes)
        finally:
            await tasks.close()
        await in_thread(lambda _check: writer.finish())


def _append(writer: BlobWriter, data: memoryview, _check: Check) -> None:
    writer.write(data)


def _count_nothing(_size_bytes: int) -> None:
    """For who does not show progress."""


async def _fetch_piece(
    peer: Connection, job: str, blob: BlobRef, offset_bytes: int, size_bytes: int, pace: Pace
) -> Fetched:
    wanted = Fetch(job=job, what="blob", sha256=blob.sha256, offset_bytes=offset_bytes, max_bytes=size_bytes)
    async with pace.piece(size_bytes), window_of(peer).room_for(size_bytes):
        reply = await peer.request(wanted, timeout_s=PIECE_TIMEOUT_S, name=f"blob {blob.sha256.hex()[:12]}")
    if not isinstance(reply, Fetched):
        raise RequestError("the peer answered a fetch with something else")
    return reply


async def serve(body: Fetch, store: BlobStore, job_folder: Path, *, ended: Callable[[], bool]) -> Fetched:
    """Answers one piece from this device's disk.

    Args:
        ended: whether the job has ended, so that no log will grow any more.

    Raises:
        RequestError: no such file.
    """
    try:
        if body.what == "blob":
            if body.sha256 is None:
                raise RequestError("a blob is asked for by its sha256")
            return await asyncio.to_thread(_read_piece, store.blob_path(body.sha256), body, True)
        if body.what == "log":
            return await _serve_log(body, log_path(job_folder, body.rank), ended)
        path = body.path or ""
        if (wrong := check_path(path)) is not None:
            raise RequestError(f"output path {path!r} {wrong}")
        root = output_folder(job_folder, body.rank)
        return await asyncio.to_thread(_read_piece, root.joinpath(*path.split("/")), body, True)
    except OSError as error:
        raise RequestError(f"cannot read the {body.what} of job {body.job}: {error.strerror or error}") from error


async def _serve_log(body: Fetch, path: Path, ended: Callable[[], bool]) -> Fetched:
    """Waits up to `wait_s` for bytes behind the offset; the end is the job's end."""
    until_s = time.monotonic() + body.wait_s
    while True:
        over = ended()  # asked before reading: what is written until then is read
        piece = await asyncio.to_thread(_read_log, path, body)
        at_end = body.offset_bytes + len(piece.data) >= piece.total_bytes
        if piece.data or over or time.monotonic() >= until_s:
            return piece.model_copy(update={"end": over and at_end})
        await asyncio.sleep(LOG_POLL_S)


def _read_log(path: Path, body: Fetch) -> Fetched:
    if not path.exists():
        return Fetched(data=b"", total_bytes=0, end=False)
    return _read_piece(path, body, False)


def _read_piece(path: Path, body: Fetch, ends: bool) -> Fetched:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        total_bytes = os.fstat(descriptor).st_size
        file.seek(body.offset_bytes)
        data = file.read(body.max_bytes)
    return Fetched(data=data, total_bytes=total_bytes, end=ends and body.offset_bytes + len(data) >= total_bytes)


def log_path(job_folder: Path, rank: int) -> Path:
    """Where a rank's output to the terminal goes."""
    return job_folder / "logs" / f"{rank}.log"


def output_folder(job_folder: Path, rank: int) -> Path:
    """Where a rank's script leaves its results."""
    return job_folder / "out" / str(rank)


def list_outputs(job_folder: Path, rank: int) -> tuple[OutputFile, ...]:
    """Regular files below a rank's output folder, whose names every device can hold. Blocking."""
    root = output_folder(job_folder, rank)
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            relative = path.relative_to(root).as_posix()
            if path.is_symlink() or not path.is_file() or check_path(relative) is not None:
                continue
            about = path.stat()
            changed_ns = min(max(0, about.st_mtime_ns), 2**63 - 1)
            found.append(OutputFile(rank=rank, path=relative, size_bytes=about.st_size, changed_ns=changed_ns))
            if len(found) >= limits.OUTPUTS_LISTED_MAX:
                return tuple(found)
    return tuple(sorted(found, key=lambda file: file.path))
