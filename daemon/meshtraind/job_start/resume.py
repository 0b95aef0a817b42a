"""A job that begins from a checkpoint of another: what its learners load, and where its rounds begin."""

from pathlib import Path

from meshtraind.rounds.history import Entry
from meshtraind.runtime.open_below import read_below
from meshtraind.storage.cleanup import RESUME
from meshtraind.transport.connection import RequestFailed
from meshwire.checkpoints.manifest import MANIFEST_FILE, CheckpointManifest
from meshwire.messages.job import ResumePoint
from meshwire.messages.learner import LearnerModel, LearnerState, StateTask
from meshwire.rounds.chain import START


def begins_after(point: ResumePoint | None) -> tuple[int, bytes]:
    """The round after which a job begins, and its chain hash, which all members know before they have read a file.

    A checkpoint's files stand for all that came before it.
    """
    return (0, START) if point is None else (point.round, point.files.sha256[: len(START)])


class Resuming:
    """The checkpoint that a job begins from, as one member holds it; all hold the same files.

    Every method raises RequestFailed with a text for the script.

    Args:
        folder: DATA/jobs/ID of the job that begins. Blocks on the disk.
    """

    def __init__(self, folder: Path, point: ResumePoint) -> None:
        self.folder = folder / RESUME
        self._point = point
        self._name = f"the checkpoint of job {point.job} after round {point.round}"
        try:
            with read_below(folder.parent, (folder.name, RESUME, MANIFEST_FILE)) as file:
                self._manifest = CheckpointManifest.decode(file.read())
        except (OSError, ValueError) as error:
            raise RequestFailed(f"{self._name} cannot be read: {error}") from error

    def entry(self, body: LearnerModel) -> Entry:
        """The round after which the rounds and the ledger begin, if the script prepares what the checkpoint was written
        of."""
        saved = self._manifest
        if body.samples != saved.space:
            raise RequestFailed(
                f"the script's loader reads {body.samples}, that of {self._name} read {saved.space}: give it the same "
                "samples in the same batches, and submit with as many --learners as then"
            )
        if body.manifest.state_digest().hex() != saved.model:
            raise RequestFailed(f"the script prepares another model or optimizer than that of {self._name}")
        complete, chain = begins_after(self._point)
        return Entry(complete, chain, saved.samples, saved.deal, anew=True)

    def task(self, body: LearnerState) -> StateTask:
        """What the learner is to load."""
        count = len(self._manifest.units)
        if len(body.units) != count:
            raise RequestFailed(f"{self._name} has {count} units of state, the script {len(body.units)}")
        return StateTask(units=tuple(range(count)), folder=str(self.folder), round=self._manifest.round)
