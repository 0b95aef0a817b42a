"""When a learner is given which round to apply, one at a time, and when the word to start its next step (R1).

The daemon decides and the learner follows: it applies what it is given until it is told to start. There is one result
slot (M1), so a round is given when it is complete, visible (R8), decoded, and all before it are applied.

With s=0 the step after the one that is in a round may start as soon as that round is applied. The round says so itself,
a promise: so a learner waits once a step.
"""

from typing import Literal

from meshwire import limits
from meshwire.messages.learner import BarrierPassed, RoundDone, Start
from meshwire.rounds.effects import RoundComplete
from meshwire.rounds.learner_state import Phase
from meshwire.rounds.machine import RoundMachine


def round_done(done: RoundComplete, own_step: int, *, on_nan: Literal["stop", "skip"]) -> RoundDone:
    """What the learner is told of a round.

    Args:
        own_step: of this learner that is in it; 0: none.
    """
    return RoundDone(
        round=done.round,
        step=own_step,
        void=done.void,
        reason=done.reason[: limits.ERROR_CHARS_MAX],
        overflow=done.overflow,
        stop=done.not_finite and on_nan == "stop",
        weight=done.weight,
        contributors=done.contributors,
        used=done.used,
        integers=done.integers,
        hyperparameters=done.hyperparameters,
        squared_norm=done.squared_norm,
    )


