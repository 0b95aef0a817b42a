"""One job on this daemon from the entry into its generation to the end: learner, agreement, rounds, outcome."""

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshtraind.agreement import Agreement, News
from meshtraind.cleanup import SOURCE
from meshtraind.connection import Connection, RequestError
from meshtraind.fetch import log_path, output_folder
from meshtraind.job import Job
from meshtraind.learner import Learner, explain_exit
from meshtraind.learnerenvironment import learner_environment
from meshtraind.learnerlink import LearnerLink, Place
from meshtraind.memory import SharedMemory
from meshtraind.metrics import MetricsKeeper
from meshtraind.node import Node
from meshtraind.preparation import Preparation
from meshtraind.tasks import TaskSet
from meshtraind.trace import Trace
from meshwire import limits
from meshwire.header import Header
from meshwire.jobs import JobEvent, JobState, job_number
from meshwire.local import ENDPOINT_VARIABLE, TOKEN_VARIABLE
from meshwire.messages.job import BarrierReached, BaseHash, End, Generation, RankReport
from meshwire.messages.learner import LearnerHash, LearnerWelcome
from meshwire.roundevents import Message
from meshwire.wiretypes import Wire

if TYPE_CHECKING:
    from meshtraind.rounds import Rounds

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
LEARNER_LOST_GRACE_S = 5.0  # between the end of a learner's connection and that of its process
NEWS_TYPES = News.__args__


