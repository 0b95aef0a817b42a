"""What people ask about jobs: which there are, how they stand, what they wrote; and the word to end one.

Answered from here, or from the linked device that knows.
"""

import asyncio
import logging
import time
from functools import partial

from meshtraind.jobs.admission import Admission
from meshtraind.jobs.checkpoint_search import READ_TIMEOUT_S, ship
from meshtraind.jobs.registry import JobRegistry
from meshtraind.peers.node import Node
from meshtraind.runtime.disk_threads import DiskThreads
from meshtraind.runtime.threads import in_thread
from meshtraind.session.course import load_course
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.checkpoint_store import CheckpointError, list_checkpoints
from meshtraind.storage.fetch import list_outputs, serve
from meshtraind.storage.job_history import HistoryError
from meshtraind.storage.job_record import EntryMode, Job, summary_of
from meshtraind.storage.results import DAY_S
from meshtraind.transport.connection import ConnectionEnded, Emit, RequestFailed
from meshwire import limits
from meshwire.checkpoints.manifest import CheckpointName
from meshwire.jobs.lifecycle import JobEvent, JobState
from meshwire.message_base import Wire
from meshwire.messages.course import JobCourse
from meshwire.messages.job import (
    AskCheckpoint,
    CheckpointFiles,
    Checkpoints,
    CheckpointSummary,
    End,
    Fetch,
    Fetched,
    Find,
    Found,
    JobSummary,
    ListCheckpoints,
    ListOutputs,
    Member,
    OutputFile,
    Outputs,
)
from meshwire.messages.local import Cancel, ChangeSettings, SettingsTaken, Watch, Watched
from meshwire.peer_news import joined
from meshwire.sync_modes.settings_changes import SettingsWish

log = logging.getLogger(__name__)

_CHECKPOINTS = DiskThreads("reads checkpoints", 2)

CANCEL_TIMEOUT_S = 30.0
PEER_CANCEL_TIMEOUT_S = 60.0  # it saves a checkpoint before
PEER_TIMEOUT_S = 10.0
WATCH_INTERVAL_S = 1.0
CHECKPOINTS_TIMEOUT_S = READ_TIMEOUT_S - 10.0  # less than a peer waits, which then learns why
OUTPUT_FILE_OVERHEAD_BYTES = 64  # of one entry, besides its path


