"""The round machine: what one daemon decides for one learner of one job (R0 to R8, V1, V2, G3, G5, G6 of the rules).

Pure: inputs in, a list of effects out (`roundevents`), `now_s` of any monotonic clock as an argument, one timer. An
input that breaks the rules becomes a `ProtocolError` effect, never an exception, and changes nothing. Links deliver a
member's messages in the order of its effects.

What the rules leave open, and how it is settled here, stands in RULES.md after R9 and G8: lockstep, how far an absent
member goes, fixed visibility, deadlines, from one generation to the next.
"""

from collections.abc import Mapping
from dataclasses import replace

from meshwire import limits
from meshwire.messages.rounds import Bind, Call, Null, Poison, SampleBlock, Seal
from meshwire.rounds.calls import Calls
from meshwire.rounds.effects import (
    Broadcast,
    Committed,
    ContributeNothing,
    Effect,
    LearnerCutOff,
    LearnerMayStart,
    Message,
    ProtocolError,
    RoundComplete,
    StepDropped,
)
from meshwire.rounds.learner import Decision, Learner, Phase, RoundSettings
from meshwire.rounds.own_buckets import OwnParts
from meshwire.rounds.round import BucketResult
from meshwire.rounds.step_times import StepTimes
from meshwire.rounds.table import RoundTable


