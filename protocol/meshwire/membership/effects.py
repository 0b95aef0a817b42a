"""What the membership machine asks of its caller: perform the effects in the order given."""

from dataclasses import dataclass
from enum import Enum

from meshwire.messages.generation import Accuse, AskIn, Enter, Entered, Promised, Propose, Refused, Where, Wish
from meshwire.messages.job import Generation

Message = Propose | Promised | Refused | Enter | Entered | Where | AskIn | Wish | Accuse


class MembershipPhase(Enum):
    """Where a daemon is in the life of generations."""

    RUNNING = "running"  # rounds go on
    PROMISED = "promised"  # fenced: nothing older is sent, completed or applied (G2)
    CATCHING_UP = "catching up"  # told to enter; the rounds up to the cut are being fetched
    ENTERED = "entered"  # receives; sends when all have entered
    OUT = "out"  # in no generation: asks in


@dataclass(frozen=True, slots=True)
class Send:
    """On the link to `device`, in the order of the effects. A link that is gone meanwhile may drop it."""

    device: str
    message: Message


@dataclass(frozen=True, slots=True)
class Fence:
    """From now on send, complete and apply nothing (G2); give up a catch-up; then answer with a `Standing`."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class CatchUpFrom:
    """Fetch the rounds up to `enter.cut` from `device`; then answer with `CaughtUpToCut`.

    `reload`: this member's history is not the one that is kept, or it has none: end the learner, start from the cut.
    With `enter.way` "back" that is true of all: `device`, which may be this one, has the cut's state (J3).
    """

    rank: int
    device: str
    generation: Generation
    enter: Enter
    reload: bool


@dataclass(frozen=True, slots=True)
class EnterGeneration:
    """All rounds up to `enter.cut` are here: take messages and chunks of `generation`, send none yet."""

    generation: Generation
    enter: Enter


@dataclass(frozen=True, slots=True)
class Resume:
    """All members have entered: send. `begins`: this member's learner, which is ready, computes from now on (X3)."""

    generation: Generation
    begins: bool = False


@dataclass(frozen=True, slots=True)
class HistoryLeft:
    """This device is in no generation any more and its history is not kept. The machine asks in by itself.

    `kept`: where those are whose history is kept instead, if that is why.
    """

    reason: str
    kept: Where | None = None


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """This device was never in the job, and there is no room in it any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class NobodyLearns:
    """In the generation that was entered no learner computes, and nothing is left that one could load (J3).

    `failed`: by errors of the script, which end the job. Else all begin again from what lies on their disks (J5).
    """

    generation: Generation
    failed: bool


@dataclass(frozen=True, slots=True)
class WaitingFor:
    """For people: what is waited for now, of whom and why. Empty: for nothing. Told when it changes.

    `to_prepare`: that learners come to mt.prepare, which scripts with process groups never do.
    """

    reason: str
    to_prepare: bool = False


@dataclass(frozen=True, slots=True)
class MessageIgnored:
    """A message of `device`, which is no member, broke the protocol and was ignored."""

    device: str
    text: str


@dataclass(frozen=True, slots=True)
class Shunned:
    """G10: a member is left out of the next generation, for it broke the protocol; the others go on.

    `accuser`: on whose word, a device. `violations`: how many there are of it.
    """

    device: str
    reason: str
    accuser: str
    violations: int


Effect = (
    Send
    | Fence
    | CatchUpFrom
    | EnterGeneration
    | Resume
    | HistoryLeft
    | TurnedAway
    | NobodyLearns
    | WaitingFor
    | MessageIgnored
    | Shunned
)