class JobQueries:
    """Answers what people and peers ask about jobs, and ends or leaves one at their word.

    Every method raises RequestFailed with a text for the person who asked.
    """

    def __init__(self, node: Node, registry: JobRegistry, admission: Admission) -> None:
        self._node = node
        self._registry = registry
        self._admission = admission
        self._listing = asyncio.Lock()

    def summaries(self, prefix: str) -> tuple[JobSummary, ...]:
        """Jobs known here, newest first."""
        live = {id_: job.summary() for id_, job in self._registry.jobs.items() if id_.startswith(prefix)}
        try:
            past = self._node.history.newest(id_prefix=prefix)
        except HistoryError as error:
            raise RequestFailed(str(error)) from error
        for record in past:
            live.setdefault(record.id, self._past(summary_of(record)))
        return _newest(live)

    async def known_here(self, prefix: str) -> tuple[JobSummary, ...]:
        """The jobs known here, newest first, for a peer. One list at a time, and whatever else waits goes between two:
        each takes some 50 ms of a daemon that remembers a thousand jobs, and a peer may ask for 64 at once."""
        async with self._listing:
            await asyncio.sleep(0)
            return self.summaries(prefix)

    def _past(self, summary: JobSummary) -> JobSummary:
        """The summary of a job that ended before this daemon was started. Others may be in the middle of it: if so they
        tell as soon as there is a link, and before that nobody knows that it is lost."""
        waiting = self._admission.waiting(summary.job)
        if waiting is None or (summary.state != JobState.LOST and not self._admission.comes_back(summary.job)):
            return summary
        reason = waiting[: limits.ERROR_CHARS_MAX]
        returning = {"state": JobState.READY, "ended_at_s": None, "error": None, "waiting_for": reason}
        return summary.model_copy(update=returning)

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
            except (RequestFailed, ConnectionEnded, TimeoutError) as error:
                log.info("cannot ask %s for jobs: %s", link.hello.name, error)
                continue
            if isinstance(reply, Found):
                elsewhere.update((summary.job, summary) for summary in reply.jobs)
        return _newest(elsewhere)

    async def _summary(self, id_: str, *, ask_others: bool = True) -> JobSummary:
        """What is known of a job: here and, for people but not for peers, on the linked devices."""
        job = self._registry.jobs.get(id_)
        if job is not None:
            return job.summary()
        found = await self.find(id_) if ask_others else self.summaries(id_)
        if not found:
            where = " or on any linked device" if ask_others else ""
            raise RequestFailed(f"no job {id_} here{where}; see `meshtrain jobs`")
        return found[0]

    async def watch(self, body: Watch, emit: Emit) -> Watched:
        """Follows a job to its end, also one that runs elsewhere."""
        while True:
            job = self._registry.jobs.get(body.job)
            summary = await self._summary(body.job)
            if summary.ended_at_s is not None:
                return Watched(summary=summary)
            emit(Watched(summary=summary))
            if job is not None:
                await job.news(WATCH_INTERVAL_S)
            else:
                await asyncio.sleep(WATCH_INTERVAL_S)

    async def cancel(self, body: Cancel, by: str, *, forward: bool) -> None:
        """Ends a job everywhere, from here or (`forward`) from a member of it; returns when it has ended."""
        summary = await self._summary(body.job, ask_others=forward)
        if summary.ended_at_s is not None:
            raise RequestFailed(f"job {body.job} has ended already: it is {summary.state}")
        job, session = self._registry.jobs.get(body.job), self._registry.session(body.job)
        reason = f"cancelled on {by}"
        lies = session is None and (job is None or job.was_here)
        if lies and self._admission.revivals.waits(body.job) and not self._admission.returns(body.job):
            self._admission.cancel(body.job, reason)
            return
        if job is None or (forward and session is None and not job.begins):  # its files are on their way
            await self._cancel_elsewhere(body, summary)
            return
        if session is not None:
            if not body.now:
                await session.passage.save()
            session.end("cancelled", reason, now=body.now)
        else:
            self._admission.end_job(End(job=body.job, outcome="cancelled", reason=reason, now=body.now))
        await self._await_end(job)
        if self._admission.revivals.waits(body.job):  # it was being laid down
            self._admission.cancel(body.job, reason)

    async def _await_end(self, job: Job) -> None:
        deadline_s = asyncio.get_running_loop().time() + CANCEL_TIMEOUT_S
        while not job.ended:
            if asyncio.get_running_loop().time() > deadline_s:
                raise RequestFailed(f"job {job.spec.job} has not ended within {CANCEL_TIMEOUT_S:.0f} s; try --now")
            await job.news(CANCEL_TIMEOUT_S)

    async def leave(self, id_: str) -> None:
        """A person takes this device out of a job. Raises RequestFailed where the others could not go on."""
        job = self._registry.jobs.get(id_)
        if job is not None and job.lies_down and not job.ended:
            await self._await_end(job)
            job = self._registry.jobs.get(id_)
        session = self._registry.session(id_)
        reason = f"{self._node.name} left it, the others went on"
        if session is not None and not session.passage.may_leave:
            reason = f"{self._node.name} left it, a hub keeps its state"
        if session is None and self._admission.comes_back(id_):
            self._admission.give_up(id_, "cancelled", f"{self._node.name} has left it", left=True)
            return
        if session is None and job is not None and not job.ended and job.entry_mode is not EntryMode.FOUNDER:
            job.left = True
            self._admission.end_unstarted(job, JobEvent.CANCEL, reason)
            return
        if session is None:
            raise RequestFailed(f"job {id_} does not run on this device; see `meshtrain jobs`")
        if not await session.leave(to_hubs=True):
            raise RequestFailed(f"no other device could go on with job {id_}; to end it: meshtrain cancel {id_}")
        session.job.left = True
        session.end("cancelled", reason, now=False, tell=False)
        await session.closed.wait()

    async def change_settings(self, body: ChangeSettings) -> SettingsTaken:
        """A person asks for other settings of a job that runs here. Raises RequestFailed where that does not go."""
        session = self._registry.session(body.job)
        if session is None:
            summary = await self._summary(body.job, ask_others=True)
            if summary.ended_at_s is not None:
                raise RequestFailed(f"job {body.job} has ended: it is {summary.state}")
            there = " or ".join(summary.members[rank].name for rank in summary.present) or "one that takes part"
            raise RequestFailed(f"job {body.job} does not run on this device: ask on {there}")
        return await session.change_settings(SettingsWish(codec=body.codec, period=body.period))

    async def _cancel_elsewhere(self, body: Cancel, summary: JobSummary) -> None:
        """Asks a member to end the job; first one that is in it now, for it can save what the job has learned."""
        error = RequestFailed(f"no device of job {body.job} is linked now; see `meshtrain peers`")
        ranks = (*summary.present, *(rank for rank in range(len(summary.members)) if rank not in summary.present))
        for member in (summary.members[rank] for rank in ranks):
            if member.device in self._node.links:
                try:
                    await self._ask(member, body, PEER_CANCEL_TIMEOUT_S)
                    return
                except RequestFailed as refused:
                    error = refused
        raise error

    async def fetch(self, body: Fetch, *, forward: bool) -> Fetched:
        """A piece of a blob, output or log, from here or (`forward`) from the member that has it."""
        if body.what == "blob":  # of any job, and asked for often: only the hash matters
            if body.sha256 is not None and not self._node.blobs.may_serve(body.sha256):
                raise RequestFailed(f"a job has written into blob {body.sha256.hex()[:12]} on {self._node.name}")
            return await serve(body, self._node.blobs, self._node.job_folder(body.job), ended=lambda: True)
        summary = await self._summary(body.job, ask_others=forward)
        if not 0 <= body.rank < len(summary.members):
            raise RequestFailed(f"job {body.job} has ranks 0 to {len(summary.members) - 1}, not {body.rank}")
        owner = summary.members[body.rank]
        if owner.device == self._node.device:
            if (gone := expired(summary)) is not None:
                raise RequestFailed(gone)
            folder = self._node.job_folder(body.job)
            return await serve(body, self._node.blobs, folder, ended=lambda: self._is_over(body.job))
        if not forward:
            raise RequestFailed(f"rank {body.rank} of job {body.job} ran on {owner.name}, not here")
        reply = await self._ask(owner, body, PEER_TIMEOUT_S + body.wait_s)
        if not isinstance(reply, Fetched):
            raise RequestFailed(f"{owner.name} answered a fetch with {type(reply).__name__}")
        return reply

    def _is_over(self, id_: str) -> bool:
        """Whether no log of it will grow here any more."""
        job = self._registry.jobs.get(id_)
        return (job is None or job.ended) and not self._admission.comes_back(id_)

    async def course(self, id_: str) -> JobCourse:
        """How a job went that this device takes part in, or did."""
        summary = await self._summary(id_, ask_others=True)
        session = self._registry.session(id_)
        if session is not None:
            return session.course.course()
        kept = await in_thread(lambda _: load_course(self._node.job_folder(id_)))
        if kept is None:
            names = joined([member.name for member in summary.members])
            raise RequestFailed(
                f"how job {id_} went is not known on this device: it was not in it, or its files were deleted, or an "
                f"earlier version ran it; it ran on {names}"
            )
        if id_ in self._registry.jobs:
            return kept.model_copy(update={"summary": summary})
        of_history = ("state", "ended_at_s", "exit_code", "error", "expired_at_s", "waiting_for")
        newer = {name: getattr(summary, name) for name in of_history}
        return kept.model_copy(update={"summary": kept.summary.model_copy(update=newer)})

    async def outputs(self, body: ListOutputs, *, forward: bool) -> Outputs:
        """Output files that lie here and (`forward`), after them, on the other members; and who did not answer."""
        summary = await self._summary(body.job, ask_others=forward)
        found: list[OutputFile] = []
        others: list[tuple[int, Member]] = []
        unreached: list[tuple[int, str]] = []
        for rank, member in enumerate(summary.members):
            if member.device == self._node.device:
                found += await list_outputs(self._node.job_folder(body.job), rank)
            elif forward:
                others.append((rank, member))
        omitted = 0
        asked = (self._outputs_of(rank, member, body) for rank, member in others)
        for (rank, _), reply in zip(others, await asyncio.gather(*asked), strict=True):
            if isinstance(reply, Outputs):
                found += reply.files
                omitted += reply.omitted
            else:
                unreached.append((rank, reply[: limits.REASON_CHARS_MAX]))
        if not found and not unreached and (gone := expired(summary)) is not None:
            raise RequestFailed(gone)
        return _bounded(found, omitted).model_copy(update={"unreached": tuple(unreached)})

    async def _outputs_of(self, rank: int, member: Member, body: ListOutputs) -> Outputs | str:
        """The output files of another member; or why they are not known."""
        try:
            reply = await self._ask(member, body, PEER_TIMEOUT_S)
        except RequestFailed as error:
            return str(error)
        if not isinstance(reply, Outputs):
            return f"{member.name} answered with {type(reply).__name__}"
        if any(file.rank != rank for file in reply.files):
            return f"{member.name} lists files of other ranks"
        return reply

    async def checkpoints(self, body: ListCheckpoints, *, forward: bool) -> Checkpoints:
        """Checkpoints that lie here and (`forward`) on the other members, all of their files read."""
        summary = await self._summary(body.job, ask_others=forward)
        found: list[CheckpointSummary] = []
        unasked: list[str] = []
        for rank, member in enumerate(summary.members):
            if member.device == self._node.device:
                folder = self._node.job_folder(body.job)
                try:
                    found += await _CHECKPOINTS.run(
                        partial(list_checkpoints, folder, body.job, rank),
                        timeout_s=CHECKPOINTS_TIMEOUT_S,
                        name="reading the checkpoints",
                    )
                except (CheckpointError, TimeoutError) as error:
                    raise RequestFailed(str(error)) from error
            elif forward:
                try:
                    reply = await self._ask(member, body, READ_TIMEOUT_S)
                except RequestFailed as error:
                    log.info("cannot list the checkpoints of %s: %s", member.name, error)
                    unasked.append(member.name)
                    continue
                if isinstance(reply, Checkpoints):
                    found += reply.checkpoints
        found.sort(key=lambda one: (-one.round, one.given_up or "", one.rank))
        return Checkpoints(checkpoints=tuple(found), unasked=tuple(unasked))

    async def checkpoint(self, body: AskCheckpoint) -> CheckpointFiles:
        """One that lies here, as blobs that another device can fetch."""
        store, folder = self._node.blobs, self._node.job_folder(body.job)
        name = CheckpointName(body.round, body.given_up or "")
        try:
            with store.holding() as owner:  # as a blob it stays until the cache needs its place
                return CheckpointFiles(files=await in_thread(lambda _: ship(folder, body.job, name, store, owner)))
        except (CheckpointError, BlobError) as error:
            raise RequestFailed(str(error)) from error

    async def _ask(self, member: Member, body: Wire, timeout_s: float) -> Wire:
        link = self._node.links.get(member.device)
        if link is None:
            raise RequestFailed(f"{member.name} is not linked now")
        try:
            return await link.connection.request(body, timeout_s=timeout_s, name=f"answer of {member.name}")
        except (ConnectionEnded, TimeoutError) as error:
            raise RequestFailed(f"{member.name} does not answer: {error}") from error


