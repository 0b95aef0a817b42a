"""Pulls blobs from a peer, piece by piece, and serves pieces of blobs, outputs and logs."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from meshtraind.blobs import BlobStore
from meshtraind.blobwriter import BlobError
from meshtraind.connection import Connection, RequestError
from meshtraind.tasks import TaskSet
from meshwire import limits
from meshwire.files import check_path
from meshwire.messages.job import BlobRef, Fetch, Fetched, OutputFile

PIECE_TIMEOUT_S = 60.0
PIECES_IN_FLIGHT = 4
LOG_POLL_S = 0.1


async def fetch_blob(
    peer: Connection, job: str, blob: BlobRef, store: BlobStore, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Receives a blob into the store, from where it broke off.

    Raises:
        BlobError: the disk refuses, or the bytes are not what their name says.
        RequestError, ConnectionLost, TimeoutError: the peer does not deliver.
    """
    if store.has(blob.sha256):
        if on_bytes is not None:
            on_bytes(blob.size_bytes)
        return
    with await asyncio.to_thread(store.writer, blob.sha256, blob.size_bytes) as writer:
        if on_bytes is not None:
            on_bytes(writer.offset)
        next_bytes = writer.offset
        pieces: deque[asyncio.Task[Fetched]] = deque()
        tasks = TaskSet(f"fetch {blob.sha256.hex()[:12]}", on_error=_ignore)
        try:
            while writer.offset < blob.size_bytes:
                while next_bytes < blob.size_bytes and len(pieces) < PIECES_IN_FLIGHT:
                    pieces.append(tasks.spawn(_fetch_piece(peer, job, blob, next_bytes), f"from {next_bytes}"))
                    next_bytes += limits.FETCH_BYTES_MAX
                piece = await pieces.popleft()
                if not piece.data:
                    raise RequestError(f"the peer's blob {blob.sha256.hex()[:12]} ends after {writer.offset} bytes")
                await asyncio.to_thread(writer.write, memoryview(piece.data))
                if on_bytes is not None:
                    on_bytes(len(piece.data))
        finally:
            await tasks.close()
        await asyncio.to_thread(writer.finish)


def _ignore(name: str, error: BaseException) -> None:
    """Whoever awaits the piece gets the error; of pieces behind it nobody wants to know."""


async def _fetch_piece(peer: Connection, job: str, blob: BlobRef, offset_bytes: int) -> Fetched:
    wanted = Fetch(
        job=job,
        what="blob",
        sha256=blob.sha256,
        offset_bytes=offset_bytes,
        max_bytes=min(limits.FETCH_BYTES_MAX, blob.size_bytes - offset_bytes),
    )
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
    except BlobError as error:
        raise RequestError(str(error)) from error
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
            found.append(OutputFile(rank=rank, path=relative, size_bytes=path.stat().st_size))
            if len(found) >= limits.OUTPUTS_LISTED_MAX:
                return tuple(found)
    return tuple(sorted(found, key=lambda file: file.path))
