"""Late invitations in the virtual cluster (J1): devices that were never in the job, and the members that ask them.

The machine that decides whom to ask is the real one (`meshwire.membership.invitations`). What a device answers is
`meshtraind.jobs.admission`, without files: they take a while.
"""

import asyncio
from dataclasses import dataclass
from functools import partial

from meshtraind.transport.requests import RequestFailed
from meshwire.membership.invitations import Invitations
from meshwire.messages.generation import Enter
from meshwire.messages.job import Generation, Member
from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterdaemon import Answer, Daemon

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
        self._fetching: asyncio.Task[None] | None = None
        self._invited_to: tuple[Member, ...] = ()
        super().__init__(world, number, incarnation, None)

    def _begin(self, generation: Generation | None) -> None:
        """It knows of no job."""

    @property
    def joins(self) -> bool:
        return self._shell is not None

    async def asked(self, device: str, body: object) -> object:
        """Raises RequestFailed."""
        if not isinstance(body, Invite):
            return await super().asked(device, body)
        here = {end.hello for end in self.place.links.values()}
        if unlinked := [member.name for member in body.generation.live.values() if member not in here]:
            raise RequestFailed(f"{self.name} has no link to {', '.join(unlinked)}")
        if not self.joins:
            if self._fetching is None:
                self._fetching = self.tasks.spawn(self._join(body.generation), "join")
            await asyncio.wait({self._fetching})
        return WillJoin()

    async def _join(self, generation: Generation) -> None:
        self.world.tell(self.name, "is asked to join, and fetches the job's files")
        await asyncio.sleep(FILES_S)
        self.world.tell(self.name, "joins")
        known = {member.device: member for member in (*generation.members, self.member)}
        self._invited_to = tuple(known.values())
        self._take_part(None)
        self._fetching = None

    def _knows(self) -> tuple[Member, ...]:
        return self._invited_to

    def turned_away(self, reason: str) -> None:
        """The job ends here alone, and may ask again."""
        self.world.tell(self.name, f"is turned away: {reason}")
        self.driver.close()
        self._shell = None


class InvitingCluster(Cluster):
    """A job of `submit --peers N:MAX`.

    Args:
        strangers: devices beyond the founders, which are in no job when they start.
        members_max: MAX.
    """

    def __init__(
        self, seed: int, setting: Setting, *, strangers: int, members_max: int, recording: bool = False
    ) -> None:
        super().__init__(seed, setting, recording=recording, members_max=members_max)
        self._guests: dict[Daemon, Invitations] = {}
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

    def _look(self) -> None:
        for daemon in self.daemons:
            generation, rounds = daemon.generation, daemon.rounds
            if generation is not None and rounds is not None and rounds.machine.complete > 0:
                daemon.do(partial(self._invite, daemon, generation))
        self.clock.at(LOOK_S, self._look)

    def _invite(self, daemon: Daemon, generation: Generation) -> None:
        guests = self._guests.setdefault(daemon, Invitations(self.members_max, self.timeouts))
        links = {device: end.hello.incarnation for device, end in daemon.place.links.items()}
        for device in guests.due(generation, links, self.now_s):
            took = partial(self._answered, guests, device)
            daemon.ask(daemon.place.links[device], Invite(generation), INVITATION_TIMEOUT_S, took)

    def _answered(self, guests: Invitations, device: str, answer: Answer) -> None:
        if answer is None:
            guests.unanswered(device)
        else:
            why_not = str(answer) if isinstance(answer, RequestFailed) else None
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
