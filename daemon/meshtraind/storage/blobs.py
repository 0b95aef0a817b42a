"""Content-addressed store of job files: DATA/blobs/ab/abcdef..., named by the SHA-256 of what they hold.

Everything here blocks on the disk: call it in a worker thread (`asyncio.to_thread`), never on the event loop.
One daemon owns a data folder, so a lock in this process is enough to keep two writers from one blob.

A job's data are further names of the blobs (hard links), for a copy would take a data set's place twice; not every file
system has copies on write. Nobody can write into such a file but root, or who changes its mode first. Every blob's time
of writing is `SEALED_NS`, so that the store sees such a write: what has another time is hashed before it is used again,
and never served.
"""

import contextlib
import hashlib
import itertools
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from meshtraind.runtime.open_below import read_below
from meshtraind.storage.blob_writer import (
    BINARY,
    COPY_BYTES,
    NO_FOLLOW,
    PART_SUFFIX,
    SEALED_NS,
    BlobBusyError,
    BlobDamagedError,
    BlobError,
    BlobWriter,
    explain,
    explained,
    part_path,
    seal,
    write_all,
)
from meshtraind.storage.disk_space import ShareOfDisk, require, reserve_bytes, short_bytes
from meshwire import limits
from meshwire.jobs.files import FileEntry, FileManifest, check_manifest

__all__ = ["BlobBusyError", "BlobDamagedError", "BlobError", "BlobStore", "BlobWriter"]


