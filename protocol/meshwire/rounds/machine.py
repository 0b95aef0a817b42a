"""The round machine: what one daemon decides for one learner of one job (R0 to R8, V1, V2, G3, G5, G6 of the rules).

Pure: `handle` takes an input (`inputs`) and returns a list of effects (`effects`), `now_s` of any monotonic clock is an
argument, and there is one timer. An input that breaks the rules becomes a `ProtocolError` effect, never an exception,
and changes nothing. Links deliver a member's messages in the order of its effects.

What the rules leave open, and how it is settled here, stands in RULES.md after R9 and G8: lockstep, how far an absent
member goes, fixed visibility, deadlines, from one generation to the next.
"""

from dataclasses import replace

from meshwire import limits
from meshwire.messages.rounds import Bind, Call, Null, Poison, Seal
from meshwire.rounds.calls import Calls
from meshwire.rounds.effects import (
    Broadcast,
    Committed,
    ContributeNothing,
    Effect,
    LearnerCutOff,
    Message,
    PeriodCalled,
    ProtocolError,
    RoundComplete,
    StepDropped,
)
from meshwire.rounds.inputs import (
    BaseLoaded,
    BucketReady,
    CompleteAnnounced,
    FenceRaised,
    GenerationEntered,
    Input,
    LearnerAbsent,
    LearnerPresent,
    MessageReceived,
    ResultReady,
    RoundApplied,
    RoundServed,
    RoundTripMeasured,
    StartStep,
    StepSealed,
    TimeReached,
)
from meshwire.rounds.learner_state import Decision, Learner, Phase, RoundSettings, StepTimes
from meshwire.rounds.open_rounds import BucketResult, OpenRounds
from meshwire.rounds.own_buckets import OwnBuckets


