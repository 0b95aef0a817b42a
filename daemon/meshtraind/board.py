"""All jobs of this daemon: offered, running, past; and the way of every job message to its job."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from meshtraind.blobwriter import BlobError
from meshtraind.cleanup import clean_up, clean_up_all, discard
from meshtraind.connection import Connection, ConnectionLost, RequestError
from meshtraind.intake import Intake
from meshtraind.job import Job
from meshtraind.jobfile import JobFile, forget, load_all
from meshtraind.jobspec import Emit
from meshtraind.learnerenvironment import learner_threads
from meshtraind.links import Link
from meshtraind.node import Node
from meshtraind.passage import Asked
from meshtraind.session import Session
from meshtraind.submission import PROGRESS_INTERVAL_S, Submission
from meshtraind.tasks import TaskSet
from meshwire import limits
from meshwire.codec import CODECS
from meshwire.header import Header
from meshwire.jobs import JobEvent, JobState, job_number
from meshwire.membershipevents import Message
from meshwire.messages.generation import (
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
    Offer,
    OfferReply,
    Promise,
    RankReport,
)
from meshwire.messages.local import Submit, Submitted
from meshwire.wiretypes import Wire

log = logging.getLogger(__name__)

COMMIT_TIMEOUT_S = 60.0  # between a member's promise and the submitter's word


class Board:
    """Jobs by id, sessions of those that run here.

    Every method that raises RequestError does so with a text for the person who asked.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._jobs: dict[str, Job] = {}
        self._ids: dict[int, str] = {}  # by number in frame headers
        self._sessions: dict[str, Session] = {}
        self._promised: dict[str, Generation] = {}
        self._early: dict[str, list[tuple[str, Header, Wire]]] = {}  # members that were told to start sooner than we
        self._submissions: dict[str, Submission] = {}  # on their way from here
        self._called_off: dict[str, None] = {}  # ended before they were offered; oldest first
        self._closing = False
        self._tasks = TaskSet("jobs")
        past = list(node.job_folder("").glob("*"))  # now: those of new jobs are to stay
        self._left = load_all(past)  # jobs that ran when this daemon stopped
        self._tasks.spawn(asyncio.to_thread(clean_up_all, past), "remove files of past jobs")

    @property
    def running(self) -> int:
        """Jobs that have not ended."""
        return sum(1 for job in self._jobs.values() if not job.ended)

    @property
    def jobs(self) -> Mapping[str, Job]:
        """Jobs of this daemon's life by id; a live view. Older ones are in the history."""
        return self._jobs

    def session(self, job: str) -> Session | None:
        """The session of a job that runs here."""
        return self._sessions.get(job)

    async def close(self) -> None:
        """Ends every job here; the other members learn that this daemon stops."""
        self._closing = True
        for session in self._sessions.values():
            if not session.job.ended:
                session.end("failed", f"meshtraind on {self._node.name} was stopped", now=True)
        for job in self._jobs.values():
            if not job.ended and job.spec.job not in self._sessions:
                job.advance(JobEvent.FAIL, f"meshtraind on {self._node.name} was stopped")
        sessions = list(self._sessions.values())
        await asyncio.gather(*(session.close() for session in sessions))
        for session in sessions:
            if not session.job.ended:
                session.job.advance(JobEvent.STOPPED)
        await self._tasks.close()

    # Submitting

    async def submit(self, body: Submit, emit: Emit) -> Submitted:
        """From a person's command to a running job."""
        blobs = self._node.blobs
        with blobs.holding() as owner:
            submitted = await Submission(self._node, self, body, emit).run(owner)
        self._tasks.spawn(asyncio.to_thread(blobs.trim), "trim the blobs")  # a submitter need not be a member
        return submitted

    @contextmanager
    def submitting(self, job: str, submission: Submission) -> Iterator[None]:
        """While this holds, the members' progress reaches the submission."""
        self._submissions[job] = submission
        try:
            yield
        finally:
            del self._submissions[job]

    # Taking part

    def offered(self, offer: Offer, submitter: str) -> OfferReply:
        """A job is proposed to this device."""
        spec, node = offer.spec, self._node
        rank = next((rank for rank, member in enumerate(offer.members) if member.device == node.device), None)
        known = self._jobs.get(spec.job)
        if known is not None and known.spec == spec and not known.ended:
            return OfferReply(refusal=None)  # asked again, because the link broke before the first answer arrived
        refusal = None
        if self._closing:
            refusal = "meshtraind is stopping there"
        elif spec.job in self._called_off:
            refusal = "it was called off meanwhile"
        elif spec.submitter != submitter:
            refusal = "it was offered by another device than its submitter"
        elif rank is None or offer.members[rank].incarnation != node.incarnation:
            refusal = "meshtraind was restarted meanwhile; submit again"
        elif self.running >= limits.JOBS_RUNNING_MAX:
            refusal = f"{limits.JOBS_RUNNING_MAX} jobs run there already"
        elif known is not None:
            refusal = f"there is a job {spec.job} already"
        elif spec.codec not in CODECS:
            refusal = f"--codec {spec.codec} is unknown there: install the same version of meshtraind"
        elif node.software.torch is None:
            refusal = "it has no torch: run `pip install '.[torch]'` there"
        if refusal is not None:
            return OfferReply(refusal=refusal)
        assert rank is not None
        job = Job(spec, offer.members, rank, node.job_folder(spec.job), node.history)
        self._add(job)
        self._tasks.spawn(self._take_in(job, spec.submitter), f"files of {spec.job}")
        return OfferReply(refusal=None)

    def _add(self, job: Job) -> None:
        job.advance(JobEvent.ACCEPT)
        self._jobs[job.spec.job] = job
        self._ids[job_number(job.spec.job)] = job.spec.job

    async def _take_in(self, job: Job, source_device: str) -> None:
        """Fetches the files from a device that has them, and tells the submitter."""
        spec = job.spec
        last_s = 0.0
        loop = asyncio.get_running_loop()

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal last_s
            if job.ended:
                raise RequestError("the job has ended")
            if loop.time() - last_s >= PROGRESS_INTERVAL_S:
                last_s = loop.time()
                self._tell_progress(job, done_bytes, total_bytes, ready=False, error=None)

        try:
            source = None
            if source_device != self._node.device:
                link = self._node.links.get(source_device)
                if link is None:
                    raise RequestError("the link to where the files are was lost")
                source = link.connection
            await Intake(spec, job.folder, self._node.blobs, source, on_progress).run()
        except (BlobError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
            if not job.ended:
                job.advance(JobEvent.FAIL, str(error))
                self._tell_progress(job, 0, 0, ready=False, error=str(error)[: limits.ERROR_CHARS_MAX])
        if job.ended:
            await asyncio.to_thread(discard, spec.job, job.folder, self._node.blobs)
            return
        job.advance(JobEvent.FILES_COMPLETE)
        self._tell_progress(job, 0, 0, ready=True, error=None)

    def _tell_progress(self, job: Job, done_bytes: int, total_bytes: int, *, ready: bool, error: str | None) -> None:
        report = FilesProgress(
            job=job.spec.job, done_bytes=done_bytes, total_bytes=total_bytes, ready=ready, error=error
        )
        if job.spec.submitter == self._node.device:
            self.files_progress(self._node.device, report)
        elif job.spec.submitter in self._node.links:
            self._node.links[job.spec.submitter].connection.notify(report, job=job_number(job.spec.job))

    def files_progress(self, device: str, report: FilesProgress) -> None:
        """A member of a job submitted here says how far its files are."""
        submission = self._submissions.get(report.job)
        if submission is not None:
            submission.files_progress(device, report)

    def prepared(self, generation: Generation) -> Promise:
        """First phase: promises to enter, unless this member could not work in it (G7)."""
        job = self._jobs.get(generation.job)
        if job is None or job.state is not JobState.READY:
            return Promise(refusal=f"job {generation.job} is not ready there")
        if generation.members != job.members:
            return Promise(refusal="the proposed members are not those of the offer")
        for member in generation.members:
            if member.device == self._node.device:
                continue
            link = self._node.links.get(member.device)
            if link is None:
                return Promise(
                    refusal=f"{self._node.name} has no link to {member.name}: pair these two "
                    f"(`meshtrain pair` on one, `meshtrain pair CODE` on the other), or leave one out with --on"
                )
            if link.hello.incarnation != member.incarnation:
                return Promise(refusal=f"{member.name} was restarted meanwhile; submit again")
        self._promised[generation.job] = generation
        self._tasks.spawn(self._await_commit(job), f"commit of {generation.job}")
        return Promise(refusal=None)

    async def _await_commit(self, job: Job) -> None:
        """A submitter that promised and vanished must not leave a job behind."""
        deadline_s = asyncio.get_running_loop().time() + COMMIT_TIMEOUT_S
        while job.state is JobState.READY:
            if asyncio.get_running_loop().time() > deadline_s:
                reason = f"the submitter did not start it within {COMMIT_TIMEOUT_S:.0f} s"
                self.ended(End(job=job.spec.job, outcome="failed", reason=reason, now=True))
                return
            await job.news(1.0)

    def committed(self, commit: Commit) -> None:
        """Second phase: the generation is entered."""
        generation = self._promised.pop(commit.job, None)
        job = self._jobs.get(commit.job)
        if generation is None or job is None or generation.hash64() != commit.generation or job.ended or self._closing:
            log.warning("commit of job %s does not match what was promised; ignored", commit.job)
            return
        links: dict[int, Connection] = {}
        for rank, member in enumerate(job.members):
            if member.device == self._node.device:
                continue
            link = self._node.links.get(member.device)
            if link is None:
                self.ended(End(job=commit.job, outcome="failed", reason=f"lost {member.name} at the start", now=True))
                return
            links[rank] = link.connection
        session = self._open_session(job, generation, links)
        session.start()
        for device, header, body in self._early.pop(commit.job, []):
            self._to_session(session, device, header, body)

    def _open_session(self, job: Job, generation: Generation | None, links: dict[int, Connection]) -> Session:
        peers = [
            link
            for member in job.members
            if member.device != self._node.device and (link := self._node.links.get(member.device)) is not None
        ]
        first = self._node.links.get(job.members[0].device)
        session = Session(
            self._node,
            job,
            generation,
            links,
            rtt_s=max((link.rtt_s or 0.0 for link in peers), default=0.0),
            threads=learner_threads(1 + sum(link.connection.same_host for link in peers)),
            master_host=first.address.host if first is not None else "127.0.0.1",
        )
        self._sessions[job.spec.job] = session
        self._tasks.spawn(self._forget(session), f"end of {job.spec.job}")
        try:
            JobFile(spec=job.spec, members=job.members).save(job.folder)
        except OSError as error:
            log.warning("job %s: a restarted meshtraind could not return to it: %s", job.spec.job, error)
        return session

    # Returning to a job that others have gone on with

    async def _return(self, job: Job, where: Where, device: str) -> None:
        await self._take_in(job, device)
        if job.state is not JobState.READY:
            return
        session = self._open_session(job, None, {})
        session.come_back()
        self._to_generations(session, device, where)

    def _left_behind(self, device: str, where: Where) -> None:
        """A member tells of a job that ran here when this daemon stopped, or that others have finished with."""
        left = self._left.get(where.job)
        rank = next((r for r, m in enumerate(where.generation.members) if m.device == self._node.device), None)
        if left is None or rank is None or where.job in self._jobs or self._closing:
            return
        del self._left[where.job]
        log.info("job %s: it goes on without this device, which asks to be taken in again", where.job)
        folder = self._node.job_folder(where.job)
        job = Job(left.spec, where.generation.members, rank, folder, self._node.history)
        self._add(job)
        self._tasks.spawn(self._return(job, where, device), f"return to {where.job}")

    async def _forget(self, session: Session) -> None:
        """Lets go of a session, its files, and the oldest ended jobs, when it has closed."""
        await session.closed.wait()
        job_id, folder = session.job.spec.job, session.job.folder
        del self._sessions[job_id]
        ended = [id_ for id_, job in self._jobs.items() if job.ended]
        for id_ in ended[: -limits.ENDED_JOBS_IN_MEMORY_MAX]:
            del self._ids[job_number(id_)]
            del self._jobs[id_]
        await asyncio.to_thread(forget, folder)
        await asyncio.to_thread(clean_up, job_id, folder, self._node.blobs)

    def ended(self, end: End) -> None:
        """A member, the submitter or, before the start, a person here ends a job."""
        job = self._jobs.get(end.job)
        if job is None:  # its offer may be right behind: requests are answered by tasks
            self._called_off[end.job] = None
            while len(self._called_off) > limits.CALLED_OFF_MAX:
                del self._called_off[next(iter(self._called_off))]
            return
        if job.ended:
            return
        session = self._sessions.get(end.job)
        if session is not None:
            session.end(end.outcome, end.reason, now=end.now, tell=False)
        else:
            self._end_unstarted(job, JobEvent.CANCEL if end.outcome == "cancelled" else JobEvent.FAIL, end.reason)

    def _end_unstarted(self, job: Job, event: JobEvent, reason: str) -> None:
        """Ends a job that has no session. A submission that still goes on hears of it and calls the others off."""
        self._promised.pop(job.spec.job, None)
        self._early.pop(job.spec.job, None)
        if job.state is JobState.READY:  # while they still come, whoever fetches them sees the end
            work = asyncio.to_thread(discard, job.spec.job, job.folder, self._node.blobs)
            self._tasks.spawn(work, f"remove files of {job.spec.job}")
        job.advance(event, reason)
        self._tell_progress(job, 0, 0, ready=False, error=reason[: limits.ERROR_CHARS_MAX])

    # What arrives from members of running jobs

    def notice(self, device: str, header: Header, body: Wire) -> str | None:
        """Hands a job's message to its job. Returns what is wrong with it, if anything."""
        match body:
            case Commit():
                self.committed(body)
            case FilesProgress():
                self.files_progress(device, body)
            case End() if body.job not in self._sessions:
                self.ended(body)
            case Propose() | Promised() | Refused() | Enter() | Entered() | Where() | AskIn() | Wish():
                self._of_generations(device, header, body)
            case _:
                id_ = self._ids.get(header.job)
                if id_ is None:
                    return None  # of a job that was called off before it reached this device
                session = self._sessions.get(id_)
                if session is not None:
                    return self._to_session(session, device, header, body)
                if isinstance(body, RankReport):
                    self._jobs[id_].report(body)  # how the others ended, after this device has
                    self._answer_late(device, self._jobs[id_], body)
                elif id_ in self._promised:
                    early = self._early.setdefault(id_, [])
                    if len(early) >= limits.EARLY_MESSAGES_MAX:
                        return f"more than {limits.EARLY_MESSAGES_MAX} messages before the job began here"
                    early.append((device, header, body))
        return None

    def _of_generations(self, device: str, header: Header, body: Message) -> None:
        """What concerns the membership of a job."""
        id_ = self._ids.get(header.job, "")
        session = self._sessions.get(id_)
        if session is not None:
            self._to_generations(session, device, body)
        elif id_ and self._jobs[id_].ended:
            self._tell_end(device, self._jobs[id_])
        elif isinstance(body, Where):
            self._left_behind(device, body)

    def _to_generations(self, session: Session, device: str, body: Message) -> None:
        generations = session.passage.generations
        if generations is not None and not session.job.ended:
            generations.notice(device, body)

    async def asked(self, device: str, body: Asked) -> Wire:
        """What a member needs that lacks rounds, or loads. Raises RequestError."""
        session = self._sessions.get(body.job)
        if session is None or session.job.rank_of(device) is None:
            raise RequestError(f"job {body.job} does not run there")
        return await session.passage.asked(body)

    def link_made(self, link: Link) -> None:
        """There is a new link: the jobs of its device may go on with it."""
        for session in list(self._sessions.values()):
            if not session.job.ended:
                session.passage.link_made(link.device, link.hello.incarnation)

    def _tell_end(self, device: str, job: Job) -> None:
        outcome: Literal["succeeded", "failed", "cancelled"] = (
            "succeeded"
            if job.state is JobState.SUCCEEDED
            else "cancelled"
            if job.state is JobState.CANCELLED
            else "failed"
        )
        end = End(job=job.spec.job, outcome=outcome, reason=job.error or "the job has ended", now=False)
        self._node.links[device].connection.notify(end, job=job_number(job.spec.job))

    def _answer_late(self, device: str, job: Job, report: RankReport) -> None:
        """A job that ended here just before it began there would wait for this member."""
        if job.state in (JobState.FAILED, JobState.CANCELLED) and report.state in (JobState.STARTING, JobState.RUNNING):
            self._tell_end(device, job)

    def _to_session(self, session: Session, device: str, header: Header, body: Wire) -> str | None:
        rank = session.job.rank_of(device)
        if rank is None or rank == session.job.rank:
            return f"{device[:8]} is not a member of job {session.job.spec.job}"
        if getattr(body, "rank", rank) != rank:
            return f"rank {rank} of job {session.job.spec.job} speaks for another"
        return session.peer_notice(rank, header, body)

    def chunk_announced(self, device: str, header: Header) -> memoryview | str | None:
        """Where a chunk belongs; None: nowhere any more."""
        session = self._sessions.get(self._ids.get(header.job, ""))
        if session is None:
            return None
        rank = session.job.rank_of(device)
        if rank is None:
            return f"{device[:8]} is not a member of job {session.job.spec.job}"
        return session.chunk_announced(rank, header)

    def chunk_received(self, device: str, header: Header) -> None:
        """A chunk is in its place."""
        session = self._sessions.get(self._ids.get(header.job, ""))
        if session is not None and (rank := session.job.rank_of(device)) is not None:
            session.chunk_received(rank, header)

    def peer_lost(self, device: str, connection: Connection, reason: str) -> None:
        """A link is gone; there may be a newer one. Jobs that have not begun end with it."""
        for session in list(self._sessions.values()):
            if not session.job.ended:
                session.passage.link_lost(device, connection, reason)
        if device in self._node.links:
            return
        for job in self._jobs.values():
            if not job.ended and job.spec.job not in self._sessions and device == job.spec.submitter:
                self._end_unstarted(job, JobEvent.FAIL, f"lost the submitter before the job began: {reason}")
