"""What the inputs of the round machine have in common: its state, what it tells others, and what follows from both.

Every input changes something and ends in `_settle`, which does all that has become possible and hands out the effects.
"""

from meshwire import limits
from meshwire.messages.rounds import Bind, Call, Null, Poison, Seal
from meshwire.rounds.calls import Calls
from meshwire.rounds.effects import (
    Broadcast,
    Committed,
    ContributeNothing,
    Effect,
    LearnerMayStart,
    ProtocolError,
    RoundComplete,
    StepDropped,
)
from meshwire.rounds.learner import Decision, Learner, Phase, RoundSettings
from meshwire.rounds.own_buckets import OwnParts
from meshwire.rounds.table import RoundTable


class RoundCore:
    """The round machine without its inputs.

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
