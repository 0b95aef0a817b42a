"""The shell around the round machine: performs its effects on links, memory and learner, and owns its one timer."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.connection import Connection
from meshtraind.executor import Executor
from meshtraind.memory import SharedMemory
from meshtraind.trace import Trace
from meshwire import limits
from meshwire.exchange import Part
from meshwire.header import Header
from meshwire.manifest import ModelManifest
from meshwire.messages.job import JobSpec
from meshwire.messages.local import LearnerApplied, LearnerBucket, LearnerSealed, RoundDone
from meshwire.messages.rounds import Bind
from meshwire.plan import Plan
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
from meshwire.rounds import RoundMachine

log = logging.getLogger(__name__)


class Rounds:
    """All rounds of one job on this daemon, from the first bind to the end.

    Args:
        links: the connection to each other member, by rank.
        generation: what every frame carries (G2).
        notify: tells the learner that a round is done.
        fail: ends the job with a reason; called at most once for each cause.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        manifest: ModelManifest,
        plan: Plan,
        rank: int,
        members: int,
        links: Mapping[int, Connection],
        job: int,
        generation: int,
        staleness: int,
        memory: SharedMemory,
        rtt_s: float,
        notify: Callable[[RoundDone], None],
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
        self._trace = trace
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._machine = RoundMachine(
            RoundSettings(
                members=members,
                rank=rank,
                buckets=len(plan.buckets),
                used_bytes=math.ceil(len(manifest.tensors) / 8),
                integers=manifest.integer_values,
                staleness=staleness,
                straggler="carry",
                rtt_s=rtt_s,
            )
        )
        self._executor = Executor(
            plan=plan,
            rank=rank,
            members=members,
            codec=spec.codec,
            links=links,
            job=job,
            generation=generation,
            staleness=staleness,
            result=_values(memory.result()),
            on_bucket=self._bucket_complete,
            on_broken=lambda text: fail(f"rank {(rank - 1) % members} sent a payload that cannot be decoded: {text}"),
            complete=lambda: self._machine.complete,
        )
        if trace is not None:
            self._executor.on_chunk_sent = self._trace_chunk
        self._own: dict[int, Bind] = {}  # own binds of rounds that are not complete
        self._bound_at_s: dict[int, float] = {}
        self._pending: deque[Effect] = deque()
        self._performing = False
        self.exchange_s = 0.0
        self.samples = 0
        self.finished = False  # the learner takes no further step

    # The learner

    def begin(self, step: int) -> None:
        """The learner begins its first step."""
        self._perform(self._machine.start_step(step, self._now()))

    def bucket(self, message: LearnerBucket) -> None:
        """A bucket lies in the raw slot."""
        self._perform(
            self._machine.bucket_ready(
                message.step,
                message.bucket,
                self._now(),
                weight=message.weight,
                samples=message.samples,
                hyperparameters=message.hyperparameters,
                poison=message.poison,
            )
        )

    def sealed(self, message: LearnerSealed) -> None:
        """The backward pass has ended."""
        self._perform(self._machine.seal(message.step, message.used, message.integers, self._now()))

    def applied(self, message: LearnerApplied) -> None:
        """The optimizer has stepped; the next step begins."""
        now_s = self._now()
        if message.round > self._machine.applied:
            self._perform(self._machine.learner_applied(message.round, now_s))
        self.samples += message.samples
        self._perform(self._machine.start_step(message.step + 1, now_s))

    def absent(self, reason: str) -> None:
        """No step will follow (R5), or the learner is dead (V2)."""
        self.finished = True
        if self._machine.phase is not Phase.ABSENT:
            self._perform(self._machine.absent(reason, self._now()))

    def waiting(self) -> str | None:
        """What a blocked learner waits for; None while it computes."""
        blocked = self._machine.phase is Phase.BOUNDARY and self._machine.decided > self._machine.complete
        return self._machine.waiting() if blocked else None

    @property
    def complete(self) -> int:
        """The newest round held completely (G5)."""
        return self._machine.complete

    # Other members

    def message(self, sender: int, message: Message) -> None:
        """A round message of a member."""
        self._perform(self._machine.receive(sender, message, self._now()))

    def peer_complete(self, sender: int, complete: int) -> None:
        """G5: every frame says how far its sender is."""
        self._perform(self._machine.peer_complete(sender, complete, self._now()))

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

    def _bucket_complete(self, round_: int, bucket: int, poisoned: bool, contributors: int, weight: float) -> None:
        self._perform(
            self._machine.result_ready(
                round_, bucket, self._now(), contributors=contributors, weight=weight, poisoned=poisoned
            )
        )

    def _perform(self, effects: list[Effect]) -> None:
        """Effects of effects (a contribution may complete a bucket at once) are performed after those before them."""
        self._pending.extend(effects)
        if self._performing:
            return
        self._performing = True
        try:
            while self._pending:
                self._perform_one(self._pending.popleft())
        finally:
            self._performing = False
        self._arm()

    def _perform_one(self, effect: Effect) -> None:
        match effect:
            case Broadcast(message):
                if isinstance(message, Bind):
                    self._own[message.round] = message
                    self._bound_at_s[message.round] = self._now()
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
                self._executor.forget(round_)
            case LearnerCutOff(_, reason):
                log.warning("job %s: the learner was cut off: %s", self._spec.job, reason)
            case StepDropped(step, reason):
                log.warning("job %s: step %d is not contributed: %s", self._spec.job, step, reason)
            case ProtocolError(rank, text):
                self._fail(
                    f"rank {rank} broke the protocol: {text}" if rank is not None else f"the exchange broke: {text}"
                )
            case LearnerMayStart():
                pass  # with s=0 a learner that has its round never asks in vain
        if self._trace is not None:
            self._trace.effect(effect)

    def _round_complete(self, done: RoundComplete) -> None:
        own = self._own.pop(done.round, None)
        bound_at_s = self._bound_at_s.pop(done.round, None)
        if bound_at_s is not None:
            self.exchange_s += self._now() - bound_at_s
        if done.void:
            log.warning("job %s: round %d is void: %s", self._spec.job, done.round, done.reason)
        gradient_broken = not done.poisons or any(poison.parameter for poison in done.poisons.values())
        self._notify(
            RoundDone(
                round=done.round,
                step=own.step if own is not None else 0,
                void=done.void,
                reason=done.reason[: limits.ERROR_CHARS_MAX],
                stop=done.void and gradient_broken and self._spec.on_nan == "stop",
                weight=done.weight,
                contributors=done.contributors,
                used=done.used,
                integers=done.integers,
            )
        )

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

    def _trace_chunk(self, header: Header) -> None:
        assert self._trace is not None
        self._trace.write(
            "chunk", round=header.round, bucket=header.bucket, step=header.step, first_segment=header.first_segment
        )


def _values(slot: memoryview) -> Values:
    return np.frombuffer(slot, np.float32)
