"""All rounds of one job on this daemon, from the first bind to the end, through every generation of the job."""

import asyncio
from collections.abc import Callable, Mapping

import numpy as np

from meshtraind.executor.executor import Executor
from meshtraind.learner.shared_memory import SharedMemory
from meshtraind.rounds.effects import Performer, Stage
from meshtraind.rounds.generation_change import Crossing
from meshtraind.rounds.history import Entry, RoundHistory
from meshtraind.rounds.learner_inputs import LearnerMoves
from meshtraind.rounds.learner_turn import Turn
from meshtraind.rounds.sample_grants import Dealing
from meshtraind.rounds.trace import Trace
from meshtraind.rounds.trace_recorder import round_machine
from meshtraind.transport.connection import Connection
from meshwire.codecs.registry import parse_codec
from meshwire.frames.header import Header
from meshwire.jobs.lifecycle import job_number
from meshwire.layout.projections import builds_on
from meshwire.memory.footprint import unapplied_max
from meshwire.message_base import Wire
from meshwire.messages.job import Generation, JobSpec, RankReport
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import Bind
from meshwire.model.manifest import ModelManifest
from meshwire.model.plan import Plan
from meshwire.model.plans_by_round import RoundPlans
from meshwire.rounds.effects import Message
from meshwire.rounds.inputs import (
    CompleteAnnounced,
    LearnerPresent,
    MessageReceived,
    ResultReady,
    RoundTripMeasured,
    StartStep,
)
from meshwire.rounds.learner import Phase, RoundSettings
from meshwire.rounds.stall import StallWatch


