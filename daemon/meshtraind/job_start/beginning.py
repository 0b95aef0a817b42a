"""Where a job has begun: all can go back to it as long as no round is complete, for nothing is lost by that (J3)."""

import asyncio
import shutil

from meshtraind.job_start.resume import Resuming, begins_after
from meshtraind.rounds.history import Entry
from meshtraind.storage.cleanup import RESUME
from meshtraind.storage.job_record import Job
from meshwire.messages.generation import Enter
from meshwire.messages.learner import LearnerModel, LearnerState, StateTask


class JobBeginning:
    """The state before a job's first round, as one of its devices can make it: by the script's first lines, or from
    the checkpoint that the job goes on from.

    Attributes:
        here: a learner of this device could begin the job. The files of a checkpoint are only on devices that have
            begun it with the others, until the first round is complete.
        resumes: it is a checkpoint, which is the same on all of them.
        entry: where the rounds begin; of a checkpoint once `read` has looked.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.round, self.chain = begins_after(job.spec.resume)
        self.resumes = job.spec.resume is not None
        self._resuming: Resuming | None = None
        self.here = not self.resumes or job.begins
        self.entry = Entry(self.round, self.chain, anew=True)

    async def read(self, body: LearnerModel) -> None:
        """Looks at the checkpoint, if it is one. Raises RequestFailed where it does not suit what was prepared."""
        point = self._job.spec.resume
        if point is not None and self.here:
            self._resuming = await asyncio.to_thread(Resuming, self._job.folder, point)
            self.entry = self._resuming.entry(body)

    def task(self, body: LearnerState) -> StateTask | None:
        """What a learner is to load of the checkpoint, if it is one. Raises RequestFailed."""
        return self._resuming.task(body) if self._resuming is not None and self.here else None

    def way_back(self, complete: int) -> tuple[int, bytes] | None:
        """As in `Holding.saved`, of a member that holds so many rounds."""
        return (self.round, self.chain) if self.here and complete == self.round else None

    def is_cut_of(self, enter: Enter) -> bool:
        """Whether this is where all go back to."""
        return (enter.cut, enter.chain) == (self.round, self.chain)

    def is_passed(self, complete: int) -> bool:
        """Whether this round is the one after which the checkpoint's files are needed no more; true once."""
        passed = self.resumes and self.here and complete > self.round
        if passed:
            self.here = False
        return passed

    async def delete_files(self) -> None:
        """Deletes the files of the checkpoint that the job has begun from. Raises OSError."""
        await asyncio.to_thread(shutil.rmtree, self._job.folder / RESUME)
