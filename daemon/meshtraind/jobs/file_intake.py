"""Receives a job's files: manifests first, then every blob that is not here yet, then the folders for the learner."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from meshtraind.runtime.privacy import PrivacyError, make_private
from meshtraind.runtime.tasks import TaskSet, told_elsewhere
from meshtraind.runtime.threads import Check, in_thread
from meshtraind.storage.background_pacing import Pacer
from meshtraind.storage.blob_writer import BlobError, explain
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.cleanup import DATA, RESUME, SOURCE
from meshtraind.storage.fetch import fetch_blob
from meshtraind.transport.connection import Connection, RequestFailed
from meshwire import limits
from meshwire.jobs.files import FileEntry, FileManifest, check_manifest, check_path
from meshwire.messages.job import BlobRef, JobSpec

BLOBS_IN_FLIGHT = 8  # many small files: one by one, each would wait for the network's delay


class Intake:
    """What it takes to have the files of one job here. Their blobs are held in the job's name: its owner releases them.

    Args:
        source: the submitter, None when that is this device.
        on_progress: called with (done, total) of the bytes that travel, at least every second or so while anything
            moves, here on the disk too; what it raises ends the intake.
        begins: this device begins the job with the others; else they train already, are not to be held up, and will
            give it their state, not that of a checkpoint.
    """

    def __init__(
        self,
        spec: JobSpec,
        folder: Path,
        store: BlobStore,
        source: Connection | None,
        on_progress: Callable[[int, int], None],
        *,
        begins: bool = True,
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._store = store
        self._source = source
        self._on_progress = on_progress
        self._begins = begins
        self._pace = None if begins else Pacer()
        self._done_bytes = 0
        self._total_bytes = 0

    async def run(self) -> None:
        """Returns when the learner could start.

        Raises:
            BlobError, RequestFailed, ConnectionEnded, TimeoutError: with a text for a person.
        """
        spec = self._spec
        trees = [(spec.files, self._folder / SOURCE, limits.SOURCE_BYTES_MAX)]
        if spec.data is not None:
            trees.append((spec.data, self._folder / DATA, limits.DATA_BYTES_MAX))
        if spec.resume is not None and self._begins:
            trees.append((spec.resume.files, self._folder / RESUME, limits.DATA_BYTES_MAX))
        manifests = [(await self._manifest(ref, bytes_max), target) for ref, target, bytes_max in trees]
        if all(entry.path != spec.script for entry in manifests[0][0].entries):
            raise RequestFailed(f"the script {spec.script} is not among the files of the job")
        missing: list[FileEntry] = []
        for manifest, target in manifests:
            passing = target.name == RESUME
            await asyncio.to_thread(hold_files, self._store, spec.job, manifest, passing=passing)
            missing += await asyncio.to_thread(self._store.missing, manifest)  # looks for every file
        missing_bytes = sum(entry.size_bytes for entry in missing)
        copied_bytes = sum(manifest.total_bytes for manifest, target in manifests if target.name == SOURCE)
        await asyncio.to_thread(self._store.ensure_space, missing_bytes + copied_bytes)
        self._total_bytes = missing_bytes
        await self._fetch_all(missing)
        try:
            await asyncio.to_thread(make_private, self._folder)
        except PrivacyError as error:
            raise RequestFailed(str(error)) from error
        for manifest, target in manifests:
            await self._write_out(manifest, target)
        if spec.data is not None and spec.data_path is not None:
            await asyncio.to_thread(show_data, self._folder, spec.data_path)

    async def _manifest(self, ref: BlobRef, bytes_max: int) -> FileManifest:
        def count(_size_bytes: int) -> None:
            self._count(0)  # how much there is to fetch is not known yet

        async def fetch(blob: BlobRef) -> None:
            await self._fetch(blob, count)

        return await fetch_manifest(ref, bytes_max, self._store, self._spec.job, fetch)

    async def _fetch_all(self, entries: list[FileEntry]) -> None:
        left = iter(entries)

        async def fetch_next() -> None:
            for entry in left:
                await self._fetch(BlobRef(sha256=entry.sha256, size_bytes=entry.size_bytes), self._count)

        tasks = TaskSet(f"files of {self._spec.job}", on_error=told_elsewhere)
        try:
            await asyncio.gather(*(tasks.spawn(fetch_next(), f"fetch {number}") for number in range(BLOBS_IN_FLIGHT)))
        finally:
            await tasks.close()

    async def _write_out(self, manifest: FileManifest, target: Path) -> None:
        steps, told_steps = 0, 0
        link = target.name != SOURCE  # which a script may well write to

        def work(check: Check) -> None:
            def on_bytes(_size_bytes: int) -> None:
                nonlocal steps
                check()
                steps += 1

            self._store.materialise(manifest, target, on_bytes, link=link)

        def tell() -> None:
            nonlocal told_steps
            if steps == told_steps:
                return  # a disk that hangs is silence, which the submitter gives up on
            told_steps = steps
            self._count(0)

        await in_thread(work, tell)
        tell()

    async def _fetch(self, blob: BlobRef, on_bytes: Callable[[int], None]) -> None:
        if self._store.has(blob.sha256, blob.size_bytes):
            return
        if self._source is None:
            raise BlobError(f"blob {blob.sha256.hex()[:12]} has vanished from {self._store.path}; submit again")
        await fetch_blob(self._source, self._spec.job, blob, self._store, on_bytes, self._pace)

    def _count(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._on_progress(self._done_bytes, self._total_bytes)


def show_data(folder: Path, data_path: str) -> None:
    """Puts a job's data where its script looks for them without a job: a link below its working directory. Blocking.

    Raises:
        RequestFailed: the path is refused, or the working directory has something there.
        BlobError: the disk refuses.
    """
    if (wrong := check_path(data_path)) is not None:
        raise RequestFailed(f"the place of the job's data {data_path!r} {wrong}")
    parts = data_path.split("/")
    link = (folder / SOURCE).joinpath(*parts)
    up = [os.pardir] * len(parts)
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.join(*up, DATA), target_is_directory=True)
    except (FileExistsError, NotADirectoryError):
        raise RequestFailed(f"the job ships {data_path!r} twice: in its working directory and as its data") from None
    except OSError as error:
        raise explain(error, "write", link) from error


async def fetch_manifest(
    ref: BlobRef, bytes_max: int, store: BlobStore, owner: str, fetch: Callable[[BlobRef], Awaitable[None]]
) -> FileManifest:
    """The list of a folder's files, checked. Raises RequestFailed, and what `fetch` raises."""
    if ref.size_bytes > limits.MANIFEST_BYTES_MAX:
        raise RequestFailed(f"a manifest of {ref.size_bytes} bytes exceeds {limits.MANIFEST_BYTES_MAX}")
    await asyncio.to_thread(store.hold, owner, [ref.sha256])
    await fetch(ref)
    try:
        manifest, reason = await asyncio.to_thread(_read_manifest, store.blob_path(ref.sha256), bytes_max)
    except ValueError as error:
        raise RequestFailed(f"the job's manifest cannot be read: {error}") from error
    if reason is not None:
        raise RequestFailed(f"the job's files are refused: {reason}")
    return manifest


def hold_files(store: BlobStore, owner: str, manifest: FileManifest, *, passing: bool = False) -> None:
    """Holds all files of a manifest, and the manifest, as `BlobStore.hold` does."""
    store.hold(owner, (entry.sha256 for entry in manifest.entries), passing=passing)


def _read_manifest(path: Path, bytes_max: int) -> tuple[FileManifest, str | None]:
    """A manifest, and what is wrong with it. Blocking: it may list 100,000 files. Raises OSError, ValueError."""
    manifest = FileManifest.unpack(path.read_bytes())
    return manifest, check_manifest(manifest, bytes_max)
