"""The rounds of one job as one daemon and its learner live them, decided without doing anything.

Around the round machine stand the learner's schedule, which says what the learner is told when, and the grants of
samples, which follow from complete rounds. What a daemon adds is the doing: links, memory, a timer.
"""

from typing import Literal

from meshwire import limits
from meshwire.messages.generation import DealState
from meshwire.messages.learner import (
    BarrierPassed,
    EndPeriod,
    LearnerApplied,
    LearnerBack,
    LearnerBucket,
    LearnerIdle,
    LearnerSealed,
    LearnerStepped,
    RoundDone,
    Start,
    StepLost,
)
from meshwire.messages.rounds import Bind
from meshwire.rounds.effects import (
    Broadcast,
    Committed,
    Contribute,
    ContributePoison,
    DecodeRound,
    Effect,
    JobEffect,
    LearnerBrokeRules,
    LearnerCutOff,
    PeriodCalled,
    ProtocolError,
    RoundComplete,
    RoundCounted,
    RoundForgotten,
    SamplesDealt,
    StepDropped,
    TellLearner,
)
from meshwire.rounds.inputs import (
    BarrierBroken,
    BarrierEntered,
    BarrierFull,
    BarrierSeen,
    BaseLoaded,
    BucketReady,
    CompleteAnnounced,
    FenceRaised,
    GenerationEntered,
    Input,
    JobInput,
    LearnerAbsent,
    LearnerDied,
    LearnerGone,
    LearnerLoads,
    LearnerParts,
    LearnerPresent,
    LearnerTakenIn,
    LearningChanged,
    MemberMessage,
    MessageReceived,
    ResultReady,
    RoundApplied,
    RoundDecoded,
    RoundServed,
    RoundTripMeasured,
    SettingsChanged,
    SpeedMeasured,
    StartStep,
    StepSealed,
    TimeReached,
)
from meshwire.rounds.learner_state import Phase
from meshwire.rounds.machine import RoundMachine
from meshwire.rounds.schedule import LearnerSchedule, round_done
from meshwire.samples.grants import SampleGrants
from meshwire.sync_modes.mode import SyncSettings
from meshwire.sync_modes.settings_changes import SettingsChanges, local_steps

FIRST_STEP = 1  # of every process
MORE_STEPS = "rank {} has more steps to go to its barrier"  # than a learner that waits there


