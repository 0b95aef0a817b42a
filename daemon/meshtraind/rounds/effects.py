"""Performs what the round machine asks for, on links, memory and learner, and owns its one timer."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.executor.executor import Executor
from meshtraind.learner.shared_memory import SharedMemory
from meshtraind.rounds.history import RoundHistory
from meshtraind.rounds.learner_turn import Turn, round_done
from meshtraind.rounds.sample_grants import Dealing
from meshtraind.rounds.stats import RoundStats
from meshtraind.transport.connection import Connection
from meshwire import limits
from meshwire.collectives.exchange import Part
from meshwire.message_base import Wire
from meshwire.messages.job import JobSpec
from meshwire.messages.learner import StepLost
from meshwire.messages.rounds import Bind
from meshwire.rounds.effects import (
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
from meshwire.rounds.inputs import Input, TimeReached
from meshwire.rounds.learner import Phase
from meshwire.rounds.machine import RoundMachine

log = logging.getLogger(__name__)


class Stage(Enum):
    """Where this daemon is in its generation (G2)."""

    RUNNING = "running"
    FENCED = "fenced"  # it has promised a newer one: nothing is sent, for all of it will be told again
    ENTERED = "entered"  # others send; what is sent from here waits until all have entered


class Performer:
    """One job's.

    Args:
        spec: the job's.
        links: the connection to each other member of the generation, by rank.
        job: number for the frames.
        generation: the same (G2).
        notify: sends the learner a notice.
        fail: ends this device's part, with a reason.
        refuse: called with the rank of a member that has broken the rules, and how.
        on_round: called with each complete round, in order.

    Attributes:
        stage: set by whoever leads from one generation to the next.
        generation: in which rounds are completed now.
        finished: the learner takes no further step.
        committed: the newest round that every member has announced complete (G5).
        keeps_unapplied: there is a learner, or one that loads, which is to apply what is complete.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        links: Mapping[int, Connection],
        job: int,
        generation: int,
        machine: RoundMachine,
        executor: Executor,
        turn: Turn,
        dealing: Dealing | None,
        history: RoundHistory,
        memory: SharedMemory,
        notify: Callable[[Wire], None],
        fail: Callable[[str], None],
        refuse: Callable[[int, str], None],
        on_round: Callable[[int], None],
    ) -> None:
        self._spec = spec
        self._links = links
        self._job = job
        self._machine = machine
        self._executor = executor
        self._turn = turn
        self._dealing = dealing
        self._history = history
        self._memory = memory
        self._notify = notify
        self._fail = fail
        self._refuse = refuse
        self._on_round = on_round
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._own: dict[int, Bind] = {}  # own binds of rounds that are not complete
        self._pending: deque[Effect] = deque()
        self._unsent: list[Message] = []  # until all have entered
        self._performing = False
        self._closed = False
        self.committed = 0
        self._past = 0  # rounds up to it were decided by learners that have died
        self._forgotten = history.complete
        self.generation = generation
        self.stage = Stage.RUNNING
        self.finished = False
        self.keeps_unapplied = True
        self.stats = RoundStats()

    def handle(self, input_: Input) -> None:
        """Tells the machine, now, and performs what it answers."""
        self.perform(self._machine.handle(input_, self._loop.time()))

    def perform(self, effects: list[Effect]) -> None:
        """Effects of effects (a contribution may complete a bucket at once) are performed after those before them."""
        self._pending.extend(effects)
        if self._performing or self._closed:
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

    def send_waiting(self) -> None:
        """All have entered the generation: what was to be told since is sent."""
        self.stage = Stage.RUNNING
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self._send(message)

    def fence(self) -> None:
        """G2: nothing of this generation is sent any more."""
        self.stage = Stage.FENCED
        self._unsent = []

    def learner_died(self) -> None:
        """The steps of rounds in flight are not those of the learner to come."""
        self._past = self._machine.decided

    def broken(self, rank: int | None, text: str) -> None:
        """A member has broken the rules, which concerns nobody else; or this device has, or cannot go on."""
        if rank is None:
            self._fail(f"the exchange broke: {text}")
        elif rank == self._machine.settings.rank:
            self._fail(f"it broke the protocol: {text}")
        else:
            self._refuse(rank, text)

    def close(self) -> None:
        """Stops the timer, and performs nothing more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _perform_one(self, effect: Effect) -> None:
        self.stats.take(effect, self._loop.time())
        match effect:
            case Broadcast(message):
                self._broadcast(message)
            case Contribute(round_, bucket):
                bind = self._own[round_]
                raw: Values = np.frombuffer(self._memory.raw(bind.step), np.float32)
                self._executor.contribute(round_, bucket, Part.DATA, bind.weight, raw)
            case ContributePoison(round_, bucket):
                self._executor.contribute(round_, bucket, Part.POISON, self._own[round_].weight, None)
            case ContributeNothing(round_):
                self._executor.contribute_nothing(round_)
            case RoundComplete():
                self._round_complete(effect)
            case Committed(round_):
                self.committed = round_
            case LearnerCutOff(round_, reason):
                log.warning("job %s: the learner was cut off: %s", self._spec.job, reason)
                if round_ is not None:
                    self._lost(self._own[round_].step, reason, retry=False)
            case StepDropped(step, reason):
                if self._machine.phase is not Phase.ABSENT:  # else it went idle by itself, with nothing in hand
                    log.warning("job %s: step %d is not contributed: %s", self._spec.job, step, reason)
                    self._lost(step, reason, retry=True)
            case ProtocolError(rank, text):
                self.broken(rank, text)
            case LearnerMayStart():
                pass  # whether it waits for that, its turn knows

    def _broadcast(self, message: Message) -> None:
        if isinstance(message, Bind):
            self._own[message.round] = message
        if self.stage is Stage.RUNNING:
            self._send(message)
        elif self.stage is Stage.ENTERED:
            self._unsent.append(message)

    def _send(self, message: Message) -> None:
        for link in self._links.values():
            link.notify(message, job=self._job, generation=self.generation, complete=self._machine.complete)

    def _lost(self, step: int, reason: str, *, retry: bool) -> None:
        self.stats.steps_lost += 1
        self._notify(StepLost(step=step, reason=reason[: limits.ERROR_CHARS_MAX], retry=retry))

    def _round_complete(self, done: RoundComplete) -> None:
        own = self._own.pop(done.round, None)
        self._executor.settle(done.round, void=done.void, contributed=self._machine.settings.rank in done.binds)
        if done.round > self._history.complete:  # those that others have served stand in it already
            self._history.add(self.generation, done)
        if done.void:
            log.warning("job %s: round %d is void: %s", self._spec.job, done.round, done.reason)
        own_step = own.step if own is not None and done.round > self._past else 0
        self._turn.complete(round_done(done, own_step, on_nan=self._spec.on_nan))
        for rank, wrong in self._dealing.complete(done).items() if self._dealing is not None else ():
            self.broken(rank, f"round {done.round}: it {wrong}")
        self._on_round(done.round)

    def _forget(self) -> None:
        """G5: what every member holds, and this learner has applied, is needed no more."""
        self._history.forget(self.committed)
        kept_for_learner = self.keeps_unapplied and not self.finished
        upto = min(self.committed, self._machine.applied) if kept_for_learner else self.committed
        for round_ in range(self._forgotten + 1, upto + 1):
            self._executor.forget(round_)
            self._turn.forget(round_)
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
        self.handle(TimeReached())