class LearnerSchedule:
    """What one learner is told next: a round, the end of a barrier, or to start. Ask `next_notice` until it has none.

    Args:
        machine: is asked what the learner may do; it is told of what was decided by whoever asks for notices.

    Attributes:
        gone: the learner applies nothing any more, and takes no further step.
    """

    def __init__(self, machine: RoundMachine) -> None:
        self._machine = machine
        self._complete: dict[int, RoundDone] = {}  # not given yet
        self._decoded = 0  # the round that lies in the result slot
        self._given = 0
        self._in_hand: RoundDone | None = None  # the one given, until the next
        self._pending_step: int | None = None  # waits for the word to start
        self._begun_step = 0
        self._promised_step = 0  # begins when the round in hand is applied and its step has ended; 0: none
        self._barrier: int | None = None
        self._barrier_round: int | None = None  # the newest one older than it; None: not everybody has reached it
        self.gone = False
        self._away = False
        self._returning = False  # taken in, with a round in hand

    def complete(self, done: RoundDone) -> None:
        """A round is complete, its means may still be encoded."""
        if not self.gone:
            self._complete[done.round] = done

    @property
    def rounds_kept(self) -> int:
        """Complete rounds that the learner was not given."""
        return len(self._complete)

    def forget(self, round_: int) -> None:
        """No learner will be given this round: it was applied, or whoever comes loads a later base (J1)."""
        self._complete.pop(round_, None)

    def decoded(self, round_: int) -> None:
        """The result slot holds the means of `round_`."""
        self._decoded = round_

    def fenced(self, complete: int) -> None:
        """G6: what lies in the result slot of a round after `complete` is void; it will be decoded again."""
        self._decoded = min(self._decoded, complete)

    def wants_to_start(self, step: int) -> None:
        """The learner stands at a boundary in front of `step`."""
        self._pending_step = step

    def idle(self) -> None:
        """The learner does something else than its step. One that it has not sealed it will begin again. What was
        promised is so no more: rounds may go on without it meanwhile."""
        self._promised_step = 0
        if self._pending_step is None and self._machine.phase in (Phase.COMPUTING, Phase.BOUND, Phase.GIVEN_UP):
            self._pending_step = self._begun_step

    def end(self) -> None:
        """The learner is gone from now on."""
        self.gone = True
        self._promised_step = 0
        self._in_hand = self._pending_step = None
        self._complete.clear()

    def away(self) -> None:
        """Its process has ended, or has not begun: what is complete is kept until it is forgotten."""
        self._away = True
        if self._in_hand is not None and self._in_hand.round > self._machine.applied:
            self._complete[self._in_hand.round] = self._in_hand
        self._in_hand = None
        for round_, done in self._complete.items():  # steps of the next process are others
            self._complete[round_] = done.model_copy(update={"step": 0})
        self._returning = False
        self._pending_step = None
        self._barrier = self._barrier_round = None
        self._begun_step = self._promised_step = 0

    def returned(self, applied: int) -> None:
        """A new process holds the base after `applied`. It applies rounds, and starts when it is taken in."""
        self._away = False
        self._given = applied
        self._decoded = 0  # the slot is opened anew: the last process may have written there, and it fills by and by
        for round_ in [round_ for round_ in self._complete if round_ <= applied]:
            del self._complete[round_]

    def taken_in(self) -> None:
        """Its steps count again, as soon as it has applied what it holds: with `fixed`, its next step stands on more
        than that rule shows (R8)."""
        self._returning = True

    def enter_barrier(self, number: int) -> None:
        """The learner waits for all others."""
        self._barrier = number
        self._barrier_round = None

    def all_in_barrier(self, newest_round: int) -> None:
        """So have all others; none has contributed to a newer round before it."""
        self._barrier_round = newest_round

    def barrier_broken(self, error: str) -> BarrierPassed:
        """Somebody will never reach it: what the learner is told, which goes on."""
        assert self._barrier is not None
        passed = BarrierPassed(number=self._barrier, error=error)
        self._barrier = None
        return passed

    def comes_back(self) -> bool:
        """Once: the learner that was taken in has applied what it held, and its steps count from now on."""
        comes = self._returning and self._given <= self._machine.applied
        self._returning = self._returning and not comes
        return comes

    def holds(self, round_: int) -> bool:
        """Whether the learner was given this round, and has not said that it has applied it."""
        return self._given == round_ > self._machine.applied

    def at_end(self, step: int) -> bool:
        """Whether this step has begun and is sealed, and the learner has not said that it has ended."""
        return step == self._begun_step and self._pending_step is None and self._machine.phase is Phase.BOUNDARY

    def begins_promised(self, step: int) -> bool:
        """At the end of the step before: whether the learner begins this one by itself, as it was promised. That counts
        as told to start."""
        promised, self._promised_step = self._promised_step == step, 0
        if promised:
            self._begun_step = step
        return promised

    @property
    def begun_step(self) -> int:
        """The one that the learner was told to begin last; 0: none."""
        return self._begun_step

    @property
    def in_barrier(self) -> bool:
        """Whether the learner waits for all others."""
        return self._barrier is not None

    @property
    def waits(self) -> bool:
        """Whether the learner waits to be told to start."""
        return self._pending_step is not None

    def next_notice(self, *, promises: bool) -> RoundDone | BarrierPassed | Start | None:
        """What the learner is to be told now, which counts as told; None when there is nothing more.

        Args:
            promises: a round of a step that has ended but for its optimizer may bring the promise of the next one.
        """
        if self.gone or self._away or self._returning:
            return None
        upto = None
        if self._barrier_round is not None:
            if self._machine.applied >= self._barrier_round:
                assert self._barrier is not None
                passed = BarrierPassed(number=self._barrier, error=None)
                self._barrier = self._barrier_round = None
                return passed
            upto = self._barrier_round
        following = self._machine.applied + 1
        decoded = self._given < following == self._decoded
        if decoded and (upto is None or following <= upto) and following <= self._machine.visible:
            self._given = following
            self._in_hand = self._complete.pop(following)
            if promises and self._is_newest_own(self._in_hand):
                self._promised_step = self._begun_step + 1
                return self._in_hand.model_copy(update={"start": self._promised_step})
            return self._in_hand
        if self._pending_step is not None and self._barrier is None and self._machine.may_start()[0]:
            start = Start(step=self._pending_step, decided=self._machine.decided)
            self._begun_step, self._pending_step = self._pending_step, None
            return start
        return None

    def _is_newest_own(self, done: RoundDone) -> bool:
        """Whether the step whose round this is is sealed, and nothing has been decided after it."""
        machine = self._machine
        at_its_end = done.step != 0 and self.at_end(done.step)
        return at_its_end and self._barrier is None and machine.decided == done.round