def expired(summary: JobSummary) -> str | None:
    """What became of a job's results here, for a person; None: they were not deleted."""
    if summary.expired_at_s is None:
        return None
    day = time.strftime("%Y-%m-%d", time.localtime(summary.expired_at_s))
    days = limits.RESULTS_S_MAX / DAY_S
    return (
        f"the results and logs of job {summary.job} on this device are gone: they were deleted on {day}, by meshtrain "
        f"rm, or because they are kept for {days:.0f} days, and the oldest go first where they take too much of the "
        "disk"
    )


def _newest(jobs: dict[str, JobSummary]) -> tuple[JobSummary, ...]:
    """Newest first, as many as one message holds: each may come with a traceback."""
    chosen: list[JobSummary] = []
    size_bytes = 0
    newest = sorted(jobs.values(), key=lambda job: (job.created_at_s, job.job), reverse=True)
    for job in newest[: limits.JOBS_LISTED_MAX]:
        size_bytes += len(job.pack())
        if chosen and size_bytes > limits.JOBS_LISTED_BYTES_MAX:
            break
        chosen.append(job)
    return tuple(chosen)


def _bounded(files: list[OutputFile], omitted: int) -> Outputs:
    """Cuts a list of files to what one message holds, and counts those that are left out, `omitted` included."""
    kept_bytes, count = 0, 0
    for file in files:
        kept_bytes += len(file.path.encode()) + OUTPUT_FILE_OVERHEAD_BYTES
        if kept_bytes > limits.OUTPUT_LIST_BYTES_MAX:
            break
        count += 1
    return Outputs(files=tuple(files[:count]), omitted=omitted + len(files) - count)
