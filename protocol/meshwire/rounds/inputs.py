"""What the round machine is told: frozen data, so that a history of inputs is a list that can be written and read.

Every `Input` goes through `RoundMachine.handle`, with the time at which it came, and every `JobInput` through
`JobRounds.handle`, which is told the learner's own messages as they come.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwire.messages.learner import (
    LearnerApplied,
    LearnerBack,
    LearnerBucket,
    LearnerIdle,
    LearnerSealed,
    LearnerStepped,
)
from meshwire.messages.rounds import Poison, SampleBlock
from meshwire.rounds.effects import Message, RoundComplete
from meshwire.sync_modes.settings_changes import SettingsChanges

# The local learner


@dataclass(frozen=True, slots=True)
class StartStep:
    """The learner begins its step number `step` on all rounds applied so far (R1, the bound on how far it is ahead)."""

    step: int
    local_steps: int = 1
    """That a period has (R9): as many times as long it may take."""


@dataclass(frozen=True, slots=True)
class BucketReady:
    """A bucket's gradients are in their slot, or `poison` says why they are not usable (V1, void rounds).

    The first bucket binds the step: what the others say besides `poison` is not looked at (R2, one bind a step).
    """

    step: int
    bucket: int
    weight: float
    samples: tuple[SampleBlock, ...] = ()
    hyperparameters: bytes = b""
    claim: int = 0
    sizes: tuple[int, ...] = ()
    poison: Poison | None = None


@dataclass(frozen=True, slots=True)
class StepSealed:
    """The backward pass of `step` has ended, all its buckets were given: the learner is at a step boundary."""

    step: int
    used: bytes
    integers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundApplied:
    """At a step boundary the learner has applied all rounds up to this one in order; void ones it counts (R1).

    None is applied before it is `RoundMachine.visible`.
    """

    round: int


@dataclass(frozen=True, slots=True)
class LearnerAbsent:
    """No step will follow for now, or none ever.

    The learner is idle or paused (R5, absent learners); or `gone`: finished or dead, and nothing is kept for it; or
    `loading`: it will load a base of what is complete now or later, and what follows is kept for it (J1); or dead,
    while memory `holds` its base after this round, and what follows is kept for the next one (J3).

    What it had bound is void (V2, step deadlines), unless this member `rests` from the next generation on, which is on
    its way: the round stays open until then, and runs again there without it. An absent learner may be absent for
    another reason from now on.
    """

    reason: str
    gone: bool = False
    loading: bool = False
    holds: int | None = None
    rests: bool = False


@dataclass(frozen=True, slots=True)
class BaseLoaded:
    """The absent learner holds, or is about to hold, the base after `round`: nothing older is kept for it (J1)."""

    round: int


@dataclass(frozen=True, slots=True)
class LearnerPresent:
    """The learner is back, at a step boundary."""


# The other members and the exchange


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message of the member `rank`. Whoever nulls a round has heard its call, and tells it so to others (R3)."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class CompleteAnnounced:
    """The counter in a frame or report of the member `rank`: so many rounds it holds whole (G5, committed rounds)."""

    rank: int
    complete: int


@dataclass(frozen=True, slots=True)
class ResultReady:
    """All values of a bucket's result are here; the rest is what their frames' headers say (W1, O4)."""

    round: int
    bucket: int
    contributors: int
    """Bitmap by rank."""
    weight: float
    poisoned: bool
    squared_norm: float


# From one generation to the next


@dataclass(frozen=True, slots=True)
class FenceRaised:
    """This daemon promises (G2): until it enters a generation, no round completes here but those it is served, and what
    others say is not heard. Its learner goes on; `GenerationEntered` tells what it does meanwhile."""


@dataclass(frozen=True, slots=True)
class RoundServed:
    """Others hold the next round whole, in the history that is kept, and its result has been fetched (G4)."""

    done: RoundComplete


@dataclass(frozen=True, slots=True)
class GenerationEntered:
    """A generation of these members is entered, each of which holds all rounds up to `cut` (G6).

    The rounds above it begin anew: forgotten is what others have said, and told again what this member has decided.
    """

    ranks: tuple[int, ...]
    cut: int
    completes: Mapping[int, int]
    """By rank, how many rounds it held when it promised; of those that bring a history (G5)."""
    computes: bool = True
    """This member's learner is one of those that compute in it. If not, what it had bound above the cut is nulled: its
    samples have been dealt to others (X3)."""
    unapplied_max: int | None = None
    """From now on, as rounds may be larger or smaller (C3); None: as before."""


# Time


@dataclass(frozen=True, slots=True)
class RoundTripMeasured:
    """As it is now to the farthest member: binds from now on are called no sooner than twice that after (R3)."""

    rtt_s: float


@dataclass(frozen=True, slots=True)
class TimeReached:
    """`RoundMachine.deadline` has come. Harmless before."""


Input = (
    BucketReady
    | StepSealed
    | ResultReady
    | MessageReceived
    | CompleteAnnounced
    | RoundApplied
    | StartStep
    | TimeReached
    | LearnerAbsent
    | LearnerPresent
    | BaseLoaded
    | FenceRaised
    | RoundServed
    | GenerationEntered
    | RoundTripMeasured
)
"""The most frequent first."""

# What `JobRounds` is told besides


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """What the history has changed, in a fence: how many local steps its rounds have (C3)."""

    changes: SettingsChanges


@dataclass(frozen=True, slots=True)
class LearnerTakenIn:
    """The learner that has loaded computes from this generation on (X3, entered generations)."""


@dataclass(frozen=True, slots=True)
class LearnerGone:
    """No step will ever follow: the learner has finished, or its job has failed (V2)."""

    reason: str


@dataclass(frozen=True, slots=True)
class LearnerDied:
    """No process is there. What it had bound is open until the next generation, in which this rank is to rest (V2)."""

    reason: str
    holds: int | None
    """What follows the base that memory holds is kept for the process to come (J3); None: nothing is."""


@dataclass(frozen=True, slots=True)
class LearnerLoads:
    """A process begins to load the base after some round, perhaps one to come. What follows is kept for it (J1)."""


@dataclass(frozen=True, slots=True)
class LearnerParts:
    """The rounds are fenced for good, for this `reason`: the learner applies what is complete and stays at its next
    boundary, where it can write its base. A step of s=0 that waits for its round is told that there will be none."""

    reason: str


@dataclass(frozen=True, slots=True)
class BarrierEntered:
    """The learner waits for all others; where nobody is missing (`waits` is false) it goes on at once."""

    number: int
    waits: bool = True


@dataclass(frozen=True, slots=True)
class BarrierFull:
    """All members' learners are in the barrier; none has contributed to a round after `newest_round`."""

    newest_round: int


