"""The shell around the membership machine: performs its effects on links, rounds and learner, and owns its timer.

Rounds go on in a generation until a newer one is promised; then they are fenced, brought to the cut, and go on in the
next one. The learner computes through all of it.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from meshtraind.job_start.beginning import JobBeginning
from meshtraind.recovery.given_up_history import Parting, WrittenBase
from meshtraind.rounds.catchup import (
    Beginning,
    FalseRoundError,
    HeldRounds,
    RoundsAtCut,
    fetch_beginning,
    fetch_rounds,
)
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session.membership_recorder import MembershipWitness
from meshtraind.storage.job_record import Job
from meshtraind.transport.messenger import Messenger
from meshtraind.transport.requests import ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.jobs.lifecycle import job_number
from meshwire.jobs.partition_wait import partition_wait_s
from meshwire.membership.effects import (
    CatchUpFrom,
    Effect,
    EnterGeneration,
    Fence,
    HistoryLeft,
    MembershipPhase,
    Message,
    MessageIgnored,
    NobodyLearns,
    Resume,
    Send,
    Shunned,
    TurnedAway,
    WaitingFor,
)
from meshwire.membership.inputs import (
    CannotCatchUp,
    CaughtUpToCut,
    FarthestRoundTrip,
    HoldingLost,
    Input,
    LinkDown,
    LinkUp,
    MessageFrom,
    PeerGone,
    RequestMade,
    RoundsCounted,
    SettingsAsked,
    SteppedOut,
    TimerDue,
    ViolationSeen,
    WasAway,
)
from meshwire.membership.lineage import Path, rank_of
from meshwire.membership.machine import Membership
from meshwire.membership.proposal_checks import changes_wrong
from meshwire.membership.record import MembershipStart
from meshwire.membership.requests import Kind
from meshwire.messages.generation import AskIn, Enter, Holding, PathStep, Promised, Standing, Where
from meshwire.messages.group import WorldHere
from meshwire.messages.job import Generation, GivenUp, Member
from meshwire.sync_modes.settings_changes import SettingsWish
from meshwire.text import printable
from meshwire.timeouts import Timeouts

log = logging.getLogger(__name__)

RTT_S_MIN = 0.001

M_co = TypeVar("M_co", bound=Messenger, covariant=True)
M = TypeVar("M", bound=Messenger)


class Lifetime(Protocol):
    """Which process of a device is meant (G1); `Hello` and `Member` tell."""

    @property
    def incarnation(self) -> int:
        """Unlike that of any other process of this device."""

    @property
    def name(self) -> str:
        """What the device is called, for people."""

    @property
    def hub(self) -> bool:
        """It runs no learner (H1)."""


class MemberLink(Protocol[M_co]):
    """A device that can be talked to now. `meshtraind.peers.links.Link` is one."""

    @property
    def hello(self) -> Lifetime:
        """What the process at the other end has said of itself."""

    @property
    def connection(self) -> M_co:
        """The way to it."""

    @property
    def rtt_s(self) -> float | None:
        """The round trip of now; None before it was measured."""


class MemberNode(Protocol[M_co]):
    """This device among the others, as far as its membership of a job goes. `meshtraind.peers.node.Node` is one."""

    @property
    def device(self) -> str:
        """Its id."""

    @property
    def member(self) -> Member:
        """This very process as a member of a job."""

    @property
    def patience_s(self) -> float:
        """Silence after which a device is lost."""

    @property
    def links(self) -> Mapping[str, MemberLink[M_co]]:
        """By device; live."""


class Crossing(Protocol):
    """What leads this member's part in a job from one generation into the next: its rounds."""

    def fence(self) -> None:
        """G2: from now on nothing of the generation is sent, completed or taken."""

    def standing(self) -> Standing:
        """What is held here."""

    def enter(self, generation: Generation, enter: Enter) -> None:
        """G6: from now on this generation's rounds are taken; those above the cut begin anew."""

    def resume(self, generation: Generation) -> None:
        """All have entered."""


class CrossingRounds(RoundsAtCut, Crossing, Protocol):
    """Rounds while a generation changes. `meshtraind.rounds.generation_change.GenerationChange` is one."""

    def take_in(self) -> None:
        """X3 (what others held is dealt again): the learner that has loaded computes from this generation on."""