class JobRounds:
    """The round machine with its learner's schedule and samples, in one history of rounds.

    Args:
        machine: the round machine, which may be recorded; nobody else tells it anything.
        grants: what the learners' prepared loader reads; None without one.
        sync: how far learners may run ahead, and the period that the job has begun with, as typed.
        on_nan: whether a learner stops at a round that is not finite.

    Attributes:
        keeps_unapplied: there is a learner, or one that loads, which is to apply what is complete.
    """

    def __init__(
        self, machine: RoundMachine, grants: SampleGrants | None, sync: SyncSettings, on_nan: Literal["stop", "skip"]
    ) -> None:
        self.machine = machine
        self._schedule = LearnerSchedule(machine)
        self._grants = grants
        self._sync = sync
        self._changes: SettingsChanges = ()
        self._on_nan = on_nan
        self._own_steps: dict[int, int] = {}  # by round that is not complete, the own step that is bound to it
        self._past = 0  # rounds up to it were decided by learners that have died
        self._waits_in_barrier = False  # others are missing in the one that the learner has entered last
        self._parting: str | None = None  # why the learner is brought to a boundary and no further
        self._committed = self._forgotten = machine.complete
        self.keeps_unapplied = True
        self._out: list[JobEffect] = []

    # What is known.

    @property
    def finished(self) -> bool:
        """The learner takes no further step."""
        return self._schedule.gone

    @property
    def in_barrier(self) -> bool:
        """Whether the learner waits for all others."""
        return self._schedule.in_barrier

    @property
    def batch(self) -> int:
        """Units of a batch that is granted to this learner now; 0: none is."""
        return self._grants.batch if self._grants is not None else 0

    @property
    def epochs(self) -> float:
        """How many epochs' samples are in complete rounds, or will be in none; 0 without a prepared loader."""
        return self._grants.epochs if self._grants is not None else 0.0

    @property
    def epochs_over(self) -> int:
        """How many epochs are over; 0 without a prepared loader."""
        return self._grants.epochs_over if self._grants is not None else 0

    @property
    def rounds_kept(self) -> int:
        """Complete rounds that the learner was not given."""
        return self._schedule.rounds_kept

    def deal(self) -> DealState | None:
        """What the ledger of samples holds; None without a prepared loader."""
        return self._grants.state() if self._grants is not None else None

    def loads_after(self) -> int:
        """After which round, or a later one, a learner of now could load a state."""
        return self.machine.applied if self.keeps_unapplied else self.machine.complete

    def waiting(self) -> str | None:
        """What a blocked learner waits for; None while it computes."""
        machine = self.machine
        blocked = machine.phase is Phase.BOUNDARY and machine.decided > machine.complete
        if not self._schedule.waits and not blocked:
            return None
        text = machine.may_start()[1] if self._schedule.waits else machine.waiting()
        return text[: limits.ERROR_CHARS_MAX]

    # What it is told.

    def handle(self, input_: JobInput, now_s: float) -> list[JobEffect]:
        """Takes one input, decides all that it has made possible, and returns the effects to perform, in order."""
        if isinstance(input_, CompleteAnnounced) and not self.machine.is_news(input_):
            return []  # what time alone has made possible comes with `TimeReached`
        self._take(input_, now_s)
        if self._grants is not None:
            self._tell_notices(self._grants)
        self._advance(now_s)
        self._forget()
        effects, self._out = self._out, []
        return effects

    def _take(self, input_: JobInput, now_s: float) -> None:
        match input_:
            case LearnerBucket():
                self._bucket(input_, now_s)
            case LearnerSealed(step=step, used=used, integers=integers):
                self._tell(StepSealed(step, used, integers), now_s)
                self._part_from_step()
            case (
                ResultReady()
                | CompleteAnnounced()
                | TimeReached()
                | RoundTripMeasured()
                | RoundServed()
                | GenerationEntered()
            ):
                self._tell(input_, now_s)
            case MemberMessage():
                self._member_message(input_, now_s)
            case SettingsChanged(changes):
                self._changes = changes
            case SpeedMeasured() | BarrierSeen() | LearningChanged():
                self._deal(input_)
            case FenceRaised():
                self._schedule.fenced(self.machine.complete)
                self._tell(input_, now_s)
            case BarrierEntered() | BarrierFull() | BarrierBroken():
                self._barrier(input_, now_s)
            case _:
                self._learner(input_, now_s)

    # The learner

    def _learner(
        self,
        input_: LearnerApplied
        | LearnerStepped
        | LearnerIdle
        | LearnerBack
        | LearnerTakenIn
        | LearnerGone
        | LearnerDied
        | LearnerLoads
        | LearnerParts
        | BaseLoaded
        | RoundDecoded,
        now_s: float,
    ) -> None:
        match input_:
            case LearnerApplied(round=round_):
                self._applied(round_, now_s)
            case RoundDecoded(round_):
                self._schedule.decoded(round_)
            case LearnerStepped(step=step):
                self._stepped(step, now_s)
            case LearnerIdle(reason=reason, finished=finished):
                if finished:
                    self._gone(reason, now_s)
                else:
                    self._idle(reason, now_s)
            case LearnerGone(reason):
                self._gone(reason, now_s)
            case LearnerBack():
                self._tell(LearnerPresent(), now_s)
            case LearnerTakenIn():
                self._schedule.taken_in()
                self._schedule.wants_to_start(FIRST_STEP)
                self._begin_grants()
            case LearnerDied():
                self._died(input_, now_s)
            case LearnerLoads():
                self.keeps_unapplied = True
                self._tell(LearnerAbsent("it loads the state of the others", loading=True), now_s)
            case BaseLoaded(round_):
                self._out.append(DecodeRound(round_ + 1))
                self._tell(input_, now_s)
                self._schedule.returned(round_)
            case LearnerParts(reason):
                self._parting = reason
                if self._schedule.waits:
                    self._idle(reason, now_s)
                else:
                    self._part_from_step()

    def _bucket(self, message: LearnerBucket, now_s: float) -> None:
        sizes: tuple[int, ...] = ()
        if self._grants is not None and self.machine.phase is Phase.COMPUTING:  # it binds the step
            sizes = self._grants.sizes()
        ready = BucketReady(
            message.step,
            message.bucket,
            weight=message.weight,
            samples=message.samples,
            hyperparameters=message.hyperparameters,
            claim=message.claim,
            sizes=sizes,
            poison=message.poison,
        )
        self._tell(ready, now_s)

    def _applied(self, round_: int, now_s: float) -> None:
        if not self._schedule.holds(round_):
            self._out.append(LearnerBrokeRules(f"the learner has applied round {round_}, which it was not given"))
            return
        first = len(self._out)
        self._tell(RoundApplied(round_), now_s)
        if self.machine.applied == round_:
            self._out.insert(first, DecodeRound(round_ + 1))

    def _stepped(self, step: int, now_s: float) -> None:
        if not self._schedule.at_end(step):
            self._out.append(LearnerBrokeRules(f"the learner has ended step {step}, which was not at its end"))
            return
        following = step + 1
        if self._schedule.begins_promised(following):
            self._tell(StartStep(following, self._local_steps(self.machine.applied + 1)), now_s)
            return
        self._schedule.wants_to_start(following)
        if self._parting is not None:
            self._idle(self._parting, now_s)

    def _idle(self, reason: str, now_s: float, *, last: bool = False) -> None:
        """No step will follow for now (R5): rounds are still applied. `last`: none ever, so none waits for it."""
        self._schedule.idle()
        self._tell(LearnerAbsent(reason, gone=last), now_s)

    def _gone(self, reason: str, now_s: float) -> None:
        if not self.finished:
            self._schedule.end()
            self._tell(LearnerAbsent(reason, gone=True), now_s)

    def _died(self, died: LearnerDied, now_s: float) -> None:
        self._schedule.away()
        if self._grants is not None:
            self._grants.learner_lost()
        self._past = self.machine.decided
        self.keeps_unapplied = died.holds is not None
        self._tell(LearnerAbsent(died.reason, gone=died.holds is None, holds=died.holds, rests=True), now_s)

    def _part_from_step(self) -> None:
        """With s=0 a learner stays in its step until the round is applied, and this one will never be complete. With
        rounds that overlap it may wait for such a one within its next period: it is to go on to its boundary."""
        machine = self.machine
        if self._parting is None or self._schedule.waits:
            return
        if machine.settings.overlaps:
            for round_ in range(machine.complete + 1, machine.decided + 1):
                if step := self._own_steps.get(round_):
                    self._lost(step, self._parting, retry=False)
            return
        if machine.settings.staleness:
            return
        if machine.phase is Phase.BOUNDARY and machine.decided > machine.complete:
            self._lost(self._schedule.begun_step, self._parting, retry=True)

    def _resume(self, now_s: float) -> None:
        if self.machine.phase is Phase.ABSENT and not self.finished:
            self._tell(LearnerPresent(), now_s)

    def _barrier(self, input_: BarrierEntered | BarrierFull | BarrierBroken, now_s: float) -> None:
        schedule = self._schedule
        match input_:
            case BarrierEntered(number, waits):
                if schedule.in_barrier:
                    text = f"the learner entered barrier {number} while it was in another"
                    self._out.append(LearnerBrokeRules(text))
                schedule.enter_barrier(number)
                self._waits_in_barrier = waits
                if self.machine.settings.staleness:
                    last = number == 0 and self._sync.visibility == "fixed"  # else what is kept for it is bounded (R8)
                    self._idle("it has finished" if number == 0 else f"it is in barrier {number}", now_s, last=last)
                elif waits and (behind := self.machine.awaited_by):  # they have not passed it: this one enters only now
                    self._idle(MORE_STEPS.format(behind[0]), now_s)
            case BarrierFull(newest_round):
                schedule.all_in_barrier(newest_round)
            case BarrierBroken(error):
                self._out.append(TellLearner(schedule.barrier_broken(error)))
                self._resume(now_s)

    # The other members

    def _member_message(self, sent: MemberMessage, now_s: float) -> None:
        """Steps that its learner takes (it has begun anew, perhaps) while this one is in a barrier are its own (R5):
        else each would wait for the other."""
        message = sent.message
        waits = self.in_barrier and self._waits_in_barrier
        if sent.behind and isinstance(message, Bind) and message.round > self.machine.decided and waits:
            self._idle(MORE_STEPS.format(sent.rank), now_s)
        self._tell(MessageReceived(sent.rank, message), now_s)

    def _deal(self, input_: SpeedMeasured | BarrierSeen | LearningChanged) -> None:
        if self._grants is None:
            return
        match input_:
            case SpeedMeasured(rank, samples_per_s, finished):
                self._grants.measured(rank, samples_per_s)
                if finished:
                    self._grants.finished(rank)
            case BarrierSeen(rank, inside):
                self._grants.in_barrier(rank, inside)
            case LearningChanged(ranks):
                self._grants.enter(ranks)
                self._out.append(SamplesDealt(self._grants.state()))

    def _begin_grants(self) -> None:
        if self._grants is not None:
            self._grants.begin()

    # The round machine

    def _tell(self, input_: Input, now_s: float) -> None:
        for effect in self.machine.handle(input_, now_s):
            if isinstance(effect, Contribute | ContributePoison):
                self._out.append(effect)  # nothing follows from the most frequent ones
            else:
                self._follow(effect)

    def _follow(self, effect: Effect) -> None:
        """Hands an effect of the machine on, with what follows from it for the learner and its samples."""
        match effect:
            case Broadcast(message=Bind(round=round_, step=step)):
                self._own_steps[round_] = step
            case StepDropped(step, reason):
                if self.machine.phase is Phase.ABSENT:
                    return  # it went idle by itself, with nothing in hand
                self._lost(step, reason, retry=True)
            case LearnerCutOff(round_, reason) if round_ is not None:
                self._lost(self._own_steps[round_], reason, retry=False)
            case PeriodCalled(step):
                self._out.append(TellLearner(EndPeriod(step=step)))
            case Committed(round_):
                self._committed = round_
            case _:
                pass
        self._out.append(effect)
        if isinstance(effect, RoundComplete):
            self._round_complete(effect)

    def _round_complete(self, done: RoundComplete) -> None:
        own_step = self._own_steps.pop(done.round, 0)
        told_step = own_step if done.round > self._past else 0
        self._schedule.complete(round_done(done, told_step, on_nan=self._on_nan))
        if self._grants is not None:
            least = self._batches_least(done.round)
            for rank, wrong in self._grants.complete(done.binds, least).items():
                self._out.append(ProtocolError(rank, f"round {done.round}: it {wrong}"))
            self._tell_notices(self._grants)
        self._out.append(RoundCounted(done.round, self.deal()))

    def _lost(self, step: int, reason: str, *, retry: bool) -> None:
        self._out.append(TellLearner(StepLost(step=step, reason=reason[: limits.ERROR_CHARS_MAX], retry=retry)))

    # What follows

    def _tell_notices(self, grants: SampleGrants) -> None:
        self._out += map(TellLearner, grants.notices)
        grants.notices.clear()

    def _advance(self, now_s: float) -> None:
        """Tells the learner all that it can be told. A step that starts, or a barrier that ends, has effects too."""
        if self._schedule.comes_back():
            self._resume(now_s)
        promises = self.machine.settings.staleness == 0 and self._parting is None
        while (notice := self._schedule.next_notice(promises=promises)) is not None:
            if isinstance(notice, BarrierPassed):
                self._out.append(TellLearner(notice))
                self._resume(now_s)
                continue
            base = notice.round if isinstance(notice, RoundDone) else self.machine.applied
            notice = notice.model_copy(update={"local_steps": self._local_steps(base + 1)})
            self._out.append(TellLearner(notice))
            if isinstance(notice, Start):
                self._tell(StartStep(notice.step, notice.local_steps), now_s)

    def _local_steps(self, round_: int) -> int:
        """C3: of a period that begins on the base before this round."""
        return local_steps(self._sync, self._changes, round_)

    def _batches_least(self, complete: int) -> int:
        """How many batches each contributor of the newest complete round is to hold at least, whatever it has claimed:
        where periods become longer, it could not know. Where others end them (R9) claims follow by and by."""
        first = complete + self._sync.staleness + 1
        steps = self._local_steps(first)
        if self._sync.ends_early or steps <= self._local_steps(first - 1):
            return 0
        return min(2 * (self._sync.staleness + 1) * steps + 1, limits.CLAIM_BATCHES_MAX)

    def _forget(self) -> None:
        """G5: what every member holds, and this learner has applied, is needed no more."""
        upto = self._committed
        if upto <= self._forgotten:
            return
        if self.keeps_unapplied and not self._schedule.gone:
            upto = min(upto, self.machine.applied)
        for round_ in range(self._forgotten + 1, upto + 1):
            self._schedule.forget(round_)
            self._out.append(RoundForgotten(round_))
        self._forgotten = max(self._forgotten, upto)
