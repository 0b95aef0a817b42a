"""This device's way into jobs: an offer, its files, the promise and the start; or later, to return to it or to join."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshtraind.jobs.file_intake import Intake
from meshtraind.jobs.submission import PROGRESS_INTERVAL_S, Submission
from meshtraind.learner.software import installed_anew
from meshtraind.peers.node import Node
from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.cleanup import clean_up, discard
from meshtraind.storage.job_record import BEFORE_START, Job, Way
from meshtraind.storage.resume_file import JobFile
from meshtraind.transport.connection import ConnectionLost, RequestError
from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.jobs.lifecycle import JobEvent, JobState, job_number
from meshwire.membership.invitations import invitation_wrong
from meshwire.membership.lineage import rank_of
from meshwire.messages.generation import Invite, Where
from meshwire.messages.job import Commit, End, FilesProgress, Generation, JobSpec, Offer, OfferReply, Promise

if TYPE_CHECKING:
    from meshtraind.jobs.registry import Board

log = logging.getLogger(__name__)

COMMIT_TIMEOUT_S = 60.0  # between a member's promise and the submitter's word
RETURN_RETRY_S = 1.0
EXPIRY_POLL_S = 0.1
RETURNS_WITHIN_S = 30.0  # members that live are linked by then; until then a job that ran here is not called lost

OnProgress = Callable[[int, int], None]


class Enlisting:
    """Of one daemon.

    Args:
        board: keeps the jobs.
        left: jobs that ran when this daemon stopped, by id.
    """

    def __init__(self, node: Node, board: "Board", tasks: TaskSet, left: dict[str, JobFile]) -> None:
        self._node = node
        self._board = board
        self._tasks = tasks
        self._left = left
        self._began_s = time.monotonic()
        self._promised: dict[str, Generation] = {}
        self._repeated_s: dict[str, float] = {}  # when an offer that has not begun came last, on the loop's clock
        self._submissions: dict[str, Submission] = {}  # on their way from here
        self._joining: set[str] = set()  # jobs whose files are on their way, or are deleted again
        self._called_off: dict[str, None] = {}  # ended before they were offered; oldest first

    @contextmanager
    def submitting(self, job: str, submission: Submission) -> Iterator[None]:
        """While this holds, the members' progress reaches the submission."""
        self._submissions[job] = submission
        try:
            yield
        finally:
            del self._submissions[job]

    def promised(self, job: str) -> bool:
        """Whether this device waits for the start of a job."""
        return job in self._promised

    def may_return(self, job: str) -> bool:
        """Whether a job ran here when this daemon stopped, and others may go on with it."""
        return job in self._left

    def returns_soon(self, job: str) -> bool:
        """Whether this daemon was just started, and may return to a job as soon as it has a link to a member."""
        return self.may_return(job) and time.monotonic() < self._began_s + RETURNS_WITHIN_S

    def call_off(self, job: str) -> None:
        """An unknown job has ended: its offer may be right behind, for requests are answered by tasks."""
        self._called_off[job] = None
        while len(self._called_off) > limits.CALLED_OFF_MAX:
            del self._called_off[next(iter(self._called_off))]

    def end_unstarted(self, job: Job, event: JobEvent, reason: str) -> None:
        """Ends a job that has no session. A submission that still goes on hears of it and calls the others off."""
        self._promised.pop(job.spec.job, None)
        if job.state is JobState.READY:  # while they still come, whoever fetches them sees the end
            work = asyncio.to_thread(discard, job.spec.job, job.folder, self._node.blobs)
            self._tasks.spawn(work, f"remove files of {job.spec.job}")
        job.advance(event, reason)
        self._tell_progress(job, 0, 0, ready=False, error=reason[: limits.ERROR_CHARS_MAX])

    # An offer

    def offered(self, offer: Offer, submitter: str) -> OfferReply:
        """A job is proposed to this device."""
        spec, node = offer.spec, self._node
        rank = next((rank for rank, member in enumerate(offer.members) if member.device == node.device), None)
        known = self._board.jobs.get(spec.job)
        if known is not None and known.spec == spec and not known.ended:
            if spec.job in self._repeated_s:
                self._repeated_s[spec.job] = asyncio.get_running_loop().time()
            return OfferReply(refusal=None)  # it still stands, or the link broke before the first answer arrived
        refusal = None
        if self._board.closing:
            refusal = "meshtraind is stopping there"
        elif spec.job in self._called_off:
            refusal = "it was called off meanwhile"
        elif spec.submitter != submitter:
            refusal = "it was offered by another device than its submitter"
        elif rank is None or offer.members[rank].incarnation != node.incarnation:
            refusal = "meshtraind was restarted meanwhile; submit again"
        elif self._board.running >= limits.JOBS_RUNNING_MAX:
            refusal = f"{limits.JOBS_RUNNING_MAX} jobs run there already"
        elif known is not None and known.ended and known.started_at_s is None:
            refusal = f"it has ended there: {known.error or known.state}"
        elif known is not None:
            refusal = f"there is a job {spec.job} already"
        elif self._open_offers(submitter) >= limits.OFFERS_OPEN_MAX:
            refusal = f"{limits.OFFERS_OPEN_MAX} jobs of this submitter wait there to begin already"
        else:
            refusal = self._unsuitable(spec)
        if refusal is not None:
            return OfferReply(refusal=refusal)
        assert rank is not None
        job = Job(spec, offer.members, rank, node.job_folder(spec.job), node.history)
        self._board.add(job)
        self._repeated_s[spec.job] = asyncio.get_running_loop().time()
        self._tasks.spawn(self._take_in(job, spec.submitter), f"files of {spec.job}")
        self._tasks.spawn(self._expire(job), f"offer of {spec.job}")
        return OfferReply(refusal=None)

    def _open_offers(self, submitter: str) -> int:
        jobs = self._board.jobs.values()
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
            collective_for(parse_codec(spec.codec), spec.topology)
        except ValueError as error:
            return f"{error} (there: install the same version of meshtraind)"
        typed = (*spec.args, *(part for pair in spec.env for part in pair))
        typed_bytes = sum(len(text.encode()) + 1 for text in typed)
        if typed_bytes > 2 * limits.JOB_SPEC_BYTES_MAX:
            return f"its arguments and environment take {typed_bytes} bytes"
        if self._node.software.torch is None:
            return "it has no torch: run `pip install '.[torch]'` there"
        return None

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
            if job.way is Way.BEGINS:
                await self._fetch(job, source_device, on_progress)
            else:
                await self._fetch_from_any(job, source_device, on_progress)
        except (BlobError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
            if not job.ended:
                job.advance(JobEvent.FAIL, str(error))
                self._tell_progress(job, 0, 0, ready=False, error=str(error)[: limits.ERROR_CHARS_MAX])
        if job.ended:
            place = spec.job, job.folder, self._node.blobs
            if job.way is Way.RETURNS:  # its results and checkpoints of before stay
                await asyncio.to_thread(clean_up, *place, succeeded=False)
            else:
                await asyncio.to_thread(discard, *place)
            return
        job.advance(JobEvent.FILES_COMPLETE)
        self._tell_progress(job, 0, 0, ready=True, error=None)

    async def _fetch(self, job: Job, device: str, on_progress: OnProgress) -> None:
        source = None
        if device != self._node.device:
            link = self._node.links.get(device)
            if link is None:
                raise ConnectionLost("the link to where the files are was lost")
            source = link.connection
        begins = job.way is Way.BEGINS
        await Intake(job.spec, job.folder, self._node.blobs, source, on_progress, begins=begins).run()

    async def _fetch_from_any(self, job: Job, device: str, on_progress: OnProgress) -> None:
        """For a device that comes later: links may break, others have the files as well, and nobody waits for it."""
        loop = asyncio.get_running_loop()
        heard_s, heard_bytes = loop.time(), 0

        def heard(done_bytes: int, total_bytes: int) -> None:
            nonlocal heard_s, heard_bytes
            if done_bytes != heard_bytes:
                heard_s, heard_bytes = loop.time(), done_bytes
            on_progress(done_bytes, total_bytes)

        while True:
            others = [member.device for member in job.members if member.device != self._node.device]
            for source in sorted(others, key=lambda other: other != device):
                try:
                    await self._fetch(job, source, heard)
                except (ConnectionLost, TimeoutError) as error:
                    log.debug("job %s: %s", job.spec.job, error)
                else:
                    return
            if job.way is Way.JOINS and loop.time() - heard_s > limits.JOIN_SILENCE_S_MAX:
                raise RequestError(f"no member has sent its files for {limits.JOIN_SILENCE_S_MAX:.0f} s")
            await job.news(RETURN_RETRY_S)
            if job.ended:
                raise RequestError("the job has ended")

    def _tell_progress(self, job: Job, done_bytes: int, total_bytes: int, *, ready: bool, error: str | None) -> None:
        if job.way is not Way.BEGINS:
            return  # nobody waits for it
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
        job = self._board.jobs.get(generation.job)
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
                self._board.ended(End(job=job.spec.job, outcome="failed", reason=reason, now=True))
                return
            await job.news(1.0)

    def committed(self, commit: Commit) -> None:
        """Second phase: the generation is entered."""
        generation = self._promised.get(commit.job)
        if generation is not None and generation.hash64() == commit.generation:
            self.begin(commit.job)
        elif self._board.session(commit.job) is None:
            log.warning("commit of job %s does not match what was promised; ignored", commit.job)

    def begin(self, id_: str) -> None:
        """Enters the generation that was promised: all others have promised it, too. A member that was lost since then
        is gone on without (G9)."""
        generation = self._promised.pop(id_)
        job = self._board.jobs[id_]
        if not job.ended and not self._board.closing:
            others = {rank: self._node.links.get(member.device) for rank, member in enumerate(job.members)}
            links = {rank: link.connection for rank, link in others.items() if link is not None}
            self._board.start(job, generation, links)

    # Returning to a job that others have gone on with

    async def _come_later(self, job: Job, device: str, where: Where | None) -> None:
        try:
            await self._take_in(job, device)
        finally:
            self._joining.discard(job.spec.job)
        if job.state is JobState.READY:
            await self._board.come_back(job, device, where)

    def left_behind(self, device: str, where: Where) -> None:
        """A member tells of a job that ran here when this daemon stopped, or that others have finished with."""
        left = self._left.get(where.job)
        rank = rank_of(where.generation, self._node.device)
        if left is None or rank is None or where.job in self._board.jobs or self._board.closing:
            return
        del self._left[where.job]
        log.info("job %s: it goes on without this device, which asks to be taken in again", where.job)
        folder = self._node.job_folder(where.job)
        job = Job(
            *(left.spec, where.generation.members, rank, folder, self._node.history, Way.RETURNS, left.started_at_s)
        )
        self._board.add(job)
        self._tasks.spawn(self._come_later(job, device, where), f"return to {where.job}")

    # Joining a job that others have begun

    async def invited(self, invite: Invite, device: str) -> OfferReply:
        """A member asks this device to join. Several may: they get the same answer, once the files are here."""
        spec = invite.spec
        known = self._board.jobs.get(spec.job)
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
        if self._board.closing:
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
        if self._board.running >= limits.JOBS_RUNNING_MAX:
            return f"{limits.JOBS_RUNNING_MAX} jobs run there already"
        return self._unsuitable(spec)

    def _is_on(self, job: Job) -> bool:
        return not job.ended or job.spec.job in self._joining

    def _join(self, invite: Invite, device: str) -> Job:
        """Its rank is the next one for now, and for good when the others take it in."""
        spec, members = invite.spec, invite.generation.members
        log.info("job %s: this device joins it, which others have begun", spec.job)
        self._left.pop(spec.job, None)
        folder, history = self._node.job_folder(spec.job), self._node.history
        job = Job(spec, (*members, self._node.member), len(members), folder, history, Way.JOINS)
        self._board.add(job)
        self._joining.add(spec.job)
        self._tasks.spawn(self._come_later(job, device, None), f"join {spec.job}")
        return job


def _codec_known(text: str) -> bool:
    try:
        parse_codec(text)
    except ValueError:
        return False
    return True
