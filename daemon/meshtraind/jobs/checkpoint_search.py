"""`submit --resume`: the newest checkpoint of a job that can be used, on this device or a linked one, brought here."""

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import msgpack

from meshtraind.jobs.file_intake import fetch_manifest, hold_files
from meshtraind.peers.node import Node
from meshtraind.runtime.threads import in_thread
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.checkpoint_store import CheckpointError, CheckpointStore, Rejected, list_checkpoints
from meshtraind.storage.fetch import fetch_blob
from meshtraind.storage.state_transfer import lend
from meshtraind.transport.connection import Connection, ConnectionEnded, Emit, RequestFailed
from meshwire import limits
from meshwire.checkpoints.manifest import GIVEN_UP_CHARS, MANIFEST_FILE, CheckpointManifest, CheckpointName, unit_file
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import topology_after
from meshwire.jobs.files import FileEntry, FileManifest
from meshwire.messages.job import (
    AskCheckpoint,
    BlobRef,
    CheckpointFiles,
    Checkpoints,
    CheckpointSummary,
    JobSpec,
    ListCheckpoints,
    ResumePoint,
)
from meshwire.messages.local import ResumeFrom, SubmitProgress
from meshwire.sync_modes.settings_changes import newest_codec, newest_sync

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 300.0  # a slow disk reads some gigabytes


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a job begins from.

    Attributes:
        spec: of the job that has written the checkpoint.
        source: where the checkpoint was; None: here.
        notes: newer ones that cannot be used, for a person.
    """

    point: ResumePoint
    spec: JobSpec
    source: Connection | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    name: str
    link: Connection | None  # None: this device
    summary: CheckpointSummary

    @property
    def checkpoint(self) -> CheckpointName:
        return CheckpointName(self.summary.round, self.summary.given_up or "")

    def wrong(self, reason: str) -> str:
        return f"the checkpoint after round {self.checkpoint} on {self.name} is not used: {reason}"


class NoCheckpointError(RequestFailed):
    """Everybody who is linked was asked, and no checkpoint of the job lies anywhere."""


class CheckpointSearch:
    """Finds the checkpoint that a submission is to go on from, and brings it here.

    Args:
        owner: in its name the blobs are held that the members will fetch from here.
        emit: is told how far it is.
    """

    def __init__(self, node: Node, owner: str, emit: Emit) -> None:
        self._node = node
        self._store = node.blobs
        self._owner = owner
        self._emit = emit

    async def bring(self, resume: ResumeFrom) -> Resumed:
        """Finds the newest usable checkpoint and brings it here.

        Raises:
            NoCheckpointError: there is none.
            RequestFailed: none can be used; or a device does not say what it has.
        """
        self._emit(SubmitProgress(text=f"looking for checkpoints of job {resume.job}"))
        places, unasked = await self._places(resume.job)
        wanted = [
            place
            for place in places
            if resume.round in (None, place.summary.round) and resume.given_up == place.summary.given_up
        ]
        notes: list[str] = []
        for place in wanted:
            try:
                if place.summary.wrong is not None:
                    raise RequestFailed(place.summary.wrong)
                found = await self._take(resume.job, place)
            except (RequestFailed, ConnectionEnded, TimeoutError, CheckpointError, BlobError) as error:
                notes.append(place.wrong(str(error)))
                continue
            return Resumed(*found, place.link, tuple(notes))
        named = None if resume.round is None else CheckpointName(resume.round, resume.given_up or "")
        what = f"job {resume.job}" if named is None else f"job {resume.job} after round {named}"
        known = ", ".join(str(name) for name in dict.fromkeys(place.checkpoint for place in places))
        facts = [*notes, *unasked]
        if not wanted:
            facts.append(f"there are those after round {known}" if known else "none lies here or on a linked device")
        kind = RequestFailed if wanted or unasked else NoCheckpointError
        raise kind(f"no checkpoint of {what} can be used: " + "; ".join(facts))

    async def bring_files(self, spec: JobSpec, source: Connection | None) -> None:
        """Brings the files that a job ran from. Raises RequestFailed when they are not to be had.

        Args:
            source: who has them; None: this device.
        """
        trees = [(spec.files, limits.SOURCE_BYTES_MAX)]
        if spec.data is not None:
            trees.append((spec.data, limits.DATA_BYTES_MAX))
        try:
            for ref, bytes_max in trees:
                await self._bring_tree(ref, bytes_max, source, spec.job)
        except (BlobError, RequestFailed, ConnectionEnded, TimeoutError) as error:
            raise RequestFailed(
                f"the files of job {spec.job} are not to be had any more ({error}): give its script again, "
                f"`meshtrain submit --resume {spec.job} {spec.script}`"
            ) from error

    async def _places(self, job: str) -> tuple[list[_Place], list[str]]:
        """Where checkpoints of the job lie, the newest first, those of this device before others; and who was asked in
        vain."""
        folder = self._node.job_folder(job)
        try:
            here = await in_thread(lambda check: list_checkpoints(folder, job, 0, check))
        except CheckpointError as error:
            raise RequestFailed(str(error)) from error
        found = [_Place(self._node.name, None, summary) for summary in here]
        unasked = []
        links = [link.connection for link in self._node.links.values()]
        asked = [link.request(ListCheckpoints(job=job), timeout_s=READ_TIMEOUT_S, name="checkpoints") for link in links]
        replies = await asyncio.gather(*asked, return_exceptions=True)
        for link, reply in zip(links, replies, strict=True):
            if isinstance(reply, Checkpoints):
                found += [_Place(link.name, link, summary) for summary in reply.checkpoints]
            elif isinstance(reply, ConnectionEnded | TimeoutError):
                unasked.append(f"{link.name} does not answer")
            elif isinstance(reply, RequestFailed):
                log.info("job %s: %s has no checkpoints: %s", job, link.name, reply)
            elif isinstance(reply, BaseException):
                raise reply
        found.sort(key=lambda place: (-place.summary.root, -place.summary.round, place.link is not None))
        return found, unasked

    async def _take(self, job: str, place: _Place) -> tuple[ResumePoint, JobSpec]:
        round_ = place.summary.round
        if place.link is None:
            folder = self._node.job_folder(job)
            files = await in_thread(lambda _: ship(folder, job, place.checkpoint, self._store, self._owner))
        else:
            asked = AskCheckpoint(job=job, round=round_, given_up=place.summary.given_up)
            reply = await place.link.request(asked, timeout_s=READ_TIMEOUT_S, name=f"checkpoint of {place.name}")
            if not isinstance(reply, CheckpointFiles):
                raise RequestFailed(f"it answered with {type(reply).__name__}")
            files = reply.files
        tree = await self._bring_tree(files, limits.DATA_BYTES_MAX, place.link, job)
        manifest = await in_thread(lambda _: _manifest_of(tree, self._store))
        if (manifest.job, manifest.round) != (job, round_):
            raise RequestFailed(f"it is of job {manifest.job} after round {manifest.round}")
        if not manifest.chain.startswith(place.checkpoint.given_up):
            raise RequestFailed(f"it is of the history {manifest.chain[:GIVEN_UP_CHARS]}")
        return ResumePoint(job=job, round=round_, files=files), spec_of(manifest)

    async def _bring_tree(self, ref: BlobRef, bytes_max: int, source: Connection | None, job: str) -> FileManifest:
        done_bytes, total_bytes = 0, 0

        def on_bytes(size_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += size_bytes
            if total_bytes:
                self._emit(SubmitProgress(text="receiving", done_bytes=done_bytes, total_bytes=total_bytes))

        async def fetch(blob: BlobRef) -> None:
            if self._store.has(blob.sha256, blob.size_bytes):
                return
            if source is None:
                raise RequestFailed(f"blob {blob.sha256.hex()[:12]} is not in {self._store.path}")
            await fetch_blob(source, job, blob, self._store, on_bytes)

        tree = await fetch_manifest(ref, bytes_max, self._store, self._owner, fetch)
        await in_thread(lambda _: hold_files(self._store, self._owner, tree))
        missing = await in_thread(lambda _: self._store.missing(tree))
        total_bytes = sum(entry.size_bytes for entry in missing)
        await in_thread(lambda _: self._store.ensure_space(total_bytes))
        for entry in missing:
            await fetch(BlobRef(sha256=entry.sha256, size_bytes=entry.size_bytes))
        return tree


def ship(job_folder: Path, job: str, wanted: CheckpointName, store: BlobStore, owner: str) -> BlobRef:
    """Stores a checkpoint as blobs, held for the owner, and returns the packed FileManifest of its folder. Blocking.

    Raises:
        RequestFailed: there is none, or it cannot be used.
        CheckpointError, BlobError: the disk refuses.
    """
    checkpoint = CheckpointStore(job_folder, job, keep=1).at(*wanted)
    if isinstance(checkpoint, Rejected):
        raise RequestFailed(checkpoint.reason)
    manifest = checkpoint.manifest.encode()
    head = BlobRef(sha256=hashlib.sha256(manifest).digest(), size_bytes=len(manifest))
    files = [(MANIFEST_FILE, head)]
    files += [(unit_file(unit), record.blob()) for unit, record in enumerate(checkpoint.manifest.units)]
    for name, blob in files:
        lend(owner, checkpoint.folder / name, blob, store, passing=False)
    entries = [
        FileEntry(path=name, size_bytes=blob.size_bytes, sha256=blob.sha256, executable=False) for name, blob in files
    ]
    tree = FileManifest(entries=tuple(sorted(entries, key=lambda entry: entry.path)))
    packed = tree.pack()
    ref = BlobRef(sha256=tree.digest(), size_bytes=len(packed))
    store.hold(owner, [ref.sha256])
    if not store.has(ref.sha256, ref.size_bytes):
        with store.writer(ref.sha256, ref.size_bytes, resume=False) as writer:
            writer.write(memoryview(packed))
            writer.finish()
    return ref


def spec_of(manifest: CheckpointManifest) -> JobSpec:
    """The specification of the job that has written it, with the settings that it had gone over to (C3). Raises
    RequestFailed when that cannot be read."""
    try:
        spec = JobSpec.load(msgpack.unpackb(bytes.fromhex(manifest.spec), strict_map_key=True))
        codec, sync = newest_codec(spec.codec, manifest.changes), newest_sync(spec.sync, manifest.changes)
        if codec == spec.codec:
            return spec.model_copy(update={"sync": sync})
        topology = topology_after(spec.topology, parse_codec(spec.codec), parse_codec(codec))
    except ValueError as error:
        raise RequestFailed(f"it does not hold the specification of its job: {error}") from error
    return spec.model_copy(update={"codec": codec, "topology": topology, "sync": sync})


def _manifest_of(tree: FileManifest, store: BlobStore) -> CheckpointManifest:
    entry = next((entry for entry in tree.entries if entry.path == MANIFEST_FILE), None)
    if entry is None or entry.size_bytes > limits.CHECKPOINT_MANIFEST_BYTES_MAX:
        raise RequestFailed(f"it has no {MANIFEST_FILE}")
    try:
        return CheckpointManifest.decode(store.blob_path(entry.sha256).read_bytes())
    except (OSError, ValueError) as error:
        raise RequestFailed(f"{MANIFEST_FILE}: {error}") from error
