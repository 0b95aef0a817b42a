"""One daemon's learner processes, one after the other, and their way into a job that runs (J1, J3).

The counterpart of `meshtraind.learner.supervisor`, `meshtraind.recovery.join_requests` and
`meshtraind.recovery.state_donor`.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from meshtraind.recovery.state_donor import Loans
from meshtraind.rounds.history import Entry
from meshtraind.transport.requests import RequestFailed
from meshwire.message_base import Wire
from meshwire.messages.generation import Holding
from tests.sim.clusterconnection import LinkEnd
from tests.sim.clusterlearner import Learner
from tests.sim.clustermoments import Moment
from tests.sim.clusterrounds import WatchedRounds

if TYPE_CHECKING:
    from tests.sim.clusterdaemon import Daemon

STATE_TIMEOUT_S = 600.0
POLL_S = 0.2
PATIENCE_S = 60.0  # for a state
CHECKPOINT_ROUNDS = 4
LOCAL_S = 0.001  # between daemon and learner


@dataclass(frozen=True, slots=True)
class AskState:
    """`meshwire.messages.generation.AskState`, answered by a `State`."""

    after_round: int
    device: str  # that loads it


@dataclass(frozen=True, slots=True)
class State:
    """The base after a round: what it is."""

    round: int
    base: bytes


class LearnerSupervisor:
    """Of one daemon.

    Attributes:
        learner: the process that has called.
        starts: of processes.
        kept: what the process of before has left in memory, for the next one.
        saved: the newest checkpoint, with where who goes on from it begins.
    """

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._world = daemon.world
        self.starts = 0
        self._starting: Learner | None = None
        self._given: State | None = None  # to others, last
        self.loans: Loans[State] = Loans()
        self.kept: State | None = None
        self.saved: Entry | None = None
        self._entries: dict[int, Entry] = {}  # of rounds that may become checkpoints
        self.learner: Learner | None = None

    def found(self, rounds: WatchedRounds) -> None:
        """The first process begins the job with the others'."""
        self.learner = self._new()
        self.learner.begin(rounds, rounds.first, rounds.path[rounds.first])

    def notify(self, body: Wire, chain: bytes) -> None:
        """Tells the learner, if it is there."""
        if self.learner is not None:
            self._daemon.later(LOCAL_S, partial(self.learner.take, body, chain))

    def kill(self) -> None:
        """Its process is killed; the daemon sees it end."""
        process = self.learner or self._starting
        if process is not None and process.alive:
            self._world.tell(self._daemon.name, "'s learner is killed")
            self.exit(process)

    def exit(self, process: Learner, after_s: float = 5 * LOCAL_S) -> None:
        """It ends, and the daemon hears of it later."""
        process.die()
        self._daemon.later(after_s, partial(self._ended, process))

    def _ended(self, process: Learner) -> None:
        """Another one takes its place (J3)."""
        if process not in (self.learner, self._starting):
            return
        kept = self.kept if self.learner is not process else None  # it ended before it took that over
        if self.learner is process and process.rounds is self._daemon.rounds and not process.changes_base:
            kept = State(process.applied, process.base)
        self.end()
        rounds = self._daemon.rounds
        if rounds is not None and not self._daemon.driver.end_parting():
            if kept is not None and not rounds.shipped.learner.could_hold(kept.round):
                kept = None
            rounds.shipped.learner.dead("its process has ended", None if kept is None else kept.round)
            self.load_next(kept)
            self._daemon.wish("rest")
            self._daemon.look_again()
            self.run()
        self._world.check(self._daemon)

    def give_up(self) -> None:
        """It has failed too often and is started no more: this daemon only forwards."""
        self.end()
        self.kept = None
        if self._daemon.rounds is not None and not self._daemon.driver.end_parting():
            self._world.tell(self._daemon.name, "'s learner is started no more")
            self._daemon.rounds.shipped.learner.dead("its script has failed")
            self._daemon.wish("rest")

    def forget(self, above: int = -1) -> None:
        """The history is not kept, or only as far as the round `above`."""
        self._given = None
        self._entries.clear()
        if self.saved is not None and self.saved.complete > above:
            self.saved = None

    def round_complete(self, rounds: WatchedRounds, round_: int) -> None:
        """Some become checkpoints; and nobody is kept waiting for who could find its base in memory."""
        if round_ % CHECKPOINT_ROUNDS == 0:
            self._entries[round_] = replace(rounds.shipped.entry(), anew=True)
        waits = self.kept is not None and (self.learner is None or self.learner.rounds is None)
        if waits and rounds.shipped.hold_others_up:
            self.kept = None
            rounds.shipped.learner.dead("its process has ended, and the others have gone on")

    def base_changed(self, rounds: WatchedRounds) -> None:
        """Its learner has applied rounds: those that all hold are saved."""
        upto = min(rounds.shipped.applied, rounds.shipped.committed)
        for round_ in [round_ for round_ in self._entries if round_ <= upto]:
            self.saved = self._entries.pop(round_)

    def holding(self) -> Holding:
        """`meshtraind.session.membership_host.MembershipHost.holding`."""
        rounds, learner, saved = self._daemon.rounds, self.learner, self.saved
        if rounds is None:
            return Holding(loads_after=0)
        ready = learner is not None and learner.alive and learner.rounds is rounds
        given = self._given.round if self._given is not None and self.loans.has(self._given) else None
        states = [round_ for round_ in (given, None if saved is None else saved.complete) if round_ is not None]
        return Holding(
            base=ready or self.kept is not None,
            loads_after=rounds.shipped.learner.loads_after,
            state=max(states, default=None),
            saved=None if saved is None else (saved.complete, saved.chain),
        )

    def load_next(self, kept: State | None = None) -> None:
        """Another process will load: that of now has lost its connection, and ends."""
        self.kept = kept
        old, self.learner = self.learner, None
        if old is not None and old.alive:
            self._starting = old
            self.exit(old)

    def end(self) -> None:
        """No process is to run until `run`."""
        for process in (self.learner, self._starting):
            if process is not None:
                process.die()
        self.learner = self._starting = None

    def run(self) -> None:
        """Starts a process, which takes a time until it calls."""
        self.end()
        self._starting = self._new()
        self._daemon.later(self._world.random.choice(self._world.start_s), partial(self._attach, self._starting))

    def _attach(self, process: Learner) -> None:
        rounds = self._daemon.rounds
        if process is self._starting and process.alive and rounds is not None:
            self._starting, self.learner = None, process
            JoinRequests(self._daemon, self, process, rounds).ask()

    def _new(self) -> Learner:
        daemon = self._daemon
        self.starts += 1
        name = f"{daemon.number}.{daemon.member.incarnation}.{self.starts}"
        return Learner(name, self._world.sync, daemon.later, self._world.step_s[daemon.number])

    # As a donor

    async def give_state(self, asked: AskState) -> State:
        """One that was given already is given again, if it is new enough. Raises RequestFailed."""
        given, saved = self._given, self.saved
        if given is not None and self.loans.has(given) and given.round >= asked.after_round:
            state = given
        elif saved is not None and saved.complete >= asked.after_round:
            state = State(saved.complete, saved.chain)
        else:
            state = await self._save(asked.after_round)
        self._given = state
        self.loans.give(asked.device, state, self._daemon.machine.promised)
        return state

    async def _save(self, after_round: int) -> State:
        learner = self.learner
        if learner is None or learner.rounds is None:
            raise RequestFailed("no learner is ready here")
        round_, base = await learner.saved(after_round)
        if self.learner is not learner:
            raise RequestFailed("its learner has ended")
        return State(round_, base)


