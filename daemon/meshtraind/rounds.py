"""All rounds of one job on this daemon, from the first bind to the end, through every generation of the job."""

import asyncio
from collections.abc import Callable, Mapping

import numpy as np

from meshtraind.connection import Connection
from meshtraind.crossing import Crossing
from meshtraind.dealing import Dealing
from meshtraind.executor import Executor
from meshtraind.memory import SharedMemory
from meshtraind.performer import Performer, Stage
from meshtraind.recorder import round_machine
from meshtraind.roundhistory import Entry, RoundHistory
from meshtraind.trace import Trace
from meshtraind.turn import Turn
from meshwire import limits
from meshwire.footprint import unapplied_max
from meshwire.header import Header
from meshwire.jobs import job_number
from meshwire.manifest import ModelManifest
from meshwire.messages.job import Generation, JobSpec, RankReport
from meshwire.messages.learner import LearnerBucket, LearnerSealed, LearnerStepped, SampleSpace
from meshwire.messages.rounds import Bind
from meshwire.plan import Plan
from meshwire.roundevents import Effect, Message
from meshwire.roundlearner import Phase, RoundSettings
from meshwire.wiretypes import Wire


class Rounds:
    """The round machine with its executor, ledger and learner's turn.

    Args:
        samples: what the learners' prepared loaders read; None without one.
        generation: in which this member begins.
        entry: and where.
        loading: it has no learner yet, and enters by `enter`.
        links: the connection to each other member, by rank; live.
        notify: sends the learner a notice.
        fail: ends the job with a reason; called at most once for each cause.
        on_round: called with this and each complete round, in order.

    Attributes:
        crossing: leads all of it from one generation into the next.
        samples: that this device's learners have used.
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
        notify: Callable[[Wire], None],
        fail: Callable[[str], None],
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
        self._executor = Executor(
            plan=plan,
            rank=rank,
            ranks=generation.ranks,
            codec=spec.codec,
            momentum=manifest.momentum,
            links=links,
            job=job_number(spec.job),
            seed=spec.seed,
            generation=generation.hash64(),
            staleness=staleness,
            first=None if loading else entry.complete + 1,
            result=np.frombuffer(memory.result(), np.float32),
            on_bucket=self._bucket_complete,
            on_result=self._result_decoded,
            on_broken=lambda text: fail(f"a payload was received that cannot be decoded: {text}"),
            complete=lambda: self._machine.complete,
        )
        round_bytes = self._executor.round_bytes(spec.peers_max or len(generation.members))
        self._machine = round_machine(
            RoundSettings(
                ranks=generation.ranks,
                rank=rank,
                buckets=len(plan.buckets),
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
        if trace is not None:
            self._executor.on_chunk_sent = lambda header: trace.chunk(header)
        if loading:
            self.crossing.fence()
            self.dead("its script has not loaded yet")
        self.samples, self.closed = 0, False

    # The learner

    def begin(self) -> None:
        """All members are ready: the learner is told to begin its first step."""
        self._executor.open_result(self.complete + 1)
        self._turn.wants_to_start(1)
        self._perform([])
        if self._dealing is not None:
            self._dealing.begin()

    def bucket(self, message: LearnerBucket) -> None:
        """A bucket lies in the raw slot."""
        binds = self._machine.phase is Phase.COMPUTING
        self._perform(
            self._machine.bucket_ready(
                message.step,
                message.bucket,
                self._now(),
                weight=message.weight,
                samples=message.samples,
                hyperparameters=message.hyperparameters,
                claim=message.claim,
                sizes=self._dealing.sizes() if self._dealing is not None and binds else (),
                poison=message.poison,
            )
        )

    def sealed(self, message: LearnerSealed) -> None:
        """The backward pass has ended."""
        self._perform(self._machine.seal(message.step, message.used, message.integers, self._now()))

    def applied(self, round_: int) -> None:
        """The learner has applied a round: the result slot is free for the next one."""
        if not self._turn.holds(round_):
            self._fail(f"the learner has applied round {round_}, which it was not given (R1)")
            return
        effects = self._machine.learner_applied(round_, self._now())
        if self._machine.applied == round_:
            self._executor.open_result(round_ + 1)
        self._perform(effects)

    def stepped(self, message: LearnerStepped) -> None:
        """A step has ended; the learner waits for the word to start the next one."""
        if not self._turn.at_end(message.step):
            self._fail(f"the learner has ended step {message.step}, which was not at its end")
            return
        self.samples += message.samples
        self._turn.wants_to_start(message.step + 1)
        self._perform([])

    def idle(self, reason: str, *, last: bool = False) -> None:
        """No step will follow for now (R5): rounds are still applied. `last`: none ever, so none waits for it."""
        self._turn.idle()
        self._perform(self._machine.absent(reason, self._now(), gone=last))

    def back(self) -> None:
        """No longer idle."""
        self._perform(self._machine.present(self._now()))

    def gone(self, reason: str) -> None:
        """No step will ever follow: the learner has finished, or is dead (V2)."""
        if not self.finished:
            self._performer.finished = True
            self._turn.gone()
            self._perform(self._machine.absent(reason, self._now(), gone=True))

    def dead(self, reason: str) -> None:
        """No process is there: what it had bound is void (V2), and nothing is kept for the one to come."""
        self._turn.away()
        if self._dealing is not None:
            self._dealing.learner_lost()
        self._performer.learner_died()
        self._performer.keeps_unapplied = False
        self._perform(self._machine.absent(reason, self._now(), gone=True))

    def loads(self) -> int:
        """J1: a process begins to load the base of after the round that is returned, or of after a later one. What
        follows is kept for it."""
        self._performer.keeps_unapplied = True
        self._perform(self._machine.absent("it loads the state of the others", self._now(), loading=True))
        return self._machine.applied

    def loaded(self, round_: int) -> None:
        """J1: a new learner holds the base after `round_`, which is complete here. It waits to be taken in."""
        effects = self._machine.loaded(round_, self._now())
        self._executor.open_result(round_ + 1)
        self._turn.returned(round_)
        self._perform(effects)

    def enter_barrier(self, number: int) -> int:
        """The learner waits for all others. Returns the last round it has contributed to."""
        if self._turn.in_barrier:
            self._fail(f"the learner entered barrier {number} while it was in another")
        self._turn.enter_barrier(number)
        if self._machine.settings.staleness or (self._dealing is not None and not self._spec.sync.lockstep):
            last = number == 0 and self._spec.sync.visibility == "fixed"  # else what is kept for it is bounded (R8)
            self.idle("it has finished" if number == 0 else f"it is in barrier {number}", last=last)
        return self._machine.decided

    def barrier_broken(self, error: str) -> None:
        """Some other will never come: the learner goes on, after the rounds that it is to apply."""
        self._turn.barrier_broken(error)
        self._perform([])

    def all_in_barrier(self, newest_round: int) -> None:
        """So do all others; none has contributed to a round after `newest_round`."""
        self._turn.all_in_barrier(newest_round)
        self._perform([])

    def waiting(self) -> str | None:
        """What a blocked learner waits for; None while it computes."""
        blocked = self._machine.phase is Phase.BOUNDARY and self._machine.decided > self._machine.complete
        if not self._turn.waits and not blocked:
            return None
        text = self._machine.may_start()[1] if self._turn.waits else self._machine.waiting()
        return text[: limits.ERROR_CHARS_MAX]

    @property
    def complete(self) -> int:
        """The newest round held completely (G5)."""
        return self._machine.complete

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
            "samples": self.samples,
            "ahead": max(0, self._machine.decided - self._machine.applied),
            "batch": self._dealing.batch if self._dealing is not None else 0,
            "finished": self.finished,
            "waiting_for": self.waiting(),
        }

    # Other members

    def takes(self, generation: int) -> bool:
        """G2: whether what comes in this generation is taken now."""
        return generation == self._performer.generation and self._performer.stage is not Stage.FENCED

    def message(self, sender: int, message: Message, *, behind: bool = False) -> None:
        """A round message of a member. `behind`: it is in no barrier. Steps that its learner takes (it has begun anew,
        perhaps) while this one is in a barrier are its own (R5): else each would wait for the other."""
        if behind and isinstance(message, Bind) and message.round > self._machine.decided and self._turn.in_barrier:
            self.idle(f"rank {sender} has more steps to go to its barrier")
        self._perform(self._machine.receive(sender, message, self._now()))

    def peer_complete(self, sender: int, complete: int) -> None:
        """G5: every frame says how far its sender is."""
        self._perform(self._machine.peer_complete(sender, complete, self._now()))

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

    def _now(self) -> float:
        return self._loop.time()

    def _perform(self, effects: list[Effect]) -> None:
        self._performer.perform(effects)

    def _start_step(self, step: int) -> None:
        self._perform(self._machine.start_step(step, self._now()))

    def _resume(self) -> None:
        if self._machine.phase is Phase.ABSENT and not self.finished:
            self._perform(self._machine.present(self._now()))

    def _bucket_complete(
        self, round_: int, bucket: int, poisoned: bool, contributors: int, weight: float, squared_norm: float
    ) -> None:
        self._perform(
            self._machine.result_ready(
                round_,
                bucket,
                self._now(),
                contributors=contributors,
                weight=weight,
                poisoned=poisoned,
                squared_norm=squared_norm,
            )
        )

    def _result_decoded(self, round_: int) -> None:
        self._turn.decoded(round_)
        self._perform([])
