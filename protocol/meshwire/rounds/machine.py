"""The round machine: what one daemon decides for one learner of one job (R0 to R8, V1, V2, G3, G5, G6 of the rules).

Pure: inputs in, a list of effects out (`roundevents`), `now_s` of any monotonic clock as an argument, one timer. An
input that breaks the rules becomes a `ProtocolError` effect, never an exception, and changes nothing. Links deliver a
member's messages in the order of its effects.

What the rules leave open, and how it is settled here, stands in RULES.md after R9 and G8: lockstep, how far an absent
member goes, fixed visibility, deadlines, from one generation to the next.
"""

from collections.abc import Mapping
from dataclasses import replace

from meshwire.messages.rounds import Bind, Call, Null, Poison, SampleBlock, Seal
from meshwire.rounds.calls import Calls
from meshwire.rounds.core import RoundCore
from meshwire.rounds.effects import Broadcast, Effect, LearnerCutOff, Message, ProtocolError, RoundComplete
from meshwire.rounds.learner import Phase
from meshwire.rounds.round import BucketResult
from meshwire.rounds.step_times import StepTimes


class RoundMachine(RoundCore):
    """One learner's part in the rounds of one job. Every input returns the effects to perform, in order."""

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
