"""The shell around the round machine: performs its effects on links, memory and learner, and owns its one timer."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.connection import Connection
from meshtraind.dealing import Dealing
from meshtraind.executor import Executor
from meshtraind.memory import SharedMemory
from meshtraind.recorder import round_machine
from meshtraind.roundstats import RoundStats
from meshtraind.trace import Trace
from meshtraind.turn import Turn, round_done
from meshwire import limits
from meshwire.exchange import Part
from meshwire.footprint import unapplied_max
from meshwire.header import Header
from meshwire.manifest import ModelManifest
from meshwire.messages.job import JobSpec
from meshwire.messages.learner import LearnerBucket, LearnerSealed, LearnerStepped, SampleSpace, StepLost
from meshwire.messages.rounds import Bind
from meshwire.plan import Plan, parameter_buckets
from meshwire.roundevents import (
    Broadcast,
    Committed,
    Contribute,
    ContributeNothing,
    ContributePoison,
    Effect,
    LearnerCutOff,
    LearnerMayStart,
    Message,
    ProtocolError,
    RoundComplete,
    StepDropped,
)
from meshwire.roundlearner import Phase, RoundSettings
from meshwire.wiretypes import Wire

log = logging.getLogger(__name__)


class Rounds:
    """All rounds of one job on this daemon, from the first bind to the end.

    Args:
        samples: what the learner's prepared loader reads; None without one.
        links: the connection to each other member, by rank.
        generation: what every frame carries (G2).
        notify: sends the learner a notice.
        fail: ends the job with a reason; called at most once for each cause.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        manifest: ModelManifest,
        plan: Plan,
        samples: SampleSpace | None,
        rank: int,
        members: int,
        links: Mapping[int, Connection],
        job: int,
        generation: int,
        memory: SharedMemory,
        rtt_s: float,
        notify: Callable[[Wire], None],
        fail: Callable[[str], None],
        trace: Trace | None,
    ) -> None:
        self._spec = spec
        self._links = links
        self._job = job
        self._generation = generation
        self._memory = memory
        self._notify = notify
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        staleness = spec.sync.staleness
        self._executor = Executor(
            plan=plan,
            rank=rank,
            members=members,
            codec=spec.codec,
            links=links,
            job=job,
            generation=generation,
            staleness=staleness,
            norm_buckets=parameter_buckets(plan, manifest),
            result=_values(memory.result()),
            on_bucket=self._bucket_complete,
            on_result=self._result_decoded,
            on_broken=lambda text: fail(f"rank {(rank - 1) % members} sent a payload that cannot be decoded: {text}"),
            complete=lambda: self._machine.complete,
        )
        self._machine = round_machine(
            RoundSettings(
                members=members,
                rank=rank,
                buckets=len(plan.buckets),
                used_bytes=math.ceil(len(manifest.tensors) / 8),
                integers=manifest.integer_values,
                staleness=staleness,
                straggler=spec.sync.straggler,
                visibility=spec.sync.visibility,
                unapplied_max=unapplied_max(self._executor.round_bytes, staleness),
                rtt_s=rtt_s,
            ),
            trace,
        )
        self._turn = Turn(self._machine, notify, self._start_step, self._resume)
        self._dealing = (
            Dealing(samples, members, rank, staleness, spec.sync.shares, notify)
            if samples is not None and spec.sync.claims
            else None
        )
        if trace is not None:
            self._executor.on_chunk_sent = lambda header: trace.chunk(header)
        self._own: dict[int, Bind] = {}  # own binds of rounds that are not complete
        self._pending: deque[Effect] = deque()
        self._performing = False
        self._committed = 0
        self._forgotten = 0
        self.stats = RoundStats()
        self.samples = 0
        self.finished = False  # the learner takes no further step

    # The learner

    def begin(self) -> None:
        """All members are ready: the learner is told to begin its first step."""
        self._executor.open_result(1)
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
            self.finished = True
            self._turn.gone()
            self._perform(self._machine.absent(reason, self._now(), gone=True))

    def enter_barrier(self, number: int) -> int:
        """The learner waits for all others. Returns the last round it has contributed to."""
        if self._turn.in_barrier:
            self._fail(f"the learner entered barrier {number} while it was in another")
        self._turn.enter_barrier(number)
        if self._machine.settings.staleness or self._dealing is not None:
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

    def measures(self) -> dict[str, object]:
        """The fields of `Metrics` that are known here."""
        return {
            **self.stats.values(),
            "samples": self.samples,
            "ahead": max(0, self._machine.decided - self._machine.applied),
            "batch": self._dealing.batch if self._dealing is not None else 0,
            "finished": self.finished,
            "waiting_for": self.waiting(),
        }

    # Other members

    def message(self, sender: int, message: Message) -> None:
        """A round message of a member."""
        self._perform(self._machine.receive(sender, message, self._now()))

    def peer_complete(self, sender: int, complete: int) -> None:
        """G5: every frame says how far its sender is."""
        self._perform(self._machine.peer_complete(sender, complete, self._now()))

    def peer_measured(self, sender: int, samples_per_s: float, *, finished: bool) -> None:
        """A member's report, or this one's: how fast it computes, and whether its learner will go on."""
        if self._dealing is not None:
            self._dealing.measured(sender, samples_per_s)
            if finished:
                self._dealing.finished(sender)

    def peer_in_barrier(self, rank: int, *, inside: bool) -> None:
        """A member's learner, this one's too, waits for all others, or goes on."""
        if self._dealing is not None:
            self._dealing.in_barrier(rank, inside)

    def chunk_announced(self, sender: int, header: Header) -> memoryview | str:
        """Where an incoming chunk belongs."""
        return self._executor.chunk_announced(sender, header)

    def chunk_received(self, sender: int, header: Header) -> None:
        """An incoming chunk is in its place."""
        self._executor.chunk_received(header)
        self.peer_complete(sender, header.complete)

    def close(self) -> None:
        """Stops the timer and lets go of links and memory."""
        if self._timer is not None:
            self._timer.cancel()
        self._executor.close()

    # Effects

    def _now(self) -> float:
        return self._loop.time()

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

    def _perform(self, effects: list[Effect]) -> None:
        """Effects of effects (a contribution may complete a bucket at once) are performed after those before them."""
        self._pending.extend(effects)
        if self._performing:
            return
        self._performing = True
        try:
            while True:
                while self._pending:
                    self._perform_one(self._pending.popleft())
                self._turn.advance()  # a step that starts has effects of its own
                if not self._pending:
                    break
        finally:
            self._performing = False
        self._forget()
        self._arm()

    def _perform_one(self, effect: Effect) -> None:
        self.stats.take(effect, self._now())
        match effect:
            case Broadcast(message):
                if isinstance(message, Bind):
                    self._own[message.round] = message
                for link in self._links.values():
                    link.notify(message, job=self._job, generation=self._generation, complete=self._machine.complete)
            case Contribute(round_, bucket):
                bind = self._own[round_]
                raw = _values(self._memory.raw(bind.step))
                self._executor.contribute(round_, bucket, Part.DATA, bind.weight, raw)
            case ContributePoison(round_, bucket):
                self._executor.contribute(round_, bucket, Part.POISON, self._own[round_].weight, None)
            case ContributeNothing(round_):
                self._executor.contribute_nothing(round_)
            case RoundComplete():
                self._round_complete(effect)
            case Committed(round_):
                self._committed = round_
            case LearnerCutOff(round_, reason):
                log.warning("job %s: the learner was cut off: %s", self._spec.job, reason)
                if round_ is not None:
                    self._lost(self._own[round_].step, reason, retry=False)
            case StepDropped(step, reason):
                if self._machine.phase is not Phase.ABSENT:  # else it went idle by itself, with nothing in hand
                    log.warning("job %s: step %d is not contributed: %s", self._spec.job, step, reason)
                    self._lost(step, reason, retry=True)
            case ProtocolError(rank, text):
                self._fail(
                    f"rank {rank} broke the protocol: {text}" if rank is not None else f"the exchange broke: {text}"
                )
            case LearnerMayStart():
                pass  # whether it waits for that, its turn knows

    def _lost(self, step: int, reason: str, *, retry: bool) -> None:
        self.stats.steps_lost += 1
        self._notify(StepLost(step=step, reason=reason[: limits.ERROR_CHARS_MAX], retry=retry))

    def _round_complete(self, done: RoundComplete) -> None:
        own = self._own.pop(done.round, None)
        if done.void:
            log.warning("job %s: round %d is void: %s", self._spec.job, done.round, done.reason)
        self._turn.complete(round_done(done, own.step if own is not None else 0, on_nan=self._spec.on_nan))
        if self._dealing is not None and (wrong := self._dealing.complete(done)):
            self._fail(f"round {done.round}: {wrong}")

    def _forget(self) -> None:
        """G5: what every member holds, and this learner has applied, is needed no more."""
        upto = self._committed if self.finished else min(self._committed, self._machine.applied)
        for round_ in range(self._forgotten + 1, upto + 1):
            self._executor.forget(round_)
        self._forgotten = max(self._forgotten, upto)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_s = self._machine.deadline()
        if deadline_s is not None:
            self._timer = self._loop.call_at(deadline_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._perform(self._machine.timer(self._now()))


def _values(slot: memoryview) -> Values:
    return np.frombuffer(slot, np.float32)