class MemberRounds(HeldRounds, Protocol):
    """The rounds of a job as far as its membership concerns them. `meshtraind.rounds.driver.Rounds` is one."""

    @property
    def history_samples(self) -> int:
        """In all complete rounds."""

    @property
    def crossing(self) -> CrossingRounds:
        """Leads all of it from one generation into the next."""

    def note_round_trip(self, rtt_s: float) -> None:
        """As it is now to the farthest member."""


class Host(Protocol):
    """The session, as far as a change of generation concerns it."""

    @property
    def rounds(self) -> MemberRounds | None:
        """None while this member brings no history, and before its learner has prepared."""

    @property
    def crossing(self) -> Crossing | None:
        """None while this member brings no history."""

    @property
    def founding(self) -> bool:
        """Whether the job is at its beginning here: it has gone on in no generation in which learners compute (G9)."""

    @property
    def beginning(self) -> JobBeginning:
        """Where the job has begun."""

    def holding(self) -> Holding:
        """What there is here, beside rounds, to go on from where no learner computes (J3)."""

    def world(self) -> WorldHere | None:
        """Of a job that restarts its scripts: the newest world that this device was in (P6)."""

    def saved_beginning(self, enter: Enter) -> Beginning:
        """The own checkpoint of the cut, to which all go back. Raises RequestFailed when it is gone."""

    def begin_loading(self, generation: Generation, beginning: Beginning) -> None:
        """Makes the rounds of a member without history, or of one that goes back, at the cut. Raises RequestFailed."""

    def samples_at_beginning(self, enter: Enter) -> int | None:
        """Where all go back to where the job has begun: the samples in the rounds up to there. None: somewhere else."""

    def begin_anew(self, generation: Generation) -> None:
        """Drops what there is here: the job is at its beginning again."""

    def entered(self, generation: Generation) -> None:
        """The generation was entered; a loading member may start its learner."""

    def resumed(self) -> None:
        """All members have entered it."""

    async def write_given_up(self) -> WrittenBase:
        """The learner writes the base of a history that is not kept. Its rounds are fenced. Raises RequestFailed,
        CheckpointError, OSError."""

    def left_out(self, reason: str) -> None:
        """The history that this member has is not kept: rounds and learner are dropped."""

    def turned_away(self, reason: str) -> None:
        """This device wanted to join, and there is no room any more."""

    def nobody_learns(self, *, failed: bool) -> None:
        """No member has anything left that a learner could compute with. `failed`: by errors of the script."""


