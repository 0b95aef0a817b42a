"""Checkpoints of one job on this device: JOB/checkpoints/ROUND/ with one file for each unit, and a manifest.

Those of a history that was given up lie beside them as ROUND-TAG (`meshwire.checkpoints.manifest.CheckpointName`).

A checkpoint is there whole or not at all: the learner writes into a folder whose name begins with a dot, and only the
last step gives it its name. Everything here blocks on the disk: call it in a worker thread.
"""

import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshtraind.runtime.open_below import folder_below, open_below
from meshtraind.runtime.threads import Check
from meshtraind.storage.blob_writer import BINARY, COPY_BYTES, NO_FOLLOW, explain, write_all
from meshwire import limits
from meshwire.checkpoints.manifest import (
    GIVEN_UP_CHARS,
    MANIFEST_FILE,
    CheckpointFacts,
    CheckpointManifest,
    CheckpointName,
    UnitRecord,
    unit_file,
)
from meshwire.messages.job import CheckpointSummary

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # below a job's folder
_SAVING, _DELETING = ".saving-", ".deleting-"


class CheckpointError(Exception):
    """A checkpoint cannot be written or used; the message names it and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is complete."""

    folder: Path
    manifest: CheckpointManifest

    @property
    def round(self) -> int:
        """The newest round in it."""
        return self.manifest.round

    @property
    def name(self) -> CheckpointName:
        """Which tells whether its history was given up."""
        return CheckpointName.parse(self.folder.name)

    def unit_path(self, unit: int) -> Path:
        """The file of a unit."""
        return self.folder / unit_file(unit)


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that cannot be used, and why."""

    round: int
    reason: str
    given_up: str = ""

    @property
    def name(self) -> CheckpointName:
        """What it is called, as `Checkpoint.name`."""
        return CheckpointName(self.round, self.given_up)


def _unchecked() -> None:
    """The check of who does not stop in the middle: none."""


class CheckpointStore:
    """The checkpoints of one job in its folder. One daemon writes them, one after the other.

    Args:
        job_folder: DATA/jobs/ID.
        keep: so many stay.
    """

    def __init__(self, job_folder: Path, job: str, keep: int) -> None:
        if keep < 1:
            raise ValueError("at least one checkpoint is kept")
        self.path = job_folder / CHECKPOINTS
        self._job = job
        self._keep = keep

    # Writing

    def clean_up(self) -> None:
        """Deletes what a daemon that was killed has left; to be called when nothing is being written. Raises
        CheckpointError."""
        if not self.path.is_dir():
            return
        with _explained("clean up", self.path):
            for entry in list(self.path.iterdir()):
                if entry.name.startswith("."):
                    shutil.rmtree(entry)

    def begin(self, number: int) -> Path:
        """An empty folder for the learner to write save `number` into. Raises CheckpointError."""
        folder = self._saving(number)
        with _explained("write", folder):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.path.lexists(folder):
                shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        return folder

    def abandon(self, number: int) -> None:
        """The learner could not write it, or is gone."""
        shutil.rmtree(self._saving(number), ignore_errors=True)  # whatever is left: `clean_up`

    def finish(
        self, number: int, facts: CheckpointFacts, units: int, check: Check = _unchecked, *, given_up: bool = False
    ) -> Checkpoint:
        """What the learner has written becomes a checkpoint, safe from a power cut; the oldest ones go.

        Args:
            units: how many it has written.
            check: called before each block; may raise to stop.
            given_up: its history is. Of such ones so many are kept as `limits` says; others are neither among them nor
                deleted for them.

        Raises:
            CheckpointError: the disk refuses, or a file is missing. Nothing of it is kept, older ones are.
        """
        saving = self._saving(number)
        try:
            with _explained("write", saving):
                records = tuple(_hashed(saving / unit_file(unit), check, synced=True) for unit in range(units))
                manifest = CheckpointManifest(**dict(facts), units=records)
                self._write_manifest(saving / MANIFEST_FILE, manifest.encode())
                _sync_folder(saving)
                tag = manifest.chain[:GIVEN_UP_CHARS] if given_up else ""
                made = self._name(saving, CheckpointName(manifest.round, tag), manifest, check)
        except BaseException:
            self.abandon(number)
            raise
        if given_up:
            self._prune_given_up()
        else:
            self._prune(made.round)
        return made

    def _name(self, saving: Path, name: CheckpointName, manifest: CheckpointManifest, check: Check) -> Checkpoint:
        folder = self.path / str(name)
        if os.path.lexists(folder):
            if (there := self._same(name, manifest, check)) is not None:
                shutil.rmtree(saving)
                return there
            self._delete(folder)  # damaged, or of a history that was not kept
        os.rename(saving, folder)
        _sync_folder(self.path)
        return Checkpoint(folder, manifest)

    def _same(self, name: CheckpointName, manifest: CheckpointManifest, check: Check) -> Checkpoint | None:
        """A whole one of this name and history, if there is one."""
        there = self._read(name)
        if isinstance(there, Rejected) or there.manifest.chain != manifest.chain or self.verify(there, check):
            return None
        return there

    def _write_manifest(self, path: Path, data: bytes) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | BINARY, 0o600)
        try:
            write_all(handle, memoryview(data))
            os.fsync(handle)
        finally:
            os.close(handle)

    def _prune(self, newest: int) -> None:
        """Keeps `newest`, which was just written, and the complete ones before it. Those after it are of a history that
        was not kept: the job stands at `newest` now."""
        kept = 0
        for one in self.listed():
            complete = one.round <= newest and not isinstance(one, Rejected)
            if complete and kept < self._keep:
                kept += 1
            else:
                self._delete_surplus(one.name)

    def _prune_given_up(self) -> None:
        """Keeps the latest of those whose history was given up, by when they were."""
        there = self.given_up()
        whole = [one for one in there if isinstance(one, Checkpoint)]
        whole.sort(key=lambda one: one.manifest.created_at_s, reverse=True)
        latest = [one.name for one in whole[: limits.GIVEN_UP_CHECKPOINTS_MAX]]
        for one in there:
            if one.name not in latest:
                self._delete_surplus(one.name)

    def _delete_surplus(self, name: CheckpointName) -> None:
        try:
            self._delete(self.path / str(name))
        except OSError as error:  # a checkpoint too many is no reason to lose the new one
            log.warning("cannot delete the checkpoint %s: %s", self.path / str(name), error)

    def _delete(self, folder: Path) -> None:
        """Deletes a checkpoint, its name first, so that nobody finds half of it."""
        doomed = self.path / f"{_DELETING}{folder.name}"
        if os.path.lexists(doomed):
            shutil.rmtree(doomed)
        os.rename(folder, doomed)
        shutil.rmtree(doomed)

    def _saving(self, number: int) -> Path:
        return self.path / f"{_SAVING}{number}"

    def respell(self) -> None:
        """Spells every manifest as it is written today: what an earlier version did not know stands in it then, too.

        What cannot be read stays as it is, and `listed` names it. Raises CheckpointError where the disk refuses.
        """
        try:
            names = self._names()
        except CheckpointError as error:
            log.warning("checkpoints stay as they are: %s", error)
            return
        for name in names:
            path = self.path / str(name) / MANIFEST_FILE
            try:
                data = _read_manifest(path)
                spelled = CheckpointManifest.decode(data).encode()
            except (OSError, ValueError) as error:
                log.warning("the checkpoint %s stays as it is: %s", path.parent, error)
                continue
            if spelled != data:
                part = path.with_name(f"{MANIFEST_FILE}.part")
                with _explained("write", path):
                    part.unlink(missing_ok=True)  # of a start that was killed
                    self._write_manifest(part, spelled)
                    part.replace(path)
                    _sync_folder(path.parent)

    # Reading

    def listed(self) -> tuple[Checkpoint | Rejected, ...]:
        """The checkpoints of the history that is kept, the newest first. Their files have the right sizes; what these
        hold is not looked at: see `verify`."""
        return tuple(self._read(name) for name in self._names() if not name.given_up)

    def given_up(self) -> tuple[Checkpoint | Rejected, ...]:
        """The checkpoints of histories that are not kept, the newest first: nobody goes on from them but who names
        one."""
        return tuple(self._read(name) for name in self._names() if name.given_up)

    def at(self, round_: int, given_up: str = "") -> Checkpoint | Rejected:
        """The one of this name, as `listed` or `given_up` has it."""
        return self._read(CheckpointName(round_, given_up))

    def verify(self, checkpoint: Checkpoint, check: Check = _unchecked) -> str | None:
        """Reads a whole checkpoint. Returns what is wrong with it, or None."""
        for unit, record in enumerate(checkpoint.manifest.units):
            name = unit_file(unit)
            try:
                found = _hashed(checkpoint.unit_path(unit), check, synced=False)
            except OSError as error:
                return f"{name} cannot be read: {error.strerror or error}"
            except CheckpointError as error:
                return str(error)
            if found != record:
                return f"{name} holds other bytes than were written"
        return None

    def _names(self) -> list[CheckpointName]:
        """Whatever else lies there is none of ours."""
        with _explained("list", self.path):
            try:
                with folder_below(self.path.parents[1], self.path.parts[-2:]) as folder:
                    return sorted(names_among(os.listdir(folder)), reverse=True)
            except FileNotFoundError:
                return []

    def _read(self, name: CheckpointName) -> Checkpoint | Rejected:
        folder = self.path / str(name)
        try:
            manifest = CheckpointManifest.decode(_read_manifest(folder / MANIFEST_FILE))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            return Rejected(name.round, f"{MANIFEST_FILE}: {reason}"[: limits.REFUSAL_CHARS_MAX], name.given_up)
        wrong = None
        checkpoint = Checkpoint(folder, manifest)
        if manifest.job != self._job:
            wrong = f"it is of job {manifest.job}"
        elif manifest.round != name.round:
            wrong = f"its manifest is of round {manifest.round}"
        elif not manifest.chain.startswith(name.given_up):
            wrong = f"its manifest is of the history {manifest.chain[:GIVEN_UP_CHARS]}"
        else:
            wrong = _sizes_wrong(checkpoint)
        return checkpoint if wrong is None else Rejected(name.round, wrong, name.given_up)


def names_among(entries: Iterable[str]) -> Iterator[CheckpointName]:
    """The entries of a folder that are checkpoints."""
    for entry in entries:
        try:
            yield CheckpointName.parse(entry)
        except ValueError:
            continue


def list_checkpoints(job_folder: Path, job: str, rank: int, check: Check) -> tuple[CheckpointSummary, ...]:
    """All checkpoints of a job that lie here, every file read, the newest first. Raises CheckpointError."""
    store = CheckpointStore(job_folder, job, keep=1)
    found = []
    for one in (*store.listed(), *store.given_up()):
        found.append(
            CheckpointSummary(
                round=one.round,
                rank=rank,
                created_at_s=None if isinstance(one, Rejected) else one.manifest.created_at_s,
                size_bytes=None if isinstance(one, Rejected) else one.manifest.size_bytes,
                wrong=one.reason if isinstance(one, Rejected) else store.verify(one, check),
                given_up=one.name.given_up or None,
                root=0 if isinstance(one, Rejected) else one.manifest.generation.generation(job).root,
            )
        )
    return tuple(found)


def _sizes_wrong(checkpoint: Checkpoint) -> str | None:
    for unit, record in enumerate(checkpoint.manifest.units):
        name = unit_file(unit)
        try:
            status = checkpoint.unit_path(unit).lstat()
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is no file"
        if status.st_size != record.size_bytes:
            return f"{name} has {status.st_size} bytes instead of {record.size_bytes}"
    return None


def _read_manifest(path: Path) -> bytes:
    with os.fdopen(_open_regular(path, os.O_RDONLY), "rb", buffering=0) as file:
        return file.read(limits.CHECKPOINT_MANIFEST_BYTES_MAX + 1)


def _hashed(path: Path, check: Check, *, synced: bool) -> UnitRecord:
    """Reads a file for its size and hash. Raises OSError; CheckpointError when it holds nothing."""
    sha256, size_bytes = hashlib.sha256(), 0
    handle = _open_regular(path, os.O_RDWR if synced else os.O_RDONLY)  # Windows syncs what may be written
    try:
        while block := os.read(handle, COPY_BYTES):
            check()
            sha256.update(block)
            size_bytes += len(block)
        if synced:
            os.fsync(handle)
    finally:
        os.close(handle)
    if not size_bytes:
        raise CheckpointError(f"{path.name} is empty")
    return UnitRecord(size_bytes=size_bytes, sha256=sha256.hexdigest())


def _open_regular(path: Path, mode: int) -> int:
    """Opens what neither is a link nor makes its reader wait."""
    return open_below(path.parents[3], path.parts[-4:], mode)  # below the folder of all jobs


def _sync_folder(folder: Path) -> None:
    """Names last as files do, where a system lets a folder be opened; Windows keeps them by itself."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(str(explain(error, action, Path(error.filename or path)))) from error
