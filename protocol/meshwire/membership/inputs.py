"""Everything that can happen to a membership, as data: what its shell hands to `Membership.handle`.

Where a message of the protocol says it all it is the input itself: `Standing` answers the effect `Fence`, and `Holding`
tells what there is here, beside rounds, to go on from (J3).
"""

from dataclasses import dataclass

from meshwire.membership.effects import Message
from meshwire.membership.requests import Kind
from meshwire.messages.generation import Holding, Standing
from meshwire.sync_modes.settings_changes import SettingsWish

# What is seen of other devices.


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A link to a device that may take part is up, or has replaced another to it.

    `incarnation`: of the process at the other end (G1).
    """

    device: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link to a device is gone: closed, or given up after a silence. `reason` is for people."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """This incarnation is gone for good: it said so, or its link ended, and where it was nobody listens any more.

    It is not waited for as one that may be together with others elsewhere. The second can be wrong.
    """

    device: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class MessageFrom:
    """A message has come over the live link to `device`."""

    device: str
    message: Message


@dataclass(frozen=True, slots=True)
class ViolationSeen:
    """This daemon has seen a member break the protocol (G10): it enters no generation with it until that one asks in
    again, later. Nothing of it is to be heard until then."""

    device: str
    reason: str


# What has become of this device.


@dataclass(frozen=True, slots=True)
class WasAway:
    """This machine slept, stood still, or was in no network or another: what is missed here was not lost here.

    Even if it is entitled to go on without the others, it looks for them first: they may have done so provisionally.
    """


@dataclass(frozen=True, slots=True)
class RequestMade:
    """The learner is ready to compute (`learn`) or computes no more (`rest`), or this device goes (`leave`).

    It is repeated until a generation fulfils it; a newer request replaces it, but rest comes before `learn` (X3). A
    device that leaves does not ask in again.
    """

    kind: Kind


@dataclass(frozen=True, slots=True)
class SettingsAsked:
    """Other settings are asked for here (C3). That is repeated until a generation in which learners compute brings it;
    a newer one replaces it, and None takes it back."""

    wish: SettingsWish | None


@dataclass(frozen=True, slots=True)
class SteppedOut:
    """This device has nothing to bring into the rounds: it asks to be taken in, and gets what it lacks."""

    reason: str


@dataclass(frozen=True, slots=True)
class HoldingLost:
    """What this member told of its `Holding` is so no more: where nobody computes, it may be what all wait for."""


@dataclass(frozen=True, slots=True)
class RoundsCounted:
    """So many samples are in the rounds that are complete here: by them the sides of a partition are weighed (G4)."""

    samples: int


@dataclass(frozen=True, slots=True)
class FarthestRoundTrip:
    """To the farthest member, as it is now. What is waited for already keeps its deadline."""

    rtt_s: float


# Answers to `CatchUpFrom`, and the clock.


@dataclass(frozen=True, slots=True)
class CaughtUpToCut:
    """All rounds up to the cut are here, or a member that reloads starts from it."""


@dataclass(frozen=True, slots=True)
class CannotCatchUp:
    """What came was wrong, or the source does not have it: this device asks in anew.

    A source that is gone needs no answer: a new generation follows.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class TimerDue:
    """The time of `Membership.deadline` has come. Harmless when nothing is due."""


Input = (
    LinkUp
    | LinkDown
    | PeerGone
    | MessageFrom
    | ViolationSeen
    | WasAway
    | RequestMade
    | SettingsAsked
    | SteppedOut
    | Holding
    | HoldingLost
    | RoundsCounted
    | FarthestRoundTrip
    | Standing
    | CaughtUpToCut
    | CannotCatchUp
    | TimerDue
)
