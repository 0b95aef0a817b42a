"""What the round machine and `JobRounds` around it ask of their caller: perform the effects in the order given."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwire.messages.generation import DealState
from meshwire.messages.learner import BarrierPassed, EndPeriod, EpochOver, Grant, RoundDone, Start, StepLost
from meshwire.messages.rounds import Bind, Call, Null, Poison, Seal

Message = Bind | Seal | Null | Call


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send `message` to all other members, on each link in the order of the effects."""

    message: Message


@dataclass(frozen=True, slots=True)
class Contribute:
    """The learner's bucket is this member's part in the exchange of (round, bucket)."""

    round: int
    bucket: int


@dataclass(frozen=True, slots=True)
class ContributePoison:
    """A poison chunk is this member's part in the exchange of (round, bucket) (V1)."""

    round: int
    bucket: int


@dataclass(frozen=True, slots=True)
class ContributeNothing:
    """This member forwards every bucket of `round` with an empty contribution."""

    round: int


@dataclass(frozen=True, slots=True)
class RoundComplete:
    """This daemon holds `round` whole (G3), and all before it: the learner may apply it at a step boundary (R1).

    Equal on all members, for it depends on nothing but what every member has received.
    """

    round: int
    void: bool
    """Counted and not applied (V1)."""
    reason: str
    """Why it is void, naming members and parameters; empty if it is not."""
    binds: Mapping[int, Bind]
    """The contributions by rank, in rank order."""
    poisons: Mapping[int, Poison]
    """By rank, in rank order. Empty in a void round whose sum, not a contribution, was not finite.

    One without a parameter is V2's: a learner was lost, and no gradient was wrong.
    """
    used: bytes
    """Union of the contributors' bitmaps (O5)."""
    integers: tuple[int, ...]
    """Maxima of the contributors' integer buffers (O5)."""
    squared_norm: float
    """Of all means together, as their owners computed it (O4); 0 if the round is void."""

    @property
    def contributors(self) -> int:
        """Bitmap by rank."""
        return sum(1 << rank for rank in self.binds)

    @property
    def weight(self) -> float:
        """What the sum is divided by (W3), in samples: added in the order of ranks."""
        return sum(bind.weight for _, bind in sorted(self.binds.items()))

    @property
    def overflow(self) -> bool:
        """Nothing but overflows of GradScalers made it void (O6)."""
        return bool(self.poisons) and all(poison.overflow for poison in self.poisons.values())

    @property
    def not_finite(self) -> bool:
        """A gradient, or their sum, was not finite, and no GradScaler answers for it: V1's `--on-nan` decides.

        A lost learner (V2) is no such case, nor is a round to which nobody contributed (G6).
        """
        named = any(poison.parameter and not poison.overflow for poison in self.poisons.values())
        return named or (self.void and not self.poisons and bool(self.binds))

    @property
    def hyperparameters(self) -> bytes:
        """Those of the contributor with the largest step, of the lowest rank if several (O3)."""
        leader = max(self.binds, key=lambda rank: (self.binds[rank].step, -rank), default=None)
        return b"" if leader is None else self.binds[leader].hyperparameters


@dataclass(frozen=True, slots=True)
class Committed:
    """Every member has announced `round` complete: what was retained for it and its predecessors is free (G5)."""

    round: int


@dataclass(frozen=True, slots=True)
class LearnerCutOff:
    """The learner passed its step deadline (V2 if `round`, the one it had bound, is not None; else R5)."""

    round: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class StepDropped:
    """The step will not be contributed: its samples are to be dealt again (R5)."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeriodCalled:
    """The learner is to end the period of this step with its next local step: its round is called (R9)."""

    step: int


@dataclass(frozen=True, slots=True)
class ProtocolError:
    """An input broke the rules and was ignored.

    `rank` is the member that sent it, the own rank for the local learner or executor, None where an exchange shows
    an error that no single member can be blamed for.
    """

    rank: int | None
    text: str


Effect = (
    Broadcast
    | Contribute
    | ContributePoison
    | ContributeNothing
    | RoundComplete
    | Committed
    | LearnerCutOff
    | StepDropped
    | PeriodCalled
    | ProtocolError
)

# What `JobRounds` adds.

Notice = Grant | EpochOver | RoundDone | BarrierPassed | Start | EndPeriod | StepLost


@dataclass(frozen=True, slots=True)
class TellLearner:
    """Send `notice` to the learner, if one is there."""

    notice: Notice


@dataclass(frozen=True, slots=True)
class DecodeRound:
    """The result slot is free for `round`: say `RoundDecoded` when its means lie there."""

    round: int


@dataclass(frozen=True, slots=True)
class RoundCounted:
    """The complete round stands in the ledger of samples; it follows its `RoundComplete`."""

    round: int
    deal: DealState | None
    """What the ledger holds after it; None without a prepared loader."""


@dataclass(frozen=True, slots=True)
class SamplesDealt:
    """The ledger has changed between two rounds, for others compute now (X3)."""

    deal: DealState


@dataclass(frozen=True, slots=True)
class RoundForgotten:
    """Every member holds `round` (G5), and this learner needs it no more: its memory is free."""

    round: int


@dataclass(frozen=True, slots=True)
class LearnerBrokeRules:
    """The learner has said what it cannot say now: this device's part in the job ends with `text`."""

    text: str


JobEffect = Effect | TellLearner | DecodeRound | RoundCounted | SamplesDealt | RoundForgotten | LearnerBrokeRules
