"""The learner in its job's rounds: what it does, step by step, and whether there is one."""

import asyncio
from collections.abc import Callable

from meshtraind.executor.executor import Executor
from meshtraind.rounds.effects import Performer
from meshtraind.rounds.learner_turn import Turn
from meshtraind.rounds.sample_grants import Dealing
from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.job import JobSpec
from meshwire.messages.learner import LearnerBucket, LearnerEncoder, LearnerSealed, LearnerStepped, StepLost
from meshwire.rounds.effects import Effect
from meshwire.rounds.inputs import BaseLoaded, BucketReady, LearnerAbsent, LearnerPresent, RoundApplied, StepSealed
from meshwire.rounds.learner import Phase
from meshwire.rounds.machine import RoundMachine
from meshwire.rounds.step_times import hangs_after_s


class LearnerMoves:
    """One job's, of one process after the other.

    Args:
        notify: sends the learner a notice.
        fail: ends the job with a reason.
        loadable_after: after an earlier round no base can be loaded here: rounds after it are built on results that
            this member does not hold.

    Attributes:
        samples: that this device's learners have used.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        machine: RoundMachine,
        executor: Executor,
        turn: Turn,
        dealing: Dealing | None,
        performer: Performer,
        notify: Callable[[Wire], None],
        fail: Callable[[str], None],
        loadable_after: int,
    ) -> None:
        self._spec = spec
        self._machine = machine
        self._executor = executor
        self._turn = turn
        self._dealing = dealing
        self._performer = performer
        self._notify = notify
        self._fail = fail
        self._loadable_after = loadable_after
        self._loop = asyncio.get_running_loop()
        self._in_barrier_s = self._loop.time()
        self._parts: str | None = None  # why it is brought to a boundary and no further
        self.samples = 0

    def begin(self) -> None:
        """All members are ready: the learner is told to begin its first step."""
        self._executor.open_result(self._machine.complete + 1)
        self._turn.wants_to_start(1)
        self._perform([])
        if self._dealing is not None:
            self._dealing.begin()

    def bucket(self, message: LearnerBucket) -> None:
        """A bucket lies in the raw slot."""
        binds = self._machine.phase is Phase.COMPUTING
        self._performer.handle(
            BucketReady(
                message.step,
                message.bucket,
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
        self._performer.handle(StepSealed(message.step, message.used, message.integers))
        self._part_from_step()

    def applied(self, round_: int) -> None:
        """The learner has applied a round: the result slot is free for the next one."""
        if not self._turn.holds(round_):
            self._fail(f"the learner has applied round {round_}, which it was not given")
            return
        effects = self._machine.handle(RoundApplied(round_), self._now())
        if self._machine.applied == round_:
            self._executor.open_result(round_ + 1)
        self._perform(effects)

    def stepped(self, message: LearnerStepped) -> None:
        """A step has ended; the learner waits for the word to start the next one."""
        if not self._turn.at_end(message.step):
            self._fail(f"the learner has ended step {message.step}, which was not at its end")
            return
        self.samples += message.samples
        if self._executor.encoder is not None and (task := self._executor.encoder.task()) is not None:
            self._notify(task)
        self._turn.wants_to_start(message.step + 1)
        if self._parts is not None:
            self.idle(self._parts)
        self._perform([])

    def idle(self, reason: str, *, last: bool = False) -> None:
        """No step will follow for now (R5): rounds are still applied. `last`: none ever, so none waits for it."""
        self._turn.idle()
        self._performer.handle(LearnerAbsent(reason, gone=last))

    def back(self) -> None:
        """No longer idle."""
        self._performer.handle(LearnerPresent())

    def gone(self, reason: str) -> None:
        """No step will ever follow: the learner has finished, or its job has failed (V2)."""
        if not self._performer.finished:
            self._performer.finished = True
            self._turn.gone()
            self._performer.handle(LearnerAbsent(reason, gone=True))

    def encoder(self, message: LearnerEncoder) -> None:
        """It has learnt what it was asked to, or could not."""
        if self._executor.encoder is not None:
            self._executor.encoder.answered(message)

    def dead(self, reason: str, holds: int | None = None) -> None:
        """No process is there: what it had bound is open until the next generation, in which this rank is to rest (V2).
        What follows the base that memory `holds` is kept for the one to come (J3); without one nothing is."""
        if self._executor.encoder is not None:
            self._executor.encoder.learner_lost()
        self._turn.away()
        if self._dealing is not None:
            self._dealing.learner_lost()
        self._performer.learner_died()
        self._performer.keeps_unapplied = holds is not None
        self._performer.handle(LearnerAbsent(reason, gone=holds is None, holds=holds, rests=True))

    def part(self, reason: str) -> None:
        """Its rounds are fenced for good: it applies what is complete and stays at its next boundary, where it can
        write its base. A step of s=0 that waits for its round is told that there will be none."""
        self._parts = reason
        if self._turn.waits:
            self.idle(reason)
        else:
            self._part_from_step()

    def _part_from_step(self) -> None:
        machine = self._machine
        waits_for_round = machine.phase is Phase.BOUNDARY and machine.decided > machine.complete
        if self._parts is not None and waits_for_round and not machine.settings.staleness and not self._turn.waits:
            lost = StepLost(step=self._turn.begun_step, reason=self._parts, retry=True)
            self._notify(lost)

    def could_hold(self, round_: int) -> bool:
        """Whether a base after this round is one of this history, and all that follows it is kept here."""
        return self._machine.applied <= round_ <= self._machine.complete

    @property
    def loads_after(self) -> int:
        """After which round, or a later one, a learner of now could load a state."""
        machine = self._machine
        kept = machine.applied if self._performer.keeps_unapplied else machine.complete
        return max(kept, self._loadable_after)

    def loads(self) -> int:
        """J1: a process begins to load the base of after the round that is returned, or of after a later one. What
        follows is kept for it. That round may still be to come."""
        self._performer.keeps_unapplied = True
        self._performer.handle(LearnerAbsent("it loads the state of the others", loading=True))
        return max(self._machine.applied, self._loadable_after)

    def loaded(self, round_: int) -> None:
        """J1: a new learner holds the base after `round_`, which is complete here. It waits to be taken in."""
        effects = self._machine.handle(BaseLoaded(round_), self._now())
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

    def hangs(self) -> str | None:
        """Why the learner is taken for hung, and is to be ended, or the others would wait for ever; None while it is
        not. To be asked every second or so."""
        now_s = self._now()
        if self._turn.in_barrier:
            self._in_barrier_s = now_s
        since_s, after_s = self._machine.hangs_since_s, hangs_after_s(self._spec.sync.period)
        if since_s is None or now_s - max(since_s, self._in_barrier_s) < after_s:
            return None
        step, phase = self._machine.step, self._machine.phase.value
        return f"the script hangs: nothing was heard of its step {step} for {after_s:.0f} s ({phase})"

    def waiting(self) -> str | None:
        """What a blocked learner waits for; None while it computes."""
        blocked = self._machine.phase is Phase.BOUNDARY and self._machine.decided > self._machine.complete
        if not self._turn.waits and not blocked:
            return None
        text = self._machine.may_start()[1] if self._turn.waits else self._machine.waiting()
        return text[: limits.ERROR_CHARS_MAX]

    # Steps of the above

    def _now(self) -> float:
        return self._loop.time()

    def _perform(self, effects: list[Effect]) -> None:
        self._performer.perform(effects)
