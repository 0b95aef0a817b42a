"""The learner in its job's rounds: what it says, of one process after the other, and what is said of it."""

import asyncio

from meshtraind.rounds.effects import EffectPerformer, RoundParts, RoundsHost
from meshwire.messages.learner import (
    LearnerApplied,
    LearnerBack,
    LearnerBucket,
    LearnerEncoder,
    LearnerIdle,
    LearnerSealed,
    LearnerStepped,
    LearnerTurn,
)
from meshwire.rounds.inputs import (
    BarrierBroken,
    BarrierEntered,
    BarrierFull,
    BaseLoaded,
    LearnerDied,
    LearnerGone,
    LearnerLoads,
    LearnerParts,
)
from meshwire.rounds.learner_state import hangs_after_s


class LearnerInputs:
    """Whoever keeps the learner's process and reads its socket says here what happens to it.

    Args:
        loadable_after: after an earlier round no base can be loaded here: rounds after it are built on results that
            this member does not hold.

    Attributes:
        samples: that this device's learners have used.
    """

    def __init__(self, parts: RoundParts, performer: EffectPerformer, host: RoundsHost, loadable_after: int) -> None:
        self._parts = parts
        self._performer = performer
        self._host = host
        self._loadable_after = loadable_after
        self._loop = asyncio.get_running_loop()
        self._in_barrier_s = self._loop.time()
        self.samples = 0

    def bucket(self, message: LearnerBucket) -> None:
        """A bucket lies in the raw slot."""
        self._performer.handle(message)

    def sealed(self, message: LearnerSealed) -> None:
        """The backward pass has ended."""
        self._performer.handle(message)

    def applied(self, round_: int) -> None:
        """The learner has applied a round: the result slot is free for the next one."""
        self._performer.handle(LearnerApplied(round=round_))

    def stepped(self, message: LearnerStepped) -> None:
        """A step has ended; the learner waits for the word to start the next one."""
        self.samples += message.samples
        encoder = self._parts.plane.encoder
        if encoder is not None and (task := encoder.task()) is not None:
            self._host.notify(task)
        self._performer.handle(message)

    def turn(self, message: LearnerTurn) -> str | None:
        """A turn of mixing within a period has begun (R9). Returns what is wrong with that."""
        if self._parts.gossip is None:
            return "it mixes weights, and its job does not"
        self._parts.gossip.begin(message)
        return None

    def idle(self, reason: str) -> None:
        """No step will follow for now (R5): rounds are still applied."""
        self._performer.handle(LearnerIdle(reason=reason, finished=False))

    def back(self) -> None:
        """No longer idle."""
        self._performer.handle(LearnerBack())

    def gone(self, reason: str) -> None:
        """No step will ever follow: the learner has finished, or its job has failed (V2)."""
        self._performer.handle(LearnerGone(reason))

    def encoder(self, message: LearnerEncoder) -> None:
        """It has learnt what it was asked to, or could not."""
        if self._parts.plane.encoder is not None:
            self._parts.plane.encoder.answered(message)

    def dead(self, reason: str, holds: int | None = None) -> None:
        """No process is there: what it had bound is open until the next generation, in which this rank is to rest (V2).
        What follows the base that memory `holds` is kept for the one to come (J3); without one nothing is."""
        if self._parts.plane.encoder is not None:
            self._parts.plane.encoder.learner_lost()
        if self._parts.gossip is not None:
            self._parts.gossip.learner_lost()
        self._performer.handle(LearnerDied(reason, holds))

    def part(self, reason: str) -> None:
        """Its rounds are fenced for good: it applies what is complete and stays at its next boundary, where it can
        write its base."""
        self._performer.handle(LearnerParts(reason))

    def could_hold(self, round_: int) -> bool:
        """Whether a base after this round is one of this history, and all that follows it is kept here."""
        machine = self._parts.job_rounds.machine
        return machine.applied <= round_ <= machine.complete

    @property
    def loads_after(self) -> int:
        """After which round, or a later one, a learner of now could load a state."""
        return max(self._parts.job_rounds.loads_after(), self._loadable_after)

    def loads(self) -> int:
        """J1: a process begins to load the base after the round that is returned, or after a later one. What follows
        is kept for it. That round may still be to come."""
        self._performer.handle(LearnerLoads())
        return max(self._parts.job_rounds.machine.applied, self._loadable_after)

    def loads_anew(self) -> int:
        """J1: it asks for a state once more, and the others wait for it: nothing of before is kept for it any more."""
        self._performer.handle(LearnerDied("it asks for another state, and the others have gone on", None))
        return self.loads()

    def loaded(self, round_: int) -> None:
        """J1: a new learner holds the base after `round_`, which is complete here. It waits to be taken in."""
        self._performer.handle(BaseLoaded(round_))

    def enter_barrier(self, number: int, *, waits: bool = True) -> int:
        """The learner waits for all others, if some are missing. Returns the last round it has contributed to."""
        self._performer.handle(BarrierEntered(number, waits))
        return self._parts.job_rounds.machine.decided

    def barrier_broken(self, error: str) -> None:
        """Some other will never come: the learner goes on, after the rounds that it is to apply."""
        self._performer.handle(BarrierBroken(error))

    def all_in_barrier(self, newest_round: int) -> None:
        """So do all others; none has contributed to a round after `newest_round`."""
        self._performer.handle(BarrierFull(newest_round))

    def hangs(self) -> str | None:
        """Why the learner is taken for hung, and is to be ended, or the others would wait for ever; None while it is
        not. To be asked every second or so."""
        now_s, job_rounds = self._loop.time(), self._parts.job_rounds
        if job_rounds.in_barrier:
            self._in_barrier_s = now_s
        since_s, after_s = job_rounds.machine.hangs_since_s, hangs_after_s(job_rounds.machine.local_steps)
        if since_s is None or now_s - max(since_s, self._in_barrier_s) < after_s:
            return None
        step, phase = job_rounds.machine.step, job_rounds.machine.phase.value
        return f"the script hangs: nothing was heard of its step {step} for {after_s:.0f} s ({phase})"

    def waiting(self) -> str | None:
        """What a blocked learner waits for; None while it computes."""
        return self._parts.job_rounds.waiting()