class RoundMachine:
    """One learner's part in the rounds of one job: told of what happens by `handle`, and asked what is known.

    Args:
        settings: those of the generation in which it begins; the ranks change with each that it enters.
        complete: the cut of that generation. Its learner holds the base after so many rounds, or is `loading`.
    """

    def __init__(self, settings: RoundSettings, *, complete: int = 0) -> None:
        self.settings = settings
        self._learner = Learner(settings, applied=complete)
        self._table = OpenRounds(settings, complete)
        self._calls = Calls()
        self._own_buckets = OwnBuckets(settings.buckets_of)
        self._fenced = False
        self._out: list[Effect] = []

    # What is known.

    @property
    def phase(self) -> Phase:
        """Where the learner is."""
        return self._learner.phase

    @property
    def step(self) -> int:
        """The learner's newest."""
        return self._learner.step

    @property
    def local_steps(self) -> int:
        """Of that step: more than one where it is a period (R9)."""
        return self._learner.times.local_steps

    @property
    def applied(self) -> int:
        """Rounds that the learner has applied (R0: a)."""
        return self._learner.applied

    @property
    def decided(self) -> int:
        """The last round contributed to or nulled (R0: d)."""
        return self._table.own_decided

    @property
    def complete(self) -> int:
        """The last round held whole, as are all before it: the counter in every frame and report (G5)."""
        return self._table.complete

    @property
    def visible(self) -> int:
        """The last round that the learner may apply now: the complete ones, or fewer with `fixed` (R8)."""
        return self._learner.visible(self._table.own_decided, self._table.complete)

    @property
    def committed(self) -> int:
        """The newest round that every member has announced complete (G5)."""
        return self._table.committed

    def bound(self, round_: int, bitmap: int) -> tuple[int, float] | None:
        """R2: contributors and summed weight of the ranks in the bitmap; None while one of them has not decided."""
        return self._table.bound(round_, bitmap)

    def own_bind(self, round_: int) -> Bind:
        """That of this member, of a round that it has bound and that is not committed."""
        own = self._table.own(round_)
        assert own is not None, f"round {round_} was nulled here"
        return own[0]

    def is_news(self, announced: CompleteAnnounced) -> bool:
        """G5: whether a member's counter says more than is known. Every frame carries it, and most repeat it."""
        return self._table.is_news(announced.rank, announced.complete)

    @property
    def decided_by_all(self) -> int:
        """The last round that nobody has still to bind, seal or null."""
        return min(self._table.settled(rank) for rank in self.settings.ranks)

    @property
    def awaited_by(self) -> list[int]:
        """Ranks that have bound the round after `decided`: it does not end without this member."""
        return self._table.awaits_own()

    @property
    def rounds_kept(self) -> int:
        """Rounds in memory, at most 3(s+1)."""
        return len(self._table)

    def may_start(self) -> Decision:
        """R1: may the learner begin a step, and if not, which round waits for whom."""
        return self._learner.may_start(self._table.own_decided, self._table.complete, self.waiting)

    def may_null(self) -> Decision:
        """R4, R5: may this daemon null the next round, provided that it is called."""
        decided = self._table.own_decided
        if self._learner.phase is Phase.ABSENT and self._table.settled(self.settings.rank) < decided:
            return False, f"its learner died in round {decided}, which runs again in the next generation (V2)"
        return self._learner.may_null(decided, self._table.complete)

    def waiting(self) -> str:
        """What the oldest incomplete round waits for, and of whom."""
        return self._table.waiting()

    @property
    def hangs_since_s(self) -> float | None:
        """Since when the learner makes no move, where nothing but its end would let the others go on."""
        return self._learner.hangs_since_s()

    def deadline(self) -> float | None:
        """When to say `TimeReached` next, on the clock of `now_s`; None if nothing is due at any time."""
        at_s = [] if self._fenced else list(self._calls.at_s.values())[:1]
        if (cut_off_s := self._learner.cut_off_at_s()) is not None:
            at_s.append(cut_off_s)
        return min(at_s, default=None)

    # What it is told.

    def handle(self, input_: Input, now_s: float) -> list[Effect]:
        """Takes one input, does all that has become possible with it, and returns the effects to perform, in order.

        Args:
            now_s: of any monotonic clock, the same for all inputs.
        """
        wrong = self._take(input_, now_s)
        if wrong is not None:
            self._out.append(ProtocolError(self.settings.rank, wrong))
        return self._settle(now_s)

    def _take(self, input_: Input, now_s: float) -> str | None:
        """Changes what the input changes. Returns what is wrong with it, if this daemon's own side broke the rules."""
        match input_:
            case BucketReady():
                return self._bucket_ready(input_, now_s)
            case StepSealed():
                return self._step_sealed(input_, now_s)
            case ResultReady() | MessageReceived() | CompleteAnnounced():
                return None if self._fenced else self._heard(input_)
            case RoundApplied():
                return self._round_applied(input_, now_s)
            case StartStep(step, local_steps):
                return self._start_step(step, local_steps, now_s)
            case TimeReached():
                self._time_reached(now_s)
            case LearnerAbsent():
                self._learner_absent(input_)
            case LearnerPresent():
                return self._learner_present(now_s)
            case BaseLoaded(round_):
                return self._base_loaded(round_)
            case FenceRaised():
                self._fenced = True
            case RoundServed(done):
                return self._round_served(done)
            case GenerationEntered():
                return self._generation_entered(input_, now_s)
            case RoundTripMeasured(rtt_s):
                self.settings = self._learner.settings = replace(self.settings, rtt_s=rtt_s)
        return None

    # The local learner.

    def _start_step(self, step: int, local_steps: int, now_s: float) -> str | None:
        learner = self._learner
        may, reason = self.may_start()
        if not may:
            return f"step {step} may not start: {reason} (R1)"
        learner.phase = Phase.COMPUTING
        learner.step, learner.base, learner.started_s = step, learner.applied, now_s
        learner.times.local_steps = local_steps
        learner.given_up_step = learner.called_step = None
        learner.moved(now_s)
        return None

    def _bucket_ready(self, ready: BucketReady, now_s: float) -> str | None:
        learner, step, bucket = self._learner, ready.step, ready.bucket
        if step == learner.given_up_step:
            return None
        if step != learner.step or learner.phase not in (Phase.COMPUTING, Phase.BOUND):
            return f"bucket {bucket} of step {step}, which is not running"
        bound = learner.phase is Phase.BOUND
        buckets = self.settings.buckets_of(self._table.own_decided if bound else self._table.own_decided + 1)
        if not 0 <= bucket < buckets or (bound and self._own_buckets.given(self._table.own_decided, bucket)):
            return f"bucket {bucket} of step {step}: expected once, of buckets 0 to {buckets - 1}"
        if not bound:
            if not 0 < ready.weight < float("inf"):
                return f"step {step} has the weight {ready.weight}, not a number of samples"
            age = self._table.own_decided - learner.base
            if age > self.settings.staleness:
                self._drop_step(f"its gradient would be of age {age}, {self.settings.staleness} allowed (R5)")
                learner.phase = Phase.GIVEN_UP
                return None
            self._bind(ready, now_s)
        self._out.append(self._own_buckets.add(self._table.own_decided, bucket, ready.poison))
        return None

    def _step_sealed(self, sealed: StepSealed, now_s: float) -> str | None:
        learner, step = self._learner, sealed.step
        if step == learner.given_up_step and learner.phase is not Phase.GIVEN_UP:
            return None  # it was absent in between
        if step != learner.step or learner.phase not in (Phase.BOUND, Phase.GIVEN_UP):
            return f"seal of step {step}, which has no bucket"
        if learner.phase is Phase.BOUND:
            if missing := self._own_buckets.missing(self._table.own_decided):
                return f"seal of step {step} without its buckets {missing}"
            poison = self._own_buckets.poison(self._table.own_decided)
            seal = Seal(round=self._table.own_decided, used=sealed.used, integers=sealed.integers, poison=poison)
            if wrong := self._table.seal(self.settings.rank, seal):
                return wrong
            self._out.append(Broadcast(seal))
        learner.times.add(now_s - learner.started_s)
        learner.phase = Phase.BOUNDARY
        learner.moved(now_s)
        return None

    def _round_applied(self, applied: RoundApplied, now_s: float) -> str | None:
        learner, round_ = self._learner, applied.round
        stands = learner.phase in (Phase.BOUNDARY, Phase.ABSENT) or (
            self.settings.overlaps and learner.phase is Phase.COMPUTING  # between two local steps (R9)
        )
        if not stands or not learner.applied < round_ <= self.visible:
            known = f"it had applied {learner.applied}, {self.visible} are to be applied, it is {learner.phase.value}"
            return f"round {round_} cannot be applied: {known} (R1)"
        learner.applied = round_
        learner.moved(now_s)
        return None

    def _learner_absent(self, absent: LearnerAbsent) -> None:
        learner = self._learner
        if learner.phase is Phase.BOUND and not absent.rests:
            self._give_up(f"its learner is absent: {absent.reason}")
        elif learner.phase is Phase.COMPUTING:
            self._drop_step(f"its learner is absent: {absent.reason} (R5)")
        learner.phase = Phase.ABSENT
        learner.absence = absent.reason
        learner.based = learner.begins = False
        if absent.loading and not learner.loading:
            learner.applied = self._table.complete
            learner.times = StepTimes()  # it compiles and allocates anew
        if absent.holds is not None:
            learner.applied = min(max(learner.applied, absent.holds), self._table.complete)
        learner.gone, learner.loading = absent.gone, absent.loading or absent.holds is not None

    def _base_loaded(self, round_: int) -> str | None:
        learner = self._learner
        if learner.phase is not Phase.ABSENT or learner.gone or not learner.applied <= round_ <= self._table.complete:
            known = f"rounds {learner.applied} to {self._table.complete} are kept, it is {learner.phase.value}"
            return f"a base after round {round_} cannot be loaded: {known} (J1)"
        learner.applied = round_
        learner.based = True
        return None

    def _learner_present(self, now_s: float) -> str | None:
        learner = self._learner
        if learner.phase is not Phase.ABSENT:
            return f"present again, but it was {learner.phase.value}"
        learner.phase = Phase.BOUNDARY
        learner.gone = learner.loading = learner.based = learner.begins = False
        learner.moved(now_s)
        return None

    # The other members and the exchange.

    def _heard(self, input_: ResultReady | MessageReceived | CompleteAnnounced) -> str | None:
        """What is not heard in a fence (G2). What a member says wrong is its own error, not this daemon's."""
        match input_:
            case ResultReady(round_, bucket):
                result = BucketResult(input_.contributors, input_.weight, input_.poisoned, input_.squared_norm)
                return self._table.result(round_, bucket, result)
            case MessageReceived(rank, message):
                wrong = self._message_received(rank, message)
            case CompleteAnnounced(rank, complete):
                wrong = self._table.announce(rank, complete)
        if wrong:
            self._out.append(ProtocolError(rank, wrong))
        return None

    def _message_received(self, rank: int, message: Message) -> str | None:
        called = 0
        match message:
            case Bind():
                wrong = self._table.bind(rank, message)
                called = message.round if self.settings.lockstep else 0
            case Seal():
                wrong = self._table.seal(rank, message)
            case Null():
                wrong = self._table.null(rank, message)
                called = message.round
            case Call():
                wrong = self._table.call(rank, message)
                called = message.round
        if not wrong:
            self._calls.heard(called)
        return wrong

    # From one generation to the next.

    def _round_served(self, done: RoundComplete) -> str | None:
        if not self._fenced:
            return f"was served round {done.round} in a generation that it has not left (G2)"
        if wrong := self._table.served(done):
            return wrong
        self._completed(done)
        return None

    def _generation_entered(self, entered: GenerationEntered, now_s: float) -> str | None:
        ranks, cut = entered.ranks, entered.cut
        if cut != self._table.complete:
            return f"entered at round {cut}, but it holds the rounds up to {self._table.complete} (G6)"
        if self.settings.rank not in ranks:
            return f"entered a generation of the ranks {ranks} (G2)"
        before, learner = self._table, self._learner
        learner.begins = learner.based and entered.computes and learner.applied == cut
        kept = self.settings.unapplied_max if entered.unapplied_max is None else entered.unapplied_max
        self.settings = self._learner.settings = replace(self.settings, ranks=ranks, unapplied_max=kept)
        self._table = before.entered(self.settings, entered.completes)
        self._calls = Calls()
        self._fenced = False
        for round_ in range(cut + 1, before.own_decided + 1):
            self._tell_again(round_, before.own(round_) if entered.computes else None, now_s)
        return None

    # Time.

    def _time_reached(self, now_s: float) -> None:
        learner = self._learner
        cut_off_s = learner.cut_off_at_s()
        if cut_off_s is not None and now_s >= cut_off_s:
            deadline = f"its step deadline of {learner.times.deadline_s:.1f} s"
            if learner.phase is Phase.BOUND:
                reason = f"step {learner.step} passed {deadline} (V2)"
                self._out.append(LearnerCutOff(self._table.own_decided, reason))
                self._give_up(reason)
                learner.phase = Phase.GIVEN_UP
            else:
                reason = f"the learner passed {deadline} while it was {learner.phase.value} (R5)"
                self._out.append(LearnerCutOff(None, reason))
                learner.overdue = True

    # Steps of the above.

    def _bind(self, first: BucketReady, now_s: float) -> None:
        learner = self._learner
        bind = Bind(
            round=self._table.own_decided + 1,
            step=first.step,
            base=learner.base,
            weight=first.weight,
            samples=first.samples,
            hyperparameters=first.hyperparameters,
            claim=first.claim,
            sizes=first.sizes,
        )
        self._tell_bind(bind, now_s)
        learner.phase = Phase.BOUND
        learner.moved(now_s)

    def _tell_bind(self, bind: Bind, now_s: float) -> None:
        learner = self._learner
        self._own(self._table.bind(self.settings.rank, bind))
        self._out.append(Broadcast(bind))
        if not self.settings.lockstep:
            late_after_s = learner.late_after_s(now_s)
            self._calls.contributed(bind.round, now_s + late_after_s)

    def _tell_seal(self, seal: Seal) -> None:
        self._own(self._table.seal(self.settings.rank, seal))
        self._out.append(Broadcast(seal))

    def _tell_null(self, round_: int) -> None:
        null = Null(round=round_)
        self._own(self._table.null(self.settings.rank, null))
        self._out += (Broadcast(null), ContributeNothing(round_))

    def _tell_again(self, round_: int, own: tuple[Bind, Seal | None] | None, now_s: float) -> None:
        """G6: this member's part in the round keeps its number, binding and bytes."""
        if own is None:
            self._tell_null(round_)
            self._calls.heard(round_)  # and so does whoever receives it
            return
        bind, seal = own
        self._tell_bind(bind, now_s)
        self._out += self._own_buckets.again(round_)
        if seal is not None:
            self._tell_seal(seal)

    def _give_up(self, reason: str) -> None:
        """V2: poison for the missing buckets, and a seal that says so; if none is missing, the seal alone."""
        round_, missing = self._table.own_decided, self._own_buckets.missing(self._table.own_decided)
        bucket = missing[0] if missing else self.settings.buckets_of(round_) - 1
        lost = Poison(bucket=bucket, parameter="", reason=reason[: limits.ERROR_CHARS_MAX])
        first = self._own_buckets.poison(round_) or lost
        self._out += [self._own_buckets.add(round_, bucket, lost) for bucket in missing]
        used, integers = bytes(self.settings.used_bytes), (0,) * self.settings.integers
        self._tell_seal(Seal(round=round_, used=used, integers=integers, poison=first))
        self._learner.given_up_step = self._learner.step

    def _drop_step(self, reason: str) -> None:
        self._out.append(StepDropped(self._learner.step, reason))
        self._learner.given_up_step = self._learner.step

    def _own(self, wrong: str | None) -> None:
        assert wrong is None, f"this daemon {wrong}"

    def _settle(self, now_s: float) -> list[Effect]:
        """Does what the last input has made possible, and hands out all effects."""
        if not self._fenced:
            self._complete_rounds()
        if self._table.commit():
            self._out.append(Committed(self._table.committed))
        self._null_called_rounds()
        # R1 would hold the learner up even if it had applied every complete round.
        waits = self._table.own_decided - self._table.complete > self.settings.staleness
        if self._calls.at_s and not self._fenced:
            self._call_late_members(waits, now_s)
        self._learner.wait_for_peers(waits, now_s)
        effects, self._out = self._out, []
        return effects

    def _complete_rounds(self) -> None:
        while (oldest := self._table.next_round()).whole() and not oldest.disputed:
            if dispute := oldest.dispute():
                oldest.disputed = True
                self._out.append(ProtocolError(None, dispute))
                return
            self._table.count_complete()
            self._completed(oldest.completion())

    def _completed(self, done: RoundComplete) -> None:
        self._own_buckets.forget(done.round)
        self._out.append(done)

    def _null_called_rounds(self) -> None:
        while self._table.own_decided < self._calls.newest and self.may_null()[0]:
            self._tell_null(self._table.own_decided + 1)
        learner = self._learner
        called = self._table.own_decided < self._calls.newest and learner.phase is Phase.COMPUTING
        if called and self.settings.ends_early and learner.called_step != learner.step:
            learner.called_step = learner.step
            self._out.append(PeriodCalled(learner.step))

    def _call_late_members(self, waits: bool, now_s: float) -> None:
        blocked = self._learner.phase is Phase.BOUNDARY and waits
        blocked_on = self._table.complete + 1 if blocked else None
        if round_ := self._calls.due(now_s, self._table.decided_by_all, blocked_on):
            self._out.append(Broadcast(Call(round=round_)))
