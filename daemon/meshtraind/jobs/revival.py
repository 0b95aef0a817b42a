"""Jobs that all of their devices have lost, by a power cut or with the last base: begun again from checkpoints (J5).

When, and by whom, says `meshwire.revival`. They keep their ids: who comes up later returns to them as to any
job that goes on.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from meshtraind.peers.node import Node
from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.job_history import HistoryError, JobHistory
from meshtraind.storage.resume_file import JobFile
from meshtraind.transport.connection import RequestFailed
from meshwire.jobs.lifecycle import JobState, job_number
from meshwire.membership.lineage import rank_of
from meshwire.messages.job import Generation, Remains
from meshwire.revival import Revival
from meshwire.timeouts import Timeouts

log = logging.getLogger(__name__)

POLL_S = 0.25  # while there is such a job


class RefusedError(RequestFailed):
    """A member does not take part, and says why.

    Attributes:
        device: the member's.
    """

    def __init__(self, text: str, device: str) -> None:
        super().__init__(text)
        self.device = device


class Beginner(Protocol):
    """Whoever can begin a job again that all of its daemons have lost."""

    def is_under_way(self, job: str) -> bool:
        """Whether it is about to begin, here or from elsewhere, or its files are being deleted again."""

    async def begin_again(self, generation: Generation) -> None:
        """Submits a job from its newest checkpoint, to go on in it. Raises RefusedError, RequestFailed, BlobError."""


class Revivals:
    """The jobs that this device had, that nobody has gone on with, and that it may begin again.

    Args:
        left: when this daemon ended, by id; those that name no generation were left by a person's word, or by an
            earlier meshtraind.
    """

    def __init__(self, node: Node, left: Mapping[str, JobFile]) -> None:
        self._node = node
        self._why_not: dict[str, str] = {}  # what came of the last try
        self._machines: dict[str, Revival] = {}
        self._added = asyncio.Event()
        for id_, file in left.items():
            if _is_lost(node.history, id_):
                self.add(id_, file)

    def start(self, tasks: TaskSet, beginner: Beginner) -> None:
        """Starts to begin them again, each as soon as enough of its devices are there."""
        tasks.spawn(self._run(beginner), "begin lost jobs again")

    def add(self, job: str, file: JobFile, rests_until_s: float = float("-inf")) -> None:
        """Puts a job on the list, if this device was in it, and tells the others that it has lost it. This device does
        not begin it again before `rests_until_s`."""
        if file.generation is None or rank_of(file.generation, self._node.device) is None:
            return
        timeouts = Timeouts(patience_s=self._node.patience_s)
        self._machines[job] = Revival(self._node.member, file.generation, timeouts, rests_until_s)
        self._added.set()
        for device in self._node.links:
            self.tell(device, job)

    def waits(self, job: str) -> bool:
        """Whether the job is one of them."""
        return job in self._machines

    def waiting(self, job: str) -> str | None:
        """What the job waits for, for people; None where it is not one that is to begin again."""
        if job not in self._machines:
            return None
        why_not = self._why_not.get(job)
        return self._machines[job].waiting() + (f" (tried, and tries again: {why_not})" if why_not else "")

    def devices(self, job: str) -> tuple[str, ...]:
        """The devices of all that were ever in the job."""
        return tuple(member.device for member in self._machines[job].entered.members)

    def is_now(self, job: str, device: str) -> bool:
        """Whether the device was in the generation that this one entered last."""
        entered = self._machines[job].entered
        return rank_of(entered, device) in entered.ranks

    def drop(self, job: str) -> None:
        """Takes a job off the list: it goes on, or is over."""
        self._machines.pop(job, None)
        self._why_not.pop(job, None)

    def link_made(self, device: str) -> None:
        """Tells a newly linked device of the jobs that both have lost."""
        for job in self._machines:
            self.tell(device, job)

    def tell(self, device: str, job: str) -> None:
        """Tells a linked device that the job lies here, if both were in it."""
        if job in self._machines and rank_of(self._machines[job].entered, device) is not None:
            remains = Remains(job=job, generation=self._machines[job].entered)
            self._node.links[device].connection.notify(remains, job=job_number(job))

    def link_lost(self, device: str) -> None:
        """Counts no more on a device whose link has ended."""
        for machine in self._machines.values():
            machine.lost(device, asyncio.get_running_loop().time())

    def goes_on(self, job: str, device: str) -> None:
        """Counts no more on a device that has the job again."""
        if job in self._machines:
            self._machines[job].lost(device, asyncio.get_running_loop().time())

    def told(self, device: str, body: Remains) -> str | None:
        """Hears from a device that it has lost the job, too. Returns what is wrong with what it says, or None."""
        machine, link = self._machines.get(body.job), self._node.links.get(device)
        if machine is None or link is None:
            return None
        member = link.member
        news = not machine.counts(device)
        wrong = machine.told(member, body.generation, asyncio.get_running_loop().time())
        if news and wrong is None:  # when it was told last it may have had the job still
            self.tell(device, body.job)
        return wrong

    async def _run(self, beginner: Beginner) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._machines:
                self._added.clear()
                await self._added.wait()
            for job, machine in list(self._machines.items()):
                generation = machine.due(loop.time())
                if generation is not None and not beginner.is_under_way(job):
                    await self._begin(machine, generation, beginner)
            await asyncio.sleep(POLL_S)

    async def _begin(self, machine: Revival, generation: Generation, beginner: Beginner) -> None:
        """Tries to begin one as the member that proposes it. Others may do so, too: then they refuse, and it tries
        again."""
        job = generation.job
        names = ", ".join(member.name for member in generation.live.values())
        log.info("job %s: all of its devices had lost it; it begins again on %s", job, names)
        by = None
        try:
            await beginner.begin_again(generation)
            return
        except RefusedError as error:
            by, why_not = error.device, str(error)
        except (RequestFailed, BlobError) as error:
            why_not = str(error)
        if job in self._machines:
            log.warning("job %s: it could not begin again: %s", job, why_not)
            self._why_not[job] = why_not
            machine.failed(asyncio.get_running_loop().time(), by)


def _is_lost(history: JobHistory, job: str) -> bool:
    """Whether it ran when this daemon ended, as far as is recorded."""
    try:
        return history.find(job).state is JobState.LOST
    except HistoryError as error:
        log.warning("job %s: it is not begun again: %s", job, error)
        return False
