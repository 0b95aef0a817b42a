"""The process groups of one job on this device: one for all its life, or, with `submit --restart`, one for each of its
worlds, which follow each other (P6).

Which world follows is agreed upon with the generation that it begins in (`meshwire.membership.proposals.next_world`).
"""

from collections.abc import Mapping

from meshtraind.learner.environment import ScriptPlace
from meshtraind.learner.own_groups import meet
from meshtraind.process_group.relay import GroupRelay
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import Connection
from meshwire import limits
from meshwire.messages.group import GroupWorld, WorldHere
from meshwire.messages.job import Generation
from meshwire.peer_news import joined

SURE_TO_FAIL = "it ends by this error whenever it is started: it is not started again"


class Worlds:
    """Whose scripts run together now, and how often they were begun anew.

    Args:
        links: the connection to each other member, by rank; live.

    Attributes:
        world: of now; None in a job that does not restart its scripts, and before this device is taken in.
        group: serves its process group.
        begun: number of the newest world whose script was to be started here.
        broken: why it cannot go on, if the reason is here.
        runs: number of the newest world whose script was started here.
    """

    def __init__(self, job: Job, links: Mapping[int, Connection]) -> None:
        self._job = job
        self._links = links
        self.world: GroupWorld | None = None
        self.group = GroupRelay(job, links)
        self.begun = 0
        self.runs = 0
        self._said = ""
        self.broken: str | None = None

    @property
    def _most(self) -> int:
        return self._job.spec.restarts_max or 0

    def found(self, generation: Generation) -> None:
        """The job begins in this generation, with the scripts of all."""
        if self._job.spec.restarts_max is not None:
            self.world = GroupWorld(number=generation.number, restarts=0, ranks=generation.ranks)
            self.group = GroupRelay(self._job, self._links, self.world)
            self.begun = generation.number

    def enter(self, world: GroupWorld) -> str | None:
        """All have agreed on this world. Returns what people are told; None: it is the one of now, which goes on."""
        if world == self.world:
            return None
        said = self._sentence(world)
        self.group.stop(said)
        self.group.close(said)
        self.world, self.broken, self._said = world, None, said
        self.group = GroupRelay(self._job, self._links, world, used=self.group.used)
        return said

    def _sentence(self, world: GroupWorld) -> str:
        counted = self.world is not None and world.restarts > self.world.restarts
        if world.restarts > self._most:
            return f"{world.why}, and --restart {self._most} is used up"
        names = joined([self._job.members[rank].name for rank in world.ranks]) or "nobody: all have ended"
        return f"{world.why}: restarting on {names}{f', {world.restarts} of {self._most}' if counted else ''}"

    def start(self) -> ScriptPlace:
        """The script of this world is started: who it is there. Raises NoMeetingError (P9)."""
        if self.world is None:
            meeting = meet(self._job, self._links) if self._job.spec.engine == "torchrun" else None
            return ScriptPlace(self._job.rank, len(self._job.members), meeting=meeting)
        self.runs = self.world.number
        return ScriptPlace(self.group.place, len(self.world.ranks), self.world.restarts, self._most, self._said)

    @property
    def is_between(self) -> bool:
        """Whether a process that runs here is of a world that has ended."""
        return self.world is not None and self.runs != self.world.number

    @property
    def used_up(self) -> bool:
        """Whether no failure is followed by another world."""
        return self.world is not None and self.world.restarts >= self._most

    @property
    def is_over(self) -> bool:
        """Whether more has failed than may."""
        return self.world is not None and self.world.restarts > self._most

    def here(self, *, done: bool) -> WorldHere | None:
        """What this device says of it when another generation is promised. `done`: its script has ended well."""
        if self.world is None:
            return None
        broken = self.broken or self.group.loss
        return WorldHere(
            world=self.world, broken=None if broken is None else broken[: limits.REASON_CHARS_MAX], done=done
        )
