"""Whom a member asks to join its job, and when: linked devices that were never in it, while there is room (J1).

Every member asks those that it is linked to, and a device that another one has asked already gives the same answer: so
nobody has to know who asks, and a member that is lost while it does is not missed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwire import limits
from meshwire.membership.lineage import rank_of
from meshwire.membership.proposal_checks import list_wrong
from meshwire.messages.generation import Invite
from meshwire.messages.job import Generation
from meshwire.timeouts import ASK_S_MAX, Timeouts


def invitation_wrong(invite: Invite, device: str, sender: str) -> str | None:
    """Can `device` have been invited so by `sender`? Returns what is wrong with it, or None."""
    spec, generation = invite.spec, invite.generation
    if wrong := list_wrong(generation):
        return wrong
    if spec.job != generation.job:
        return f"its generation is one of job {generation.job}"
    if rank_of(generation, sender) not in generation.ranks:
        return "it comes from a device that is not in the job"
    if rank_of(generation, device) is not None:
        return "it is for a device that was in the job already"
    if len(generation.members) >= (spec.peers_max or 0):
        return "the job has all the devices that it takes"
    return None


@dataclass(slots=True)
class _Guest:
    incarnation: int
    ask_at_s: float
    tries: int = 1
    asking: bool = False
    willing: bool = False
    why: str = ""


class Invitations:
    """One job's, at one member. `members_max`: how many devices the job takes, those counted that it has lost."""

    def __init__(self, members_max: int, timeouts: Timeouts) -> None:
        self.members_max = members_max
        self._timeouts = timeouts
        self._guests: dict[str, _Guest] = {}

    def due(self, generation: Generation, links: Mapping[str, int], now_s: float) -> tuple[str, ...]:
        """The devices to ask now; each is to be answered for by `answered` or `unanswered`.

        `links` are all live ones, by device, with the incarnation at the other end. A device is asked a second after
        its link was made, for those to the other members may be on their way, too. No more are asked than there is room
        for, in the order of their ids, as the other members do.
        """
        self._follow(generation, links, now_s)
        room = self.members_max - len(generation.members)
        room -= sum(guest.asking or guest.willing for guest in self._guests.values())
        asked = []
        for device, guest in sorted(self._guests.items()):
            if guest.asking or now_s < guest.ask_at_s or (room <= 0 and not guest.willing):
                continue
            room -= not guest.willing
            guest.asking = True
            asked.append(device)
        return tuple(asked)

    def _follow(self, generation: Generation, links: Mapping[str, int], now_s: float) -> None:
        guests = self._guests
        for device in list(guests):
            gone = links.get(device) != guests[device].incarnation
            if gone or rank_of(generation, device) is not None:
                del guests[device]
        for device, incarnation in links.items():
            if device not in guests and rank_of(generation, device) is None:
                guests[device] = _Guest(incarnation, now_s + self._timeouts.ask_s(1))

    def answered(self, device: str, why_not: str | None, now_s: float) -> bool:
        """Whether it will join (`why_not` is None). Who will not is asked again after 1, 2, 4 .. 60 s; who will, and
        does not come, after 60 s. Returns whether people were told something else of it before."""
        guest = self._guests.get(device)
        if guest is None:
            return False  # it is a member by now, or its link is gone
        guest.asking = False
        guest.willing = why_not is None
        guest.ask_at_s = now_s + (ASK_S_MAX if guest.willing else self._timeouts.ask_s(guest.tries))
        guest.tries = 1 if guest.willing else guest.tries + 1
        before, guest.why = guest.why, (why_not or "")[: limits.ERROR_CHARS_MAX]
        return guest.why != before

    def unanswered(self, device: str) -> None:
        """The link is gone; a new one is a new beginning."""
        self._guests.pop(device, None)

    @property
    def asked(self) -> tuple[str, ...]:
        """Those that are about to join, as far as is known here."""
        return tuple(sorted(device for device, guest in self._guests.items() if guest.asking or guest.willing))

    @property
    def refusals(self) -> Mapping[str, str]:
        """Why the others do not, by device."""
        return {device: guest.why for device, guest in sorted(self._guests.items()) if guest.why}
