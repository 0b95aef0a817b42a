"""All jobs of this daemon: offered, running, past; and the way of every job message to its job."""

import asyncio
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from meshtraind.jobs.admission import Admission
from meshtraind.jobs.submission import Submission
from meshtraind.learner.environment import learner_threads
from meshtraind.peers.links import Link
from meshtraind.peers.node import Node
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session.membership_host import Asked
from meshtraind.session.session import JobSession
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.cleanup import clean_up, clean_up_all
from meshtraind.storage.disk_space import results_bytes_max
from meshtraind.storage.job_history import RESUME, HistoryError, UnknownJobError
from meshtraind.storage.job_record import BEFORE_START, EntryMode, Job
from meshtraind.storage.results import expire
from meshtraind.storage.resume_file import forget, load_all
from meshtraind.transport.connection import Connection, Emit, RequestError
from meshwire import limits
from meshwire.frames.header import Header
from meshwire.jobs.lifecycle import JOB_ID_PATTERN, TERMINAL_STATES, JobEvent, JobState, job_number
from meshwire.membership.effects import Message
from meshwire.message_base import Wire
from meshwire.messages.generation import (
    Accuse,
    AskIn,
    Enter,
    Entered,
    Promised,
    Propose,
    Refused,
    Where,
    Wish,
)
from meshwire.messages.job import (
    Commit,
    End,
    FilesProgress,
    Generation,
    Outcome,
    RankReport,
    Remains,
)
from meshwire.messages.local import Resubmit, Submit, Submitted

log = logging.getLogger(__name__)

UNSTARTED = {  # what an end means for a device that does not take part yet, or not again
    "succeeded": JobEvent.DAEMON_DIED,
    "failed": JobEvent.FAIL,
    "cancelled": JobEvent.CANCEL,
}
OUTCOMES: dict[JobState, Outcome] = {  # all other ends are failures to those who ask
    JobState.SUCCEEDED: "succeeded",
    JobState.CANCELLED: "cancelled",
}
EXPIRY_INTERVAL_S = 3600.0
UNDER_WAY = (JobState.STARTING, JobState.RUNNING)


