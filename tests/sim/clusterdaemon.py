"""One daemon of the cluster: the real membership machine with its rounds and its learner's processes.

`_perform_one` and what it calls are `meshtraind.session.membership_driver`; what is asked and answered is
`meshtraind.session.membership_host`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from meshtraind.rounds.history import Entry
from meshwire.membership.effects import (
    CatchUpFrom,
    Effect,
    EnterGeneration,
    Fence,
    HistoryLeft,
    MembershipPhase,
    MessageIgnored,
    NobodyLearns,
    Resume,
    Send,
    Shunned,
    WaitingFor,
)
from meshwire.membership.inputs import (
    CannotCatchUp,
    CaughtUpToCut,
    FarthestRoundTrip,
    HoldingLost,
    LinkDown,
    LinkUp,
    MessageFrom,
    PeerGone,
    RequestMade,
    RoundsCounted,
    TimerDue,
    WasAway,
)
from meshwire.membership.lineage import Ballot, Path, ballot, rank_of
from meshwire.membership.machine import Membership
from meshwire.membership.requests import Kind
from meshwire.messages.generation import DealState, Enter, PathStep, Propose, Standing, Where
from meshwire.messages.job import Generation, Member
from tests.sim.clusterexchange import Chunk, LinkSide, News, ServedBytes
from tests.sim.clusterjoining import AskState, LearnerSupervisor
from tests.sim.clusterlearner import Learner
from tests.sim.clustermoments import Moment
from tests.sim.clusternetwork import Link, Node, Wake
from tests.sim.clusterrequests import Answer, CannotAnswer, Reply, Request, Requests
from tests.sim.clusterrounds import WatchedRounds
from tests.sim.virtualloop import virtual_loop

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

REPORT_S = 1.0
CATCH_UP_TIMEOUT_S = 10.0
DIAL_S = 0.05


@dataclass(frozen=True, slots=True)
class CatchUp:
    """`meshwire.messages.generation.CatchUp`, answered by `ServedRounds` or, if `complete` is None, by a `Deal`."""

    complete: int | None
    cut: int | None = None


@dataclass(frozen=True, slots=True)
class ServedRounds:
    """The next rounds, with what was summed."""

    rounds: tuple[ServedBytes, ...]


@dataclass(frozen=True, slots=True)
class Deal:
    """Of the cut, for whoever brings no history."""

    state: DealState | None
    samples: int
    path: tuple[PathStep, ...]


class Daemon(Node):
    """One process.

    Args:
        generation: the first one of the job; None for a device that asks to be taken in.
    """

    def __init__(self, world: "Cluster", number: int, incarnation: int, generation: Generation | None) -> None:
        super().__init__(number)
        self.world = world
        self.loop = virtual_loop(world.clock, self)
        self.life = LearnerSupervisor(self)
        self.member = member_of(number, incarnation)
        self.name = self.member.name
        self.generation = generation
        self.rounds: WatchedRounds | None = None
        self.leaving = False
        self.left = False
        self.left_out = 0
        self.woke_s = 0.0
        self._without_learner = generation is None
        self.round_links: dict[int, Link] = {}
        self.round_sides: dict[int, LinkSide] = {}  # of these, as the rounds know them
        self.requests = Requests(world.network, self, self._answer)
        self._catching_up = 0
        self._path = Path()
        if generation is not None:
            self._path.entered(generation, 0, 0)
        self._ballot: Ballot | None = None  # of the newest promise
        self._promised = 0  # its generation, by hash
        self._armed_s: float | None = None
        known = [device_of(other) for other in range(world.devices)]
        self.machine = Membership(
            self.member, world.job, world.timeouts, world.now_s, generation=generation, known=known
        )
        self._perform([])
        self.later(world.random.uniform(0.0, REPORT_S), self._report_regularly)

    @property
    def rank(self) -> int:
        assert self.generation is not None
        rank = rank_of(self.generation, self.member.device)
        assert rank is not None
        return rank

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        """On this very process, when it is awake."""
        self.world.clock.at(delay_s, partial(self.do, event))

    def found(self) -> None:
        """The job begins, with this member and its learner."""
        assert self.generation is not None
        self.rounds = self._make_rounds(self.generation, Entry(), loading=False)
        self._use_links()
        self.life.found(self.rounds)
        self.rounds.shipped.learner.begin()

    def _make_rounds(self, generation: Generation, entry: Entry, *, loading: bool) -> WatchedRounds:
        rank = rank_of(generation, self.member.device)
        assert rank is not None
        return WatchedRounds(self, rank, generation, entry, loading=loading)

    def wake(self, order: Wake) -> None:
        """It knows that it slept before it hears anything."""
        if self.asleep:
            self.woke_s = self.world.now_s
            self._perform(self.machine.handle(WasAway(), self.world.now_s))
        super().wake(order)

    # Links

    def linked(self, peer: Node, link: Link) -> None:
        assert isinstance(peer, Daemon)
        self.world.tell(self.name, f"is linked to {peer.name}")
        self._perform(self.machine.handle(LinkUp(peer.member.device, peer.member.incarnation), self.world.now_s))

    def unlinked(self, peer: Node, link: Link, reason: str) -> None:
        assert isinstance(peer, Daemon)
        self.requests.lost(link)
        if peer.number not in self.links:
            self.world.tell(self.name, f"has lost its link to {peer.name}: {reason}")
            self._perform(self.machine.handle(LinkDown(peer.member.device, reason), self.world.now_s))
            if reason == "closed":
                self.later(DIAL_S, partial(self._dial_again, peer))

    def _dial_again(self, peer: "Daemon") -> None:
        """Whoever closed, this side did not: if nobody listens there any more, that process is gone."""
        if peer.number not in self.links and self.world.network.refuses(self.number, peer):
            self._perform(self.machine.handle(PeerGone(peer.member.device, peer.member.incarnation), self.world.now_s))

    def received(self, peer: Node, link: Link, body: object) -> None:
        assert isinstance(peer, Daemon)
        match body:
            case News() | Chunk():
                if self.rounds is not None and self.generation is not None:
                    report = isinstance(body, News) and body.message is None
                    early = body.generation == self._promised != self.rounds.generation
                    assert report or not early, "nobody sends in a generation before all have entered it"
                    rank = rank_of(self.generation, peer.member.device)
                    if rank is not None:
                        self.rounds.received(rank, body)
            case Request() | Reply():
                self.requests.received(link, body)
            case _:
                self._perform(self.machine.handle(MessageFrom(peer.member.device, body), self.world.now_s))  # type: ignore[arg-type]
        if self.rounds is not None:
            self.life.base_changed(self.rounds)
        self.world.check(self)

    def _report_regularly(self) -> None:
        self._report()
        self.world.note_base(self)
        if self.rounds is not None:
            self.machine.handle(RoundsCounted(self.rounds.shipped.history_samples), self.world.now_s)
            self.machine.handle(self.life.holding(), self.world.now_s)
        if self.world.setting.measured_s is not None:
            self.machine.handle(FarthestRoundTrip(self.world.setting.measured_s), self.world.now_s)
        self.later(REPORT_S, self._report_regularly)

    def _report(self) -> None:
        if self.rounds is not None and self.generation is not None:
            news = News(self.generation.hash64(), self.rounds.shipped.complete, None)
            for link in self.round_links.values():
                self.world.network.send(link, self, news)

    # Generations

    def wish(self, kind: Kind) -> None:
        """Of the learner, or of whoever lets this device go."""
        self._perform(self.machine.handle(RequestMade(kind), self.world.now_s))

    def look_again(self) -> None:
        """Its learner's base may be lost."""
        self._perform(self.machine.handle(HoldingLost(), self.world.now_s))

    def wish_leave(self) -> None:
        """`meshtrain leave`, where somebody else can go on."""
        generation = self.generation
        if self.rounds is not None and generation is not None and set(generation.learning) - {self.rank}:
            self.leaving = True
            self.wish("leave")
            self.later(3.0, self._leave)

    def _leave(self) -> None:
        if self.leaving:
            self.world.kill(self, "has left")

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._perform_one(effect)
        deadline_s = self.machine.deadline()
        if deadline_s is not None and deadline_s != self._armed_s:
            self.later(max(0.0, deadline_s - self.world.now_s), partial(self._timer, deadline_s))
        self._armed_s = deadline_s

    def _timer(self, deadline_s: float) -> None:
        if self._armed_s == deadline_s:
            self._armed_s = None
            effects = self.machine.handle(TimerDue(), max(self.world.now_s, deadline_s))
            assert effects or self.machine.deadline() != deadline_s, f"no timer is idle: {self.machine.waiting()}"
            self._perform(effects)
            self.world.check(self)

    def _perform_one(self, effect: Effect) -> None:
        match effect:
            case Send(device, message):
                if (link := self.links.get(int(device, 16) - 1)) is not None:
                    if isinstance(message, Propose):
                        self.world.tell_once(self.name, message.generation)
                    self.world.network.send(link, self, message)
            case Fence(generation):
                self._fence(generation)
            case CatchUpFrom():
                self._catch_up(effect)
            case EnterGeneration(generation, enter):
                self._enter(generation, enter)
            case Resume(generation, begins):
                assert self.rounds is not None
                self.rounds.shipped.crossing.resume(generation)
                if begins:
                    self.rounds.shipped.crossing.take_in()
                self._report()
                self.world.resumed(self, generation)
            case HistoryLeft(reason, kept):
                if kept is not None and self.holds_base:
                    self.world.leaves_base(self, kept)
                self._note_given_up(kept)
                self._leave_out(reason)
            case NobodyLearns():
                self.world.fail("no peer can run the script any more")
            case MessageIgnored(device, text):
                raise AssertionError(f"{self.name}: honest daemons break no rule: peer{int(device, 16) - 1}: {text}")
            case Shunned(device, reason, accuser):
                accused = f"peer{int(device, 16) - 1}: {reason}, says peer{int(accuser, 16) - 1}"
                raise AssertionError(f"{self.name}: honest daemons break no rule: {accused}")
            case WaitingFor(reason):
                if reason.startswith("a new generation"):
                    self.world.tell(self.name, f"wants {reason}")

    def _fence(self, generation: Generation) -> None:
        newest = ballot(generation)
        assert self._ballot is None or newest > self._ballot, "G2: promises have rising ballots"
        self._ballot, self._promised = newest, generation.hash64()
        self._catching_up += 1
        if self.rounds is not None:
            self.rounds.shipped.crossing.fence()
            standing = self.rounds.shipped.crossing.standing()
        else:
            standing = Standing(generation=None, number=0, complete=0, chains=(), samples=0, linked=())
        standing = standing.model_copy(update={"holding": self.life.holding()})
        held = f"holding {standing.complete} rounds" if self.rounds is not None else "without a history"
        self.world.tell(self.name, f"promises generation {generation.number}, {held}")
        self.world.moments.come(Moment.PROMISES, self.number)
        self._perform(self.machine.handle(standing, self.world.now_s))

    def _catch_up(self, effect: CatchUpFrom) -> None:
        self._catching_up += 1
        self.world.moments.come(Moment.CATCHES_UP, self.number)
        link = self.links.get(int(effect.device, 16) - 1)
        if effect.device == self.member.device:
            saved = self.life.saved
            assert saved is not None
            assert (saved.complete, saved.chain) == (effect.enter.cut, effect.enter.chain)
            self._begin_loading(effect, saved, self._path.tell())
        elif link is None:
            self._perform(self.machine.handle(CannotCatchUp("it is not linked any more"), self.world.now_s))
        elif effect.reload or self.rounds is None:
            took = partial(self._take_beginning, self._catching_up, effect)
            self.requests.ask(link, CatchUp(None, effect.enter.cut), CATCH_UP_TIMEOUT_S, took)
        else:
            self._ask_rounds(self._catching_up, link, effect.enter)

    def _ask_rounds(self, catching_up: int, link: Link, enter: Enter) -> None:
        assert self.rounds is not None
        took = partial(self._take_rounds, catching_up, link, enter)
        self.requests.ask(link, CatchUp(self.rounds.shipped.complete), CATCH_UP_TIMEOUT_S, took)

    def _take_rounds(self, catching_up: int, link: Link, enter: Enter, answer: Answer) -> None:
        if catching_up != self._catching_up or answer is None or self.rounds is None:
            return  # of a source that is gone the machine hears by itself
        if isinstance(answer, CannotAnswer):
            assert answer.generation != enter.generation, f"G5: {self.name} lacks a round, and nobody has kept it"
            self._perform(self.machine.handle(CannotCatchUp(answer.reason), self.world.now_s))
            return
        assert isinstance(answer, ServedRounds)
        for each in answer.rounds:
            self.rounds.take_served(each)
        if self.rounds.shipped.complete < enter.cut:
            self._ask_rounds(catching_up, link, enter)
        else:
            self._perform(self.machine.handle(CaughtUpToCut(), self.world.now_s))

    def _take_beginning(self, catching_up: int, effect: CatchUpFrom, answer: Answer) -> None:
        if catching_up != self._catching_up or answer is None:
            return
        if isinstance(answer, CannotAnswer):
            self._perform(self.machine.handle(CannotCatchUp(answer.reason), self.world.now_s))
            return
        assert isinstance(answer, Deal)
        enter = effect.enter
        anew = enter.way == "back"
        entry = Entry(enter.cut, enter.chain, answer.samples, answer.state, enter.counted, enter.learning, anew)
        self._begin_loading(effect, entry, answer.path)

    def _begin_loading(self, effect: CatchUpFrom, entry: Entry, path: Collection[PathStep]) -> None:
        if effect.enter.way == "back":
            self._without_learner = True
            self.life.end()
            self.world.went_back(self, entry)
        self.life.forget(above=entry.complete if entry.anew else -1)
        self._drop_rounds()
        self._path = Path(path)
        self.generation = effect.generation
        self.rounds = self._make_rounds(effect.generation, entry, loading=True)
        self.life.load_next()
        self._perform(self.machine.handle(CaughtUpToCut(), self.world.now_s))

    def _enter(self, generation: Generation, enter: Enter) -> None:
        assert self.rounds is not None
        self.generation = generation
        self._use_links()
        self.world.entered(self, generation, enter)
        self.rounds.shipped.crossing.enter(generation, enter)
        self._path.entered(generation, enter.cut, self.rounds.shipped.history_samples)
        self.life.loans.entered(generation)
        if self._without_learner and self.rank not in generation.learning:
            self._without_learner = False
            self.life.run()

    def _use_links(self) -> None:
        assert self.generation is not None
        self.round_links = {}
        for rank, member in self.generation.live.items():
            link = self.links.get(int(member.device, 16) - 1)
            if link is not None:
                peer = link.other(self)
                assert isinstance(peer, Daemon)
                if peer.member.incarnation == member.incarnation:
                    self.round_links[rank] = link
        self.round_sides.clear()
        self.round_sides.update((rank, LinkSide(self, link)) for rank, link in self.round_links.items())

    def _note_given_up(self, kept: Where | None) -> None:
        parted = self._path.parted(kept.generation, kept.ancestors) if kept is not None else None
        self._path = Path()
        if kept is not None and self.rounds is not None:
            history = self.rounds.history
            self.world.given_up(self, kept, parted, history.chain, history.samples)

    def _leave_out(self, reason: str) -> None:
        self.world.tell(self.name, f"is left out: {reason}")
        self.left_out += 1
        self._catching_up += 1
        self._without_learner = True
        self._drop_rounds()
        self.life.end()
        if self.leaving:
            self.later(0.0, self._leave)

    def _drop_rounds(self) -> None:
        if self.rounds is not None:
            self.rounds.close()
        self.rounds = None

    @property
    def based(self) -> Collection[bytes]:
        """The chain ids of its history, if its learner computes with the base; none of a dead one's."""
        rounds, generation = self.rounds, self.generation
        computes = rounds is not None and generation is not None and self.rank in generation.learning
        return {*self.world.histories.path(rounds.history.chain)} if rounds and computes and self.alive else ()

    @property
    def holds_base(self) -> bool:
        """A learner's process, or the memory that it has left, holds the model of this history."""
        return self.alive and self.rounds is not None and self.life.holding().base

    # What others ask

    def _answer(self, what: object, reply: Callable[[Answer], None]) -> None:
        rounds = self.rounds
        if rounds is None:
            reply(CannotAnswer(f"{self.name} has no history"))
        elif isinstance(what, AskState):
            self.life.give_state(what, reply)
        elif isinstance(what, CatchUp):
            if what.cut is not None and rounds.machine.complete > what.cut:  # it has not gone back yet
                self.later(0.02, partial(self._answer, what, reply))
            else:
                reply(self._rounds_after(rounds, what.complete))

    def _rounds_after(self, rounds: WatchedRounds, complete: int | None) -> Answer:
        if complete is None:
            crossing = rounds.shipped.crossing
            return Deal(crossing.deal, crossing.samples, self._path.tell())
        try:
            return ServedRounds(rounds.served_after(complete))
        except KeyError as error:
            return CannotAnswer(f"round {error} is not kept here any more", rounds.generation)

    @property
    def computes(self) -> bool:
        """It runs in a generation in which its learner computes."""
        generation = self.machine.generation
        running = (
            self.machine.phase is MembershipPhase.RUNNING
            and generation is not None
            and self.rank in generation.learning
        )
        return running and self.learner is not None and self.learner.rounds is not None

    @property
    def learner(self) -> Learner | None:
        """Its process, once that has called."""
        return self.life.learner


def device_of(number: int) -> str:
    """The device id of a daemon."""
    return f"{number + 1:064x}"


def member_of(number: int, incarnation: int) -> Member:
    """How a generation lists it."""
    return Member(device=device_of(number), incarnation=incarnation, name=f"peer{number}")