class BlobStore:
    """The blobs in one folder, which is made if missing. Thread-safe.

    Args:
        reserve: what is left free of a disk of so many bytes.

    Raises:
        BlobError: the folder cannot be made or written.
    """

    def __init__(self, path: Path, reserve: ShareOfDisk = reserve_bytes) -> None:
        self.path = path
        self._reserve = reserve
        self._hashed: set[bytes] = set()  # by this process, since they were sealed
        self._lock = threading.Lock()
        self._receiving: set[bytes] = set()
        self._cached: dict[str, set[bytes]] = {}  # held, by owner
        self._passing: dict[str, set[bytes]] = {}  # held, and deleted when their last owner lets go
        self._submissions = itertools.count(1)
        with explained("make the folder", path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def blob_path(self, sha256: bytes) -> Path:
        """The blob's file, whether it is there or not."""
        name = sha256.hex()
        return self.path / name[:2] / name

    def has(self, sha256: bytes, size_bytes: int) -> bool:
        """Whether the blob is here. One of another size is not: a power cut may leave such a file. Nor is one that
        somebody has written to: `missing` finds out whether it can be used."""
        status = self._status(sha256)
        return status is not None and status.st_size == size_bytes and status.st_mtime_ns == SEALED_NS

    def may_serve(self, sha256: bytes) -> bool:
        """Whether nobody has written into it since it was stored. True where it is not here."""
        status = self._status(sha256)
        return status is None or status.st_mtime_ns == SEALED_NS

    def _status(self, sha256: bytes) -> os.stat_result | None:
        """What the disk says of a blob's file; None where there is no regular file."""
        try:
            status = self.blob_path(sha256).lstat()
        except FileNotFoundError:
            return None
        return status if stat.S_ISREG(status.st_mode) else None

    def missing(self, manifest: FileManifest) -> tuple[FileEntry, ...]:
        """One entry for each content of the manifest that is not here, in the manifest's order. A blob that somebody
        has written to, or an older version of this program has stored, is hashed: it is here, or deleted."""
        distinct: dict[bytes, FileEntry] = {}
        for entry in manifest.entries:
            distinct.setdefault(entry.sha256, entry)
        return tuple(entry for entry in distinct.values() if not self._is_intact(entry.sha256, entry.size_bytes))

    def _is_intact(self, sha256: bytes, size_bytes: int) -> bool:
        if self.has(sha256, size_bytes):
            return True
        status = self._status(sha256)
        if status is None or status.st_size != size_bytes or not self._hash(sha256, lambda _size_bytes: None):
            return False
        path = self.blob_path(sha256)
        with explained("read", path):
            if path.lstat().st_mtime_ns != status.st_mtime_ns:
                return False  # it was written to meanwhile
            seal(path)
        return True

    def _hash(self, sha256: bytes, on_bytes: Callable[[int], None]) -> bool:
        """Reads a blob. Returns whether its bytes are what its name says; else it is deleted, whoever holds it."""
        sha, path = hashlib.sha256(), self.blob_path(sha256)
        with self.open(sha256) as reader, explained("read", path):
            while block := reader.read(COPY_BYTES):
                on_bytes(0)
                sha.update(block)
        if sha.digest() == sha256:
            self._know(sha256)
            return True
        with self._lock, explained("delete", path):
            self._hashed.discard(sha256)
            path.unlink(missing_ok=True)
        return False

    def _know(self, sha256: bytes) -> None:
        with self._lock:
            if len(self._hashed) >= limits.FILES_MAX:
                self._hashed.clear()
            self._hashed.add(sha256)

    # What is kept

    def hold(self, owner: str, digests: Iterable[bytes], *, passing: bool = False) -> None:
        """Keeps these blobs, here or to come, until `release(owner)`. Call it before asking which are missing.

        Args:
            owner: a job's id, or what `holding` gave.
            passing: of use to this job alone, so that they are deleted when nobody holds them any more.
        """
        digests = set(digests)
        with self._lock:
            (self._passing if passing else self._cached).setdefault(owner, set()).update(digests)
        for sha256 in digests:
            path = self.blob_path(sha256)
            with explained("touch", self.path), contextlib.suppress(FileNotFoundError):
                os.utime(path, ns=(time.time_ns(), path.lstat().st_mtime_ns), follow_symlinks=False)

    def release(self, owner: str) -> None:
        """Lets go of what `owner` held. Blobs that were passing through are deleted, others stay until `trim`."""
        with self._lock:
            self._cached.pop(owner, None)
            passing = self._passing.pop(owner, set())
        self._delete_passing(passing)

    def release_passing(self, owner: str, digests: Iterable[bytes]) -> None:
        """Lets go of these blobs that were passing through for `owner`, and of no others."""
        with self._lock:
            passing = self._passing.get(owner, set()).intersection(digests)
            self._passing.get(owner, set()).difference_update(passing)
        self._delete_passing(passing)

    def _delete_passing(self, passing: Iterable[bytes]) -> None:
        for sha256 in passing:
            path = self.blob_path(sha256)
            self._delete(sha256, path)
            self._delete(sha256, part_path(path))

    @contextmanager
    def holding(self) -> Iterator[str]:
        """An owner for blobs of a job that has no id yet; lets go at the end."""
        owner = f"submission {next(self._submissions)}"
        try:
            yield owner
        finally:
            self.release(owner)

    def trim(self, bytes_max: int = limits.BLOB_CACHE_BYTES_MAX) -> int:
        """Deletes what was not used for longest and nobody holds, until `bytes_max` are left, and parts that nobody has
        gone on receiving for long. Returns bytes deleted.

        Raises:
            BlobError: the store cannot be read, or a blob not deleted.
        """
        return self._trim(lambda stored_bytes: stored_bytes - bytes_max)

    def _trim_by(self, wanted_bytes: int) -> int:
        return self._trim(lambda _stored_bytes: wanted_bytes)

    def _trim(self, over: Callable[[int], int]) -> int:
        found: list[tuple[float, int, Path]] = []
        with explained("list", self.path):
            for folder in self.path.iterdir():
                for file in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat(follow_symlinks=False)
                        used_s = max(status.st_atime, status.st_mtime)
                        found.append((used_s, status.st_size, Path(file.path)))
        over_bytes = over(sum(size_bytes for _, size_bytes, _ in found))
        deleted_bytes = 0
        given_up_s = time.time() - limits.BLOB_PART_S_MAX
        for used_s, size_bytes, path in sorted(found):
            given_up = path.name.endswith(PART_SUFFIX) and used_s < given_up_s
            if deleted_bytes >= over_bytes and not given_up:
                continue
            if self._delete(bytes.fromhex(path.name.partition(".")[0]), path):
                deleted_bytes += size_bytes
        return deleted_bytes

    def _delete(self, sha256: bytes, path: Path) -> bool:
        """Unless somebody holds or receives it: under the lock, so that nobody can begin to meanwhile."""
        with self._lock:
            held = any(sha256 in digests for owners in (self._cached, self._passing) for digests in owners.values())
            if held or sha256 in self._receiving:
                return False
            with explained("delete", path):
                path.unlink(missing_ok=True)
            self._hashed.discard(sha256)
            return True

    # Reading and receiving

    def open(self, sha256: bytes) -> BinaryIO:
        """The blob for reading. Raises BlobError if it is not here."""
        path = self.blob_path(sha256)
        try:
            return read_below(self.path, path.parts[-2:])
        except FileNotFoundError:
            raise BlobError(f"blob {sha256.hex()[:12]} is not in {self.path}") from None
        except OSError as error:
            raise explain(error, "read", path) from error

    def ensure_space(self, needed_bytes: int) -> None:
        """Makes room: what nobody holds goes first. Raises BlobError if `needed_bytes` and a reserve for the machine's
        owner do not fit on the disk all the same."""
        if short := short_bytes(self.path, needed_bytes, self._reserve):
            self._trim_by(short)
        require(self.path, needed_bytes, self._reserve)

    def check_room(self, needed_bytes: int) -> None:
        """Asked for each block that is written: several jobs may come at once, and others fill the disk, too. Raises
        BlobError where so many bytes and the reserve do not fit."""
        require(self.path, needed_bytes, self._reserve)

    def writer(
        self, sha256: bytes, size_bytes: int, *, resume: bool = True, on_block: Callable[[], None] = lambda: None
    ) -> BlobWriter:
        """Begins to receive a blob, by default where it broke off: what is here is read again to hash it.

        Args:
            on_block: called before each block that is hashed; may raise to stop.

        Raises:
            BlobBusyError: it is being received already.
            BlobError: the folder cannot be written.
        """
        with self._lock:
            if sha256 in self._receiving:
                raise BlobBusyError(f"blob {sha256.hex()[:12]} is being received already")
            self._receiving.add(sha256)
        try:
            path = self.blob_path(sha256)
            return BlobWriter(path, sha256, size_bytes, resume, self, on_block)
        except BaseException:
            self.receiving_ended(sha256, whole=False)
            raise

    def receiving_ended(self, sha256: bytes, *, whole: bool) -> None:
        """A writer has been closed: another one may be made for the blob, and if `whole`, its bytes are known."""
        with self._lock:
            self._receiving.discard(sha256)
        if whole:
            self._know(sha256)

    def ingest(
        self, source: Path, sha256: bytes, size_bytes: int, on_bytes: Callable[[int], None] = lambda _size_bytes: None
    ) -> None:
        """Copies a local file into the store, unless its content is there.

        Args:
            on_bytes: called with the size of each block before it is copied; may raise to stop.

        Raises:
            BlobDamagedError: the file no longer has this content: it changed after its manifest was made.
            BlobError: the file cannot be read, or the store not written.
        """
        if self.has(sha256, size_bytes):
            return
        try:
            reader = read_below(source.parent, (source.name,))
        except OSError as error:
            raise explain(error, "read", source) from error
        with reader, self.writer(sha256, size_bytes, resume=False) as writer:
            changed = f"{source} changed while it was being submitted; submit again"
            try:
                while block := _read(reader, source):
                    on_bytes(len(block))
                    writer.write(memoryview(block))
                if writer.offset < size_bytes:  # nothing to resume: the rest will never come
                    writer.discard()
                    raise BlobDamagedError(changed)
                writer.finish()
            except BlobDamagedError as error:
                raise BlobDamagedError(changed) from error

    def materialise(
        self,
        manifest: FileManifest,
        target: Path,
        on_bytes: Callable[[int], None] = lambda _size_bytes: None,
        *,
        link: bool = False,
    ) -> None:
        """Writes the tree of `manifest` as the new folder `target`, all of it or nothing.

        No link is followed below `target`; files have mode 0644 or 0755, less the owner's umask. A blob that has
        rotted on the disk is removed, so that it can be fetched again.

        Args:
            on_bytes: called with the size of each block before it is written, and with 0 before each file, and each
                block that is only read; may raise to stop.
            link: the files are only read: they are the blobs, with mode 0444, where the file system has hard links.

        Raises:
            BlobDamagedError: a stored blob has other bytes than its name says.
            BlobError: the manifest is refused, a blob is missing, `target` exists, or the disk refuses.
        """
        reason = check_manifest(manifest)
        if reason is not None:
            raise BlobError(f"the job's files are refused: {reason}")
        if os.path.lexists(target):
            raise BlobError(f"{target} is already there; a job's files are written into a new folder only")
        building = building_folder(target)
        with explained("write", building):
            if os.path.lexists(building):  # left by a daemon that was killed here
                shutil.rmtree(building)
            building.mkdir(mode=0o755, parents=True)
        try:
            for entry in manifest.entries:
                file = building.joinpath(*entry.path.split("/"))
                with explained("make the folder", file.parent):
                    file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                on_bytes(0)
                if not (link and self._link_out(entry, file, on_bytes)):
                    self._write_out(entry, file, on_bytes)
            with explained("rename to", target):
                building.rename(target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)  # the first error is the one to tell
            raise

    def _link_out(self, entry: FileEntry, file: Path, on_bytes: Callable[[int], None]) -> bool:
        """False where it has to be a copy."""
        if entry.executable:
            return False
        blob = self.blob_path(entry.sha256)
        if not (entry.sha256 in self._hashed and self.has(entry.sha256, entry.size_bytes)):
            if not self._hash(entry.sha256, on_bytes):
                raise self._rotted(entry)
            with explained("write", blob):
                blob.chmod(0o444)
                seal(blob)
        try:
            os.link(blob, file, follow_symlinks=False)
        except OSError:  # no such links on this disk, or too many of one file: the copy says what else is wrong
            return False
        return True

    def _rotted(self, entry: FileEntry) -> BlobDamagedError:
        return BlobDamagedError(
            f"blob {entry.sha256.hex()[:12]} ({entry.path}) has rotted in {self.path} and was removed; "
            "submit the job again to fetch it anew"
        )

    def _write_out(self, entry: FileEntry, file: Path, on_bytes: Callable[[int], None]) -> None:
        sha = hashlib.sha256()
        mode = 0o755 if entry.executable else 0o644
        with self.open(entry.sha256) as reader, explained("write", file, entry.size_bytes):
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | BINARY, mode)
            with os.fdopen(handle, "wb", buffering=0) as out:
                while block := reader.read(COPY_BYTES):
                    on_bytes(len(block))
                    self.check_room(len(block))
                    sha.update(block)
                    write_all(out.fileno(), memoryview(block))
        if sha.digest() != entry.sha256:
            self.blob_path(entry.sha256).unlink(missing_ok=True)
            raise self._rotted(entry)


def building_folder(target: Path) -> Path:
    """The folder in which a tree lies while it is written."""
    return target.with_name(f".{target.name}.building")


def _read(reader: BinaryIO, source: Path) -> bytes:
    with explained("read", source):
        return reader.read(COPY_BYTES)
