"""Late invitations in the virtual cluster (J1): devices that were never in the job, and the members that ask them.

The machine that decides whom to ask is the real one (`meshwire.membership.invitations`). What a device answers is
`meshtraind.jobs.admission`, without files: they take a while.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from meshwire.membership.effects import Effect, TurnedAway
from meshwire.membership.invitations import Invitations
from meshwire.membership.machine import Membership
from meshwire.messages.generation import Enter
from meshwire.messages.job import Generation
from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterdaemon import Daemon, device_of
from tests.sim.clusternetwork import Link, Node
from tests.sim.clusterrequests import Answer, CannotAnswer, Reply, Request

LOOK_S = 0.5
FILES_S = 1.5
INVITATION_TIMEOUT_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Invite:
    """`meshwire.messages.generation.Invite`; the answer is `WillJoin`, or why it does not."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class WillJoin:
    """It has the files."""


class Stranger(Daemon):
    """A device that is linked to the members and has never been in the job, until it was asked and has the files."""

    world: "InvitingCluster"

    def __init__(self, world: "InvitingCluster", number: int, incarnation: int) -> None:
        self.joins = False
        self._asked: list[Callable[[Answer], None]] = []
        super().__init__(world, number, incarnation, None)

    def linked(self, peer: Node, link: Link) -> None:
        if self.joins:
            super().linked(peer, link)

    def unlinked(self, peer: Node, link: Link, reason: str) -> None:
        if self.joins:
            super().unlinked(peer, link, reason)
        else:
            self.requests.lost(link)

    def received(self, peer: Node, link: Link, body: object) -> None:
        if self.joins or isinstance(body, Request | Reply):
            super().received(peer, link, body)

    def _answer(self, what: object, reply: Callable[[Answer], None]) -> None:
        if not isinstance(what, Invite):
            super()._answer(what, reply)
            return
        live = what.generation.live.values()
        here = {peer.member for link in self.links.values() if isinstance(peer := link.other(self), Daemon)}
        if unlinked := [member.name for member in live if member not in here]:
            reply(CannotAnswer(f"{self.name} has no link to {', '.join(unlinked)}"))
        elif self.joins:
            reply(WillJoin())
        else:
            self._asked.append(reply)
            if len(self._asked) == 1:
                self.world.tell(self.name, "is asked to join, and fetches the job's files")
                self.later(FILES_S, partial(self._join, what.generation))

    def _join(self, generation: Generation) -> None:
        self.world.tell(self.name, "joins")
        self.joins = True
        known = [*(member.device for member in generation.members), self.member.device]
        world = self.world
        self.machine = Membership(
            self.member, world.job, world.timeouts, world.now_s, known=known, members_max=world.members_max
        )
        for link in self.links.values():
            super().linked(link.other(self), link)
        asked, self._asked = self._asked, []
        for reply in asked:
            reply(WillJoin())

    def _perform_one(self, effect: Effect) -> None:
        if isinstance(effect, TurnedAway):
            self.world.tell(self.name, f"is turned away: {effect.reason}")
            self.joins = False
        else:
            super()._perform_one(effect)


class InvitingCluster(Cluster):
    """A job of `submit --peers N:MAX`.

    Args:
        strangers: devices beyond the founders, which are in no job when they start.
        members_max: MAX.
    """

    def __init__(
        self, seed: int, setting: Setting, *, strangers: int, members_max: int, recording: bool = False
    ) -> None:
        super().__init__(seed, setting, recording=recording)
        self.members_max = members_max
        self._guests: dict[Daemon, Invitations] = {}
        for daemon in self.daemons:
            daemon.machine._state.members_max = members_max
        for number in range(setting.founders, setting.founders + strangers):
            stranger = Stranger(self, number, next(self._incarnations))
            self.daemons.append(stranger)
            self.network.add(stranger)
        self.clock.at(LOOK_S, self._look)

    def restart(self, number: int) -> None:
        """Who was a member returns by itself, which a daemon knows of its file; others are asked again."""
        before = self.daemons[number]
        if not before.alive and isinstance(before, Stranger) and before.generation is None:
            stranger = self.daemons[number] = Stranger(self, number, next(self._incarnations))
            self.tell(stranger.name, "is started again")
            self.network.add(stranger)
            return
        super().restart(number)
        self.daemons[number].machine._state.members_max = self.members_max

    def _look(self) -> None:
        for daemon in self.daemons:
            generation, rounds = daemon.generation, daemon.rounds
            if generation is not None and rounds is not None and rounds.machine.complete > 0:
                daemon.do(partial(self._invite, daemon, generation))
        self.clock.at(LOOK_S, self._look)

    def _invite(self, daemon: Daemon, generation: Generation) -> None:
        guests = self._guests.setdefault(daemon, Invitations(self.members_max, self.timeouts))
        peers = {number: link.other(daemon) for number, link in daemon.links.items()}
        links = {device_of(n): peer.member.incarnation for n, peer in peers.items() if isinstance(peer, Daemon)}
        for device in guests.due(generation, links, self.now_s):
            link = daemon.links[int(device, 16) - 1]
            took = partial(self._answered, guests, device)
            daemon.requests.ask(link, Invite(generation), INVITATION_TIMEOUT_S, took)

    def _answered(self, guests: Invitations, device: str, answer: Answer) -> None:
        if answer is None:
            guests.unanswered(device)
        else:
            why_not = answer.reason if isinstance(answer, CannotAnswer) else None
            guests.answered(device, why_not, self.now_s)

    def entered(self, daemon: Daemon, generation: Generation, enter: Enter) -> None:
        """A generation, at one of its members."""
        assert len(generation.members) <= self.members_max, "no more devices than MAX are ever taken in"
        super().entered(daemon, generation, enter)

    def well(self) -> bool:
        """All that there is room for are in, and compute."""
        outside = [daemon for daemon in self.daemons if isinstance(daemon, Stranger) and not daemon.joins]
        most = max((len(d.generation.members) for d in self.daemons if d.generation is not None), default=0)
        every, self.daemons = self.daemons, [daemon for daemon in self.daemons if daemon not in outside]
        try:
            return super().well() and (not any(one.alive for one in outside) or most == self.members_max)
        finally:
            self.daemons = every
