"""All jobs of this daemon: offered, running, past; and the way of every job message to its job."""

import asyncio
import logging
import shutil

from meshtraind.blobwriter import BlobError
from meshtraind.connection import Connection, ConnectionLost, RequestError
from meshtraind.fetch import list_outputs, serve
from meshtraind.history import HistoryError
from meshtraind.intake import Intake
from meshtraind.job import Job, summary_of
from meshtraind.node import Node
from meshtraind.session import Session, learner_threads
from meshtraind.submission import Emit, choose_members, describe_size, ingest_all, make_spec
from meshtraind.tasks import TaskSet
from meshwire import limits
from meshwire.header import Header
from meshwire.jobs import JobEvent, JobState, job_number
from meshwire.messages.job import (
    Commit,
    End,
    Fetch,
    Fetched,
    FilesProgress,
    Find,
    Found,
    Generation,
    JobSpec,
    JobSummary,
    ListOutputs,
    Member,
    Offer,
    OfferReply,
    OutputFile,
    Outputs,
    Prepare,
    Promise,
)
from meshwire.messages.local import Cancel, Submit, SubmitProgress, Submitted, Watch, Watched
from meshwire.wiretypes import Wire

log = logging.getLogger(__name__)

OFFER_TIMEOUT_S = 20.0
PREPARE_TIMEOUT_S = 20.0
FILES_SILENCE_TIMEOUT_S = 120.0  # a member that receives files says so more often
COMMIT_TIMEOUT_S = 60.0  # between a member's promise and the submitter's word
CANCEL_TIMEOUT_S = 30.0
PROGRESS_INTERVAL_S = 0.5
PEER_TIMEOUT_S = 10.0
WATCH_INTERVAL_S = 1.0


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
        self._progress: dict[str, dict[str, FilesProgress]] = {}  # of jobs submitted here, by device
        self._tasks = TaskSet("jobs")

    @property
    def running(self) -> int:
        """Jobs that have not ended."""
        return sum(1 for job in self._jobs.values() if not job.ended)

    def session(self, job: str) -> Session | None:
        """The session of a job that runs here."""
        return self._sessions.get(job)

    async def close(self) -> None:
        """Ends every job here; the other members learn that this daemon stops."""
        for session in self._sessions.values():
            if not session.job.ended:
                session.end("failed", f"meshtraind on {self._node.name} was stopped", now=True)
        for job in self._jobs.values():
            if not job.ended and job.spec.job not in self._sessions:
                job.advance(JobEvent.FAIL, f"meshtraind on {self._node.name} was stopped")
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        for session in self._sessions.values():
            if not session.job.ended:
                session.job.advance(JobEvent.STOPPED)
        await self._tasks.close()

    # Submitting

    async def submit(self, body: Submit, emit: Emit) -> Submitted:
        """From a person's command to a running job."""
        node = self._node
        members, notes = choose_members(node, body.on, body.peers)
        if body.dry_run:
            files = await asyncio.to_thread(describe_size, body)
            return Submitted(job="0" * 12, members=members, notes=(*notes, *files))
        emit(SubmitProgress(text="reading the files"))
        try:
            files_ref, data_ref = await ingest_all(body, node, emit)
        except BlobError as error:
            raise RequestError(str(error)) from error
        spec = make_spec(body, node.device, files_ref, data_ref)
        self._progress[spec.job] = {}
        told: list[str] = []
        try:
            await self._offer_all(spec, members, told)
            await self._await_files(spec, members, emit)
            emit(SubmitProgress(text="starting"))
            await self._agree(spec, members)
        except (RequestError, ConnectionLost, TimeoutError) as error:
            self._call_off(spec, told, str(error))
            raise RequestError(str(error)) from error
        except asyncio.CancelledError:
            self._call_off(spec, told, "its submission was given up")
            raise
        finally:
            del self._progress[spec.job]
        return Submitted(job=spec.job, members=members, notes=tuple(notes))

    async def _offer_all(self, spec: JobSpec, members: tuple[Member, ...], told: list[str]) -> None:
        for member in members:
            offer = Offer(spec=spec, members=members)
            if member.device == self._node.device:
                reply = self.offered(offer, self._node.device)
            else:
                link = self._link(member)
                answer = await link.request(offer, timeout_s=OFFER_TIMEOUT_S, name=f"offer to {member.name}")
                if not isinstance(answer, OfferReply):
                    raise RequestError(f"{member.name} answered an offer with {type(answer).__name__}")
                reply = answer
            if reply.refusal is not None:
                raise RequestError(f"{member.name} refused the job: {reply.refusal}")
            told.append(member.device)

    async def _await_files(self, spec: JobSpec, members: tuple[Member, ...], emit: Emit) -> None:
        """Until every member has the files; shows the slowest."""
        progress = self._progress[spec.job]
        names = {member.device: member.name for member in members}
        silent_s = 0.0
        seen: dict[str, FilesProgress] = {}
        while True:
            for device, report in progress.items():
                if report.error is not None:
                    raise RequestError(f"{names[device]} could not receive the job: {report.error}")
            waiting = [device for device in names if device not in progress or not progress[device].ready]
            if not waiting:
                return
            for device in waiting:
                if device != self._node.device and device not in self._node.links:
                    raise RequestError(f"lost {names[device]} while it received the files")
            if seen == progress:
                silent_s += PROGRESS_INTERVAL_S
                if silent_s > FILES_SILENCE_TIMEOUT_S:
                    slow = ", ".join(names[device] for device in waiting)
                    raise RequestError(f"no progress in {FILES_SILENCE_TIMEOUT_S:.0f} s from {slow}")
            else:
                silent_s, seen = 0.0, dict(progress)
            reports = [progress[device] for device in waiting if device in progress]
            if reports:
                slowest = max(reports, key=lambda report: report.total_bytes - report.done_bytes)
                text = "sending files to " + ", ".join(names[device] for device in waiting)
                emit(SubmitProgress(text=text, done_bytes=slowest.done_bytes, total_bytes=slowest.total_bytes))
            await self._jobs_news(spec.job)

    async def _jobs_news(self, job: str) -> None:
        if job in self._jobs:
            await self._jobs[job].news(PROGRESS_INTERVAL_S)
        else:
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    async def _agree(self, spec: JobSpec, members: tuple[Member, ...]) -> None:
        """G2: a promise from all, then commit."""
        generation = Generation(job=spec.job, number=1, proposer=self._node.device, parent=None, members=members)
        prepare = Prepare(generation=generation)
        commit = Commit(job=spec.job, generation=generation.hash64())
        for member in members:
            if member.device == self._node.device:
                promise = self.prepared(generation)
            else:
                answer = await self._link(member).request(
                    prepare, timeout_s=PREPARE_TIMEOUT_S, name=f"promise of {member.name}"
                )
                if not isinstance(answer, Promise):
                    raise RequestError(f"{member.name} answered a proposal with {type(answer).__name__}")
                promise = answer
            if promise.refusal is not None:
                raise RequestError(f"{member.name} cannot take part: {promise.refusal}")
        for member in members:
            if member.device == self._node.device:
                self.committed(commit)
            else:
                self._link(member).notify(commit, job=job_number(spec.job))

    def _call_off(self, spec: JobSpec, told: list[str], reason: str) -> None:
        end = End(job=spec.job, outcome="failed", reason=reason[: limits.ERROR_CHARS_MAX], now=True)
        for device in told:
            if device == self._node.device:
                self.ended(end)
            elif device in self._node.links:
                self._node.links[device].connection.notify(end, job=job_number(spec.job))

    def _link(self, member: Member) -> Connection:
        link = self._node.links.get(member.device)
        if link is None:
            raise RequestError(f"lost {member.name} before the job began")
        return link.connection

    # Taking part

    def offered(self, offer: Offer, submitter: str) -> OfferReply:
        """A job is proposed to this device."""
        spec, node = offer.spec, self._node
        rank = next((rank for rank, member in enumerate(offer.members) if member.device == node.device), None)
        refusal = None
        if spec.submitter != submitter:
            refusal = "it was offered by another device than its submitter"
        elif rank is None or offer.members[rank].incarnation != node.incarnation:
            refusal = "meshtraind was restarted meanwhile; submit again"
        elif self.running >= limits.JOBS_RUNNING_MAX:
            refusal = f"{limits.JOBS_RUNNING_MAX} jobs run there already"
        elif spec.job in self._jobs:
            refusal = f"there is a job {spec.job} already"
        elif node.software.torch is None:
            refusal = "it has no torch: run `pip install '.[torch]'` there"
        if refusal is not None:
            return OfferReply(refusal=refusal)
        job = Job(spec, offer.members, rank, node.job_folder(spec.job), node.history)
        self._jobs[spec.job] = job
        self._ids[job_number(spec.job)] = spec.job
        self._tasks.spawn(self._take_in(job), f"files of {spec.job}")
        return OfferReply(refusal=None)

    async def _take_in(self, job: Job) -> None:
        """Fetches the files and tells the submitter."""
        spec = job.spec
        last_s = 0.0
        loop = asyncio.get_running_loop()

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal last_s
            if loop.time() - last_s >= PROGRESS_INTERVAL_S:
                last_s = loop.time()
                self._tell_progress(job, done_bytes, total_bytes, ready=False, error=None)

        job.advance(JobEvent.ACCEPT)
        try:
            source = None
            if spec.submitter != self._node.device:
                link = self._node.links.get(spec.submitter)
                if link is None:
                    raise RequestError("the submitter's link was lost")
                source = link.connection
            await Intake(spec, job.folder, self._node.blobs, source, on_progress).run()
        except (BlobError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
            if not job.ended:
                job.advance(JobEvent.FAIL, str(error))
                self._tell_progress(job, 0, 0, ready=False, error=str(error)[: limits.ERROR_CHARS_MAX])
            await asyncio.to_thread(shutil.rmtree, job.folder, ignore_errors=True)
            return
        if job.ended:
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
        if report.job in self._progress:
            self._progress[report.job][device] = report
            if report.job in self._jobs:
                self._jobs[report.job].touch()

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
                job.advance(JobEvent.FAIL, f"the submitter did not start it within {COMMIT_TIMEOUT_S:.0f} s")
                return
            await job.news(1.0)

    def committed(self, commit: Commit) -> None:
        """Second phase: the generation is entered."""
        generation = self._promised.pop(commit.job, None)
        job = self._jobs.get(commit.job)
        if generation is None or job is None or generation.hash64() != commit.generation or job.ended:
            log.warning("commit of job %s does not match what was promised; ignored", commit.job)
            return
        links: dict[int, Connection] = {}
        rtt_s, here = 0.0, 1
        for rank, member in enumerate(job.members):
            if member.device == self._node.device:
                continue
            link = self._node.links.get(member.device)
            if link is None:
                self.ended(End(job=commit.job, outcome="failed", reason=f"lost {member.name} at the start", now=True))
                return
            links[rank] = link.connection
            rtt_s = max(rtt_s, link.rtt_s or 0.0)
            here += link.connection.same_host
        first = self._node.links.get(job.members[0].device)
        session = Session(
            self._node,
            job,
            generation,
            links,
            rtt_s=rtt_s,
            threads=learner_threads(here),
            master_host=first.address.host if first is not None else "127.0.0.1",
        )
        self._sessions[commit.job] = session
        session.start()
        for device, header, body in self._early.pop(commit.job, []):
            self._to_session(session, device, header, body)

    def ended(self, end: End) -> None:
        """A member, or the submitter before the start, ends a job."""
        job = self._jobs.get(end.job)
        if job is None or job.ended:
            return
        session = self._sessions.get(end.job)
        if session is not None:
            session.end(end.outcome, end.reason, now=end.now, tell=False)
        else:
            job.advance(JobEvent.CANCEL if end.outcome == "cancelled" else JobEvent.FAIL, end.reason)

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
            case _:
                id_ = self._ids.get(header.job)
                if id_ is None:
                    return None  # of a job that was called off before it reached this device
                session = self._sessions.get(id_)
                if session is not None:
                    return self._to_session(session, device, header, body)
                if id_ in self._promised:
                    early = self._early.setdefault(id_, [])
                    if len(early) >= limits.EARLY_MESSAGES_MAX:
                        return f"more than {limits.EARLY_MESSAGES_MAX} messages before the job began here"
                    early.append((device, header, body))
        return None

    def _to_session(self, session: Session, device: str, header: Header, body: Wire) -> str | None:
        rank = session.job.rank_of(device)
        if rank is None or rank == session.job.rank:
            return f"{device[:8]} is not a member of job {session.job.spec.job}"
        session.peer_notice(rank, header, body)
        return None

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

    def peer_lost(self, device: str, reason: str) -> None:
        """A link is gone: every job that needs it ends."""
        for session in self._sessions.values():
            rank = session.job.rank_of(device)
            if rank is not None and not session.job.ended:
                session.peer_lost(rank, reason)
        for job in self._jobs.values():
            if not job.ended and job.spec.job not in self._sessions and device == job.spec.submitter:
                job.advance(JobEvent.FAIL, f"lost the submitter before the job began: {reason}")

    # Questions

    def summaries(self, prefix: str) -> tuple[JobSummary, ...]:
        """Jobs known here, newest first."""
        live = {id_: job.summary() for id_, job in self._jobs.items() if id_.startswith(prefix)}
        try:
            past = self._node.history.newest()
        except HistoryError as error:
            raise RequestError(str(error)) from error
        for record in past:
            if record.id.startswith(prefix):
                live.setdefault(record.id, summary_of(record))
        return tuple(live[id_] for id_ in sorted(live, reverse=True))[: limits.JOBS_LISTED_MAX]

    async def find(self, prefix: str) -> tuple[JobSummary, ...]:
        """Jobs known here or, if none is, on any linked device."""
        found = self.summaries(prefix)
        if found or not prefix:
            return found
        elsewhere: dict[str, JobSummary] = {}
        for link in list(self._node.links.values()):
            try:
                reply = await link.connection.request(
                    Find(prefix=prefix), timeout_s=PEER_TIMEOUT_S, name=f"jobs of {link.hello.name}"
                )
            except (RequestError, ConnectionLost, TimeoutError) as error:
                log.info("cannot ask %s for jobs: %s", link.hello.name, error)
                continue
            if isinstance(reply, Found):
                elsewhere.update((summary.job, summary) for summary in reply.jobs)
        return tuple(elsewhere[id_] for id_ in sorted(elsewhere, reverse=True))

    async def _summary(self, id_: str) -> JobSummary:
        job = self._jobs.get(id_)
        if job is not None:
            return job.summary()
        found = await self.find(id_)
        if not found:
            raise RequestError(f"no job {id_} here or on any linked device; see `meshtrain jobs`")
        return found[0]

    async def watch(self, body: Watch, emit: Emit) -> Watched:
        """Follows a job to its end, also one that runs elsewhere."""
        while True:
            job = self._jobs.get(body.job)
            summary = await self._summary(body.job)
            if summary.ended_at_s is not None:
                return Watched(summary=summary)
            emit(Watched(summary=summary))
            if job is not None:
                await job.news(WATCH_INTERVAL_S)
            else:
                await asyncio.sleep(WATCH_INTERVAL_S)

    async def cancel(self, body: Cancel, by: str) -> None:
        """Ends a job everywhere; returns when it has ended."""
        summary = await self._summary(body.job)
        if summary.ended_at_s is not None:
            raise RequestError(f"job {body.job} has ended already: it is {summary.state}")
        reason = f"cancelled on {by}"
        session = self._sessions.get(body.job)
        if session is not None:
            session.end("cancelled", reason, now=body.now)
        elif body.job in self._jobs:
            self._jobs[body.job].advance(JobEvent.CANCEL, reason)
        else:
            end = End(job=body.job, outcome="cancelled", reason=reason, now=body.now)
            for member in summary.members:
                if member.device in self._node.links:
                    self._node.links[member.device].connection.notify(end, job=job_number(body.job))
        deadline_s = asyncio.get_running_loop().time() + CANCEL_TIMEOUT_S
        while (await self._summary(body.job)).ended_at_s is None:
            if asyncio.get_running_loop().time() > deadline_s:
                raise RequestError(f"job {body.job} has not ended within {CANCEL_TIMEOUT_S:.0f} s; try --now")
            await asyncio.sleep(0.1)

    async def fetch(self, body: Fetch, *, forward: bool) -> Fetched:
        """A piece of a blob, output or log, from here or (`forward`) from the member that has it."""
        summary = await self._summary(body.job)
        if not 0 <= body.rank < len(summary.members):
            raise RequestError(f"job {body.job} has ranks 0 to {len(summary.members) - 1}, not {body.rank}")
        owner = summary.members[body.rank]
        if body.what == "blob" or owner.device == self._node.device:
            job = self._jobs.get(body.job)
            folder = self._node.job_folder(body.job)
            return await serve(body, self._node.blobs, folder, ended=lambda: job is None or job.ended)
        if not forward:
            raise RequestError(f"rank {body.rank} of job {body.job} ran on {owner.name}, not here")
        reply = await self._ask(owner, body, PEER_TIMEOUT_S + body.wait_s)
        if not isinstance(reply, Fetched):
            raise RequestError(f"{owner.name} answered a fetch with {type(reply).__name__}")
        return reply

    async def outputs(self, body: ListOutputs, *, forward: bool) -> Outputs:
        """Output files that lie here and (`forward`) on the other members."""
        summary = await self._summary(body.job)
        found: list[OutputFile] = []
        for rank, member in enumerate(summary.members):
            if member.device == self._node.device:
                found += await asyncio.to_thread(list_outputs, self._node.job_folder(body.job), rank)
            elif forward:
                reply = await self._ask(member, body, PEER_TIMEOUT_S)
                if isinstance(reply, Outputs):
                    found += reply.files
        return Outputs(files=tuple(found))

    async def _ask(self, member: Member, body: Wire, timeout_s: float) -> Wire:
        link = self._node.links.get(member.device)
        if link is None:
            raise RequestError(f"{member.name}, which has this part of the job, is not linked now")
        try:
            return await link.connection.request(body, timeout_s=timeout_s, name=f"answer of {member.name}")
        except (ConnectionLost, TimeoutError) as error:
            raise RequestError(f"{member.name} does not answer: {error}") from error
