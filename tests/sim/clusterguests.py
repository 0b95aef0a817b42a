"""Late invitations in the virtual cluster (J1): devices that were never in the job, and the members that ask them.

Whom to ask, and when, is decided and done by what ships (`meshtraind.session.invitations`). What a device answers is
`meshtraind.jobs.admission`, without files: they take a while.
"""

import asyncio

from meshtraind.transport.requests import RequestFailed
from meshwire.messages.generation import Enter, Invite
from meshwire.messages.job import Generation, Member, OfferReply
from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterdaemon import Daemon

FILES_S = 1.5


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
        return self.job is not None

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
        return OfferReply(refusal=None)

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
        self.host.close()
        self.job = None


class InvitingCluster(Cluster):
    """A job of `submit --peers N:MAX`.

    Args:
        strangers: devices beyond the founders, which are in no job when they start.
        members_max: MAX.
    """

    invites = True

    def __init__(
        self, seed: int, setting: Setting, *, strangers: int, members_max: int, recording: bool = False
    ) -> None:
        super().__init__(seed, setting, recording=recording, members_max=members_max)
        for number in range(setting.founders, setting.founders + strangers):
            stranger = Stranger(self, number, next(self._incarnations))
            self.daemons.append(stranger)
            self.network.add(stranger)

    def restart(self, number: int) -> None:
        """Who was a member returns by itself, which a daemon knows of its file; others are asked again."""
        before = self.daemons[number]
        if not before.alive and isinstance(before, Stranger) and before.generation is None:
            stranger = self.daemons[number] = Stranger(self, number, next(self._incarnations))
            self.tell(stranger.name, "is started again")
            self.network.add(stranger)
            return
        super().restart(number)

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
