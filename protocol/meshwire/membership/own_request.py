"""What a member wishes of the next generations for its own rank: the newest wish, and what has to come before it (X3).

A rank whose learner is lost rests in a generation before its next learner computes. Only so does all that was dealt to
the lost one come back, and only by beginning to compute is the next one dealt anything: others would not see one take
the other's place. A generation counts when the ledger of samples has followed it, for one that is replaced before has
left no trace.
"""

from enum import Enum

from meshwire.membership.requests import Kind


class Seat(Enum):
    """The own rank among those that compute, as the newest generation that counts has left it."""

    VACANT = "it has rested, and no learner has computed since"
    TAKEN = "its learner computes"
    LOST = "its learner is lost or never came, and it has not rested since"


class OwnWish:
    """Of one member. It begins as that of a device whose learner, if it has one, is in no history."""

    def __init__(self) -> None:
        self._kind: Kind | None = "rest"  # None: its learner computes from the first generation on
        self._seat = Seat.LOST
        self._followed = 0  # number of the newest generation that counts

    @property
    def leaves(self) -> bool:
        """It goes, and does not ask in again."""
        return self._kind == "leave"

    def found(self, number: int, *, computes: bool) -> None:
        """The job begins in this generation, with this member's learner if it `computes` there."""
        self._kind = None
        self._seat = Seat.TAKEN if computes else Seat.VACANT
        self._followed = number

    def say(self, kind: Kind) -> None:
        """A newer wish replaces the one before; that the rank has to rest first stays so."""
        self._kind = kind
        if kind == "rest" and self._seat is Seat.TAKEN:
            self._seat = Seat.LOST

    def forget(self) -> None:
        """The history is not kept: the base that was ready is not the one that is, and what counts is to be told."""
        self._seat = Seat.LOST
        self._followed = 0
        if not self.leaves:
            self._kind = "rest"

    def follow(self, number: int, *, computes: bool) -> None:
        """This generation counts, here or with others: a learner of this rank `computes` in it, or none does."""
        if number > self._followed:
            self._followed = number
            if not computes:
                self._seat = Seat.VACANT

    def run(self, number: int, *, computes: bool) -> bool:
        """Rounds go on here in this generation. Returns whether the learner that is ready begins to compute."""
        self.follow(number, computes=computes)
        if not computes or self._seat is not Seat.VACANT:
            return False
        self._seat = Seat.TAKEN if self._kind == "learn" else Seat.LOST
        return self._seat is Seat.TAKEN

    def due(self, *, computes: bool) -> Kind | None:
        """What is to be told to a generation in which this rank `computes` or not; None: nothing, or nothing yet."""
        if self._kind == "leave":
            return "leave"
        if computes:
            return "rest" if self._seat is Seat.LOST else None
        return "learn" if self._kind == "learn" and self._seat is Seat.VACANT else None
