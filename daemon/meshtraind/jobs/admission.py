"""This device's way into jobs: an offer, its files, the promise and the start; or later, to return to it or to join."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from meshtraind.environments.environments import Environments
from meshtraind.jobs.file_intake import Intake
from meshtraind.jobs.registry import JobRegistry
from meshtraind.jobs.revival import Revivals
from meshtraind.jobs.way_back import WayBack
from meshtraind.learner.own_groups import free_port
from meshtraind.learner.software import installed_anew
from meshtraind.learner.supervisor import PROGRESS_ROUNDS, pause_s
from meshtraind.peers.node import Node
from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.cleanup import clean_up, discard, remove_inputs
from meshtraind.storage.job_history import HistoryError
from meshtraind.storage.job_record import BEFORE_START, EntryMode, Job, summary_of
from meshtraind.storage.resume_file import JobFile, forget
from meshtraind.transport.connection import ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.jobs.lifecycle import EXIT_CODES, JobEvent, JobRecord, JobState, job_number
from meshwire.membership.invitations import invitation_wrong
from meshwire.membership.lineage import rank_of
from meshwire.membership.proposal_checks import list_wrong
from meshwire.messages.generation import Invite, Where
from meshwire.messages.job import (
    Commit,
    End,
    FilesProgress,
    Generation,
    GivenUp,
    JobSpec,
    Offer,
    OfferReply,
    Outcome,
    Promise,
)
from meshwire.revival import is_older
from meshwire.sync_modes.codec_for_mode import suits

if TYPE_CHECKING:
    from meshtraind.session.session import JobSession

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.5  # between two words on how far files are
COMMIT_TIMEOUT_S = 60.0  # between a member's promise and the submitter's word
RETURN_RETRY_S = 1.0
EXPIRY_POLL_S = 0.1
RETURNS = "a link to another member of the job: meshtraind was started again here"
RETURNS_WITHIN_S = 30.0  # members that live are linked by then; until then a job that ran here is not called lost

LAID_DOWN = "no device had its state any more; it begins again from what was saved"

OnFileProgress = Callable[[int, int], None]


UNSTARTED = {  # what an end means for a device that does not take part yet, or not again
    "succeeded": JobEvent.LOSE,
    "failed": JobEvent.FAIL,
    "cancelled": JobEvent.CANCEL,
}


class ProgressWatcher(Protocol):
    """Whoever waits for the members of a job to have its files."""

    def files_progress(self, device: str, report: FilesProgress) -> None:
        """A member says how far its files are."""


class Admission:
    """Decides which jobs this device takes part in, and leads each of them to the moment when its session begins.

    Args:
        registry: keeps the jobs.
        left: jobs that ran when this daemon stopped, by id.

    Attributes:
        revivals: those of `left` that this device may begin again, with others that have lost them, too.
        environments: what jobs that bring a list of packages run in.
    """

    def __init__(self, node: Node, registry: JobRegistry, tasks: TaskSet, left: dict[str, JobFile]) -> None:
        self._node = node
        self._registry = registry
        self._tasks = tasks
        self._left = left
        self.revivals = Revivals(node, left)
        self.environments = Environments(node.data_dir)
        self._before: dict[str, JobRecord] = {}  # what was known of jobs that are about to begin again
        self._where: dict[str, tuple[str, Where]] = {}  # who has told meanwhile that they go on, by job
        self._began_s = time.monotonic()
        self._promised: dict[str, Generation] = {}
        self._repeated_s: dict[str, float] = {}  # when an offer that has not begun came last, on the loop's clock
        self._submissions: dict[str, ProgressWatcher] = {}  # on their way from here
        self._returning: dict[str, WayBack] = {}  # to jobs that lie here and that others go on with
        self._joining: set[str] = set()  # jobs whose files are on their way, or are deleted again
        self._deleting = asyncio.Lock()  # held while files of jobs that lay here are; one after the other
        self._called_off: dict[str, None] = {}  # ended before they were offered; oldest first
        self._laid_down: dict[str, int] = {}  # how often one after the other without progress; the newest last

    @contextmanager
    def submitting(self, job: str, watcher: ProgressWatcher) -> Iterator[None]:
        """While this holds, the members' progress reaches the watcher."""
        self._submissions[job] = watcher
        try:
            yield
        finally:
            del self._submissions[job]

    @property
    def jobs_running(self) -> int:
        """Jobs on this device that have not ended."""
        return self._registry.running

    def promised(self, job: str) -> bool:
        """Whether this device waits for the start of a job."""
        return job in self._promised

    def may_return(self, job: str) -> bool:
        """Whether a job ran here when this daemon stopped, and others may go on with it."""
        return job in self._left

    def left_spec(self, job: str) -> JobSpec:
        """Of a job that ran here when this daemon stopped. Raises RequestFailed when that is not known any more."""
        if job not in self._left:
            raise RequestFailed(f"job {job} does not lie here any more")
        return self._left[job].spec

    def comes_back(self, job: str) -> bool:
        """Whether a job lies here to begin again, or others go on with it and this device tries to return."""
        return self.revivals.waits(job) or job in self._returning

    def waiting(self, job: str) -> str | None:
        """What a job waits for that ran here before, for people; None where this device does not come back to it."""
        if (way := self._returning.get(job)) is not None and way.why_not:
            return f"a way back to the others, who go on (tried, and tries again: {way.why_not})"
        if (waiting := self.revivals.waiting(job)) is not None:
            return waiting
        soon = self.may_return(job) and time.monotonic() < self._began_s + RETURNS_WITHIN_S
        return RETURNS if soon or job in self._returning else None

    def returns(self, job: str) -> bool:
        """Whether others go on with a job that lies here, and this device tries to return to it."""
        return job in self._returning

    def is_under_way(self, job: str) -> bool:
        """Whether the job is about to begin here, or its files are being deleted again."""
        return job in self._registry.jobs or job in self._joining

    def call_off(self, job: str) -> None:
        """An unknown job has ended: its offer may be right behind, for requests are answered by tasks. One that lies
        here to begin again is offered again under its id."""
        if self.revivals.waits(job):
            return
        self._called_off[job] = None
        while len(self._called_off) > limits.CALLED_OFF_MAX:
            del self._called_off[next(iter(self._called_off))]

    def end_job(self, end: End) -> None:
        """A member, the submitter or, before the start, a person here ends a job."""
        job = self._registry.jobs.get(end.job)
        if job is None:
            self.call_off(end.job)
            return
        session = self._registry.session(end.job)
        if job.ended or (session is None and job.lies_down):
            return  # whoever has ended it is told that it lies here, and says so again
        if session is not None:
            session.end(end.outcome, end.reason, now=end.now, tell=False)
        else:
            late = end.outcome == "succeeded" and job.entry_mode is EntryMode.LATE_JOIN  # nothing of it is lost here
            event = JobEvent.CANCEL if late else UNSTARTED[end.outcome]
            self.end_unstarted(job, event, end.reason)

    def end_unstarted(self, job: Job, event: JobEvent, reason: str) -> None:
        """Ends a job that has no session. A submission that still goes on hears of it and calls the others off."""
        self._stop_unstarted(job, event, reason)
        if not job.was_here:
            return
        if event is JobEvent.CANCEL:
            self._forget(job.spec.job)
        else:
            self._put_back(job)

    def _stop_unstarted(self, job: Job, event: JobEvent, reason: str) -> None:
        self._promised.pop(job.spec.job, None)
        if job.state is JobState.READY:  # while they still come, whoever fetches them sees the end
            self._tasks.spawn(self._remove_files(job), f"remove files of {job.spec.job}")
        job.advance(event, reason)
        self._tell_progress(job, 0, 0, ready=False, error=reason[: limits.ERROR_CHARS_MAX])

    def _put_back(self, job: Job) -> None:
        """Puts a job that did not begin again here back where it was, on the list of those that wait for their devices.
        It is not over for that: nobody is told so. What came of its files is deleted meanwhile."""
        id_ = job.spec.job
        self._registry.drop(job)
        before = self._before.pop(id_, None)
        if before is not None:
            self._record(before)
        if job.entry_mode is EntryMode.REJOIN:
            self._returning[id_].why_not = job.error or ""
            self.revivals.add(id_, self._left[id_])

    async def _remove_files(self, job: Job) -> None:
        """Deletes what came for a job that has ended here before it began. Of one that was here before, results and
        checkpoints stay."""
        id_ = job.spec.job
        if not job.was_here:
            await asyncio.to_thread(discard, id_, job.folder, self._node.blobs)
            return
        if id_ in self._left:
            async with self._deleting:
                await asyncio.to_thread(remove_inputs, job.folder)
        else:
            await self._let_go(id_, succeeded=False)
        self._joining.discard(id_)
        if id_ in self._where and id_ not in self._returning:
            self.left_behind(*self._where.pop(id_))

    def _await_close(self, job: Job) -> None:
        """Sees to it that a job which has just begun here can lie down when its session closes."""
        if (session := self._registry.session(job.spec.job)) is not None:
            self._tasks.spawn(self._lay_down(job, session), f"whether {job.spec.job} lies down")

    async def _lay_down(self, job: Job, session: "JobSession") -> None:
        """Lets a job begin again of which no base is left on any device (J5), when its session has closed."""
        id_ = job.spec.job
        await session.closed.wait()
        if not job.lies_down or self._registry.closing:
            return
        await asyncio.to_thread(remove_inputs, job.folder)
        job.advance(JobEvent.LOSE, LAID_DOWN)
        self._registry.drop(job)
        self._left[id_] = job.file
        self.revivals.add(id_, job.file, asyncio.get_running_loop().time() + self._count_life(job))

    def _count_life(self, job: Job) -> float:
        """Counts one more life of a job. Returns how many seconds it rests before the next: what has killed its scripts
        in each of them is likely to do so again, and a learner that is started again would wait (J3)."""
        began = 0 if job.spec.resume is None else job.spec.resume.round
        before = self._laid_down.pop(job.spec.job, 0)
        self._laid_down[job.spec.job] = 0 if job.summary().rounds - began >= PROGRESS_ROUNDS else before + 1
        while len(self._laid_down) > limits.ENDED_JOBS_IN_MEMORY_MAX:
            del self._laid_down[next(iter(self._laid_down))]
        return pause_s(self._laid_down[job.spec.job])

    def _record(self, record: JobRecord) -> None:
        try:
            self._node.history.put(record)
        except HistoryError as error:
            log.error("job %s is not recorded: %s", record.id, error)

    async def _let_go(self, id_: str, *, succeeded: bool) -> None:
        """Deletes what a job that lay here needs no more: this device neither returns to it nor begins it again."""
        folder = self._node.job_folder(id_)
        async with self._deleting:
            await asyncio.to_thread(forget, folder)
            await asyncio.to_thread(clean_up, id_, folder, self._node.blobs, succeeded=succeeded)

    def give_up(self, id_: str, outcome: Outcome, reason: str, *, left: bool = False) -> None:
        """Ends a job that lies here, or is about to go on here, because a person or a device that was in it says so.
        `left`: here alone."""
        job = self._registry.jobs.get(id_)
        if not self.comes_back(id_) or (job is not None and not job.was_here):
            return
        log.info("job %s: it does not begin again: %s", id_, reason)
        if job is not None:
            self._stop_unstarted(job, JobEvent.FAIL, reason)
            self._registry.drop(job)
        try:
            record = self._before.get(id_) or self._node.history.find(id_)
        except HistoryError as error:
            log.error("job %s: its end is not recorded: %s", id_, error)
        else:
            state = JobState(outcome)
            changes = {"state": state, "exit_code": EXIT_CODES[state], "spec": {**record.spec, "left": left}}
            error_text = None if outcome == "succeeded" else reason[: limits.ERROR_CHARS_MAX]
            self._record(record.model_copy(update={**changes, "error": error_text}))
        self._forget(id_)
        self._tasks.spawn(self._let_go(id_, succeeded=outcome == "succeeded"), f"end of {id_}")

    def cancel(self, id_: str, reason: str) -> None:
        """A person ends a job that lies here to begin again, everywhere; who is away is told when it comes up."""
        end = End(job=id_, outcome="cancelled", reason=reason, now=False)
        for device in self.revivals.devices(id_):
            if device in self._node.links:
                self._node.links[device].connection.notify(end, job=job_number(id_))
        self.give_up(id_, "cancelled", reason)

    def ended_elsewhere(self, device: str, end: End) -> None:
        """A device tells how a job that does not run here has ended there. Of one that lies here: where it failed,
        others that this one was with last may have gone on; and an offer that is called off, `now`, is no end."""
        way, job = self._returning.get(end.job), self._registry.jobs.get(end.job)
        if way is not None and (job is None or job.entry_mode is EntryMode.REJOIN):
            if way.is_over(device, end):
                self.give_up(end.job, end.outcome, end.reason)
            return
        lies = self.revivals.waits(end.job) and device in self.revivals.devices(end.job)
        if lies and (end.outcome != "failed" or (not end.now and self.revivals.is_now(end.job, device))):
            self.give_up(end.job, end.outcome, end.reason)
        self.end_job(end)

    # An offer

    def offered(self, offer: Offer, submitter: str) -> OfferReply:
        """Answers a proposed job: begins to fetch its files, or says why it is refused."""
        spec, node = offer.spec, self._node
        rank = next((rank for rank, member in enumerate(offer.members) if member.device == node.device), None)
        known = self._registry.jobs.get(spec.job)
        if known is not None and known.spec == spec and not known.ended:
            if spec.job in self._repeated_s:
                self._repeated_s[spec.job] = asyncio.get_running_loop().time()
            return OfferReply(refusal=None)  # it still stands, or the link broke before the first answer arrived
        revives = self.revivals.waits(spec.job)
        refusal = None
        if self._registry.closing:
            refusal = "meshtraind is stopping there"
        elif spec.job in self._called_off:
            refusal = "it was called off meanwhile"
        elif spec.submitter != submitter:
            refusal = "it was offered by another device than its submitter"
        elif rank is None or offer.members[rank].incarnation != node.incarnation:
            refusal = "meshtraind was restarted meanwhile; submit again"
        elif self._registry.running >= limits.JOBS_RUNNING_MAX:
            refusal = f"{limits.JOBS_RUNNING_MAX} jobs run there already"
        elif known is not None and known.ended and known.started_at_s is None:
            refusal = f"it has ended there: {known.error or known.state}"
        elif self.is_under_way(spec.job):
            refusal = f"there is a job {spec.job} already"
        elif spec.resume is not None and spec.resume.job == spec.job and not revives:
            refusal = f"job {spec.job} is over there, or goes on"
        elif self._open_offers(submitter) >= limits.OFFERS_OPEN_MAX:
            refusal = f"{limits.OFFERS_OPEN_MAX} jobs of this submitter wait there to begin already"
        else:
            refusal = self._unsuitable(spec)
        if refusal is not None:
            return OfferReply(refusal=refusal)
        assert rank is not None
        job = self._revived(offer, rank) if revives else self._begun(offer, rank)
        self._registry.add(job)
        self._repeated_s[spec.job] = asyncio.get_running_loop().time()
        self._tasks.spawn(self._take_in(job, spec.submitter), f"files of {spec.job}")
        self._tasks.spawn(self._expire(job), f"offer of {spec.job}")
        return OfferReply(refusal=None)

    def _begun(self, offer: Offer, rank: int) -> Job:
        return Job(offer.spec, offer.members, rank, self._node.job_folder(offer.spec.job), self._node.history)

    def _revived(self, offer: Offer, rank: int) -> Job:
        spec, node = offer.spec, self._node
        left = self._left[spec.job]
        before = self._look_up(spec.job)
        given_up = () if before is None else summary_of(before).given_up
        if spec.resume is None:
            given_up += self._unsaved_rounds(before, len(offer.members))
        place = node.job_folder(spec.job), node.history
        job = Job(spec, offer.members, rank, *place, EntryMode.REVIVAL, left.started_at_s, left.generation)
        job.take_given_up(given_up)
        self._joining.add(spec.job)
        return job

    def _look_up(self, id_: str) -> JobRecord | None:
        """What was known of a job that lies here, and will be again if it does not begin now."""
        try:
            self._before[id_] = self._node.history.find(id_)
        except HistoryError as error:
            log.warning("job %s: what was known of it is lost: %s", id_, error)
        return self._before.get(id_)

    def _unsaved_rounds(self, before: JobRecord | None, members: int) -> tuple[GivenUp, ...]:
        """Of a job that begins from its start, those that are known of: nothing of them is left."""
        rounds = 0 if before is None else summary_of(before).rounds
        everybody = tuple(range(members))
        return (GivenUp(first=1, last=rounds, samples=0, made_by=everybody, kept=everybody),) if rounds else ()

    def _open_offers(self, submitter: str) -> int:
        jobs = self._registry.jobs.values()
        return sum(1 for job in jobs if job.state in BEFORE_START and job.spec.submitter == submitter)

    async def _expire(self, job: Job) -> None:
        """An offer whose submitter is gone, or never goes on with it, must not keep a place and a disk."""
        loop = asyncio.get_running_loop()
        id_, offered_s = job.spec.job, loop.time()
        while job.state in BEFORE_START:
            ends_s = min(self._repeated_s[id_] + limits.OFFER_SILENCE_S_MAX, offered_s + limits.OFFER_S_MAX)
            if loop.time() >= ends_s and not self.promised(id_):  # whose start has a deadline of its own
                reason = f"its offer has expired after {loop.time() - offered_s:.0f} s; submit it again"
                self.end_unstarted(job, JobEvent.FAIL, reason)
                break
            await job.news(max(ends_s - loop.time(), EXPIRY_POLL_S))
        del self._repeated_s[id_]

    def _unsuitable(self, spec: JobSpec) -> str | None:
        """Why this device could not run the job, whoever asks."""
        if installed_anew():
            return "meshtrain was installed anew there while its daemon runs: meshtrain down, then meshtrain up"
        if not _codec_known(spec.codec):
            return f"--codec {spec.codec} is unknown there: install the same version of meshtraind"
        try:
            codec = parse_codec(spec.codec)
            if not suits(spec.sync, codec):
                raise ValueError(f"--codec {codec} does not go with --sync {spec.sync.text()}")
            collective_for(codec, spec.topology)
        except ValueError as error:
            return f"{error} (there: install the same version of meshtraind)"
        typed = (*spec.args, *(part for pair in spec.env for part in pair))
        typed_bytes = sum(len(text.encode()) + 1 for text in typed)
        if typed_bytes > 2 * limits.JOB_SPEC_BYTES_MAX:
            return f"its arguments and environment take {typed_bytes} bytes"
        if self._node.software.torch is None and not self._node.member.hub:
            return "it has no torch: run `pip install '.[torch]'` there, or let it be a hub: `meshtrain up --hub`"
        return None

    async def _take_in(self, job: Job, source_device: str) -> None:
        """Fetches the files from a device that has them, installs the packages that the job asks for, and tells the
        submitter."""
        last_s = 0.0
        loop = asyncio.get_running_loop()

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal last_s
            if job.ended:
                raise RequestFailed("the job has ended")
            if loop.time() - last_s >= PROGRESS_INTERVAL_S:
                last_s = loop.time()
                self._tell_progress(job, done_bytes, total_bytes, ready=False, error=None)

        def on_installing(doing: str) -> None:
            if job.ended:
                raise RequestFailed("the job has ended")
            self._tell_progress(job, 0, 0, ready=False, error=None, doing=doing)

        try:
            if job.begins:
                await self._fetch(job, source_device, on_progress)
            else:
                await self._fetch_from_any(job, source_device, on_progress)
            if not self._node.member.hub:  # no script runs here
                await self.environments.make(job.spec.requirements, on_installing)
        except (BlobError, RequestFailed, ConnectionEnded, TimeoutError, OSError) as error:
            if not job.ended:
                self.end_unstarted(job, JobEvent.FAIL, str(error))
        if job.ended:
            await self._remove_files(job)
            return
        job.advance(JobEvent.FILES_COMPLETE)
        self._tell_progress(job, 0, 0, ready=True, error=None)

    async def _fetch(self, job: Job, device: str, on_progress: OnFileProgress) -> None:
        source = None
        if device != self._node.device:
            link = self._node.links.get(device)
            if link is None:
                raise ConnectionEnded("the link to where the files are was lost")
            source = link.connection
        begins = job.begins
        await Intake(job.spec, job.folder, self._node.blobs, source, on_progress, begins=begins).run()

    async def _fetch_from_any(self, job: Job, device: str, on_progress: OnFileProgress) -> None:
        """Fetches the files for a device that comes to a job later, from any member: links may break, most members have
        the files, and nobody waits for this one. Raises RequestFailed where a member has none, and no other is there
        that has."""
        loop = asyncio.get_running_loop()
        heard_s, heard_bytes = loop.time(), 0

        def heard(done_bytes: int, total_bytes: int) -> None:
            nonlocal heard_s, heard_bytes
            if done_bytes != heard_bytes:
                heard_s, heard_bytes = loop.time(), done_bytes
            on_progress(done_bytes, total_bytes)

        while True:
            others = [member.device for member in job.members if member.device != self._node.device]
            failure: RequestFailed | None = None
            for source in sorted(others, key=lambda other: other != device):
                try:
                    await self._fetch(job, source, heard)
                except (ConnectionEnded, TimeoutError) as error:
                    log.debug("job %s: %s", job.spec.job, error)
                except RequestFailed as error:
                    failure = error
                else:
                    return
            if failure is not None:
                raise failure
            if job.entry_mode is EntryMode.LATE_JOIN and loop.time() - heard_s > limits.JOIN_SILENCE_S_MAX:
                raise RequestFailed(f"no member has sent its files for {limits.JOIN_SILENCE_S_MAX:.0f} s")
            await job.news(RETURN_RETRY_S)
            if job.ended:
                raise RequestFailed("the job has ended")

    def _tell_progress(
        self, job: Job, done_bytes: int, total_bytes: int, *, ready: bool, error: str | None, doing: str | None = None
    ) -> None:
        if not job.begins:
            return  # nobody waits for it
        report = FilesProgress(
            job=job.spec.job, done_bytes=done_bytes, total_bytes=total_bytes, ready=ready, error=error, doing=doing
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

    def prepared(self, generation: Generation, port: int | None = None) -> Promise:
        """Answers the first phase of a start: promises to enter the generation, unless this member could not work in it
        (G7).

        Args:
            port: on which the script of rank 0 listens, as that one has promised (P9).
        """
        job = self._registry.jobs.get(generation.job)
        if job is None or job.state is not JobState.READY:
            return Promise(refusal=f"job {generation.job} is not ready there")
        if generation.members != job.members:
            return Promise(refusal="the proposed members are not those of the offer")
        if wrong := self._why_not_enter(job, generation):
            return Promise(refusal=f"the proposed generation is wrong: {wrong}")
        for member in generation.live.values():
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
        if job.spec.engine == "torchrun":
            try:
                job.port = free_port() if job.rank == 0 else port
            except OSError as error:
                return Promise(refusal=f"it has no port for the scripts to meet on: {error}")
        self._promised[generation.job] = generation
        self._tasks.spawn(self._await_commit(job), f"commit of {generation.job}")
        return Promise(refusal=None, port=job.port)

    def _why_not_enter(self, job: Job, generation: Generation) -> str | None:
        if job.entry_mode is not EntryMode.REVIVAL:  # who submits a job need not be in it
            first = Generation.first(job.spec.job, job.spec.submitter, job.members)
            return None if generation == first else "it is not the first one of this job"
        left = self._left.get(generation.job)
        before = 0 if left is None or left.generation is None else left.generation.number
        if job.rank not in generation.ranks or generation.number <= before:
            return "it leaves this device out, or is old"
        return list_wrong(generation)

    async def _await_commit(self, job: Job) -> None:
        """A submitter that promised and vanished must not leave a job behind."""
        deadline_s = asyncio.get_running_loop().time() + COMMIT_TIMEOUT_S
        while job.state is JobState.READY:
            if asyncio.get_running_loop().time() > deadline_s:
                reason = f"the submitter did not start it within {COMMIT_TIMEOUT_S:.0f} s"
                self.end_job(End(job=job.spec.job, outcome="failed", reason=reason, now=True))
                return
            await job.news(1.0)

    def committed(self, commit: Commit) -> None:
        """Takes the second phase of a start: the generation is entered."""
        generation = self._promised.get(commit.job)
        if generation is not None and generation.hash64() == commit.generation:
            self.begin(commit.job)
        elif self._registry.session(commit.job) is None:
            log.warning("commit of job %s does not match what was promised; ignored", commit.job)

    def begin(self, id_: str) -> None:
        """Enters the generation that was promised: all others have promised it, too. A member that was lost since then
        is gone on without (G9)."""
        generation = self._promised.pop(id_)
        job = self._registry.jobs[id_]
        if not job.ended and not self._registry.closing:
            if job.entry_mode is EntryMode.REVIVAL:
                self._joining.discard(id_)
                self._forget(id_)
            elif job.spec.resume is not None:  # a person's word, who does not want both
                self.give_up(job.spec.resume.job, "cancelled", f"it goes on as job {id_}")
            others = {rank: self._node.links.get(member.device) for rank, member in generation.live.items()}
            links = {rank: link.connection for rank, link in others.items() if link is not None}
            self._registry.start(job, generation, links)
            self._await_close(job)

    # Returning to a job that others have gone on with

    async def _come_later(self, job: Job, device: str, where: Where | None) -> None:
        try:
            await self._take_in(job, device)
        finally:
            self._joining.discard(job.spec.job)
        if job.state is JobState.READY:
            self._forget(job.spec.job)
            await self._registry.come_back(job, device, where)
            self._await_close(job)

    async def _return(self, job: Job, way: WayBack) -> None:
        """Returns to a job. While its files have no room here, or nobody sends them, it lies as before, and this is
        tried again."""
        id_, tries = job.spec.job, 1
        try:
            await self._come_later(job, way.device, way.where)
            while self._returning.get(id_) is way:  # else it goes on here, or is over
                tries += 1
                await asyncio.sleep(pause_s(tries))
                stopped = self._returning.get(id_) is not way or self._registry.closing
                if not stopped and not self.is_under_way(id_):  # nor is about to begin again with others
                    await self._come_later(self._rejoin(way.where), way.device, way.where)
        finally:
            if self._returning.get(id_) is way:
                del self._returning[id_]

    def _rejoin(self, where: Where) -> Job:
        """The job, to be entered again."""
        id_, rank = where.job, rank_of(where.generation, self._node.device)
        assert rank is not None, "not listed"
        log.info("job %s: it goes on without this device, which asks to be taken in again", id_)
        self._look_up(id_)
        self.revivals.drop(id_)
        left, place = self._left[id_], (self._node.job_folder(id_), self._node.history)
        members = where.generation.members
        job = Job(left.spec, members, rank, *place, EntryMode.REJOIN, left.started_at_s, left.generation)
        self._registry.add(job)
        self._joining.add(id_)
        return job

    def left_behind(self, device: str, where: Where) -> None:
        """A member tells of a job that ran here when this daemon stopped, or that others have finished with."""
        left = self._left.get(where.job)
        rank = rank_of(where.generation, self._node.device)
        if left is None or rank is None or self._registry.closing:
            return
        if left.generation is not None and is_older(where, left.generation):
            self.revivals.goes_on(where.job, device)
            log.info("job %s: the others' history is older than what is here; they will come to this one", where.job)
            return
        job = self._registry.jobs.get(where.job)
        way = self._returning.get(where.job)
        if way is not None:
            way.told(device, where)
        elif self.is_under_way(where.job):
            self._where[where.job] = device, where
        if way is not None or self.is_under_way(where.job):
            if (
                job is not None
                and job.entry_mode is EntryMode.REVIVAL
                and job.state in BEFORE_START
                and not self.promised(where.job)
            ):
                self.end_unstarted(job, JobEvent.FAIL, "others go on with it")
            return
        way = self._returning[where.job] = WayBack(self._node.device, device, where)
        self._tasks.spawn(self._return(self._rejoin(where), way), f"return to {where.job}")

    def _forget(self, id_: str) -> None:
        """Forgets that the job lay here: it goes on with this device, or this device asks in, or it is over."""
        self._left.pop(id_, None)
        self._before.pop(id_, None)
        self._where.pop(id_, None)
        self._returning.pop(id_, None)
        self.revivals.drop(id_)

    # Joining a job that others have begun

    async def invited(self, invite: Invite, device: str) -> OfferReply:
        """A member asks this device to join. Several may: they get the same answer, once the files are here."""
        spec = invite.spec
        known = self._registry.jobs.get(spec.job)
        refusal = self._why_not_join(invite, device, known)
        if refusal is not None:
            return OfferReply(refusal=refusal)
        job = known if known is not None and self._is_on(known) else self._join(invite, device)
        while spec.job in self._joining:
            await job.news(PROGRESS_INTERVAL_S)
        why_ended = job.error or "it has given the job up"
        return OfferReply(refusal=why_ended if job.ended else None)

    def _why_not_join(self, invite: Invite, sender: str, known: Job | None) -> str | None:
        spec, generation, node = invite.spec, invite.generation, self._node
        if wrong := invitation_wrong(invite, node.device, sender):
            return f"the invitation is wrong: {wrong}"
        if known is not None and known.spec != spec:
            return f"there is another job {spec.job} already"
        if self._registry.closing:
            return "meshtraind is stopping there"
        unlinked = [
            member.name
            for member in generation.live.values()
            if member.device != node.device
            and ((link := node.links.get(member.device)) is None or link.hello.incarnation != member.incarnation)
        ]
        if unlinked:
            return (
                f"{node.name} has no link to {', '.join(unlinked)}: pair these with {node.name} "
                "(`meshtrain pair` on one, `meshtrain pair CODE` on the other)"
            )
        if known is not None and self._is_on(known):
            return None
        if known is not None and (known.started_at_s is not None or known.left):
            return f"the job has ended there: {known.error or known.state}"
        if self._registry.running >= limits.JOBS_RUNNING_MAX:
            return f"{limits.JOBS_RUNNING_MAX} jobs run there already"
        return self._unsuitable(spec)

    def _is_on(self, job: Job) -> bool:
        return not job.ended or job.spec.job in self._joining

    def _join(self, invite: Invite, device: str) -> Job:
        """Makes the job that this device is to join, and begins to fetch its files. Its rank is the next free one, for
        good once the others have taken it in."""
        spec, members = invite.spec, invite.generation.members
        log.info("job %s: this device joins it, which others have begun", spec.job)
        folder, history = self._node.job_folder(spec.job), self._node.history
        job = Job(spec, (*members, self._node.member), len(members), folder, history, EntryMode.LATE_JOIN)
        self._registry.add(job)
        self._joining.add(spec.job)
        self._tasks.spawn(self._come_later(job, device, None), f"join {spec.job}")
        return job


def _codec_known(text: str) -> bool:
    try:
        parse_codec(text)
    except ValueError:
        return False
    return True
