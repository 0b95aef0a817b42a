"""Receiving one blob: resumable, hashed on the way, in its place only when it is whole. Blocks on the disk."""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from meshwire import limits
from meshwire.jobs.files import human_bytes

COPY_BYTES = 1 * limits.MIB  # one read or write; large enough that hashing dominates
PART_SUFFIX = ".part"
SEALED_NS = 10**18  # when a blob was written, says its file; any write to it says otherwise

# Windows has no O_NOFOLLOW; only there O_BINARY exists, and keeps line ends as they are.
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
BINARY = getattr(os, "O_BINARY", 0)


class BlobError(Exception):
    """The store could not do what was asked; the message names the blob or folder and what to do."""


class BlobBusyError(BlobError):
    """Another job is receiving this blob; it will be here when that one is done."""


class BlobDamagedError(BlobError):
    """Bytes that do not have the promised hash or size. Nothing of them is kept: fetch the blob again."""


class BlobKeeper(Protocol):
    """Whoever keeps the blobs that are received: the store."""

    def check_room(self, needed_bytes: int) -> None:
        """Called with the size of what is about to be written. Raises BlobError where that does not fit on the disk."""

    def receiving_ended(self, sha256: bytes, *, whole: bool) -> None:
        """Called once by each writer, at its end. `whole`: the blob is in its place."""


class BlobWriter:
    """One blob being received: made by `BlobStore.writer`, one call at a time.

    Use as a context manager: leaving it keeps what came, for the next attempt.

    Args:
        on_block: called before each block of a part that is read again; may raise to stop.

    Attributes:
        offset: bytes that are here; ask the sender for the rest from there.
    """

    def __init__(
        self,
        final: Path,
        sha256: bytes,
        size_bytes: int,
        resume: bool,
        keeper: BlobKeeper,
        on_block: Callable[[], None],
    ) -> None:
        self.sha256 = sha256
        self.size_bytes = size_bytes
        self.offset = 0
        self._sha = hashlib.sha256()
        self._final = final
        self._part = part_path(final)
        self._keeper = keeper
        self._handle: int | None = None
        self._whole = False
        with explained("write", self._part, size_bytes):
            self._final.parent.mkdir(mode=0o700, exist_ok=True)
            self._handle = os.open(self._part, os.O_RDWR | os.O_CREAT | NO_FOLLOW | BINARY, 0o600)
            try:
                # More bytes than the blob has are the part of a sender with another idea of its size.
                if not resume or os.fstat(self._handle).st_size > size_bytes:
                    os.ftruncate(self._handle, 0)
                self._rehash(self._handle, on_block)
            except BaseException:
                os.close(self._handle)
                raise

    def _rehash(self, handle: int, on_block: Callable[[], None]) -> None:
        while block := os.read(handle, COPY_BYTES):
            on_block()
            self._sha.update(block)
            self.offset += len(block)

    def write(self, data: memoryview) -> None:
        """Appends the next bytes. After an error the writer is closed; what reached the disk is kept.

        Raises:
            BlobDamagedError: more bytes than the blob has.
            BlobError: disk full or not writable; names folder, needed and free bytes.
        """
        if self._handle is None:
            raise BlobError(f"blob {self.sha256.hex()[:12]}: write after close")
        if self.offset + data.nbytes > self.size_bytes:
            self.discard()
            raise BlobDamagedError(
                f"blob {self.sha256.hex()[:12]} was announced with {self.size_bytes} bytes, more have come"
            )
        try:
            self._keeper.check_room(data.nbytes)
            with explained("write", self._part, self.size_bytes - self.offset):
                write_all(self._handle, data)
        except BlobError:
            self.close()
            raise
        self._sha.update(data)
        self.offset += data.nbytes

    def finish(self) -> None:
        """Checks size and hash and puts the blob in its place.

        Nothing is synced: the store is a cache. What a power cut took is missing or has another size, or its hash is
        found wrong by whoever reads it, and it is fetched again; two syncs for each of 60,000 images take minutes.

        Raises:
            BlobDamagedError: bytes are missing (those here are kept) or the hash is wrong (they are deleted).
            BlobError: the disk refuses.
        """
        if self._handle is None:
            raise BlobError(f"blob {self.sha256.hex()[:12]}: finish after close")
        if self.offset != self.size_bytes:
            self.close()
            raise BlobDamagedError(
                f"blob {self.sha256.hex()[:12]} broke off after {self.offset} of {self.size_bytes} bytes"
            )
        if self._sha.digest() != self.sha256:
            self.discard()
            raise BlobDamagedError(
                f"blob {self.sha256.hex()[:12]} arrived with the hash {self._sha.hexdigest()[:12]}; "
                "it was deleted and has to be sent again"
            )
        with self._closing(), explained("write", self._final):
            self._close_handle()  # Windows renames no open file
            self._part.chmod(0o444)
            seal(self._part)
            self._part.replace(self._final)
            self._whole = True

    def close(self) -> None:
        """Stops receiving and keeps the part, unless nothing came. Does nothing when closed already."""
        if self._handle is not None and os.fstat(self._handle).st_size == 0:
            self.discard()
        if self._handle is not None:
            with self._closing():
                self._close_handle()

    def discard(self) -> None:
        """Stops receiving and deletes what came. Does nothing when closed already."""
        if self._handle is not None:
            with self._closing(), explained("delete", self._part):
                self._close_handle()  # Windows deletes no open file
                self._part.unlink(missing_ok=True)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Lets the next writer begin only when the part is in its last state."""
        try:
            yield
        finally:
            self._close_handle()
            self._keeper.receiving_ended(self.sha256, whole=self._whole)

    def _close_handle(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> "BlobWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def part_path(final: Path) -> Path:
    """The file in which a blob lies until it is whole."""
    return final.with_name(final.name + PART_SUFFIX)


def seal(path: Path) -> None:
    """Marks a file whose content is known. Jobs have links to blobs: who writes into one breaks the mark."""
    os.utime(path, ns=(time.time_ns(), SEALED_NS), follow_symlinks=False)


def write_all(handle: int, data: memoryview) -> None:
    """A full disk may take a part of a write before it refuses the rest."""
    while data.nbytes:
        data = data[os.write(handle, data) :]


@contextmanager
def explained(action: str, path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turns the system's errors within into BlobErrors."""
    try:
        yield
    except OSError as error:
        raise explain(error, action, path, needed_bytes) from error


def explain(error: OSError, action: str, path: Path, needed_bytes: int | None = None) -> BlobError:
    """What went wrong, with the numbers and the remedy."""
    message = f"cannot {action} {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = "" if needed_bytes is None else f"{human_bytes(needed_bytes)} needed, "
        folder = next(folder for folder in path.parents if folder.is_dir())
        free = human_bytes(shutil.disk_usage(folder).free)
        return BlobError(
            f"{message}: {needed}{free} free in {folder}; "
            "free some space, or start the daemon with --data-dir on another disk"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return BlobError(
            f"{message}; make it accessible to the daemon's user, or start the daemon with another --data-dir"
        )
    return BlobError(message)
