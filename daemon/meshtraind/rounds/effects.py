"""Performs what is decided in `JobRounds`, in order, on links, data plane and learner, and owns the one timer."""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from meshtraind.rounds.data_plane import DataPlane, RawSlots
from meshtraind.rounds.gossip import Gossip
from meshtraind.rounds.history import Entry, RoundHistory
from meshtraind.rounds.stats import RoundStats
from meshtraind.transport.round_link import RoundLink
from meshwire.collectives.exchange import Part
from meshwire.jobs.lifecycle import job_number
from meshwire.message_base import Wire
from meshwire.messages.job import JobSpec
from meshwire.rounds.effects import (
    Broadcast,
    Committed,
    Contribute,
    ContributeNothing,
    ContributePoison,
    DecodeRound,
    JobEffect,
    LearnerBrokeRules,
    LearnerCutOff,
    Message,
    ProtocolError,
    RoundComplete,
    RoundCounted,
    RoundForgotten,
    SamplesDealt,
    StepDropped,
    TellLearner,
)
from meshwire.rounds.inputs import JobInput, TimeReached
from meshwire.rounds.rounds_and_learner import JobRounds

log = logging.getLogger(__name__)


class Stage(Enum):
    """Where this daemon is in its generation (G2)."""

    RUNNING = "running"
    FENCED = "fenced"  # it has promised a newer one: nothing is sent, for all of it will be told again
    ENTERED = "entered"  # others send; what is sent from here waits until all have entered


class RoundsHost(Protocol):
    """Whom the rounds of a job concern besides links and memory: its learner, its members, its end."""

    def notify(self, body: Wire, /) -> None:
        """Sends the learner a notice."""

    def fail(self, reason: str, /) -> None:
        """Ends this device's part; called at most once for each cause."""

    def refuse(self, rank: int, text: str, /) -> None:
        """The member has broken the rules in the way that `text` says."""

    def round_complete(self, round_: int, /) -> None:
        """The next round is complete; called in order."""


@dataclass(frozen=True, slots=True)
class RoundParts:
    """All that makes up one job's rounds on this daemon, given once to those who work on it.

    Attributes:
        job_rounds: the round machine with schedule and samples, which decides all and does nothing.
        plane: moves the bytes.
        links: the way to each other member of the generation, by rank; live.
        slots: where the learner puts what it has computed.
        gossip: its neighbours within a period (R9); None: its job has none.
    """

    spec: JobSpec
    rank: int
    job_rounds: JobRounds
    plane: DataPlane
    history: RoundHistory
    links: Mapping[int, RoundLink]
    slots: RawSlots
    gossip: Gossip | None = None


class EffectPerformer:
    """Tells `JobRounds` what happens, now, and performs what it answers.

    Args:
        generation: in which rounds are completed now (G2).

    Attributes:
        stage: set by whoever leads from one generation to the next, as is `generation`.
        committed: the newest round that every member has announced complete (G5).
        deal: what the ledger of samples held after the newest round of the history; None without a prepared loader.
    """

    def __init__(self, parts: RoundParts, generation: int, host: RoundsHost) -> None:
        self._parts = parts
        self._job = job_number(parts.spec.job)
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s: float | None = None  # when it fires
        self._pending: deque[JobEffect] = deque()
        self._unsent: list[Message] = []  # until all have entered
        self._performing = False
        self._closed = False
        self.committed = 0
        self.generation = generation
        self.stage = Stage.RUNNING
        self.stats = RoundStats()
        self.deal = parts.job_rounds.deal()

    def handle(self, input_: JobInput) -> None:
        """Effects of effects (a contribution may complete a bucket at once) are performed after those before them."""
        self._pending.extend(self._parts.job_rounds.handle(input_, self._loop.time()))
        if self._performing or self._closed:
            return
        self._performing = True
        try:
            while self._pending:
                self._perform(self._pending.popleft())
        finally:
            self._performing = False
        self._arm()

    def send_waiting(self) -> None:
        """All have entered the generation: what was to be told since is sent."""
        self.stage = Stage.RUNNING
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self._broadcast(message)

    def fence(self) -> None:
        """G2: nothing of this generation is sent any more."""
        self.stage = Stage.FENCED
        self._unsent = []

    def broken(self, rank: int | None, text: str) -> None:
        """A member has broken the rules, which concerns nobody else; or this device has, or cannot go on."""
        if rank is None:
            self._host.fail(f"the exchange broke: {text}")
        elif rank == self._parts.rank:
            self._host.fail(f"it broke the protocol: {text}")
        else:
            self._host.refuse(rank, text)

    def entry(self) -> Entry:
        """Where who would go on from the newest round of the history begins."""
        history = self._parts.history
        return Entry(history.complete, history.chain, history.samples, self.deal, changes=history.changes)

    def close(self) -> None:
        """Stops the timer, and performs nothing more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _perform(self, effect: JobEffect) -> None:
        parts = self._parts
        match effect:
            case TellLearner(notice):
                self.stats.take(effect, self._loop.time())
                self._host.notify(notice)
            case Broadcast(message):
                self.stats.take(effect, self._loop.time())
                self._broadcast(message)
            case Contribute(round_, bucket):
                bind = parts.job_rounds.machine.own_bind(round_)
                parts.plane.contribute(round_, bucket, Part.DATA, bind.weight, parts.slots.raw(bind.step))
            case ContributePoison(round_, bucket):
                weight = parts.job_rounds.machine.own_bind(round_).weight
                parts.plane.contribute(round_, bucket, Part.POISON, weight, None)
            case ContributeNothing(round_):
                parts.plane.contribute_nothing(round_)
            case RoundComplete():
                self.stats.take(effect, self._loop.time())
                self._round_complete(effect)
            case RoundCounted(round_, deal):
                self.deal = deal
                self._host.round_complete(round_)
            case SamplesDealt(deal):
                self.deal = deal
            case DecodeRound(round_):
                parts.plane.open_result(round_)
            case Committed(round_):
                self.committed = round_
                parts.history.forget(round_)
            case RoundForgotten(round_):
                parts.plane.forget(round_)
            case LearnerCutOff(_, reason):
                log.warning("job %s: the learner was cut off: %s", parts.spec.job, reason)
            case StepDropped(step, reason):
                log.warning("job %s: step %d is not contributed: %s", parts.spec.job, step, reason)
            case ProtocolError(rank, text):
                self.broken(rank, text)
            case LearnerBrokeRules(text):
                self._host.fail(text)

    def _broadcast(self, message: Message) -> None:
        if self.stage is Stage.RUNNING:
            complete = self._parts.job_rounds.machine.complete
            for link in self._parts.links.values():
                link.notify(message, job=self._job, generation=self.generation, complete=complete)
        elif self.stage is Stage.ENTERED:
            self._unsent.append(message)

    def _round_complete(self, done: RoundComplete) -> None:
        parts = self._parts
        parts.plane.settle(done.round, void=done.void, contributed=parts.rank in done.binds)
        if done.round > parts.history.complete:  # those that others have served stand in it already
            parts.history.add(self.generation, done)
        if done.void:
            log.warning("job %s: round %d is void: %s", parts.spec.job, done.round, done.reason)

    def _arm(self) -> None:
        deadline_s = self._parts.job_rounds.machine.deadline()
        if deadline_s == self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due_s = deadline_s
        if deadline_s is not None:
            self._timer = self._loop.call_at(deadline_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = self._due_s = None
        self.handle(TimeReached())
