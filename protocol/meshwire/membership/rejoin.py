"""A device that is in no generation of its job: whom it asks to take it in, and when (G7)."""

from collections.abc import Collection

from meshwire.membership.lineage import Relation, ballot, keeps_history, relation
from meshwire.membership.links import MemberLinks
from meshwire.messages.generation import Where
from meshwire.messages.job import Generation
from meshwire.timeouts import STEADY_S, Timeouts


class Rejoin:
    """Remembers where others said they are. `known` are devices that may know the job."""

    def __init__(self, me: str, known: Collection[str], now_s: float) -> None:
        self._me = me
        self._known = {*known} - {me}
        self._heard: dict[str, Where] = {}
        self._tries = 0
        self._failures = 0  # of this device's, to begin where the others are, one after the other
        self._named: set[str] = set()  # who was told to be linked here since it was time to ask
        self._in_since_s: float | None = None
        self.ask_at_s = now_s

    def heard(self, device: str, where: Where) -> None:
        """The newest of `device`; it replaces what was heard before."""
        self._heard[device] = where
        self._known |= {device, *(member.device for member in where.generation.members)} - {self._me}

    @property
    def told(self) -> frozenset[str]:
        """Who has said where it is, and is linked."""
        return frozenset(self._heard)

    def forget(self, device: str) -> None:
        """Its link is gone."""
        self._heard.pop(device, None)

    def ancestors(self, generation: int) -> tuple[int, ...]:
        """Of the generation with this hash, as far as anybody told."""
        for where in self._heard.values():
            if where.generation.hash64() == generation:
                return where.ancestors
        return ()

    def is_after(self, device: str, generation: Generation) -> bool:
        """Has it told that it has entered a later one, which is not this?"""
        where = self._heard.get(device)
        return where is not None and ballot(where.generation) > ballot(generation)

    def based(self, generation: Generation) -> Where | None:
        """The best of the others that are heard of, of those whose base is there."""
        best: Where | None = None
        for where in self._heard.values():
            other = where.based and where.generation != generation
            if other and (best is None or _better(where, best)):
                best = where
        return best

    def came_in(self, now_s: float) -> None:
        """Rounds go on with this device."""
        if self._in_since_s is None:
            self._in_since_s = now_s

    def left(self, now_s: float, timeouts: Timeouts) -> None:
        """Out (again): only a long time inside makes the next wait short."""
        if self._in_since_s is not None and now_s - self._in_since_s >= STEADY_S:
            self._tries = self._failures = 0
        self._in_since_s = None
        self._named = set()
        self.ask_at_s = now_s + timeouts.ask_s(self._tries, self._failures)

    def failed(self) -> None:
        """It was taken in, for which all others stood still, and could not begin: the next time will be later."""
        self._failures += 1

    def target(self, links: MemberLinks) -> tuple[tuple[str, ...], str]:
        """Whom to ask now, and why nobody if so.

        All members of the best generation heard of, once all of them are linked: before, they could not take it in.
        Those that are there as another incarnation have ended, and are missed by nobody.
        """
        best: Where | None = None
        for device, where in self._heard.items():
            if device in links and (best is None or _better(where, best)):
                best = where
        if best is None:
            devices = tuple(sorted(device for device in self._known if device in links))
            return devices, "" if devices else "no link to any member"
        live = [member for member in best.generation.live.values() if member.device != self._me]
        others = [member for member in live if links.holds(member) or member.device not in links]
        for member in others:
            if not links.holds(member):
                return (), f"no link to {member.name}, a member of generation {best.generation.number}"
        return tuple(member.device for member in others), ""

    def asks_now(self, links: MemberLinks, now_s: float) -> bool:
        """Is it time, or are there links to members of which those that were asked do not know yet?"""
        more = {device for device in self._known if device in links} - self._named
        return now_s >= self.ask_at_s or (bool(self._named) and bool(more))

    def asked(self, devices: Collection[str], linked: Collection[str], now_s: float, timeouts: Timeouts) -> None:
        """They were told who is linked. They answer by a proposal, or by saying anew where they are; what they said
        before counts no more."""
        for device in devices:
            self.forget(device)
        if now_s >= self.ask_at_s:
            self._named = set()
            self._tries += 1
            self.ask_at_s = now_s + timeouts.ask_s(self._tries, self._failures)
        self._named |= {*linked}


def _better(where: Where, best: Where) -> bool:
    if where.based != best.based:
        return where.based
    match relation(best.generation, best.ancestors, where.generation, where.ancestors):
        case Relation.NEWER:
            return True
        case Relation.PARTED:
            return keeps_history(where.generation, where.samples, best.generation, best.samples)
    return False