class Session:
    """Owns the learner and the rounds of one job here.

    Args:
        links: the connection to each other member, by rank.
        rtt_s: of the farthest member.
        threads: how many a learner may use (M3).
        master_host: where rank 0 is, for scripts that read torchrun's variables.
    """

    def __init__(
        self,
        node: Node,
        job: Job,
        generation: Generation,
        links: Mapping[int, Connection],
        *,
        rtt_s: float,
        threads: int,
        master_host: str,
    ) -> None:
        self._node = node
        self.job = job
        self._rank = job.rank
        self._generation = generation.hash64()
        self._number = job_number(job.spec.job)
        self._links = links
        self._threads = threads
        self._master_host = master_host
        self._memory = SharedMemory()
        self._learner = Learner(
            job.folder / SOURCE, job.spec.script, job.spec.args, log_path(job.folder, self._rank), self._memory
        )
        self._agreement = Agreement(job.spec.job, self._rank, job.members, self._send, self._gone)
        self._metrics = MetricsKeeper(links)
        self._tasks = TaskSet(f"job {job.spec.job}", self._task_failed)
        place = Place(
            job=job,
            who=self._who(),
            links=links,
            generation=self._generation,
            rtt_s=rtt_s,
            memory=self._memory,
            agreement=self._agreement,
            preparation=Preparation(job, links, self._memory, self._agreement, node.blobs),
            metrics=self._metrics,
            tasks=self._tasks,
        )
        self.learner = LearnerLink(place, self._fail, self._tell_hash, self._tell_report)
        self.closed = asyncio.Event()

    # Life

    def start(self) -> None:
        """Enters the generation: the learner is spawned."""
        self.job.advance(JobEvent.START)
        self._tasks.spawn(self._run(), "learner")
        self._tasks.spawn(self._report_regularly(), "report")

    async def _run(self) -> None:
        job = self.job
        output = output_folder(job.folder, self._rank)
        try:
            for folder in (output, log_path(job.folder, self._rank).parent):
                await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            if job.spec.trace:
                self.learner.trace = Trace(job.folder / "trace.jsonl")
            environment = learner_environment(
                job.spec, self._rank, len(job.members), threads=self._threads, master_host=self._master_host
            )
            await self._learner.start(
                {**environment, ENDPOINT_VARIABLE: self._node.endpoint(), TOKEN_VARIABLE: self._node.token}
            )
        except OSError as error:
            self.end("failed", f"{self._who()} could not start the script: {error}", now=True)
            return
        job.advance(JobEvent.LEARNER_STARTED)
        self._tell_report()
        code = await self._learner.wait()
        self._metrics.exit_code = code
        if job.state is JobState.RUNNING:
            if code != 0:
                if self.rounds is not None:
                    self.rounds.gone("it failed")
                why = explain_exit(code, log_path(job.folder, self._rank), self._node.name)
                self._fail(f"{self._who()}: {why}")
                return
            if self.rounds is not None:
                self.rounds.gone("its script has ended")
            job.advance(JobEvent.LEARNER_DONE)
        self._tell_report()
        self._check_all_done()

    def end(self, outcome: str, reason: str, *, now: bool, tell: bool = True) -> None:
        """Ends the job here and, unless the end came from a member, everywhere. Later calls change nothing."""
        if self.job.ended or self.job.state in (JobState.CANCELLING, JobState.FAILING):
            return
        if tell:
            message = End(
                job=self.job.spec.job,
                outcome="cancelled" if outcome == "cancelled" else "failed",
                reason=reason[: limits.ERROR_CHARS_MAX],
                now=now,
            )
            for link in self._links.values():
                link.notify(message, job=self._number, generation=self._generation)
        self.job.advance(JobEvent.CANCEL if outcome == "cancelled" else JobEvent.FAIL, reason)
        self._agreement.wake()
        self.learner.stop(reason)
        self._tasks.spawn(self._stop(now), "stop")

    async def _stop(self, now: bool) -> None:
        await self._learner.stop(now=now)
        if not self.job.ended:
            self.job.advance(JobEvent.STOPPED)
        self._tell_report()
        await self.close()

    async def close(self) -> None:
        """Ends what is left of the session; the job's state stays as it is."""
        await self._learner.stop(now=True)
        self.learner.close()
        self._metrics.freeze()
        self._memory.close()
        self.closed.set()
        await self._tasks.close()

    def _check_all_done(self) -> None:
        """Succeeds when every rank's script has ended well."""
        if self.job.state is not JobState.FINISHING:
            return
        others_done = all(
            (report := self.job.reports.get(rank)) is not None and report.exit_code == 0 for rank in self._links
        )
        if others_done:
            self.job.advance(JobEvent.ALL_DONE)
            self._tell_report()
            self._tasks.spawn(self.close(), "close")

    # The learner's connection

    def attach(self, connection: Connection) -> LearnerWelcome:
        """The learner has called. Raises RequestError when there is one already, or none is expected."""
        if not self._learner.running:
            raise RequestError(f"job {self.job.spec.job} runs no learner here any more")
        return self.learner.attach(connection)

    def learner_lost(self, connection: Connection) -> None:
        """Its socket has closed; the process tells how it ended."""
        if self.learner.lost(connection) and not self.job.ended:
            self._tasks.spawn(self._end_unless_finished(), "learner lost")

    async def _end_unless_finished(self) -> None:
        """A script that has lost its daemon and goes on would let all others wait for its next step."""
        await asyncio.sleep(LEARNER_LOST_GRACE_S)
        finished = self.rounds is not None and self.rounds.finished
        if self._learner.running and not finished and self.job.state is JobState.RUNNING:
            self._fail(f"{self._who()}: the script has closed its connection to meshtraind")

    def _tell_hash(self, body: LearnerHash) -> None:
        message = BaseHash(job=self.job.spec.job, rank=self._rank, round=body.round, sha256=body.sha256)
        self._take_hash(message)
        for link in self._links.values():
            link.notify(message, job=self._number, generation=self._generation)

    @property
    def rounds(self) -> "Rounds | None":
        """None before the learner is ready."""
        return self.learner.rounds

    # Other members

    def peer_notice(self, rank: int, header: Header, body: Wire) -> str | None:
        """A message of another member in this generation. Returns what is wrong with it, if anything."""
        if isinstance(body, RankReport):
            self.job.report(body)
            if self.rounds is not None and not self.job.ended:
                self.rounds.peer_complete(rank, header.complete)
                self._measured(body)
            self._agreement.wake()
            self._check_all_done()
        elif isinstance(body, End):
            self.end(body.outcome, body.reason, now=body.now, tell=False)
        elif isinstance(body, BaseHash):
            self._take_hash(body)
        elif isinstance(body, NEWS_TYPES):
            if wrong := self._agreement.news(body):
                return wrong
            if isinstance(body, BarrierReached) and self.rounds is not None and not self.job.ended:
                self.rounds.peer_in_barrier(rank, inside=True)
        elif not isinstance(body, Message):
            return f"a member does not send {type(body).__name__}"
        elif self.rounds is not None and not self.job.ended:
            self.rounds.message(rank, body)
            self.rounds.peer_complete(rank, header.complete)
        return None

    def chunk_announced(self, rank: int, header: Header) -> memoryview | str | None:
        """Where a chunk belongs; None when its round is no longer of interest."""
        if self.rounds is None or self.job.ended or self.job.state in (JobState.CANCELLING, JobState.FAILING):
            return None
        if header.generation != self._generation:
            return None  # G2: work of another generation is dropped
        return self.rounds.chunk_announced(rank, header)

    def chunk_received(self, rank: int, header: Header) -> None:
        """A chunk is in its place."""
        if self.rounds is not None and not self.job.ended:
            self.rounds.chunk_received(rank, header)

    def rank_over(self, connection: Connection) -> int | None:
        """The member to which this connection leads; None when the job does not use it."""
        return next((rank for rank, link in self._links.items() if link is connection), None)

    def peer_lost(self, rank: int, reason: str) -> None:
        """Until generations can change, a lost member ends the job."""
        self._fail(f"lost rank {rank} ({self.job.members[rank].name}): {reason}")

    def _take_hash(self, message: BaseHash) -> None:
        self.job.hashes.add(message)
        if self.job.hashes.unequal_round == message.round:
            log.error("job %s: the replicas differ after round %d", self.job.spec.job, message.round)

    # Helpers

    def _send(self, rank: int, message: Wire) -> None:
        self._links[rank].notify(message, job=self._number, generation=self._generation)

    def _who(self) -> str:
        return f"rank {self._rank} ({self._node.name})"

    def _gone(self) -> set[int]:
        return {rank for rank, report in self.job.reports.items() if report.exit_code is not None}

    async def _report_regularly(self) -> None:
        while True:
            self._tell_report()
            self.learner.sign_of_life()
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _tell_report(self) -> None:
        report = self._metrics.report(self.job, self._rank, self.rounds)
        self.job.report(report)
        if self.rounds is not None and not self.job.ended:
            self._measured(report)
        for link in self._links.values():
            complete = self.rounds.complete if self.rounds is not None else 0
            link.notify(report, job=self._number, generation=self._generation, complete=complete)

    def _measured(self, report: RankReport) -> None:
        assert self.rounds is not None
        finished = report.metrics.finished or report.exit_code is not None
        self.rounds.peer_measured(report.rank, report.metrics.samples_per_s, finished=finished)

    def _fail(self, reason: str) -> None:
        self.end("failed", reason, now=False)

    def _task_failed(self, name: str, error: BaseException) -> None:
        log.error("%s failed", name, exc_info=error)
        self.end("failed", f"{self._who()}: {name} failed: {type(error).__name__}: {error}", now=True)
