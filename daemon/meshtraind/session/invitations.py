"""Asks devices that were paired, or have woken up, to join a job that runs (`submit --peers N:MAX`)."""

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from meshtraind.runtime.tasks import TaskSet
from meshtraind.session.membership_driver import MemberNode
from meshtraind.storage.job_record import Job
from meshtraind.transport.messenger import Messenger
from meshtraind.transport.requests import ConnectionEnded, RequestFailed
from meshwire.jobs.lifecycle import JobState
from meshwire.membership.invitations import Invitations
from meshwire.membership.lineage import rank_of
from meshwire.messages.generation import Invite
from meshwire.messages.job import Generation, OfferReply
from meshwire.messages.learner import SampleSpace
from meshwire.samples.epochs import members_most
from meshwire.timeouts import Timeouts

if TYPE_CHECKING:
    from meshtraind.rounds.driver import Rounds

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
FILES_TIMEOUT_S = 7 * 86400.0  # a large data folder takes days; a transfer that stands still ends long before


class HasRounds(Protocol):
    """Whoever knows the rounds of this member."""

    @property
    def rounds(self) -> "Rounds | None":
        """None while there are none."""


class Inviter:
    """Asks, for one member of one job, linked devices that were never in it to join; it ends with `tasks`.

    Args:
        member: nobody is asked before the first of its rounds is complete: there is no state to give.
    """

    def __init__(
        self, node: MemberNode[Messenger], job: Job, peers_max: int, member: HasRounds, tasks: TaskSet
    ) -> None:
        self._node = node
        self._job = job
        self._peers_max = peers_max
        self._member = member
        self._tasks = tasks
        self._invitations = Invitations(peers_max, Timeouts(node.patience_s))
        self._too_many: str | None = None  # why it takes fewer devices than it may

    @property
    def asked(self) -> tuple[str, ...]:
        """The devices that are about to join: they want to know when the job ends."""
        return self._invitations.asked

    async def run(self) -> None:
        """For the job's whole life."""
        loop = asyncio.get_running_loop()
        while True:
            generation, rounds = self._job.generation, self._member.rounds
            has_begun = rounds is not None and rounds.complete > 0
            if generation is not None and rounds is not None and has_begun and self._job.state is JobState.RUNNING:
                if rounds.sample_space is not None:
                    self._limit(rounds.sample_space)
                able = {device: link for device, link in self._node.links.items() if not link.hello.hub}
                links = {device: link.hello.incarnation for device, link in able.items()}
                for device in self._invitations.due(generation, links, loop.time()):
                    self._tasks.spawn(self._ask(device, generation), f"invite {device[:8]}")
                self._tell(generation)
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _limit(self, samples: SampleSpace) -> None:
        """X4: each member needs a sample in every round. With more of them no newcomer's script could prepare its
        loader."""
        most = members_most(samples.total, samples.batch, drop_last=samples.drop_last)
        self._invitations.members_max = min(self._peers_max, most)
        self._too_many = f"the job's data is enough for {most} devices" if most < self._peers_max else None

    async def _ask(self, device: str, generation: Generation) -> None:
        link = self._node.links.get(device)
        if link is None:
            self._invitations.unanswered(device)
            return
        spec, name = self._job.spec, link.hello.name
        invite = Invite(spec=spec, generation=generation)
        try:
            reply = await link.connection.request(invite, timeout_s=FILES_TIMEOUT_S, name=f"invitation of {name}")
        except ConnectionEnded:
            self._invitations.unanswered(device)
            return
        except (RequestFailed, TimeoutError) as error:
            why_not: str | None = str(error)
        else:
            unknown = f"it answered an invitation with {type(reply).__name__}"
            why_not = reply.refusal if isinstance(reply, OfferReply) else unknown
        news = self._invitations.answered(device, why_not, asyncio.get_running_loop().time())
        if why_not is None:
            log.info("job %s: %s has the files and will join", spec.job, name)
        elif news:
            log.warning("job %s: %s does not join: %s; it is asked again", spec.job, name, why_not)
        self._tell(generation)

    def _tell(self, generation: Generation) -> None:
        links, refusals = self._node.links, dict(self._invitations.refusals)
        if self._too_many is not None and len(generation.members) >= self._invitations.members_max:
            refusals = {device: self._too_many for device in links if rank_of(generation, device) is None}
        self._job.not_joining = tuple(
            (links[device].hello.name, why) for device, why in refusals.items() if device in links
        )
