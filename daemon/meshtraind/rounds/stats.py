"""What one daemon counts of its rounds, for people: ages, nulls, void rounds, lost steps, times."""

from collections import Counter
from collections.abc import Mapping

from meshwire.messages.learner import StepLost
from meshwire.messages.rounds import Bind, Null
from meshwire.rounds.effects import Broadcast, JobEffect, RoundComplete, TellLearner


class RoundStats:
    """Fed with the effects of the rounds.

    Attributes:
        age: of the newest contribution, None before the first (R0).
        nulls: rounds that went on without this member (R4, R5).
        void_rounds: counted and not applied (V1).
        steps_lost: those the learner was told of: cut off or too old (V2, R5).
        exchange_s: summed time from a round's bind to its completion.
        round: the newest complete round.
    """

    def __init__(self) -> None:
        self._ages: Counter[int] = Counter()
        self._bound_at_s: dict[int, float] = {}
        self._decided = 0
        self.age: int | None = None
        self.nulls = 0
        self.void_rounds = 0
        self.steps_lost = 0
        self.exchange_s = 0.0
        self.round = 0

    @property
    def ages(self) -> tuple[int, ...]:
        """Contributions by age, from 0 to the oldest."""
        return tuple(self._ages[age] for age in range(max(self._ages, default=-1) + 1))

    def take(self, effect: JobEffect, now_s: float) -> None:
        """Counts one effect."""
        match effect:
            case Broadcast(message=Bind(round=round_) | Null(round=round_)) if round_ <= self._decided:
                pass  # told again in a new generation (G6)
            case Broadcast(message=Bind(round=round_, base=base)):
                self._decided = round_
                self.age = round_ - 1 - base
                self._ages[self.age] += 1
                self._bound_at_s[round_] = now_s
            case Broadcast(message=Null(round=round_)):
                self._decided = round_
                self.nulls += 1
            case RoundComplete(round=round_, void=void):
                self.round = round_
                self.void_rounds += void
                bound_at_s = self._bound_at_s.pop(round_, None)
                if bound_at_s is not None:
                    self.exchange_s += now_s - bound_at_s
            case TellLearner(notice=StepLost()):
                self.steps_lost += 1
            case _:
                pass

    def values(self) -> Mapping[str, object]:
        """The fields of `Metrics` that are counted here."""
        return {
            "round": self.round,
            "ages": self.ages,
            "age": self.age,
            "nulls": self.nulls,
            "void_rounds": self.void_rounds,
            "steps_lost": self.steps_lost,
            "exchange_s": self.exchange_s,
        }