class JoinRequests:
    """One process's way into the job: a state of a donor, then the round after which that was read."""

    def __init__(self, daemon: "Daemon", life: LearnerSupervisor, process: Learner, rounds: WatchedRounds) -> None:
        self._daemon = daemon
        self._life = life
        self._process = process
        self._rounds = rounds
        self._after_round = 0
        self._asked = 0
        self._donors: list[LinkEnd] = []

    def ask(self) -> None:
        """What is in memory is taken over; else all that compute are asked, one after the other; if nobody does, all
        others, this device first. Again and again."""
        if self._life.kept is not None:
            self._loaded(self._life.kept, "finds the base after round {} in memory")
            return
        self._after_round = self._rounds.shipped.learner.loads()
        self._ask_all()

    def _ask_all(self) -> None:
        generation, links = self._daemon.generation, self._daemon.round_links
        assert generation is not None
        self._donors = [links[rank] for rank in generation.learning if rank in links]
        if not generation.learning:
            saved = self._life.saved
            if saved is not None and saved.complete >= self._after_round:
                self._loaded(State(saved.complete, saved.chain))
                return
            self._donors = list(links.values())
        self._ask_next()

    @property
    def _goes_on(self) -> bool:
        return self._process is self._life.learner and self._process.alive and self._rounds is self._daemon.rounds

    def _ask_next(self) -> None:
        if not self._goes_on:
            return
        generation = self._daemon.generation
        if generation is not None and generation.learning and self._rounds.shipped.hold_others_up:
            self._after_round = self._rounds.shipped.learner.loads_anew()
        if self._donors:
            donor = self._donors.pop(0)
            asked = AskState(self._after_round, self._daemon.member.device)
            self._daemon.ask(donor, asked, STATE_TIMEOUT_S, partial(self._take, donor))
        elif self._asked * POLL_S > PATIENCE_S:
            self._daemon.world.tell(self._daemon.name, "'s learner gets its state from nobody")
            self._life.exit(self._process, after_s=1.0)
        else:
            self._asked += 1
            self._daemon.later(POLL_S, self._ask_again)

    def _ask_again(self) -> None:
        if self._goes_on:
            self._ask_all()

    def _take(self, donor: LinkEnd, answer: object) -> None:
        if isinstance(answer, State):
            assert answer.round >= self._after_round, "J1: no older state than was asked for"
            self._check_history(donor, answer)
        else:
            self._ask_next()

    def _check_history(self, donor: LinkEnd, state: State) -> None:
        """G4: the donor may have completed a round that no other holds, and then be lost: it counts for nobody."""
        if not self._goes_on:
            return
        if self._rounds.machine.complete < state.round:
            if donor.closing:
                self._ask_next()
            else:
                self._daemon.later(POLL_S, partial(self._check_history, donor, state))
        elif self._rounds.path.get(state.round, state.base) != state.base:
            self._ask_next()
        else:
            transfer_s = self._daemon.world.random.choice(self._daemon.world.load_s)
            self._daemon.later(transfer_s, partial(self._fetched, donor, state))

    def _fetched(self, donor: LinkEnd, state: State) -> None:
        self._daemon.world.moments.come(Moment.LOADS, self._daemon.number)
        if donor.closing:
            self._ask_next()
        elif self._goes_on:
            self._daemon.world.check_kept(donor.link.other(self._daemon), self._daemon, state)
            self._loaded(state)

    def _loaded(self, state: State, how: str = "has loaded the base after round {}") -> None:
        daemon = self._daemon
        self._life.kept = None
        daemon.world.tell(daemon.name, f"'s learner {how.format(state.round)}")
        self._process.begin(self._rounds, state.round, state.base)
        self._rounds.shipped.learner.loaded(state.round)
        daemon.wish("learn")
        daemon.world.check(daemon)
