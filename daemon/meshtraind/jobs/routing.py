"""The way to a job of whatever concerns it: of messages and chunks from other devices, and of what links tell."""

import asyncio
import logging
from typing import TYPE_CHECKING

from meshtraind.jobs.admission import Admission
from meshtraind.jobs.housekeeping import Housekeeper
from meshtraind.jobs.registry import OUTCOMES, Dialler, JobRegistry
from meshtraind.jobs.submission import Submissions
from meshtraind.peers.links import Link
from meshtraind.peers.node import Node
from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.job_history import RESUME, HistoryError
from meshtraind.storage.job_record import BEFORE_START, Job
from meshtraind.storage.resume_file import load_all
from meshtraind.transport.connection import RequestFailed
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import TERMINAL_STATES, JobEvent, JobState
from meshwire.membership.effects import Message
from meshwire.membership.proposal_checks import list_wrong
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
from meshwire.messages.group import StoreAnswer, StoreAsk
from meshwire.messages.job import Commit, End, FilesProgress, Generation, RankReport, Remains

if TYPE_CHECKING:
    from meshtraind.session.membership_host import Asked
    from meshtraind.session.session import JobSession

log = logging.getLogger(__name__)

UNDER_WAY = (JobState.STARTING, JobState.RUNNING)


class JobRouter:
    """Owns all that concerns jobs on this device, and finds the job that a message is for.

    Attributes:
        registry: the jobs, and the sessions of those that run.
        admission: this device's way into jobs.
        submissions: jobs that are submitted here.
        housekeeper: deletes what past jobs have left.
    """

    def __init__(self, node: Node, dialler: Dialler) -> None:
        self._node = node
        self._tasks = TaskSet("jobs")
        past = list(node.job_folder("").glob("*"))  # now: those of new jobs are to stay
        self.registry = JobRegistry(node, dialler, self._tasks)
        self.admission = Admission(node, self.registry, self._tasks, load_all(past))
        self.submissions = Submissions(node, dialler, self.admission, self._tasks)
        self.housekeeper = Housekeeper(node, self.registry, self.admission, self._tasks, past)

    def start(self) -> None:
        """Starts what goes on until `close`: what has expired is deleted, and jobs that all of their daemons have lost
        are begun again (J5)."""
        self._node.settings.subscribe(self.registry.follow_settings)
        self.housekeeper.keep_clean()
        self.admission.revivals.start(self._tasks, self.submissions)

    async def close(self) -> None:
        """Leaves every job whose others can go on. Each of the rest begins again with this daemon, from a checkpoint of
        now; or it ends."""
        self.registry.closing = True
        reason = f"meshtraind on {self._node.name} was stopped"
        sessions = self.registry.sessions
        left = await asyncio.gather(*(session.leave() for session in sessions))
        stays = await asyncio.gather(*(session.stays() for session in sessions))
        for session, goes_on in zip(sessions, map(any, zip(left, stays, strict=True)), strict=True):
            if not goes_on and not session.job.ended:
                session.end("failed", f"{reason}; {RESUME.format(job=session.job.spec.job)}", now=True)
        for job in self.registry.jobs.values():
            if (
                not job.ended
                and self.registry.session(job.spec.job) is None
                and not job.was_here  # it lies here as before
                and not job.lies_down
            ):
                job.advance(JobEvent.FAIL, reason)
        await asyncio.gather(*(session.close() for session in sessions))
        for session in sessions:
            if session.job.ending and not session.job.ended and not session.job.lies_down:
                session.job.advance(JobEvent.STOPPED)
        await self._tasks.close()

    # What arrives from other devices

    def notice(self, device: str, header: Header, body: Wire) -> str | None:
        """Hands a job's message to its job. Returns what is wrong with it, if anything."""
        match body:
            case Commit():
                self.admission.committed(body)
            case FilesProgress():
                self.admission.files_progress(device, body)
            case End() if self.registry.session(body.job) is None:
                self.admission.ended_elsewhere(device, body)
            case Remains():
                return self._answer_remains(device, body)
            case Propose() | Promised() | Refused() | Enter() | Entered() | Where() | AskIn() | Wish() | Accuse():
                self._of_generations(device, header, body)
            case _:
                id_ = self.registry.id_of(header.job)
                if id_ is None:
                    return None  # of a job that was called off before it reached this device
                ended = isinstance(body, RankReport) and body.state not in UNDER_WAY
                session = self.registry.session(id_) if ended else self._session_of(device, id_)
                if session is not None:
                    return self._to_session(session, device, header, body)
                if isinstance(body, RankReport) and self.registry.jobs[id_].rank_of(device) == body.rank:
                    self.registry.jobs[id_].report(body)  # how the others ended, after this device has
                    self._answer_late(device, self.registry.jobs[id_], body)
        return None

    def _session_of(self, device: str, id_: str) -> "JobSession | None":
        """The session that a member's message is for. The member may have been told to begin sooner than this one, or
        the submitter was lost before it had told all: who has promised and hears of the job knows that all have."""
        if self.admission.promised(id_) and self.registry.jobs[id_].rank_of(device) is not None:
            self.admission.begin(id_)
        return self.registry.session(id_)

    def _of_generations(self, device: str, header: Header, body: Message) -> None:
        """Hands on a message about a job's membership: to its session, or to who knows what became of the job."""
        id_ = self.registry.id_of(header.job) or ""
        session = self._session_of(device, id_)
        if session is not None:
            asks = isinstance(body, AskIn) and session.job.spec.peers_max is not None
            if asks or session.passage.is_member(device):  # a paired device is not a member for that
                self.registry.tell_generations(session, device, body)
        elif id_ and self.registry.jobs[id_].ended:
            self.registry.tell_end(device, self.registry.jobs[id_])
        elif isinstance(body, Where):
            self.admission.left_behind(device, body)
        elif isinstance(body, AskIn) and not id_:
            self.admission.revivals.tell(device, body.job)  # when it was told last it may have been about to ask
            self._tell_of_before(device, body.job)

    def _answer_remains(self, device: str, body: Remains) -> str | None:
        """Answers a device that has lost a job it was in; if the job is over, that device is told so. Returns what is
        wrong with the message."""
        job = self.registry.jobs.get(body.job)
        if job is not None and job.ended:
            if job.rank_of(device) is not None:
                self.registry.tell_end(device, job)
        elif self.admission.revivals.waits(body.job):
            return self.admission.revivals.told(device, body)
        elif (session := self.registry.session(body.job)) is not None:
            if wrong := list_wrong(body.generation):
                return wrong
            self._member_lies_down(session, device, body.generation)
        elif job is None:
            self._tell_end_of_before(device, body.job)
        return None

    def _member_lies_down(self, session: "JobSession", device: str, generation: Generation) -> None:
        """A member that is in the job in its incarnation of now has laid it down. (A daemon that was started again
        tells of the generation that its former life was in: it is told where the others are. Neither can take in a
        device that asks.)"""
        link, rank = self._node.links.get(device), session.job.rank_of(device)
        lives = {(member.device, member.incarnation) for member in generation.live.values()}
        if link is None or rank is None:
            return
        if session.passage.is_out or (device, link.hello.incarnation) in lives:
            session.member_lies_down(rank)

    def _tell_end_of_before(self, device: str, id_: str) -> None:
        try:
            record = self._node.history.find(id_)
        except HistoryError:
            return  # it is not known here
        over = record.state in TERMINAL_STATES and record.state is not JobState.LOST and not record.spec.get("left")
        if over and device in record.members:
            self.registry.send_end(device, id_, OUTCOMES.get(record.state, "failed"), record.error)

    def _tell_of_before(self, device: str, id_: str) -> None:
        """Tells a device that asks into a job that it has succeeded, before this daemon was restarted: it would wait
        for ever."""
        try:
            succeeded = self._node.history.find(id_).state is JobState.SUCCEEDED
        except HistoryError:
            return  # it is not known here
        if succeeded:
            self.registry.send_end(device, id_, "succeeded", None)

    def _answer_late(self, device: str, job: Job, report: RankReport) -> None:
        """Tells a member that a job has ended here, just before it began there: it would wait for this one."""
        if job.state in (JobState.FAILED, JobState.CANCELLED) and report.state in UNDER_WAY:
            self.registry.tell_end(device, job)

    def _to_session(self, session: "JobSession", device: str, header: Header, body: Wire) -> str | None:
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

    async def answer_member(self, device: str, body: "Asked") -> Wire:
        """Answers a member that lacks rounds, or loads a state. Raises RequestFailed."""
        session = self.registry.session(body.job)
        if session is None or not session.passage.is_member(device):
            raise RequestFailed(f"job {body.job} does not run there")
        return await session.passage.asked(device, body)

    def chunk_announced(self, device: str, header: Header) -> memoryview | str | None:
        """Where a chunk is to be written; None where nobody needs it any more; a text where it breaks the rules."""
        session = self.registry.session(self.registry.id_of(header.job) or "")
        if session is None:
            return None
        rank = session.job.rank_of(device)
        if rank is None:
            newcomer = session.job.spec.peers_max is not None
            return None if newcomer else f"{device[:8]} is not a member of job {session.job.spec.job}"
        if header.kind is Kind.RELAYED:
            place = session.group.announced(rank, header)
            if isinstance(place, str):
                session.passage.refuse(rank, place)
                return None
            return place
        return session.members.chunk_announced(rank, header)

    def chunk_received(self, device: str, header: Header) -> None:
        """Tells the job that a chunk lies in its place."""
        session = self.registry.session(self.registry.id_of(header.job) or "")
        if session is not None and (rank := session.job.rank_of(device)) is not None:
            if header.kind is Kind.RELAYED:
                session.group.received(rank, header)
            else:
                session.members.chunk_received(rank, header)

    async def ask_store(self, device: str, body: StoreAsk) -> StoreAnswer:
        """Answers a member's daemon, whose process group asks for the job's store. Raises RequestFailed."""
        session = self.registry.session(body.job)
        if session is None or session.job.rank_of(device) is None:
            raise RequestFailed(f"job {body.job} does not run there")
        return await session.group.asked_by_member(body)

    # What links tell

    def link_made(self, link: Link) -> None:
        """Tells all jobs of a new link: those of its device may go on with it."""
        self.admission.revivals.link_made(link.device)
        for session in self.registry.sessions:
            if not session.job.ended:
                session.passage.link_made(link.device, link.hello.incarnation)

    def was_away(self) -> None:
        """Tells all jobs that this machine slept, stood still or changed networks: others may have gone on without
        it."""
        for session in self.registry.sessions:
            if not session.job.ended:
                session.passage.was_away()

    def peer_gone(self, device: str, incarnation: int) -> None:
        """Tells all jobs that the daemon of a lost link is known to have ended: it is not elsewhere."""
        for session in self.registry.sessions:
            if not session.job.ended:
                session.passage.peer_gone(device, incarnation)

    def violated(self, device: str, reason: str) -> None:
        """Has the jobs that a device is in go on without it: what came on its link is no message, or no payload."""
        for session in self.registry.sessions:
            rank = session.job.rank_of(device)
            if rank is not None and not session.job.ended:
                session.passage.refuse(rank, reason)

    def peer_lost(self, device: str, reason: str) -> None:
        """Tells all jobs that a link is gone; there may be a newer one. Jobs that have not begun end with it."""
        for session in self.registry.sessions:
            if not session.job.ended:
                session.passage.link_lost(device, reason)
                session.group_link_lost(device, reason)
        if device in self._node.links:
            return
        self.admission.revivals.link_lost(device)
        for job in list(self.registry.jobs.values()):
            if self.admission.promised(job.spec.job):
                continue  # it may have told others to begin
            if job.state in BEFORE_START and job.begins and device == job.spec.submitter:
                text = f"lost the submitter before the job began: {reason}"
                self.admission.end_unstarted(job, JobEvent.FAIL, text)
