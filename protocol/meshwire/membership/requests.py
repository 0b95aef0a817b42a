"""What others want from the next generation: devices that ask in, members that wish to learn, rest or leave."""

from collections.abc import Collection
from typing import Literal

from meshwire import limits
from meshwire.membership.lineage import rank_of
from meshwire.membership.links import MemberLinks
from meshwire.messages.generation import AskIn
from meshwire.messages.job import Generation, Member

Kind = Literal["learn", "rest", "leave", "anew"]


class Petitions:
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
        """A member's newest wish."""
        self._wishes[device] = kind, now_s

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
