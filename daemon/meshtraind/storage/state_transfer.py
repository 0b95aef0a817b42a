"""A state from one daemon to another (J1): its units as blobs, by their hashes. What broke off goes on where it was."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from meshtraind.runtime.open_below import read_below
from meshtraind.runtime.threads import Check, in_thread
from meshtraind.storage.blob_writer import BlobDamagedError, BlobError, explained, seal
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.checkpoint_store import Checkpoint
from meshtraind.storage.fetch import Pace, fetch_blob
from meshtraind.transport.connection import Emit, RequestFailed
from meshtraind.transport.messenger import Messenger
from meshwire import limits
from meshwire.checkpoints.manifest import unit_file
from meshwire.jobs.files import human_bytes
from meshwire.messages.generation import SavedState
from meshwire.messages.job import BlobRef
from meshwire.messages.learner import Waiting

TICK_S = 1.0  # how often a waiting learner gets a sign of life

# The donor


def store_state(owner: str, folder: Path, units: Sequence[int], store: BlobStore) -> tuple[BlobRef, ...]:
    """Stores what a learner has written for others, and deletes its files. Blocking.

    The blobs stay until `BlobStore.release(owner)`.

    Raises:
        BlobError: the disk refuses.
    """
    refs = []
    for unit in units:
        path = folder / unit_file(unit)
        with explained("read", path), read_below(folder.parents[2], path.parts[-4:]) as file:  # below that of all jobs
            sha256 = hashlib.file_digest(file, "sha256").digest()
            size_bytes = os.fstat(file.fileno()).st_size
        refs.append(BlobRef(sha256=sha256, size_bytes=size_bytes))
        lend(owner, path, refs[-1], store)
        with explained("delete", path):
            path.unlink()
    return tuple(refs)


def offer(owner: str, checkpoint: Checkpoint, store: BlobStore) -> SavedState:
    """The answer to whoever asks for a state: this checkpoint, which stays as it is. Blocking.

    The blobs stay until `BlobStore.release(owner)`, and outlive the checkpoint.

    Raises:
        BlobError: the disk refuses.
    """
    manifest = checkpoint.manifest
    refs = tuple(record.blob() for record in manifest.units)
    for unit, blob in enumerate(refs):
        lend(owner, checkpoint.unit_path(unit), blob, store)
    return SavedState(round=manifest.round, chain=bytes.fromhex(manifest.chain), units=refs)


def lend(owner: str, path: Path, blob: BlobRef, store: BlobStore, *, passing: bool = True) -> None:
    """A file as a blob, held as `BlobStore.hold` says: a second name of the same file, else a copy. Blocking.

    Raises:
        BlobError: the disk refuses.
    """
    store.hold(owner, [blob.sha256], passing=passing)
    if store.has(blob.sha256, blob.size_bytes):
        return
    place = store.blob_path(blob.sha256)
    try:
        place.parent.mkdir(mode=0o700, exist_ok=True)
        place.unlink(missing_ok=True)  # of another size
        os.link(path, place)
        seal(place)
    except OSError:  # no such links on this disk
        store.ingest(path, blob.sha256, blob.size_bytes)
    if not store.has(blob.sha256, blob.size_bytes):
        place.unlink(missing_ok=True)
        raise BlobError(f"{path} was exchanged while it was read")


# The joiner


async def fetch_state(
    units: Mapping[int, BlobRef],
    donor: Messenger,
    job: str,
    store: BlobStore,
    folder: Path,
    emit: Emit,
    pace: Pace | None = None,
) -> None:
    """Gets these units into `folder`, as files for the learner. Called again, it fetches only what is still missing.

    Args:
        emit: told about once a second how far it is.
        pace: so that a running job keeps its speed; None: as fast as it goes.

    Raises:
        BlobError: the disk refuses, or has no room for it.
        RequestFailed: the donor's files are not what it has offered.
        ConnectionEnded, TimeoutError: the donor does not deliver. What has come is kept for the next attempt.
    """
    progress = _Progress(sum(blob.size_bytes for blob in units.values()), donor.name, emit)
    if progress.total_bytes > limits.DATA_BYTES_MAX:
        raise RequestFailed(f"{donor.name} offers a state of {human_bytes(progress.total_bytes)}")
    digests = [blob.sha256 for blob in units.values()]
    await in_thread(lambda _: store.hold(job, digests, passing=True))
    await in_thread(lambda _: store.ensure_space(_missing_bytes(units.values(), store)))
    for unit, blob in units.items():
        try:
            await fetch_blob(donor, job, blob, store, progress.add, pace)
        except BlobDamagedError as error:
            raise RequestFailed(f"unit {unit} of the state from {donor.name}: {error}") from error
    await in_thread(lambda _: lay_out(units, folder, store))
    await in_thread(lambda _: store.release_passing(job, digests))


def _missing_bytes(units: Iterable[BlobRef], store: BlobStore) -> int:
    missing = {blob.sha256: blob.size_bytes for blob in units if not store.has(blob.sha256, blob.size_bytes)}
    return sum(missing.values())


def lay_out(units: Mapping[int, BlobRef], folder: Path, store: BlobStore) -> None:
    """Puts the blobs where the learner reads them as its files. Blocking. Raises BlobError."""
    with explained("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for unit, blob in units.items():
            path = folder / unit_file(unit)
            path.unlink(missing_ok=True)
            try:
                os.link(store.blob_path(blob.sha256), path)
            except OSError:  # no such links on this disk
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                shutil.copyfile(store.blob_path(blob.sha256), path)


def _move(source: Path, units: int, target: Path, check: Check) -> None:
    """Copied, for the same bytes may have another name in the store of blobs, which nobody may write to. Blocking."""
    for unit in range(units):
        check()
        path = source / unit_file(unit)
        with explained("write", target):
            shutil.copyfile(path, target / unit_file(unit))
            path.unlink()


class _Progress:
    def __init__(self, total_bytes: int, donor: str, emit: Emit) -> None:
        self.total_bytes = total_bytes
        self._donor = donor
        self._emit = emit
        self._done_bytes = 0
        self._told_s = 0.0

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        now_s = time.monotonic()
        if now_s - self._told_s >= TICK_S:
            self._told_s = now_s
            done, total = human_bytes(self._done_bytes), human_bytes(self.total_bytes)
            self._emit(Waiting(reason=f"the state of {self._donor}: {done} of {total}"))


# Both


class StateFiles:
    """The states of one job on this device: those that others fetch from here, and the one that its learner loads.

    Waiting for the disk holds nothing else up.

    Args:
        job: its id.
        folder: DATA/jobs/ID/state; the learner reads there what it loads.
    """

    def __init__(self, job: str, folder: Path, store: BlobStore) -> None:
        self._job = job
        self._store = store
        self.folder = folder

    async def begin(self, number: int) -> Path:
        """A new folder, in which a learner writes the state that is to be lent under this number."""
        folder = self._folder(number)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        return folder

    async def keep(self, number: int, units: Sequence[int]) -> tuple[BlobRef, ...]:
        """Lends what the learner has written there, until `release`. Raises BlobError."""
        return await asyncio.to_thread(store_state, self._owner(number), self._folder(number), units, self._store)

    async def offer(self, number: int, checkpoint: Checkpoint) -> SavedState:
        """Lends a checkpoint under this number, until `release`. Raises BlobError."""
        return await asyncio.to_thread(offer, self._owner(number), checkpoint, self._store)

    async def discard(self, number: int) -> None:
        """Deletes the folder, and what is left in it."""
        await asyncio.to_thread(shutil.rmtree, self._folder(number), ignore_errors=True)

    async def release(self, number: int) -> None:
        """Nobody loads it any more. Raises BlobError."""
        await asyncio.to_thread(self._store.release, self._owner(number))

    async def fetch(self, units: Mapping[int, BlobRef], donor: Messenger, emit: Emit, pace: Pace) -> None:
        """Gets a state that the donor lends, for the own learner: as `fetch_state`."""
        await fetch_state(units, donor, self._job, self._store, self.folder, emit, pace)

    async def move(self, units: int, folder: Path) -> None:
        """Puts so many units that were fetched into another folder, as files of its own. Raises BlobError."""
        await in_thread(lambda check: _move(self.folder, units, folder, check))

    async def lay_out(self, units: Mapping[int, BlobRef]) -> None:
        """Puts a state that lies here already where the learner reads it. Raises BlobError."""
        await in_thread(lambda _: lay_out(units, self.folder, self._store))

    def _owner(self, number: int) -> str:
        return f"{self._job} state {number}"

    def _folder(self, number: int) -> Path:
        return self.folder / f"saved-{number}"
