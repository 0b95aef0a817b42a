"""What the next generation is asked for: devices ask in, members ask to learn, to rest or to leave; and this member.

For the own rank something has to come before (X3, what was dealt to a lost learner comes back): a rank whose learner is
lost rests in a generation before its next learner computes. Only so does all that was dealt to the lost one come back,
and only by beginning to compute is the next one dealt anything: others would not see one take the other's place. A
generation counts when the ledger of samples has followed it, for one that is replaced before has left no trace.
"""

from collections.abc import Collection
from enum import Enum
from typing import Literal

from meshwire import limits
from meshwire.membership.lineage import rank_of
from meshwire.membership.links import MemberLinks
from meshwire.messages.generation import AskIn
from meshwire.messages.job import Generation, Member

Kind = Literal["learn", "rest", "leave", "anew"]


class MemberRequests:
    """A generation that is entered settles all that was heard before it was promised; who is not content asks again."""

    def __init__(self) -> None:
        self._asks: dict[str, tuple[AskIn, float]] = {}
        self._wishes: dict[str, tuple[Kind, float]] = {}

    def ask(self, ask: AskIn, now_s: float) -> None:
        """A device wants to be taken in. It brings no history, and what it wished before is void."""
        device = ask.member.device
        self._wishes.pop(device, None)
        if device in self._asks or len(self._asks) < limits.PEERS_MAX:
            self._asks[device] = ask, now_s

    def forget(self, device: str) -> None:
        """It is refused: what it asked for counts no more, but that it leaves."""
        self._asks.pop(device, None)
        if (wish := self._wishes.get(device)) is not None and wish[0] != "leave":
            del self._wishes[device]

    def wish(self, device: str, kind: Kind, now_s: float) -> None:
        """A member's newest wish. It is in: what it asked for before was told late."""
        self._asks.pop(device, None)
        self._wishes[device] = kind, now_s

    def unready(self, device: str) -> None:
        """It has entered another generation: that its learner is ready it says again there, if it is."""
        if (wish := self._wishes.get(device)) is not None and wish[0] == "learn":
            del self._wishes[device]

    @property
    def given_up(self) -> set[str]:
        """Devices that have left this generation, as they say."""
        return {*self._asks} | {device for device, (wish, _) in self._wishes.items() if wish == "leave"}

    def settle(self, promised_at_s: float) -> None:
        """Forgets what was heard up to the promise of the generation that is entered now."""
        self._asks = {device: ask for device, ask in self._asks.items() if ask[1] > promised_at_s}
        self._wishes = {device: wish for device, wish in self._wishes.items() if wish[1] > promised_at_s}

    def joining(
        self, links: MemberLinks, members: tuple[Member, ...], reached: Collection[str], members_max: int
    ) -> tuple[Member, ...]:
        """Who asks, is linked to all `reached` devices and to each other, and has a rank or can get one of the
        `members_max`. Rounds are fenced for nobody else: without a link between any two of them none could go on."""
        known = {member.device for member in members}
        room = max(0, members_max - len(members))
        chosen: dict[str, AskIn] = {}
        for device, (ask, _) in sorted(self._asks.items()):
            fits = device in known or room > 0
            linked = {*reached, *chosen} - {device} <= {*ask.linked}
            mutual = all(device in other.linked for other in chosen.values())
            if fits and linked and mutual and links.holds(ask.member):
                room -= device not in known
                chosen[device] = ask
        return tuple(ask.member for ask in chosen.values())

    def wishing(self, kind: Kind, generation: Generation) -> set[int]:
        """The ranks in `generation` that wish so, if it is not so yet."""
        ranks = {rank_of(generation, device) for device, (wish, _) in self._wishes.items() if wish == kind}
        resting = {*generation.ranks} - {*generation.learning}
        settled = {*generation.ranks} if generation.learning else set()  # whoever computes holds the base
        content = {"learn": {*generation.learning}, "rest": resting, "leave": set(), "anew": settled}
        return {rank for rank in ranks if rank in generation.ranks and rank not in content[kind]}


class Seat(Enum):
    """The own rank among those that compute, as the newest generation that counts has left it."""

    VACANT = "it has rested, and no learner has computed since"
    TAKEN = "its learner computes"
    LOST = "its learner is lost or never came, and it has not rested since"


class OwnRequest:
    """Of one member. It begins as that of a device whose learner, if it has one, is in no history."""

    def __init__(self) -> None:
        self._kind: Kind | None = "rest"  # None: its learner computes from the first generation on
        self._seat = Seat.LOST
        self._followed = 0  # number of the newest generation that counts

    @property
    def leaves(self) -> bool:
        """It goes, and does not ask in again."""
        return self._kind == "leave"

    @property
    def computes(self) -> bool:
        """Its learner does, and nothing was asked for that would let the rank rest."""
        return self._seat is Seat.TAKEN

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

    def unready(self) -> None:
        """Its learner is not ready to compute after all."""
        if self._kind == "learn":
            self._kind = None

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
