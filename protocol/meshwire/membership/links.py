"""The links of one daemon as its membership sees them: who is there, and since when somebody is missed."""

from collections.abc import Iterable, Iterator

from meshwire.messages.job import Generation, Member


class MemberLinks:
    """Live links by device, with the incarnation at the other end (G1)."""

    def __init__(self, me: Member) -> None:
        self._me = me
        self._up: dict[str, int] = {}
        self._suspect_at_s: dict[str, float] = {}  # of devices that are missed
        self._reasons: dict[str, str] = {}  # why their links are gone

    def __contains__(self, device: str) -> bool:
        return device in self._up

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._up))

    def opened(self, device: str, incarnation: int) -> None:
        """A link is up, new or in place of another."""
        self._up[device] = incarnation
        self._suspect_at_s.pop(device, None)
        self._reasons.pop(device, None)

    def closed(self, device: str, reason: str, suspect_at_s: float) -> None:
        """The link is gone; from `suspect_at_s` on its device is taken for lost."""
        if self._up.pop(device, None) is not None:
            self._suspect_at_s[device] = suspect_at_s
            self._reasons[device] = reason

    def expect(self, generation: Generation, suspect_at_s: float) -> None:
        """Members that were never linked are missed from now on."""
        for member in generation.live.values():
            if not self.holds(member):
                self._suspect_at_s.setdefault(member.device, suspect_at_s)

    def holds(self, member: Member) -> bool:
        """Is this member there, in this very incarnation?"""
        return self.leads_to(member.device, member.incarnation)

    def leads_to(self, device: str, incarnation: int | None) -> bool:
        """Is this device there, in this very incarnation? The own one is."""
        here = self._me.incarnation if device == self._me.device else self._up.get(device)
        return here is not None and here == incarnation

    def incarnation(self, device: str) -> int:
        """At the other end of the link to it. Raises KeyError if there is none."""
        return self._up[device]

    def suspect_at_s(self, member: Member) -> float:
        """When an absent member is taken for lost: at once if its device is there in another incarnation (G1)."""
        if member.device in self._up or member.device == self._me.device:
            return float("-inf")
        return self._suspect_at_s.get(member.device, float("-inf"))

    def missing(self, members: Iterable[Member]) -> str:
        """For people: to whom there is no link, and why."""
        return "no link to " + ", ".join(
            member.name + (f" ({reason})" if (reason := self._reasons.get(member.device)) else "") for member in members
        )

    def ranks(self, generation: Generation) -> tuple[int, ...]:
        """Of the members of `generation` that are linked, without the own one."""
        live = generation.live.items()
        return tuple(rank for rank, member in live if member.device != self._me.device and self.holds(member))
