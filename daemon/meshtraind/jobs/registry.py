"""The jobs of this daemon's life, and the sessions of those that run here."""

import asyncio
import importlib
import logging
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from meshtraind.peers.node import Node
from meshtraind.runtime.free_memory import release_unused
from meshtraind.runtime.tasks import TaskSet
from meshtraind.runtime.threads import Check, in_thread
from meshtraind.storage.cleanup import clean_up
from meshtraind.storage.job_record import Job
from meshtraind.storage.resume_file import forget
from meshtraind.transport.connection import Connection
from meshwire import limits
from meshwire.jobs.lifecycle import JobEvent, JobState, job_number
from meshwire.membership.effects import Message
from meshwire.messages.generation import Where
from meshwire.messages.job import End, Generation, Outcome

if TYPE_CHECKING:
    from meshtraind.session.session import JobSession

log = logging.getLogger(__name__)

OUTCOMES: dict[JobState, Outcome] = {  # all other ends are failures to those who ask
    JobState.SUCCEEDED: "succeeded",
    JobState.CANCELLED: "cancelled",
}


SESSION = "meshtraind.session.session"


def _load(_check: Check) -> None:
    """Some hundred files, which a daemon does without until then, in a thread: links go on meanwhile."""
    importlib.import_module(SESSION)


class Dialler(Protocol):
    """Whoever makes the links: is told which devices jobs need, and says which of them it cannot link."""

    @property
    def unlinkable(self) -> Mapping[str, str]:
        """Why paired devices that answer cannot be linked, by device id; a live view."""

    @property
    def away(self) -> Mapping[str, str]:
        """Names of the paired devices that are not linked, by device id."""

    def await_devices(self, devices: Collection[str]) -> None:
        """These are needed from now on, and are dialled often; what was said before does not count any more."""


class JobRegistry:
    """All jobs that this daemon takes part in, by id, and the session of each one that runs here.

    Attributes:
        closing: the daemon stops, and takes part in no other job.
    """

    def __init__(self, node: Node, dialler: Dialler, tasks: TaskSet) -> None:
        self._node = node
        self._dialler = dialler
        self._tasks = tasks
        self._jobs: dict[str, Job] = {}
        self._ids: dict[int, str] = {}  # by number in frame headers
        self._sessions: dict[str, JobSession] = {}
        self._members: set[str] = set()  # of all their jobs, as told last
        self.closing = False

    @property
    def running(self) -> int:
        """How many jobs have not ended."""
        return sum(1 for job in self._jobs.values() if not job.ended)

    @property
    def jobs(self) -> Mapping[str, Job]:
        """Jobs of this daemon's life by id; a live view. Older ones are in the history."""
        return self._jobs

    def session(self, job: str) -> "JobSession | None":
        """The session of a job that runs here."""
        return self._sessions.get(job)

    @property
    def sessions(self) -> "tuple[JobSession, ...]":
        """The sessions of all jobs that run here."""
        return tuple(self._sessions.values())

    def follow_settings(self) -> None:
        """Hears that the owner of this machine has changed how much of it may be taken."""
        for session in self._sessions.values():
            session.follow_settings()

    def look_whether_to_rest(self, why: str | None) -> None:
        """Has all learners here rest for a reason of the owner's; None: they need not any more."""
        for session in self._sessions.values():
            session.look_whether_to_rest(why)

    def id_of(self, number: int) -> str | None:
        """The id of the job that a frame's header names; None: it is not known here, or no more."""
        return self._ids.get(number)

    def add(self, job: Job) -> None:
        """Adds a job that this device takes part in from now on. The oldest ended ones are forgotten."""
        ended = [id_ for id_, known in self._jobs.items() if known.ended]
        for id_ in ended[: -limits.ENDED_JOBS_IN_MEMORY_MAX]:
            del self._ids[job_number(id_)]
            del self._jobs[id_]
        if SESSION not in sys.modules:
            self._tasks.spawn(in_thread(_load), "load what a job takes")
        job.unlinkable = self._dialler.unlinkable
        job.advance(JobEvent.ACCEPT)
        self._jobs[job.spec.job] = job
        self._ids[job_number(job.spec.job)] = job.spec.job

    def drop(self, job: Job) -> None:
        """Removes a job that has not begun, as if it had never been added."""
        del self._jobs[job.spec.job]
        del self._ids[job_number(job.spec.job)]

    def start(self, job: Job, generation: Generation, links: dict[int, Connection]) -> None:
        """Opens the job's session, in which it begins."""
        self._open_session(job, generation, links).start()

    async def come_back(self, job: Job, device: str, where: Where | None) -> None:
        """Opens the session of a job that others have begun, and asks in; `device` may have told where they are."""
        session = self._open_session(job, None, {})
        await session.come_back()
        if where is not None:
            self.tell_generations(session, device, where)

    def _open_session(self, job: Job, generation: Generation | None, links: dict[int, Connection]) -> "JobSession":
        peers = [
            link
            for member in job.members
            if member.device != self._node.device and (link := self._node.links.get(member.device)) is not None
        ]
        from meshtraind.session.session import JobSession

        session = JobSession(
            self._node,
            job,
            generation,
            links,
            rtt_s=max((link.rtt_s or 0.0 for link in peers), default=0.0),
            learners_here=1 + sum(link.computes_here for link in peers),
        )
        self._sessions[job.spec.job] = session
        self._tasks.spawn(self._forget(session), f"end of {job.spec.job}")
        self._tell_members()
        job.remember()
        return session

    def _tell_members(self) -> None:
        self._members = self._job_members()
        self._dialler.await_devices(self._members)

    def _job_members(self) -> set[str]:
        return {member.device for session in self._sessions.values() for member in session.job.members}

    async def _forget(self, session: "JobSession") -> None:
        """Lets go of a session, its memory and its files when it has closed."""
        await session.closed.wait()
        job_id, folder = session.job.spec.job, session.job.folder
        del self._sessions[job_id]
        self._tell_members()
        if not session.job.ended:
            return  # this daemon stops, and will return to it
        for device in session.guests:
            self.tell_end(device, session.job)
        await asyncio.to_thread(forget, folder)
        succeeded = session.job.state is JobState.SUCCEEDED
        await asyncio.to_thread(clean_up, job_id, folder, self._node.blobs, succeeded=succeeded)
        # Its parts hold each other, and the buffers of its rounds with them. Python looks for such circles when there
        # are a quarter more objects than before, which may be many jobs later. This takes about 30 ms.
        asyncio.get_running_loop().call_soon(release_unused)

    def tell_generations(self, session: "JobSession", device: str, body: Message) -> None:
        """Hands what a device says of a job's membership to the job's session."""
        generations = session.passage.generations
        if generations is not None and not session.job.ended:
            generations.notice(device, body)
            if isinstance(body, Where):
                session.member_goes_on(device)
            if self._job_members() != self._members:
                self._tell_members()  # somebody has joined

    def tell_end(self, device: str, job: Job) -> None:
        """Tells a device how a job has ended here, unless this device alone has left it."""
        if not job.left:
            self.send_end(device, job.spec.job, OUTCOMES.get(job.state, "failed"), job.error)

    def send_end(self, device: str, id_: str, outcome: Outcome, reason: str | None) -> None:
        """Tells a device, if it is linked, that a job has ended."""
        end = End(job=id_, outcome=outcome, reason=reason or "the job has ended", now=False)
        if device in self._node.links:
            self._node.links[device].connection.notify(end, job=job_number(id_))