class Rounds:
    """The round machine with its executor, ledger and learner's turn.

    Args:
        samples: what the learners' prepared loaders read; None without one.
        generation: in which this member begins.
        entry: and where.
        loading: it has no learner yet, and enters by `enter`.
        links: the connection to each other member, by rank; live.
        stall_s: as of `Timeouts`.
        notify: sends the learner a notice.
        fail: ends this device's part with a reason; called at most once for each cause.
        refuse: called with the rank of a member that has broken the rules, and how.
        on_round: called with this and each complete round, in order.

    Attributes:
        learner: what it does, and whether there is one.
        crossing: leads all of it from one generation into the next.
        closed: it goes on no more.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        manifest: ModelManifest,
        plan: Plan,
        samples: SampleSpace | None,
        rank: int,
        generation: Generation,
        entry: Entry,
        loading: bool,
        links: Mapping[int, Connection],
        memory: SharedMemory,
        rtt_s: float,
        stall_s: float,
        notify: Callable[[Wire], None],
        fail: Callable[[str], None],
        refuse: Callable[[int, str], None],
        on_round: Callable[["Rounds", int], None],
        trace: Trace | None,
    ) -> None:
        self._spec = spec
        self._plan = plan
        self._rank = rank
        self._links = links
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._samples = samples
        self._history = RoundHistory(entry)
        staleness = spec.sync.staleness
        in_the_middle = loading and not entry.anew
        self._executor = Executor(
            plan=plan,
            rank=rank,
            ranks=generation.ranks,
            learning=generation.learning,
            codec=spec.codec,
            momentum=manifest.momentum,
            links=links,
            job=job_number(spec.job),
            seed=spec.seed,
            generation=generation.hash64(),
            staleness=staleness,
            first=None if in_the_middle else entry.complete + 1,
            result=np.frombuffer(memory.result(), np.float32),
            on_bucket=self._bucket_complete,
            on_result=self._result_decoded,
            on_broken=lambda rank, text: self._performer.broken(rank, text),
            complete=lambda: self._machine.complete,
            on_chunk_sent=None if trace is None else trace.chunk,
            bound=lambda round_, bitmap: self._machine.bound(round_, bitmap),
        )
        round_bytes = self._executor.round_bytes(spec.peers_max or len(generation.members))
        self._machine = round_machine(
            RoundSettings(
                ranks=generation.ranks,
                rank=rank,
                buckets=len(plan.buckets),
                fewer=RoundPlans(plan).bucket_counts(),
                used_bytes=manifest.used_bytes,
                integers=manifest.integer_values,
                staleness=staleness,
                straggler=spec.sync.straggler,
                visibility=spec.sync.visibility,
                unapplied_max=unapplied_max(round_bytes, staleness),
                rtt_s=rtt_s,
            ),
            trace,
            complete=self._history.complete,
        )
        self._turn = Turn(self._machine, notify, self._start_step, self._resume)
        counted, learning = entry.follows(generation)
        self._dealing = Dealing(samples, rank, learning, spec.sync, notify, entry.deal) if samples is not None else None
        self._performer = Performer(
            spec=spec,
            links=links,
            job=job_number(spec.job),
            generation=generation.hash64(),
            machine=self._machine,
            executor=self._executor,
            turn=self._turn,
            dealing=self._dealing,
            history=self._history,
            memory=memory,
            notify=notify,
            fail=fail,
            refuse=refuse,
            on_round=lambda round_: on_round(self, round_),
        )
        self.crossing = Crossing(
            rank=rank,
            links=links,
            machine=self._machine,
            executor=self._executor,
            turn=self._turn,
            dealing=self._dealing,
            history=self._history,
            performer=self._performer,
            counted=counted,
            learning=learning,
        )
        self.learner = LearnerMoves(
            spec=spec,
            machine=self._machine,
            executor=self._executor,
            turn=self._turn,
            dealing=self._dealing,
            performer=self._performer,
            notify=notify,
            fail=fail,
            loadable_after=entry.complete + (builds_on(parse_codec(spec.codec), staleness) if in_the_middle else 0),
        )
        if loading:
            self.crossing.fence()
            self.learner.dead("its script has not loaded yet")
        self._stall = StallWatch(stall_s)
        self.closed = False

    @property
    def complete(self) -> int:
        """The newest round held completely (G5)."""
        return self._machine.complete

    @property
    def applied(self) -> int:
        """The newest round in the learner's base."""
        return self._machine.applied

    @property
    def contributions(self) -> int:
        """Rounds that this device's learners were in."""
        return sum(self._performer.stats.ages)

    @property
    def finished(self) -> bool:
        """The learner takes no further step."""
        return self._performer.finished

    @property
    def committed(self) -> int:
        """The newest round that every member has announced complete (G5)."""
        return self._performer.committed

    @property
    def history_samples(self) -> int:
        """In all complete rounds."""
        return self._history.samples

    @property
    def hold_others_up(self) -> bool:
        """No more rounds can be kept for a learner that loads: all members wait for it (R5, M1)."""
        return self._machine.decided >= self._machine.applied + self._machine.settings.unapplied_max

    def chain_after(self, round_: int) -> bytes | None:
        """h_k of a complete round (G4); None when it is too long ago."""
        return self._history.chain_after(round_)

    def entry(self) -> Entry:
        """Where who would go on from the newest complete round begins."""
        history = self._history
        deal = self._dealing.state() if self._dealing is not None else None
        return Entry(history.complete, history.chain, history.samples, deal)

    @property
    def sample_space(self) -> SampleSpace | None:
        """What the prepared loaders read."""
        return self._samples

    def measures(self) -> dict[str, object]:
        """The fields of `Metrics` that are known here."""
        return {
            **self._performer.stats.values(),
            "samples": self.learner.samples,
            "ahead": max(0, self._machine.decided - self._machine.applied),
            "batch": self._dealing.batch if self._dealing is not None else 0,
            "finished": self.finished,
            "waiting_for": self.learner.waiting(),
            "receipts": (self.complete + 1, self._executor.receipts(self.complete + 1)),
        }

    def note_round_trip(self, rtt_s: float) -> None:
        """As it is now to the farthest member; what changes little is not worth a line in the trace."""
        known_s = self._machine.settings.rtt_s
        if not 0.8 * known_s <= rtt_s <= 1.25 * known_s:
            self._performer.handle(RoundTripMeasured(rtt_s))

    def stalled(self, reports: Mapping[int, RankReport]) -> tuple[int, str] | None:
        """To be asked about once a second: a member that could send and does not, and what is to be said of it."""
        round_, decided = self.complete + 1, self._machine.decided_by_all
        lacks = list(self._executor.lacks(round_)) if decided >= round_ else []
        return self._stall.look(
            self._loop.time(),
            round_ if decided >= round_ and self._performer.stage is Stage.RUNNING else None,
            [(rank, after) for rank, _, after in lacks],
            {rank: report.metrics.receipts for rank, report in reports.items()},
            {rank: link.chunk_bytes_received for rank, link in self._links.items()},
        )

    # Other members

    def takes(self, generation: int) -> bool:
        """G2: whether what comes in this generation is taken now."""
        return generation == self._performer.generation and self._performer.stage is not Stage.FENCED

    def message(self, sender: int, message: Message, *, behind: bool = False) -> None:
        """A round message of a member. `behind`: it is in no barrier. Steps that its learner takes (it has begun anew,
        perhaps) while this one is in a barrier are its own (R5): else each would wait for the other."""
        if behind and isinstance(message, Bind) and message.round > self._machine.decided and self._turn.in_barrier:
            self.learner.idle(f"rank {sender} has more steps to go to its barrier")
        self._performer.handle(MessageReceived(sender, message))
        self._executor.decided()

    def peer_complete(self, sender: int, complete: int) -> None:
        """G5: every frame says how far its sender is."""
        self._performer.handle(CompleteAnnounced(sender, complete))

    def peer_measured(self, report: RankReport) -> None:
        """A member's report, or this one's: how fast it computes, and whether its learner will go on."""
        if self._dealing is not None:
            self._dealing.measured(report.rank, report.metrics.samples_per_s)
            if report.metrics.finished or report.exit_code is not None:
                self._dealing.finished(report.rank)

    def peer_in_barrier(self, rank: int, *, inside: bool) -> None:
        """A member's learner, this one's too, waits for all others, or goes on."""
        if self._dealing is not None:
            self._dealing.in_barrier(rank, inside)

    def chunk_announced(self, sender: int, header: Header) -> memoryview | str | None:
        """Where an incoming chunk belongs."""
        return self._executor.chunk_announced(sender, header)

    def chunk_received(self, sender: int, header: Header) -> None:
        """An incoming chunk is in its place."""
        self._executor.chunk_received(header)
        self.peer_complete(sender, header.complete)

    def close(self) -> None:
        """Stops the timer and lets go of links and memory."""
        self.closed = True
        self._performer.close()
        self._executor.close()

    # Steps of the above

    def _start_step(self, step: int) -> None:
        self._performer.handle(StartStep(step))

    def _resume(self) -> None:
        if self._machine.phase is Phase.ABSENT and not self.finished:
            self._performer.handle(LearnerPresent())

    def _bucket_complete(
        self, round_: int, bucket: int, poisoned: bool, contributors: int, weight: float, squared_norm: float
    ) -> None:
        self._performer.handle(ResultReady(round_, bucket, contributors, weight, poisoned, squared_norm))

    def _result_decoded(self, round_: int) -> None:
        self._turn.decoded(round_)
        self._performer.perform([])
