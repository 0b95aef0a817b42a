"""One daemon of the cluster: the shells that ship, on its own loop, put together as a session does it."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshtraind.recovery.checkpointer import Checkpointer
from meshtraind.recovery.hub_states import HubStates
from meshtraind.recovery.state_donor import StateDonor
from meshtraind.rounds.history import Entry
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session.barriers import Barriers
from meshtraind.session.invitations import Inviter
from meshtraind.session.learner_handler import LearnerHandler
from meshtraind.session.member_handler import MemberHandler
from meshtraind.session.membership_driver import MembershipDriver
from meshtraind.session.membership_host import JobPlace, MembershipHost
from meshtraind.storage.job_record import Job
from meshtraind.transport.requests import RequestFailed
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import JobRecord, JobState
from meshwire.membership.effects import MembershipPhase
from meshwire.membership.lineage import rank_of
from meshwire.membership.machine import Membership
from meshwire.membership.proposal_checks import change_refusal
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope
from meshwire.messages.generation import CatchUp
from meshwire.messages.job import BaseHash, Generation, GivenUp, Member
from meshwire.messages.link import Software
from meshwire.rounds.effects import Message
from meshwire.sync_modes.settings_changes import SettingsWish, newest_codec, newest_sync
from tests.sim.clusterconnection import LinkEnd
from tests.sim.clusterdisk import Disk
from tests.sim.clusterexchange import Chunk, News
from tests.sim.clusterlearner import Learner
from tests.sim.clusternetwork import Event, Link, Node, Wake
from tests.sim.clusterprocesses import Figures, LearnerProcesses
from tests.sim.clusterrounds import SimulatedRounds, WatchedRounds
from tests.sim.clusterwitness import Left, Losses, Witness
from tests.sim.virtualloop import virtual_loop

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

REPORT_S = 1.0
DIAL_S = 0.05
THREAD_S = 0.003  # for what a thread does, such as looking at a disk
SOFTWARE = Software(meshtrain="0", python="3", torch=None, system="none")


@dataclass
class Place:
    """A `meshtraind.session.membership_driver.MemberNode`."""

    device: str
    member: Member
    patience_s: float
    links: dict[str, LinkEnd] = field(default_factory=dict)


class NoDisk:
    """A `meshtraind.storage.job_record.JobRecords` of a device that finds nothing when it is started again."""

    def put(self, record: JobRecord) -> None:
        """Nobody will read it."""


class KnownJob(Job):
    """What is told of rounds that are lost is looked at, and nothing is written down.

    Args:
        members: that this device knows of when it starts.
    """

    def __init__(self, daemon: "Daemon", members: tuple[Member, ...]) -> None:
        rank = [member.device for member in members].index(daemon.member.device)
        super().__init__(daemon.world.spec, members, rank, Path(), NoDisk())
        self._daemon = daemon
        self.on_odd = self._differ

    def _differ(self, round_: int, ranks: set[int]) -> None:
        """O9: equal rounds make equal bases, and only bases of one history are compared."""
        raise AssertionError(f"{self._daemon.name} finds that the bases of {ranks} differ after round {round_}")

    def remember(self) -> None:
        """It will have lost its disk."""

    def drop_out(self) -> None:
        super().drop_out()
        self._daemon.was_left_out()

    def take_given_up(self, news: Iterable[GivenUp]) -> None:
        for one in news:
            if not self._daemon.ended:
                self._daemon.losses.told(one)
        super().take_given_up(news)


class Daemon(Node):
    """One process.

    Args:
        generation: the first one of the job; None for a device that asks to be taken in.

    Attributes:
        round_links: to each other member of the generation, by rank; kept up to date by the shell.
        processes: of its learner.
        why_left: the reason for which it leaves its history, or has left the last one.
    """

    job: KnownJob | None  # and from then on all that follows
    barriers: Barriers
    maker: SimulatedRounds
    handler: LearnerHandler
    donor: StateDonor
    checkpointer: Checkpointer
    host: MembershipHost[LinkEnd]
    members: MemberHandler

    def __init__(self, world: "Cluster", number: int, incarnation: int, generation: Generation | None) -> None:
        super().__init__(number)
        self.world = world
        self.loop = virtual_loop(world.clock, self, THREAD_S)
        self.is_hub = world.is_hub(number)
        self.member = member_of(number, incarnation, hub=self.is_hub)
        self.name = self.member.name
        self.place = Place(self.member.device, self.member, world.setting.patience_s)
        self.tasks = TaskSet(self.name, self._task_failed)
        self.losses = Losses(self)
        self.disk = Disk(self)
        self.processes = LearnerProcesses(self)
        self.ended = False
        self.leaving = False
        self.has_left = False  # its history; what is given up of that is being saved
        self.left_out = 0
        self.heard: dict[int, Generation] = {}  # that others have told of, by hash
        self.why_left = ""
        self.woke_s = 0.0
        self.round_links: dict[int, LinkEnd] = {}
        self._going_back: WatchedRounds | None = None  # whose history is left for a state that was saved
        self.job = None
        self._begin(generation)
        self.later(world.random.uniform(0.0, REPORT_S), self._report_regularly)

    def _begin(self, generation: Generation | None) -> None:
        """It takes part in the job from now on."""
        self.happen(partial(self._take_part, generation))

    def _take_part(self, generation: Generation | None) -> None:
        job = self.job = KnownJob(self, self._knows() if generation is None else generation.members)
        if generation is not None:
            job.take(generation, generation.trainers)
        rtt_s, disk, tasks, processes = self.world.setting.rtt_s, self.disk, self.tasks, self.processes
        self.barriers = Barriers(job, self._tells)
        self.maker = SimulatedRounds(self)
        self.handler = handler = LearnerHandler(job, self.barriers, Figures(), processes, tasks)
        saving = HubStates(job.spec.job, self, disk.states) if self.is_hub else handler.states
        self.checkpointer = Checkpointer(job, disk.checkpoints, SOFTWARE, saving, tasks, self.maker.model)
        self.donor = StateDonor(job, disk.states, handler, self.checkpointer, tasks)
        place = JobPlace(self.place, job, self.round_links, rtt_s, tasks, disk.states, Witness(self))
        self.host = MembershipHost(place, handler, self.barriers, self.donor, self.checkpointer, self.maker, processes)
        self.members = MemberHandler(job, self.barriers, self.host, processes)
        if self.world.invites:
            job.state = JobState.RUNNING
            tasks.spawn(Inviter(self.place, job, self.world.members_max, self.host, tasks).run(), "invite")
        if generation is None:
            tasks.spawn(self.host.come_back(), "come back")
        else:
            self.host.begin_with_all()

    def _tells(self, rank: int, message: Wire) -> None:
        raise AssertionError(f"{self.name}: no learner here enters a barrier: {message} to rank {rank}")

    @property
    def donors(self) -> Sequence[LinkEnd]:
        """The way to the members whose learners compute."""
        return self.host.computing

    @property
    def known_job(self) -> KnownJob:
        """In which it takes part."""
        assert self.job is not None, "it knows of none"
        return self.job

    @property
    def rounds(self) -> WatchedRounds | None:
        """The rounds of the history that it has; None while it has none, or leaves one."""
        watched = None if self.job is None else self.maker.watched
        return watched if watched is not None and self.host.rounds is watched.shipped else None

    @property
    def founding(self) -> bool:
        """It is to begin the job with the others (G9): there is nothing yet that could be lost."""
        return self.job is not None and self.host.founding

    @property
    def has_history(self) -> bool:
        """That others could go on with, were it only that of the beginning."""
        return self.rounds is not None or self.founding

    @property
    def _shell(self) -> MembershipDriver[LinkEnd] | None:
        return None if self.job is None else self.host.generations

    def _knows(self) -> tuple[Member, ...]:
        """Who is or was in the job, when this device asks in: as the process of before knew."""
        before = next((one.job for one in self.world.daemons if one.number == self.number), None)
        if before is not None:
            return before.members
        return tuple(member_of(other, 0, hub=self.world.is_hub(other)) for other in range(self.world.devices))

    @property
    def driver(self) -> MembershipDriver[LinkEnd]:
        """The shell of its membership."""
        assert self._shell is not None, "it is not in the job"
        return self._shell

    @property
    def machine(self) -> Membership:
        """What it decides by."""
        return self.driver.machine

    @property
    def is_in(self) -> bool:
        """It takes part in the job, or asks to."""
        return self._shell is not None

    def knows_gone(self, life: tuple[str, int]) -> bool:
        """Whether this device, with this incarnation, is known to have ended."""
        return self._shell is not None and life in self.machine._state._gone

    @property
    def generation(self) -> Generation | None:
        """The newest that it has entered."""
        return None if self.job is None else self.job.generation

    @property
    def rank(self) -> int:
        assert self.generation is not None
        rank = rank_of(self.generation, self.member.device)
        assert rank is not None
        return rank

    # Its loop

    def happen(self, event: Event) -> None:
        """All that befalls this process passes here: its timers and tasks, the network, its learner."""
        self.loop.run(event)
        if self.loop.faults:
            raise self.loop.faults[0]["exception"]

    def _task_failed(self, name: str, error: BaseException) -> None:
        raise error

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        """On this very process, when it is awake."""
        self.world.clock.at(delay_s, partial(self.do, event))

    def end(self) -> None:
        """It is killed, or the cluster is looked at no more."""
        self.ended = True
        if self._shell is not None:
            self.loop.run(self._shell.close)
        self.loop.end()

    def wake(self, order: Wake) -> None:
        """It knows that it slept before it hears anything."""
        if self.asleep:
            self.woke_s = self.world.now_s
        if self.asleep and self._shell is not None:
            self.happen(self._shell.away)
        super().wake(order)

    # The job

    def found(self) -> None:
        """The job begins, with this member and its learner."""
        assert self.generation is not None
        for rank, member in self.generation.live.items():
            if member.device in self.place.links:
                self.round_links[rank] = self.place.links[member.device]
        self.processes.found()

    def learner_ended(self) -> None:
        """By its daemon's word: its history is left, and these rounds are closed, or are about to be."""
        self._going_back = self.rounds

    def loads(self, entry: Entry) -> None:
        """It takes part from the cut on; perhaps all go back."""
        before, self._going_back = self._going_back, None
        self.has_left = False
        if entry.anew:
            if before is not None:
                history = before.history
                self.losses.leave(Left(history.chain, history.complete, entry.complete, 0, apart=False))
            self.world.went_back(self, before, entry)

    # Links

    def linked(self, peer: Node, link: Link) -> None:
        assert isinstance(peer, Daemon)
        self.place.links[peer.member.device] = LinkEnd(
            self.world.network, link, self, peer.member, self.world.setting.measured_s
        )
        if self._shell is not None:
            self.world.tell(self.name, f"is linked to {peer.name}")
            self._shell.link_made(peer.member.device, peer.member.incarnation)

    def unlinked(self, peer: Node, link: Link, reason: str) -> None:
        assert isinstance(peer, Daemon)
        self.loop.run(partial(self._unlinked, peer, link, reason))

    def _unlinked(self, peer: "Daemon", link: Link, reason: str) -> None:
        device = peer.member.device
        end = self.place.links.get(device)
        if end is not None and end.link is link:
            del self.place.links[device]
            end.lost(reason)
        if peer.number not in self.links and self._shell is not None:
            self.world.tell(self.name, f"has lost its link to {peer.name}: {reason}")
            self._shell.link_lost(device, reason)
            if reason == "closed":
                self.later(DIAL_S, partial(self._dial_again, peer))

    def _dial_again(self, peer: "Daemon") -> None:
        """Whoever closed, this side did not: if nobody listens there any more, that process is gone."""
        refused = self.world.network.refuses(self.number, peer)
        if peer.number not in self.links and refused and self._shell is not None:
            self._shell.gone(peer.member.device, peer.member.incarnation)

    def received(self, peer: Node, link: Link, body: object) -> None:
        assert isinstance(peer, Daemon)
        if isinstance(body, Envelope):
            self.place.links[peer.member.device].received(body)
        elif self._shell is not None:
            self._hear(peer, self._shell, body)

    def _hear(self, peer: "Daemon", shell: MembershipDriver[LinkEnd], body: object) -> None:
        if not isinstance(body, News | Chunk):
            shell.notice(peer.member.device, body)  # type: ignore[arg-type]
        elif self.generation is not None and (self.rounds is not None or self.founding):
            of_rounds = isinstance(body, Chunk) or isinstance(body.message, Message)
            own = None if self.rounds is None else self.rounds.generation
            early = body.generation != own and shell.promised(body.generation) and not self.founding
            assert not (of_rounds and early), "nobody sends in a generation before all have entered it"
            rank = rank_of(self.generation, peer.member.device)
            if rank is not None:
                self._hear_member(rank, body)
        self.world.check(self)

    def _hear_member(self, rank: int, body: News | Chunk) -> None:
        """As `meshtraind.jobs.routing` hands it on."""
        rule = f"{self.name}: honest daemons break no rule: rank {rank}"
        if isinstance(body, News):
            header = Header(kind=Kind.CONTROL, payload_bytes=0, generation=body.generation, complete=body.complete)
            wrong = self.members.notice(rank, header, body.message or self.world.report_of(rank))
            assert wrong is None, f"{rule}: {wrong}"
            return
        place = self.members.chunk_announced(rank, body.header)
        assert not isinstance(place, str), f"{rule} sent a {place}"
        if place is not None:
            place[:] = body.payload
            self.members.chunk_received(rank, body.header)

    def hear_hash(self, peer: "Daemon", header: Header, message: BaseHash) -> None:
        """O9: of a member's base, if there is a link to it still."""
        rank = None if self.generation is None else rank_of(self.generation, peer.member.device)
        if rank is not None and peer.member.device in self.place.links:
            wrong = self.members.notice(rank, header, message)
            assert wrong is None, f"{self.name}: honest daemons break no rule: rank {rank}: {wrong}"

    def _report_regularly(self) -> None:
        if self._shell is not None:
            self.report()
            self.world.note_base(self)
            self._shell.progress()
        self.later(REPORT_S, self._report_regularly)

    def report(self) -> None:
        """G5: every member is told how far this one is."""
        if self.rounds is not None and self.generation is not None:
            self.rounds.shipped.peer_measured(self.world.report_of(self.rank))
            news = News(self.generation.hash64(), self.rounds.shipped.complete, None)
            for end in self.round_links.values():
                end.send(news)

    # What others ask

    async def asked(self, device: str, body: object) -> object:
        """What another device wants to know. Raises RequestFailed."""
        if self._shell is None:
            raise RequestFailed(f"{self.name} has no history")
        generation = None if self.rounds is None else self.rounds.generation
        try:
            return await self.host.asked(device, body)  # type: ignore[arg-type]
        except RequestFailed as error:
            if isinstance(body, CatchUp) and body.generation == generation and "not kept here" in str(error):
                raise AssertionError(f"G5: a member of {self.name}'s generation lacks a round: {error}") from error
            raise

    # Its place in the job

    def wish_leave(self) -> None:
        """`meshtrain leave`, where somebody else can go on, or a hub keeps the state."""
        if self.rounds is not None and not self.leaving:
            self.leaving = True
            self.tasks.spawn(self._leave(), "leave")

    def ask_settings(self, wish: SettingsWish) -> None:
        """`meshtrain change`, where there are rounds, they can go by that, and do not go by it."""
        if not self.is_in or self.rounds is None or self.leaving:
            return
        generations = self.host.generations
        assert generations is not None
        changes, spec = self.rounds.history.changes, self.world.spec
        codec, period = newest_codec(spec.codec, changes), newest_sync(spec.sync, changes).period
        in_force = wish.codec in (None, codec) and wish.period in (None, period)
        if not in_force and change_refusal(spec, wish) is None:
            self.world.tell(self.name, f"is asked for {wish.text()}")
            generations.ask_settings(wish)

    async def _leave(self) -> None:
        self.leaving = self.host.may_leave or await self.host.hand_over()
        if not self.leaving:
            return
        await self.host.leave()
        self.later(0.0, partial(self.world.kill, self, "has left"))

    def stop(self) -> None:
        """`meshtrain down` of the last laptop: its hubs are given the state, and the process ends."""
        self.tasks.spawn(self._stop(), "stop")

    async def _stop(self) -> None:
        await asyncio.gather(self.host.hand_over(), self.host.save())
        self.later(0.0, partial(self.world.kill, self, "is stopped"))

    def was_left_out(self) -> None:
        """The others go on without it."""
        self.world.tell(self.name, f"is left out: {self.why_left}")
        self.left_out += 1

    def turned_away(self, reason: str) -> None:
        """There is no room for it any more."""
        raise AssertionError(f"{self.name} was in the job: {reason}")

    @property
    def based(self) -> Collection[bytes]:
        """The chain ids of its history, if its learner computes with the base; none of a dead one's."""
        rounds, generation = self.rounds, self.generation
        computes = rounds is not None and generation is not None and self.rank in generation.learning
        return {*self.world.histories.path(rounds.history.chain)} if rounds and computes and self.alive else ()

    @property
    def holds_base(self) -> bool:
        """A learner's process, or the memory that it has left, holds the model of this history, which it has not
        left."""
        return self.alive and self.rounds is not None and not self.has_left and self.host.holding().base

    @property
    def computes(self) -> bool:
        """It runs in a generation in which its learner computes."""
        if not self.is_in:
            return False
        generation = self.machine.generation
        runs = self.machine.phase is MembershipPhase.RUNNING and generation is not None
        if self.is_hub or not runs:
            return runs and self.rounds is not None
        running = generation is not None and self.rank in generation.learning
        return running and self.learner is not None and self.learner.rounds is not None

    @property
    def learner(self) -> Learner | None:
        """Its process, once that has called."""
        return None if self.job is None else self.processes.learner


def device_of(number: int) -> str:
    """The device id of a daemon."""
    return f"{number + 1:064x}"


def member_of(number: int, incarnation: int, *, hub: bool = False) -> Member:
    """How a generation lists it."""
    return Member(device=device_of(number), incarnation=incarnation, name=f"peer{number}", hub=hub)