class RoundMachine:
    """One learner's part in the rounds of one job. Every input changes something, does all that has become possible
    then, and returns the effects to perform, in order.

    Args:
        settings: those of the generation in which it begins; the ranks change with each that it enters.
        complete: the cut of that generation. Its learner holds the base after so many rounds, or is `loading`.
    """

    def __init__(self, settings: RoundSettings, *, complete: int = 0) -> None:
        self.settings = settings
        self._learner = Learner(settings, applied=complete)
        self._table = RoundTable(settings, complete)
        self._calls = Calls()
        self._parts = OwnParts(settings.buckets_of)
        self._fenced = False
        self._may_start_told = True
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
    def applied(self) -> int:
        """Rounds that the learner has applied (R0: a)."""
        return self._learner.applied

    @property
    def decided(self) -> int:
        """The last round contributed to or nulled (R0: d)."""
        return self._table.decided(self.settings.rank)

    @property
    def complete(self) -> int:
        """The last round held whole, as are all before it: the counter in every frame and report (G5)."""
        return self._table.complete

    @property
    def visible(self) -> int:
        """The last round that the learner may apply now: the complete ones, or fewer with `fixed` (R8)."""
        return self._learner.visible(self.decided, self.complete)

    @property
    def committed(self) -> int:
        """The newest round that every member has announced complete (G5)."""
        return self._table.committed

    def bound(self, round_: int, bitmap: int) -> tuple[int, float] | None:
        """R2: contributors and summed weight of the ranks in the bitmap; None while one of them has not decided."""
        return self._table.bound(round_, bitmap)

    @property
    def decided_by_all(self) -> int:
        """The last round that nobody has still to bind, seal or null."""
        return min(self._table.settled(rank) for rank in self.settings.ranks)

    @property
    def rounds_kept(self) -> int:
        """Rounds in memory, at most 3(s+1)."""
        return len(self._table)

    def may_start(self) -> Decision:
        """R1: may the learner begin a step, and if not, which round waits for whom."""
        return self._learner.may_start(self.decided, self.complete, self.waiting)

    def may_null(self) -> Decision:
        """R4, R5: may this daemon null the next round, provided that it is called."""
        if self.phase is Phase.ABSENT and self._table.settled(self.settings.rank) < self.decided:
            return False, f"its learner died in round {self.decided}, which runs again in the next generation (V2)"
        return self._learner.may_null(self.decided, self.complete)

    def waiting(self) -> str:
        """What the oldest incomplete round waits for, and of whom."""
        return self._table.waiting()

    @property
    def hangs_since_s(self) -> float | None:
        """Since when the learner makes no move, where nothing but its end would let the others go on."""
        return self._learner.hangs_since_s()

    # The local learner.

    def start_step(self, step: int, now_s: float) -> list[Effect]:
        """The learner begins its step number `step` on all rounds applied so far (R1)."""
        learner = self._learner
        may, reason = self.may_start()
        if not may:
            return self._refuse_own(f"step {step} may not start: {reason} (R1)", now_s)
        learner.phase = Phase.COMPUTING
        learner.step, learner.base, learner.started_s = step, learner.applied, now_s
        learner.given_up_step = None
        learner.moved(now_s)
        return self._settle(now_s)

    def bucket_ready(
        self,
        step: int,
        bucket: int,
        now_s: float,
        *,
        weight: float,
        samples: tuple[SampleBlock, ...] = (),
        hyperparameters: bytes = b"",
        claim: int = 0,
        sizes: tuple[int, ...] = (),
        poison: Poison | None = None,
    ) -> list[Effect]:
        """A bucket's gradients are in their slot, or `poison` says why they are not usable (V1).

        The first bucket binds the step: what the others say besides `poison` is not looked at (R2).
        """
        learner = self._learner
        if step == learner.given_up_step:
            return self._settle(now_s)
        if step != learner.step or learner.phase not in (Phase.COMPUTING, Phase.BOUND):
            return self._refuse_own(f"bucket {bucket} of step {step}, which is not running", now_s)
        bound = learner.phase is Phase.BOUND
        buckets = self.settings.buckets_of(self.decided if bound else self.decided + 1)
        if not 0 <= bucket < buckets or (bound and self._parts.given(self.decided, bucket)):
            wanted = f"expected once, of buckets 0 to {buckets - 1}"
            return self._refuse_own(f"bucket {bucket} of step {step}: {wanted}", now_s)
        if learner.phase is Phase.COMPUTING:
            if not 0 < weight < float("inf"):
                return self._refuse_own(f"step {step} has the weight {weight}, not a number of samples", now_s)
            age = self.decided - learner.base
            if age > self.settings.staleness:
                self._drop_step(f"its gradient would be of age {age}, {self.settings.staleness} allowed (R5)")
                learner.phase = Phase.GIVEN_UP
                return self._settle(now_s)
            bind = Bind(
                round=self.decided + 1,
                step=step,
                base=learner.base,
                weight=weight,
                samples=samples,
                hyperparameters=hyperparameters,
                claim=claim,
                sizes=sizes,
            )
            self._bind(bind, now_s)
        self._out.append(self._parts.add(self.decided, bucket, poison))
        return self._settle(now_s)

    def seal(self, step: int, used: bytes, integers: tuple[int, ...], now_s: float) -> list[Effect]:
        """The backward pass of `step` has ended, all its buckets were given: the learner is at a step boundary."""
        learner = self._learner
        if step == learner.given_up_step and learner.phase is not Phase.GIVEN_UP:
            return self._settle(now_s)  # it was absent in between
        if step != learner.step or learner.phase not in (Phase.BOUND, Phase.GIVEN_UP):
            return self._refuse_own(f"seal of step {step}, which has no bucket", now_s)
        if learner.phase is Phase.BOUND:
            if missing := self._parts.missing(self.decided):
                return self._refuse_own(f"seal of step {step} without its buckets {missing}", now_s)
            seal = Seal(round=self.decided, used=used, integers=integers, poison=self._parts.poison(self.decided))
            if wrong := self._table.seal(self.settings.rank, seal):
                return self._refuse_own(wrong, now_s)
            self._out.append(Broadcast(seal))
        learner.times.add(now_s - learner.started_s)
        learner.phase = Phase.BOUNDARY
        learner.moved(now_s)
        return self._settle(now_s)

    def learner_applied(self, round_: int, now_s: float) -> list[Effect]:
        """At a step boundary the learner has applied all rounds up to `round_` in order; void ones it counts (R1).

        None is applied before it is `visible`.
        """
        learner = self._learner
        if learner.phase not in (Phase.BOUNDARY, Phase.ABSENT) or not learner.applied < round_ <= self.visible:
            known = f"it had applied {learner.applied}, {self.visible} are to be applied, it is {learner.phase.value}"
            return self._refuse_own(f"round {round_} cannot be applied: {known} (R1)", now_s)
        learner.applied = round_
        learner.moved(now_s)
        return self._settle(now_s)

    def absent(
        self,
        reason: str,
        now_s: float,
        *,
        gone: bool = False,
        loading: bool = False,
        holds: int | None = None,
        rests: bool = False,
    ) -> list[Effect]:
        """The learner is idle or paused (R5); or `gone`: finished or dead, and nothing is kept for it; or `loading`: it
        will be `loaded` with a base of what is complete now or later, and what follows is kept for it (J1); or dead,
        while memory `holds` its base after this round, and what follows is kept for the next one (J3).

        What it had bound is void (V2), unless this member `rests` from the next generation on, which is on its way: the
        round stays open until then, and runs again there without it. An absent learner may be absent for another reason
        from now on.
        """
        learner = self._learner
        if learner.phase is Phase.BOUND and not rests:
            self._give_up(f"its learner is absent: {reason}")
        elif learner.phase is Phase.COMPUTING:
            self._drop_step(f"its learner is absent: {reason} (R5)")
        learner.phase = Phase.ABSENT
        learner.absence = reason
        if loading and not learner.loading:
            learner.applied = self.complete
            learner.times = StepTimes()  # it compiles and allocates anew
        if holds is not None:
            learner.applied = min(max(learner.applied, holds), self.complete)
        learner.gone, learner.loading = gone, loading or holds is not None
        return self._settle(now_s)

    def loaded(self, round_: int, now_s: float) -> list[Effect]:
        """The absent learner holds, or is about to hold, the base after `round_`: nothing older is kept for it (J1)."""
        learner = self._learner
        if learner.phase is not Phase.ABSENT or learner.gone or not learner.applied <= round_ <= self.complete:
            known = f"rounds {learner.applied} to {self.complete} are kept, it is {learner.phase.value}"
            return self._refuse_own(f"a base after round {round_} cannot be loaded: {known} (J1)", now_s)
        learner.applied = round_
        return self._settle(now_s)

    def present(self, now_s: float) -> list[Effect]:
        """The learner is back, at a step boundary."""
        learner = self._learner
        if learner.phase is not Phase.ABSENT:
            return self._refuse_own(f"present again, but it was {learner.phase.value}", now_s)
        learner.phase = Phase.BOUNDARY
        learner.gone = learner.loading = False
        learner.moved(now_s)
        return self._settle(now_s)

    # The other members and the exchange.

    def receive(self, rank: int, message: Message, now_s: float) -> list[Effect]:
        """A message of the member `rank`. Whoever nulls a round has heard its call, and tells it so to others (R3)."""
        if self._fenced:
            return self._settle(now_s)
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
        if wrong:
            self._out.append(ProtocolError(rank, wrong))
        else:
            self._calls.heard(called)
        return self._settle(now_s)

    def peer_complete(self, rank: int, complete: int, now_s: float) -> list[Effect]:
        """The counter of a frame or report of the member `rank` (G5)."""
        if self._fenced:
            return self._settle(now_s)
        if wrong := self._table.announce(rank, complete):
            self._out.append(ProtocolError(rank, wrong))
        return self._settle(now_s)

    def result_ready(
        self,
        round_: int,
        bucket: int,
        now_s: float,
        *,
        contributors: int,
        weight: float,
        poisoned: bool,
        squared_norm: float,
    ) -> list[Effect]:
        """All values of a bucket's result are here; the rest is what their frames' headers say (W1, O4)."""
        if self._fenced:
            return self._settle(now_s)
        result = BucketResult(contributors, weight, poisoned, squared_norm)
        if wrong := self._table.result(round_, bucket, result):
            return self._refuse_own(wrong, now_s)
        return self._settle(now_s)

    # From one generation to the next.

    def fence(self, now_s: float) -> list[Effect]:
        """This daemon promises (G2): until it enters a generation, no round completes here but those it is served, and
        what others say is not heard. Its learner goes on; `enter` tells what it does meanwhile."""
        self._fenced = True
        return self._settle(now_s)

    def served(self, done: RoundComplete, now_s: float) -> list[Effect]:
        """G4: others hold the next round whole, in the history that is kept, and its result has been fetched."""
        if not self._fenced:
            return self._refuse_own(f"was served round {done.round} in a generation that it has not left (G2)", now_s)
        if wrong := self._table.served(done):
            return self._refuse_own(wrong, now_s)
        self._completed(done)
        return self._settle(now_s)

    def enter(
        self, ranks: tuple[int, ...], cut: int, completes: Mapping[int, int], now_s: float, *, computes: bool = True
    ) -> list[Effect]:
        """A generation of these members is entered, each of which holds all rounds up to `cut` (G6).

        The rounds above it begin anew: forgotten is what others have said, and told again what this member has decided.

        Args:
            completes: by rank, how many rounds it held when it promised; of those that bring a history (G5).
            computes: this member's learner is one of those that compute in it. If not, what it had bound above the cut
                is nulled: its samples have been dealt to others (X3).
        """
        if cut != self.complete:
            return self._refuse_own(
                f"entered at round {cut}, but it holds the rounds up to {self.complete} (G6)", now_s
            )
        if self.settings.rank not in ranks:
            return self._refuse_own(f"entered a generation of the ranks {ranks} (G2)", now_s)
        before = self._table
        self.settings = self._learner.settings = replace(self.settings, ranks=ranks)
        self._table = before.entered(self.settings, completes)
        self._calls = Calls()
        self._fenced = False
        for round_ in range(cut + 1, before.decided(self.settings.rank) + 1):
            self._tell_again(round_, before.own(round_) if computes else None, now_s)
        return self._settle(now_s)

    # Time.

    def note_round_trip(self, rtt_s: float, now_s: float) -> list[Effect]:
        """As it is now to the farthest member: binds from now on are called no sooner than twice that after (R3)."""
        self.settings = self._learner.settings = replace(self.settings, rtt_s=rtt_s)
        return self._settle(now_s)

    def deadline(self) -> float | None:
        """When to call `timer` next, on the clock of `now_s`; None if nothing is due at any time."""
        times_s = (None if self._fenced else self._calls.next_at_s, self._learner.cut_off_at_s())
        return min((at_s for at_s in times_s if at_s is not None), default=None)

    def timer(self, now_s: float) -> list[Effect]:
        """Does what is due. Harmless when nothing is."""
        learner = self._learner
        cut_off_s = learner.cut_off_at_s()
        if cut_off_s is not None and now_s >= cut_off_s:
            deadline = f"its step deadline of {learner.times.deadline_s():.1f} s"
            if learner.phase is Phase.BOUND:
                reason = f"step {learner.step} passed {deadline} (V2)"
                self._out.append(LearnerCutOff(self.decided, reason))
                self._give_up(reason)
                learner.phase = Phase.GIVEN_UP
            else:
                reason = f"the learner passed {deadline} while it was {learner.phase.value} (R5)"
                self._out.append(LearnerCutOff(None, reason))
                learner.overdue = True
        return self._settle(now_s)

    # Steps of the above.

    def _bind(self, bind: Bind, now_s: float) -> None:
        learner = self._learner
        self._tell_bind(bind, now_s)
        self._parts.bound(bind.round)
        learner.phase = Phase.BOUND
        learner.moved(now_s)

    def _tell_bind(self, bind: Bind, now_s: float) -> None:
        learner = self._learner
        self._own(self._table.bind(self.settings.rank, bind))
        self._out.append(Broadcast(bind))
        if not self.settings.lockstep:
            late_after_s = learner.times.late_after_s(self.settings.rtt_s, now_s - learner.started_s)
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
        self._out += self._parts.again(round_)
        if seal is not None:
            self._tell_seal(seal)

    def _give_up(self, reason: str) -> None:
        """V2: poison for the missing buckets, and a seal that says so; if none is missing, the seal alone."""
        round_, missing = self.decided, self._parts.missing(self.decided)
        bucket = missing[0] if missing else self.settings.buckets_of(round_) - 1
        lost = Poison(bucket=bucket, parameter="", reason=reason[: limits.ERROR_CHARS_MAX])
        first = self._parts.poison(round_) or lost
        self._out += [self._parts.add(round_, bucket, lost) for bucket in missing]
        used, integers = bytes(self.settings.used_bytes), (0,) * self.settings.integers
        self._tell_seal(Seal(round=round_, used=used, integers=integers, poison=first))
        self._learner.given_up_step = self._learner.step

    def _drop_step(self, reason: str) -> None:
        self._out.append(StepDropped(self._learner.step, reason))
        self._learner.given_up_step = self._learner.step

    def _own(self, wrong: str | None) -> None:
        assert wrong is None, f"this daemon {wrong}"

    def _refuse_own(self, text: str, now_s: float) -> list[Effect]:
        self._out.append(ProtocolError(self.settings.rank, text))
        return self._settle(now_s)

    def _settle(self, now_s: float) -> list[Effect]:
        """Does what the last input has made possible, and hands out all effects."""
        if not self._fenced:
            self._complete_rounds()
        if self._table.commit():
            self._out.append(Committed(self._table.committed))
        self._null_called_rounds()
        if not self._fenced:
            self._call_late_members(now_s)
        self._learner.wait_for_peers(self._waits_for_peers(), now_s)
        may_start, _ = self.may_start()
        if may_start and not self._may_start_told:
            self._out.append(LearnerMayStart(self.applied))
        self._may_start_told = may_start
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
        self._parts.forget(done.round)
        self._out.append(done)

    def _null_called_rounds(self) -> None:
        while self.decided < self._calls.newest and self.may_null()[0]:
            self._tell_null(self.decided + 1)

    def _call_late_members(self, now_s: float) -> None:
        blocked = self.phase is Phase.BOUNDARY and self._waits_for_peers()
        blocked_on = self.complete + 1 if blocked else None
        if round_ := self._calls.due(now_s, self._table.decided_by_all, blocked_on):
            self._out.append(Broadcast(Call(round=round_)))

    def _waits_for_peers(self) -> bool:
        """R1 would hold the learner up even if it had applied every complete round."""
        return self.decided - self.complete > self.settings.staleness
