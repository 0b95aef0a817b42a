"""This device leaves its history, of which rounds are given up: its learner writes the base before it is ended.

Nobody waits for this device meanwhile: it is in no generation, and asks to be taken in when this is over.
"""

import asyncio
import logging
from typing import Protocol

from meshtraind.recovery.checkpointer import END_TIMEOUT_S
from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.checkpoint_store import CheckpointError
from meshtraind.storage.job_record import Job
from meshtraind.transport.requests import RequestFailed
from meshwire import limits
from meshwire.checkpoints.manifest import CheckpointName
from meshwire.messages.generation import AskIn
from meshwire.messages.job import GivenUp

log = logging.getLogger(__name__)

LEARNER_S_MAX = END_TIMEOUT_S + 2.0  # whatever the disk does: then the learner is ended, and this device returns
HOLDING_UP = "the base that is given up is being saved, before this device asks in again"
TOO_LATE = "the others took this device in before it was written"


class NamedBase(Protocol):
    """A base that is saved. `meshtraind.storage.checkpoint_store.Checkpoint` is one."""

    @property
    def name(self) -> CheckpointName:
        """What it is called."""


class WrittenBase(Protocol):
    """What a learner has written of a history that is given up; it is needed no more."""

    async def finish(self) -> NamedBase:
        """Makes it a checkpoint. Raises CheckpointError."""


class PartingHost(Protocol):
    """Whoever leaves the history. `MembershipDriver` does."""

    async def write_given_up(self) -> WrittenBase:
        """Has the learner write the base, within END_TIMEOUT_S. Raises RequestFailed, CheckpointError, OSError."""

    def parted(self, parting: "Parting", /) -> None:
        """The learner is needed no more; called once."""


class Parting:
    """One at a time. It ends by `PartingHost.parted`.

    Args:
        given_up: what the job is told when it is known whether it was saved, and under which name.

    Attributes:
        asks: to be taken in: to whom they are to be sent when it is over.
    """

    def __init__(self, job: Job, given_up: GivenUp, host: PartingHost, tasks: TaskSet) -> None:
        self._job = job
        self._given_up = given_up
        self._host = host
        self._told = given_up.model_copy(update={"unsaved": TOO_LATE})
        self._ended = False
        self.asks: dict[str, AskIn] = {}
        job.wait(HOLDING_UP)
        self._deadline = asyncio.get_running_loop().call_later(LEARNER_S_MAX, self._end)
        self._task = tasks.spawn(self._save(), "checkpoint of what is given up")  # such tasks may fail alone
        self._task.add_done_callback(self._tell)  # not in the task: one that is ended before its first step never runs

    def cut_short(self) -> None:
        """The learner is ended now, whether it has written or not."""
        self._task.cancel()
        self._end()

    async def _save(self) -> None:
        try:
            written = await self._host.write_given_up()
            self._end()
            name = (await written.finish()).name
            self._told = self._given_up.model_copy(update={"saved": (name.round, name.given_up)})
            log.info("job %s: what is given up is saved as %s", self._job.spec.job, name)
        except (RequestFailed, CheckpointError, OSError) as error:
            unsaved = str(error)[: limits.GIVEN_UP_REASON_CHARS_MAX]
            self._told = self._given_up.model_copy(update={"unsaved": unsaved})
            log.warning("job %s: what is given up could not be saved: %s", self._job.spec.job, error)

    def _tell(self, _task: "asyncio.Task[None]") -> None:
        self._end()
        log.warning("job %s: given up: %s", self._job.spec.job, self._told)
        self._job.take_given_up([self._told])

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._deadline.cancel()
            self._host.parted(self)