class Board:
    """Jobs by id, sessions of those that run here.

    Every method that raises RequestError does so with a text for the person who asked.

    Attributes:
        on_members: called with the devices that jobs here need, whenever they change.
        unlinkable: why paired devices that answer cannot be linked, by id (`Links.refused`).
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._jobs: dict[str, Job] = {}
        self._ids: dict[int, str] = {}  # by number in frame headers
        self._sessions: dict[str, JobSession] = {}
        self._members: set[str] = set()  # of all their jobs, as told last
        self.closing = False
        self.on_members: Callable[[set[str]], None] = lambda _devices: None
        self.unlinkable: Mapping[str, str] = {}
        self._tasks = TaskSet("jobs")
        past = list(node.job_folder("").glob("*"))  # now: those of new jobs are to stay
        self.admission = Admission(node, self, self._tasks, load_all(past))
        self._cleaned = self._tasks.spawn(asyncio.to_thread(clean_up_all, past), "remove files of past jobs")

    @property
    def running(self) -> int:
        """Jobs that have not ended."""
        return sum(1 for job in self._jobs.values() if not job.ended)

    @property
    def jobs(self) -> Mapping[str, Job]:
        """Jobs of this daemon's life by id; a live view. Older ones are in the history."""
        return self._jobs

    def session(self, job: str) -> JobSession | None:
        """The session of a job that runs here."""
        return self._sessions.get(job)

    async def close(self) -> None:
        """Leaves every job whose others can go on. The rest begins again with this daemon, from a checkpoint of now; or
        it ends."""
        self.closing = True
        reason = f"meshtraind on {self._node.name} was stopped"
        sessions = list(self._sessions.values())
        left = await asyncio.gather(*(session.leave() for session in sessions))
        stays = await asyncio.gather(*(session.stays() for session in sessions))
        for session, goes_on in zip(sessions, map(any, zip(left, stays, strict=True)), strict=True):
            if not goes_on and not session.job.ended:
                session.end("failed", f"{reason}; {RESUME.format(job=session.job.spec.job)}", now=True)
        for job in self._jobs.values():
            if not job.ended and job.spec.job not in self._sessions and job.entry_mode is not EntryMode.REVIVAL:
                job.advance(JobEvent.FAIL, reason)
        await asyncio.gather(*(session.close() for session in sessions))
        for session in sessions:
            if session.job.ending and not session.job.ended:
                session.job.advance(JobEvent.STOPPED)
        await self._tasks.close()

    # Submitting

    async def submit(self, body: Submit | Resubmit, emit: Emit) -> Submitted:
        """From a person's command to a running job."""
        blobs = self._node.blobs
        with blobs.holding() as owner:
            submitted = await Submission(self._node, self, body, emit).run(owner)
        self._tasks.spawn(asyncio.to_thread(blobs.trim), "trim the blobs")  # a submitter need not be a member
        return submitted

    # Sessions

    def add(self, job: Job) -> None:
        """A job that this device takes part in from now on. The oldest ended ones are forgotten."""
        ended = [id_ for id_, known in self._jobs.items() if known.ended]
        for id_ in ended[: -limits.ENDED_JOBS_IN_MEMORY_MAX]:
            del self._ids[job_number(id_)]
            del self._jobs[id_]
        job.unlinkable = self.unlinkable
        job.advance(JobEvent.ACCEPT)
        self._jobs[job.spec.job] = job
        self._ids[job_number(job.spec.job)] = job.spec.job

    def drop(self, job: Job) -> None:
        """It has not begun, and is as it was before it was added."""
        del self._jobs[job.spec.job]
        del self._ids[job_number(job.spec.job)]

    def start(self, job: Job, generation: Generation, links: dict[int, Connection]) -> None:
        """The job begins."""
        self._open_session(job, generation, links).start()

    async def come_back(self, job: Job, device: str, where: Where | None) -> None:
        """This device comes into a job that others have begun; `device` may have told where they are."""
        session = self._open_session(job, None, {})
        await session.come_back()
        if where is not None:
            self._to_generations(session, device, where)

    def _open_session(self, job: Job, generation: Generation | None, links: dict[int, Connection]) -> JobSession:
        peers = [
            link
            for member in job.members
            if member.device != self._node.device and (link := self._node.links.get(member.device)) is not None
        ]
        session = JobSession(
            self._node,
            job,
            generation,
            links,
            rtt_s=max((link.rtt_s or 0.0 for link in peers), default=0.0),
            threads=learner_threads(1 + sum(link.connection.same_host for link in peers)),
        )
        self._sessions[job.spec.job] = session
        self._tasks.spawn(self._forget(session), f"end of {job.spec.job}")
        self._tell_members()
        job.remember()
        return session

    def _tell_members(self) -> None:
        self._members = self._job_members()
        self.on_members(self._members)

    def _job_members(self) -> set[str]:
        return {member.device for session in self._sessions.values() for member in session.job.members}

    async def _forget(self, session: JobSession) -> None:
        """Lets go of a session and its files when it has closed."""
        await session.closed.wait()
        job_id, folder = session.job.spec.job, session.job.folder
        del self._sessions[job_id]
        self._tell_members()
        if not session.job.ended:
            return  # this daemon stops, and will return to it
        for device in session.passage.guests:
            self._tell_end(device, session.job)
        await asyncio.to_thread(forget, folder)
        succeeded = session.job.state is JobState.SUCCEEDED
        await asyncio.to_thread(clean_up, job_id, folder, self._node.blobs, succeeded=succeeded)

    def keep_clean(self) -> None:
        """From now on, until `close`, what has expired is deleted."""
        self._tasks.spawn(self._clean_up_regularly(), "delete what has expired")

    def revive(self) -> None:
        """From now on jobs that all of their daemons have lost are begun again (J5)."""
        self.admission.revivals.start(self._tasks)

    async def _clean_up_regularly(self) -> None:
        await self._cleaned
        while True:
            try:
                await self.expire_results()
                await asyncio.to_thread(self._node.blobs.trim)
            except (OSError, BlobError) as error:
                log.warning("what has expired could not be deleted: %s", error)
            await asyncio.sleep(EXPIRY_INTERVAL_S)

    async def expire_results(self) -> None:
        """Deletes results of jobs that ended too long ago, or for which there is no room any more."""
        jobs, now_s = self._node.job_folder(""), time.time()
        here, disk_bytes = await asyncio.to_thread(_on_disk, jobs)
        known = {folder: self._ended_s(folder, changed_s, now_s) for folder, changed_s in here.items()}
        folders = {folder: ended_s for folder, ended_s in known.items() if ended_s is not None}
        if not folders:
            return
        bytes_max = results_bytes_max(disk_bytes)
        for id_ in await asyncio.to_thread(expire, folders, now_s, bytes_max, self._is_over):
            job = self._jobs.get(id_)
            if job is not None:
                job.expire(now_s)
                continue
            try:
                self._node.history.expire(id_, now_s)
            except HistoryError as error:
                log.info("job %s: that its results have expired is not recorded: %s", id_, error)

    def _is_over(self, id_: str) -> bool:
        job = self._jobs.get(id_)
        return job is None or job.ended

    def _ended_s(self, folder: Path, changed_s: float, now_s: float) -> float | None:
        """When a job whose folder lies here has ended, Unix time; None: it may go on."""
        id_ = folder.name
        if (job := self._jobs.get(id_)) is not None:
            return job.ended_at_s if id_ not in self._sessions else None
        try:
            ended_s = self._node.history.find(id_).ended_s
        except UnknownJobError:
            ended_s = changed_s  # the history is new, or has forgotten it
        except HistoryError as error:
            log.warning("the results of job %s are kept: %s", id_, error)
            return None
        if self.admission.may_return(id_) and ended_s is not None and ended_s > now_s - limits.RESULTS_S_MAX:
            return None
        return ended_s

    def ended(self, end: End) -> None:
        """A member, the submitter or, before the start, a person here ends a job."""
        job = self._jobs.get(end.job)
        if job is None:
            self.admission.call_off(end.job)
            return
        if job.ended:
            return
        session = self._sessions.get(end.job)
        if session is not None:
            session.end(end.outcome, end.reason, now=end.now, tell=False)
        else:
            late = end.outcome == "succeeded" and job.entry_mode is EntryMode.LATE_JOIN  # nothing of it is lost here
            event = JobEvent.CANCEL if late else UNSTARTED[end.outcome]
            self.admission.end_unstarted(job, event, end.reason)

    # What arrives from members of running jobs

    def notice(self, device: str, header: Header, body: Wire) -> str | None:
        """Hands a job's message to its job. Returns what is wrong with it, if anything."""
        match body:
            case Commit():
                self.admission.committed(body)
            case FilesProgress():
                self.admission.files_progress(device, body)
            case End() if body.job not in self._sessions:
                self.admission.ended_elsewhere(device, body)
                self.ended(body)
            case Remains():
                return self._answer_remains(device, body)
            case Propose() | Promised() | Refused() | Enter() | Entered() | Where() | AskIn() | Wish() | Accuse():
                self._of_generations(device, header, body)
            case _:
                id_ = self._ids.get(header.job)
                if id_ is None:
                    return None  # of a job that was called off before it reached this device
                ended = isinstance(body, RankReport) and body.state not in UNDER_WAY
                session = self._sessions.get(id_) if ended else self._session_of(device, id_)
                if session is not None:
                    return self._to_session(session, device, header, body)
                if isinstance(body, RankReport) and self._jobs[id_].rank_of(device) == body.rank:
                    self._jobs[id_].report(body)  # how the others ended, after this device has
                    self._answer_late(device, self._jobs[id_], body)
        return None

    def _session_of(self, device: str, id_: str) -> JobSession | None:
        """For what a member says of a running job. It may have been told to begin sooner than this one, or the
        submitter was lost before it had told all: who has promised and hears of the job knows that all have."""
        if self.admission.promised(id_) and self._jobs[id_].rank_of(device) is not None:
            self.admission.begin(id_)
        return self._sessions.get(id_)

    def _of_generations(self, device: str, header: Header, body: Message) -> None:
        """What concerns the membership of a job."""
        id_ = self._ids.get(header.job, "")
        session = self._session_of(device, id_)
        if session is not None:
            asks = isinstance(body, AskIn) and session.job.spec.peers_max is not None
            if asks or session.passage.is_member(device):  # a paired device is not a member for that
                self._to_generations(session, device, body)
        elif id_ and self._jobs[id_].ended:
            self._tell_end(device, self._jobs[id_])
        elif isinstance(body, Where):
            self.admission.left_behind(device, body)
        elif isinstance(body, AskIn) and not id_:
            self._tell_of_before(device, body.job)

    def _to_generations(self, session: JobSession, device: str, body: Message) -> None:
        generations = session.passage.generations
        if generations is not None and not session.job.ended:
            generations.notice(device, body)
            if self._job_members() != self._members:
                self._tell_members()  # somebody has joined

    async def asked(self, device: str, body: Asked) -> Wire:
        """What a member needs that lacks rounds, or loads. Raises RequestError."""
        session = self._sessions.get(body.job)
        if session is None or not session.passage.is_member(device):
            raise RequestError(f"job {body.job} does not run there")
        return await session.passage.asked(device, body)

    def link_made(self, link: Link) -> None:
        """There is a new link: the jobs of its device may go on with it."""
        self.admission.revivals.link_made(link.device)
        for session in list(self._sessions.values()):
            if not session.job.ended:
                session.passage.link_made(link.device, link.hello.incarnation)

    def was_away(self) -> None:
        """This machine slept, stood still or changed networks: others may have gone on without it."""
        for session in list(self._sessions.values()):
            if not session.job.ended:
                session.passage.was_away()

    def peer_gone(self, device: str, incarnation: int) -> None:
        """The daemon of a lost link is known to have ended: it is not elsewhere."""
        for session in list(self._sessions.values()):
            if not session.job.ended:
                session.passage.peer_gone(device, incarnation)

    def _tell_end(self, device: str, job: Job) -> None:
        if not job.left:
            self._send_end(device, job.spec.job, OUTCOMES.get(job.state, "failed"), job.error)

    def _answer_remains(self, device: str, body: Remains) -> str | None:
        """A device that was in a job has lost it. If it is over, it is told so. Returns what is wrong with that."""
        job = self._jobs.get(body.job)
        if job is not None and job.ended:
            if job.rank_of(device) is not None:
                self._tell_end(device, job)
        elif self.admission.revivals.waits(body.job):
            return self.admission.revivals.told(device, body)
        elif job is None:
            self._tell_end_of_before(device, body.job)
        return None

    def _tell_end_of_before(self, device: str, id_: str) -> None:
        try:
            record = self._node.history.find(id_)
        except HistoryError:
            return  # it is not known here
        over = record.state in TERMINAL_STATES and record.state is not JobState.LOST and not record.spec.get("left")
        if over and device in record.members:
            self._send_end(device, id_, OUTCOMES.get(record.state, "failed"), record.error)

    def _tell_of_before(self, device: str, id_: str) -> None:
        """Who asks to be taken into a job that succeeded before this daemon was restarted would wait for ever."""
        try:
            succeeded = self._node.history.find(id_).state is JobState.SUCCEEDED
        except HistoryError:
            return  # it is not known here
        if succeeded:
            self._send_end(device, id_, "succeeded", None)

    def _send_end(self, device: str, id_: str, outcome: Outcome, reason: str | None) -> None:
        end = End(job=id_, outcome=outcome, reason=reason or "the job has ended", now=False)
        if device in self._node.links:
            self._node.links[device].connection.notify(end, job=job_number(id_))

    async def leave(self, id_: str) -> None:
        """A person takes this device out of a job. Raises RequestError where the others could not go on."""
        session, job = self._sessions.get(id_), self._jobs.get(id_)
        reason = f"{self._node.name} left it, the others went on"
        if session is None and job is not None and not job.ended and job.entry_mode is not EntryMode.FOUNDER:
            job.left = True
            self.admission.end_unstarted(job, JobEvent.CANCEL, reason)
            await asyncio.to_thread(forget, job.folder)
            return
        if job is None and self.admission.revivals.waits(id_):
            self.admission.give_up(id_, "cancelled", f"{self._node.name} has left it", left=True)
            return
        if session is None:
            raise RequestError(f"job {id_} does not run on this device; see `meshtrain jobs`")
        if not await session.leave():
            raise RequestError(f"no other device could go on with job {id_}; to end it: meshtrain cancel {id_}")
        session.job.left = True
        session.end("cancelled", reason, now=False, tell=False)
        await session.closed.wait()

    def _answer_late(self, device: str, job: Job, report: RankReport) -> None:
        """A job that ended here just before it began there would wait for this member."""
        if job.state in (JobState.FAILED, JobState.CANCELLED) and report.state in UNDER_WAY:
            self._tell_end(device, job)

    def _to_session(self, session: JobSession, device: str, header: Header, body: Wire) -> str | None:
        rank = session.job.rank_of(device)
        if rank is None and session.job.spec.peers_max is not None:
            return None  # it has joined, and heard of it sooner than this member
        if rank is None or rank == session.job.rank:
            return f"{device[:8]} is not a member of job {session.job.spec.job}"
        if getattr(body, "rank", rank) != rank:
            wrong: str | None = f"it speaks for rank {body.rank}"  # type: ignore[attr-defined]
        else:
            wrong = session.members.notice(rank, header, body)
        if wrong is not None:
            session.passage.refuse(rank, wrong)
        return None

    def violated(self, device: str, reason: str) -> None:
        """What came on this device's link is no message, or no payload: the jobs that it is in go on without it."""
        for session in list(self._sessions.values()):
            rank = session.job.rank_of(device)
            if rank is not None and not session.job.ended:
                session.passage.refuse(rank, reason)

    def chunk_announced(self, device: str, header: Header) -> memoryview | str | None:
        """Where a chunk belongs; None: nowhere any more."""
        session = self._sessions.get(self._ids.get(header.job, ""))
        if session is None:
            return None
        rank = session.job.rank_of(device)
        if rank is None:
            newcomer = session.job.spec.peers_max is not None
            return None if newcomer else f"{device[:8]} is not a member of job {session.job.spec.job}"
        return session.members.chunk_announced(rank, header)

    def chunk_received(self, device: str, header: Header) -> None:
        """A chunk is in its place."""
        session = self._sessions.get(self._ids.get(header.job, ""))
        if session is not None and (rank := session.job.rank_of(device)) is not None:
            session.members.chunk_received(rank, header)

    def peer_lost(self, device: str, reason: str) -> None:
        """A link is gone; there may be a newer one. Jobs that have not begun end with it."""
        for session in list(self._sessions.values()):
            if not session.job.ended:
                session.passage.link_lost(device, reason)
        if device in self._node.links:
            return
        self.admission.revivals.link_lost(device)
        for job in list(self._jobs.values()):
            if self.admission.promised(job.spec.job):
                continue  # it may have told others to begin
            if job.state in BEFORE_START and job.begins and device == job.spec.submitter:
                text = f"lost the submitter before the job began: {reason}"
                self.admission.end_unstarted(job, JobEvent.FAIL, text)


def _on_disk(jobs: Path) -> tuple[dict[Path, float], int]:
    """Folders of jobs with the Unix time of their last change, and the size of their disk in bytes; in a thread, for a
    disk may take its time. Raises OSError."""
    folders = [folder for folder in jobs.glob("*") if re.fullmatch(JOB_ID_PATTERN, folder.name)]
    return {folder: folder.stat().st_mtime for folder in folders}, shutil.disk_usage(jobs).total