@dataclass(frozen=True, slots=True)
class BarrierBroken:
    """Some other learner will never reach the barrier: this one goes on, after the rounds that it is to apply."""

    error: str


@dataclass(frozen=True, slots=True)
class MemberMessage:
    """A round message of the member `rank`, and whether that member's learner is `behind`: in no barrier."""

    rank: int
    message: Message
    behind: bool


@dataclass(frozen=True, slots=True)
class RoundDecoded:
    """The result slot holds the means of `round`."""

    round: int


@dataclass(frozen=True, slots=True)
class SpeedMeasured:
    """How fast a member, this one too, computes; 0: not known yet. `finished`: its learner takes no further step."""

    rank: int
    samples_per_s: float
    finished: bool


@dataclass(frozen=True, slots=True)
class BarrierSeen:
    """A member's learner, this one's too, waits `inside` a barrier, or goes on."""

    rank: int
    inside: bool


@dataclass(frozen=True, slots=True)
class LearningChanged:
    """These ranks' learners compute from now on: the deal of samples follows the generation (X3)."""

    ranks: tuple[int, ...]


JobInput = (
    LearnerBucket
    | LearnerSealed
    | LearnerApplied
    | LearnerStepped
    | LearnerIdle
    | LearnerBack
    | MemberMessage
    | CompleteAnnounced
    | ResultReady
    | RoundDecoded
    | TimeReached
    | SpeedMeasured
    | RoundTripMeasured
    | BarrierSeen
    | BarrierEntered
    | BarrierFull
    | BarrierBroken
    | LearnerTakenIn
    | LearnerGone
    | LearnerDied
    | LearnerLoads
    | LearnerParts
    | BaseLoaded
    | FenceRaised
    | RoundServed
    | GenerationEntered
    | LearningChanged
    | SettingsChanged
)
