"""Where a job has begun: all can go back to it as long as no round is complete, for nothing is lost by that (J3)."""

import asyncio
import shutil

from meshtraind.startup.resume import begins_after
from meshtraind.storage.cleanup import RESUME
from meshtraind.storage.job_record import Job
from meshwire.messages.generation import Enter


class JobBeginning:
    """The state before a job's first round, as one of its devices can make it: by the script's first lines, or from
    the checkpoint that the job goes on from.

    Attributes:
        here: a learner of this device could begin the job. The files of a checkpoint are only on devices that have
            begun it with the others, until the first round is complete.
        samples: in the rounds of before.
    """

    def __init__(self, job: Job) -> None:
        self._after = begins_after(job.spec.resume)
        self._resumes = job.spec.resume is not None
        self._folder = job.folder / RESUME
        self.here = not self._resumes or job.begins
        self.samples = 0

    def way_back(self, complete: int) -> tuple[int, bytes] | None:
        """As in `Holding.saved`, of a member that holds so many rounds."""
        return self._after if self.here and complete == self._after[0] else None

    def is_cut_of(self, enter: Enter) -> bool:
        """Whether this is where all go back to."""
        return (enter.cut, enter.chain) == self._after

    def is_passed(self, complete: int) -> bool:
        """Whether this round is the one after which the checkpoint's files are needed no more; true once."""
        passed = self._resumes and self.here and complete > self._after[0]
        if passed:
            self.here = False
        return passed

    async def delete_files(self) -> None:
        """Deletes the files of the checkpoint that the job has begun from. Raises OSError."""
        await asyncio.to_thread(shutil.rmtree, self._folder)