class MembershipDriver(Generic[M]):
    """Drives the membership machine of one job: hands it what happens, performs what it decides, and wakes it in time.

    It begins with the job's first generation, or with this device's return to the job, which then has none yet here.

    Args:
        host: what a change of generation asks of the session.
        links: the connection to each other member of the generation, by rank; kept up to date here.
        rtt_s: to the farthest member, before `progress` says more.
        witness: sees all that the machine is told and decides; None: nobody looks.
    """

    def __init__(
        self,
        node: MemberNode[M],
        job: Job,
        links: dict[int, M],
        host: Host,
        rtt_s: float,
        tasks: TaskSet,
        witness: MembershipWitness | None = None,
    ) -> None:
        self._node = node
        self._job = job
        self._links = links
        self._host = host
        self._tasks = tasks
        self._number = job_number(job.spec.job)
        self._loop = asyncio.get_running_loop()
        start = MembershipStart(
            me=node.member,
            job=job.spec.job,
            timeouts=Timeouts(
                patience_s=node.patience_s,
                rtt_s=max(rtt_s, RTT_S_MIN),
                partition_wait_s=partition_wait_s(job.spec.partition_wait, node.patience_s),
            ),
            now_s=self._loop.time(),
            generation=job.generation,
            known=tuple(member.device for member in job.members),
            members_max=job.spec.peers_max or len(job.members),
        )
        self._machine = start.machine()
        self._witness = witness
        if witness is not None:
            witness.began(start)
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s = 0.0  # for when
        self._catching_up: asyncio.Task[None] | None = None
        self._fenced_at_s: float | None = None
        self._asking: dict[str, AskIn] = {}  # at the beginning, when there is nothing yet that they could be given
        self._enter_of_now: Enter | None = None
        self._closed = False
        self._path = Path()
        self._parting: Parting | None = None  # while this device, out of all generations, saves what is given up
        self._why_out = ""
        if job.generation is not None:
            self._path.entered(job.generation, 0, 0)

    def start(self) -> None:
        """Tells the machine of the links that there are."""
        for device, link in list(self._node.links.items()):
            self.link_made(device, link.hello.incarnation)

    def link_made(self, device: str, incarnation: int) -> None:
        """There is a link to this device, or another one than before."""
        self._asking.pop(device, None)
        self._take(LinkUp(device, incarnation))

    def link_lost(self, device: str, reason: str) -> None:
        """There is none any more."""
        self._asking.pop(device, None)
        self._take(LinkDown(device, reason))

    def away(self) -> None:
        """This machine slept, stood still or changed networks: it looks for the others before it goes on alone."""
        self._take(WasAway())

    def gone(self, device: str, incarnation: int) -> None:
        """This incarnation of a device has ended: it is not silent, nor elsewhere."""
        self._take(PeerGone(device, incarnation))

    def notice(self, device: str, body: Message) -> None:
        """A message of a member, or of one that was or wants to be one."""
        spec = self._job.spec
        if isinstance(body, Enter | Promised) and (wrong := changes_wrong(body, spec)):
            self.refuse(device, wrong)
        elif isinstance(body, AskIn) and self._host.founding and spec.restarts_max is None:
            self._asking[device] = body
        else:
            self._take(MessageFrom(device, body))

    def wish(self, kind: Kind) -> None:
        """This member's learner computes no more, or is ready to; or this member leaves."""
        self._take(RequestMade(kind))

    def ask_settings(self, wish: SettingsWish | None) -> None:
        """Other settings are asked for here (C3), or that is taken back."""
        self._take(SettingsAsked(wish))

    @property
    def asks_settings(self) -> bool:
        """Other settings are asked for here, and all members of a generation that brings them have not entered it."""
        return self._machine.asks_settings

    def refuse(self, device: str, reason: str) -> None:
        """A member broke the protocol (G10)."""
        self._take(ViolationSeen(device, reason))

    def refuses(self, device: str) -> bool:
        """Whether it is refused now: what it sent belongs nowhere."""
        return self._machine.refuses(device)

    @property
    def enter_of_now(self) -> Enter | None:
        """By which the generation of now was entered; None before there is one."""
        if self._enter_of_now is None and self._job.generation is not None:
            self._enter_of_now = _first_enter(self._job.generation, self._host.beginning)
        return self._enter_of_now

    def lead(self, crossing: Crossing) -> None:
        """Rounds are made at the job's beginning: they are where this member is."""
        generation, enter, phase = self._job.generation, self.enter_of_now, self._machine.phase
        assert generation is not None
        assert enter is not None
        if phase in (MembershipPhase.ENTERED, MembershipPhase.RUNNING):
            crossing.enter(generation, enter)
        if phase is MembershipPhase.RUNNING:
            crossing.resume(generation)

    def begun(self) -> None:
        """Learners compute: who asked in before is taken in now."""
        asking, self._asking = self._asking, {}
        for device, body in asking.items():
            self.notice(device, body)

    def step_out(self, reason: str) -> None:
        """This member has nothing to bring into the rounds, and asks to be taken in."""
        self._take(SteppedOut(reason))

    def look_again(self) -> None:
        """What this member's learner held may be lost: where none computes, all look for something else (J3)."""
        self._take(HoldingLost())

    @property
    def newest(self) -> Generation | None:
        """The newest generation that this member has promised."""
        return self._machine.promised

    @property
    def machine(self) -> Membership:
        """What is driven, to be looked at."""
        return self._machine

    def promised(self, generation: int) -> bool:
        """Whether the generation with this hash is the newest that this member has promised."""
        promised = self._machine.promised
        return promised is not None and promised.hash64() == generation

    @property
    def running(self) -> bool:
        """Rounds go on."""
        return self._machine.phase is MembershipPhase.RUNNING

    @property
    def fenced(self) -> bool:
        """Another generation is promised, and not entered."""
        return self._machine.phase in (MembershipPhase.PROMISED, MembershipPhase.CATCHING_UP)

    @property
    def out(self) -> bool:
        """This device asks in."""
        return self._machine.phase is MembershipPhase.OUT

    @property
    def elsewhere(self) -> frozenset[str]:
        """Linked devices that have told lately in which generation they are."""
        return self._machine.elsewhere

    def lists(self, device: str) -> bool:
        """Whether the newest generation promised counts this device among the members of all times."""
        promised = self._machine.promised
        return promised is not None and rank_of(promised, device) is not None

    @property
    def path(self) -> tuple[PathStep, ...]:
        """What the history of this member has gone through."""
        return self._path.tell()

    def progress(self) -> None:
        """From time to time: how far away the members are, and how far the rounds, by which the sides of a partition
        are weighed."""
        rounds = self._host.rounds
        if rtt_s := self._round_trip_s():
            self._take(FarthestRoundTrip(rtt_s))
            if rounds is not None:
                rounds.note_round_trip(rtt_s)
        if rounds is not None:
            self._take(RoundsCounted(rounds.history_samples))
            self._take(self._host.holding())

    def _round_trip_s(self) -> float:
        """To the farthest of the devices that are or were in the job and are linked; 0 where none has been measured."""
        links = (self._node.links.get(member.device) for member in self._job.members)
        measured = [max(link.rtt_s, RTT_S_MIN) for link in links if link is not None and link.rtt_s is not None]
        return max(measured, default=0.0)

    def end_parting(self) -> bool:
        """The learner of a history that is given up is needed no more, if there is one. Returns whether there was."""
        if self._parting is None:
            return False
        self._parting.cut_short()
        return True

    def close(self) -> None:
        """Stops the timer; nobody sees any more."""
        self._closed = True
        if self._witness is not None:
            self._witness.close()
        if self._timer is not None:
            self._timer.cancel()

    # Inputs and effects

    def _take(self, input_: Input) -> None:
        """Every input of the machine comes through here. One that breaks it is seen, for it is the one to look at."""
        if self._closed:
            return
        now_s = self._loop.time()
        effects: list[Effect] = []
        try:
            effects = self._machine.handle(input_, now_s)
        finally:
            if self._witness is not None:
                self._witness.took(input_, now_s, effects)
        self._perform(effects)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._perform_one(effect)
        self._arm()

    def _perform_one(self, effect: Effect) -> None:
        if self._witness is not None:
            self._witness.performs(effect)
        job = self._job.spec.job
        match effect:
            case Send(device, AskIn() as message) if self._parting is not None:
                self._parting.asks[device] = message
            case Send(device, message):
                self._send(device, message)
            case Fence():
                self._fence()
            case CatchUpFrom():
                self._catching_up = self._tasks.spawn(self._catch_up(effect), "catch up")
            case EnterGeneration(generation, enter):
                self._enter(generation, enter)
            case Resume(generation, begins):
                self._resume(generation, begins)
            case HistoryLeft(reason, kept):
                log.warning("job %s: left out: %s", job, reason)
                self._give_up_catching_up()
                self._leave_history(reason, kept)
            case TurnedAway(reason):
                self._host.turned_away(reason)
            case NobodyLearns(_, failed):
                self._host.nobody_learns(failed=failed)
            case MessageIgnored(device, text):
                link = self._node.links.get(device)
                if link is not None:
                    link.connection.refuse(text)
            case Shunned():
                self._shunned(effect)
            case WaitingFor(reason, to_prepare):
                # Without rounds nobody is waited for while a generation runs, whatever else is said of learners.
                between = self._job.spec.restarts_max is None or not self.running
                self._job.wait(reason if between else "", to_prepare=to_prepare)

    def _send(self, device: str, message: Message) -> None:
        link = self._node.links.get(device)
        if link is not None:
            link.connection.notify(message, job=self._number)

    def _shunned(self, effect: Shunned) -> None:
        rank, accuser = self._job.rank_of(effect.device), self._job.rank_of(effect.accuser)
        if rank is None or accuser is None:
            return
        names = [f"rank {of} ({self._job.members[of].name})" for of in (rank, accuser)]
        back = "it stays out of this job" if effect.violations >= limits.VIOLATIONS_MAX else "it may ask in again later"
        log.warning(
            "job %s: %s was refused by %s: %s. The others go on without it; violation %d of %d: %s",
            *(self._job.spec.job, *names, printable(effect.reason), effect.violations, limits.VIOLATIONS_MAX, back),
        )
        self._job.refuse(rank, effect.reason, effect.violations)

    def _leave_history(self, reason: str, kept: Where | None) -> None:
        """The learner of this history is ended; where rounds of it are given up, when it has written the base."""
        self._why_out = reason
        if self._given_up(kept) is None:
            self._path = Path()
            self._host.left_out(reason)
            return
        assert self._host.crossing is not None
        self._host.crossing.fence()  # no round is completed any more
        given_up = self._given_up(kept)
        assert given_up is not None
        self._parting = Parting(self._job, given_up, self, self._tasks)

    async def write_given_up(self) -> WrittenBase:
        """The learner writes the base of the history that is left. Raises RequestFailed, CheckpointError, OSError."""
        return await self._host.write_given_up()

    def parted(self, parting: Parting, /) -> None:
        """The base is written, or cannot be: the history is left now, and this device asks in."""
        self._path = Path()
        self._parting = None
        if self._closed:
            return
        self._host.left_out(self._why_out)
        for device, ask in parting.asks.items():
            self._send(device, ask)

    def _given_up(self, kept: Where | None) -> GivenUp | None:
        """What this device and those that were with it have made since the history that is kept went another way."""
        rounds, generation = self._host.rounds, self._job.generation
        parted = self._path.parted(kept.generation, kept.ancestors) if kept is not None else None
        if kept is None or parted is None or rounds is None or generation is None or rounds.complete <= parted.cut:
            return None
        return GivenUp(
            first=parted.cut + 1,
            last=rounds.complete,
            samples=max(0, rounds.history_samples - parted.samples),
            made_by=generation.ranks,
            kept=kept.generation.ranks,
        )

    def _give_up_catching_up(self) -> None:
        if self._catching_up is not None:
            self._catching_up.cancel()
            self._catching_up = None

    def _fence(self) -> None:
        self.end_parting()  # the others wait for this device
        self._give_up_catching_up()
        if self._fenced_at_s is None:
            self._fenced_at_s = self._loop.time()
        crossing = self._host.crossing
        if crossing is not None:
            crossing.fence()
            standing = crossing.standing()
        elif self._host.founding and self._job.generation is not None and not self._node.member.hub:
            begins, of_now = self._host.beginning, self._job.generation.hash64()
            chains = (begins.chain,)
            standing = Standing(generation=of_now, number=0, complete=begins.round, chains=chains, samples=0, linked=())
        else:
            standing = Standing(generation=None, number=0, complete=0, chains=(), samples=0, linked=())
        standing = standing.model_copy(update={"holding": self._host.holding(), "world": self._host.world()})
        self._take(standing)

    async def _catch_up(self, effect: CatchUpFrom) -> None:
        """Ends by an answer to the machine, or with the source's link, of which the machine hears by itself."""
        job = self._job.spec.job
        if effect.enter.way == "back" and (samples := self._host.samples_at_beginning(effect.enter)) is not None:
            lost = self._lost_by_going_back(effect, samples)
            self._host.begin_anew(effect.generation)
            self._tell_lost(lost, effect)
            self._take(CaughtUpToCut())
            return
        if self._job.spec.restarts_max is not None:  # there are no rounds
            self._host.begin_anew(effect.generation)
            self._take(CaughtUpToCut())
            return
        if effect.enter.awaited and self._node.member.hub:  # there is no model yet: it comes with the learners (H2)
            self._take(CaughtUpToCut())
            return
        if effect.device == self._node.device:
            self._go_back_to_own(effect)
            return
        while (link := self._node.links.get(effect.device)) is not None:
            rounds = self._host.rounds
            try:
                if effect.reload or rounds is None:
                    from_start = self._node.member.hub and self._host.beginning.is_cut_of(effect.enter)
                    beginning = await fetch_beginning(link.connection, job, effect.enter, from_start=from_start)
                    self._begin_loading(effect, beginning)
                else:
                    await fetch_rounds(rounds, link.connection, job, effect.enter)
            except TimeoutError as error:  # all others wait for this member: what has come is kept
                log.warning("job %s: %s; asked again", job, error)
                continue
            except ConnectionEnded as error:
                log.warning("job %s: cannot catch up: %s", job, error)
                return
            except FalseRoundError as error:
                self.refuse(effect.device, str(error))  # another generation follows, with another source
                return
            except RequestFailed as error:
                log.warning("job %s: cannot catch up from %s: %s", job, effect.device[:8], error)
                self._take(CannotCatchUp(str(error)))
                return
            self._take(CaughtUpToCut())
            return

    def _go_back_to_own(self, effect: CatchUpFrom) -> None:
        try:
            self._begin_loading(effect, self._host.saved_beginning(effect.enter))
        except RequestFailed as error:
            log.warning("job %s: cannot go back to round %d: %s", self._job.spec.job, effect.enter.cut, error)
            self._take(CannotCatchUp(str(error)))
            return
        self._take(CaughtUpToCut())

    def _begin_loading(self, effect: CatchUpFrom, beginning: Beginning) -> None:
        lost = self._lost_by_going_back(effect, beginning.entry.samples)
        self._host.begin_loading(effect.generation, beginning)
        if effect.device != self._node.device:
            self._path = Path(beginning.path)
        self._tell_lost(lost, effect)

    def _lost_by_going_back(self, effect: CatchUpFrom, samples: int) -> GivenUp | None:
        """The rounds after a cut up to which there are so many samples, where all go back to that."""
        rounds, cut, ranks = self._host.rounds, effect.enter.cut, effect.generation.ranks
        if effect.enter.way != "back" or rounds is None or rounds.complete <= cut:
            return None
        lost = max(0, rounds.history_samples - samples)
        return GivenUp(first=cut + 1, last=rounds.complete, samples=lost, made_by=ranks, kept=ranks)

    def _tell_lost(self, lost: GivenUp | None, effect: CatchUpFrom) -> None:
        if lost is not None:
            job, cut = self._job.spec.job, effect.enter.cut
            log.warning("job %s: every learner was lost: it goes on from the state after round %d", job, cut)
            self._job.take_given_up([lost])

    def _enter(self, generation: Generation, enter: Enter) -> None:
        self._job.hashes.forget(above=enter.cut)
        self._job.take(generation, enter.awaited)
        self._job.take_changes(enter.changes)
        self._enter_of_now = enter
        for member in generation.live.values():
            self._asking.pop(member.device, None)  # it is in
        self._use_links()
        crossing = self._host.crossing
        if crossing is not None:  # else its learner has not described its model
            crossing.enter(generation, enter)
        rounds = self._host.rounds
        self._path.entered(generation, enter.cut, rounds.history_samples if rounds is not None else 0)
        fenced_s = 0.0 if self._fenced_at_s is None else self._loop.time() - self._fenced_at_s
        members = ", ".join(
            member.name + ("" if rank in generation.learning else " (hub)" if member.hub else " (loading)")
            for rank, member in generation.live.items()
        )
        log.info(
            "job %s: generation %d entered after %.3f s: members %s; cut %d",
            *(self._job.spec.job, generation.number, fenced_s, members, enter.cut),
        )
        self._host.entered(generation)

    def _resume(self, generation: Generation, begins: bool) -> None:
        crossing = self._host.crossing
        self._fenced_at_s = None
        if crossing is not None:
            crossing.resume(generation)
        if begins:
            assert self._host.rounds is not None
            self._host.rounds.crossing.take_in()
        log.info("job %s: generation %d goes on", self._job.spec.job, generation.number)
        self._host.resumed()

    def _use_links(self) -> None:
        """Those of the generation of now."""
        generation = self._job.generation
        if generation is None:
            return
        self._links.clear()
        for rank, member in generation.live.items():
            link = self._node.links.get(member.device)
            if link is not None and link.hello.incarnation == member.incarnation:
                self._links[rank] = link.connection

    def _arm(self) -> None:
        deadline_s = None if self._closed else self._machine.deadline()
        if self._timer is not None and self._armed_s != deadline_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and deadline_s is not None:
            self._armed_s = deadline_s
            self._timer = self._loop.call_at(deadline_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._take(TimerDue())


def _first_enter(generation: Generation, beginning: JobBeginning) -> Enter:
    """As if the job's first generation, which its submitter has committed, had followed another one."""
    return Enter(
        job=generation.job,
        generation=generation.hash64(),
        cut=beginning.round,
        chain=beginning.chain,
        source=generation.ranks[0],
        complete=tuple((rank, beginning.round) for rank in generation.ranks),
        reload=(),
        awaited=generation.trainers,
        giver=min(generation.trainers, default=0),
    )
