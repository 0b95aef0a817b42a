"""The whole cluster in virtual time, from one seed: round machines, membership, ledger, chain, learners, one network.

Run as a command it replays seeds: `python -m tests.sim.cluster --seed 7 --verbose`, `--seeds 0 1000`. A seed that
fails is shrunk to the faults that it needs, and told as a transcript.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from meshtraind.rounds.history import Entry
from meshwire.jobs.partition_wait import NEVER
from meshwire.messages.generation import Enter, Where
from meshwire.messages.job import Generation, Metrics, RankReport
from meshwire.messages.learner import SampleSpace
from meshwire.rounds.chain import START
from meshwire.rounds.effects import RoundComplete
from meshwire.sync_modes.mode import SyncSettings
from meshwire.sync_modes.neighbours import Turn
from meshwire.sync_modes.settings_changes import SettingsChanges
from meshwire.timeouts import Timeouts
from tests.sim.clusterdaemon import Daemon, device_of, member_of
from tests.sim.clusterhistory import Histories
from tests.sim.clusterline import Life, Line, told
from tests.sim.clustermoments import Moment, Moments
from tests.sim.clusternetwork import Clock, Network, Node, Wake
from tests.sim.clusterrounds import WatchedRounds, job_spec, predicted
from tests.sim.clusterwitness import Left

JOB = "j" + "0" * 11
FOUND_S_MAX = 60.0  # until all founders are in round 1
FOUND_STEP_S = 0.001
EVENTS_MAX = 400_000  # of one run of at most EVENTS_LINKS links, and with more links as many more: else a livelock
EVENTS_LINKS = 28
RTT_S = 0.02
ROUNDS_AFTER = 5
LATE_S = 2.0  # until a daemon is looked at again, and what it says is heard
CALM_S = 0.5  # between two looks at whether all is well again


@dataclass(frozen=True)
class Setting:
    """What a cluster is made of.

    Attributes:
        hubs: of the founders, the last ones.
        newcomers: devices beyond the founders, which ask in when they start.
        step_s: by device.
        delays_s: of one message; one of these is drawn.
        rtt_s: what daemons take for the round trip when they start, and `measured_s` what they measure later, if that
            is another one.
        start_s, load_s: of a learner's process, and of the transfer of a state; one of these is drawn.
        recovery_s: when faults have stopped, all is to be well again so soon.
        speeds: in samples/s, by device, as they were measured before the job.
        begun: the founders are in their first round when the cluster is looked at; else faults may come before.
    """

    founders: int
    hubs: int = 0
    newcomers: int = 0
    sync: SyncSettings = field(default_factory=SyncSettings)
    total: int = 40
    batch: int = 2
    patience_s: float = 2.0
    step_s: tuple[float, ...] = (0.5,) * 8
    delays_s: tuple[float, ...] = (0.001, 0.005, 0.02)
    rtt_s: float = RTT_S
    measured_s: float | None = None
    start_s: tuple[float, ...] = (0.5,)
    load_s: tuple[float, ...] = (0.3,)
    unapplied_max: int = 1 << 30
    recovery_s: float = 240.0
    partition_wait_s: float | None = None
    speeds: tuple[float, ...] = ()
    begun: bool = True


class Cluster:
    """Build, befall it with faults (`clusterfaults`), `run_until`, `recover`, `check_end`, `end`.

    Attributes:
        invites: whether members ask devices to join that were never in the job.
        failed: why the job has ended, if it has: nobody is left who could go on with it.
        befallen: faults that have happened, by kind.
        liars: numbers of daemons that may break the rules.
        accused: what was said of them.
    """

    invites = False
    liars: frozenset[int] = frozenset()

    def __init__(self, seed: int, setting: Setting, *, recording: bool = False, members_max: int | None = None) -> None:
        self.random = Random(seed)
        self.ended = False
        self.daemons: list[Daemon] = []
        self._reports: dict[int, RankReport] = {}
        self.setting = setting
        self.devices = setting.founders + setting.newcomers
        self.members_max = members_max or self.devices
        wait_s = setting.partition_wait_s
        chosen: dict[str, object] = {"peers_max": self.members_max}
        chosen["partition_wait"] = NEVER if wait_s == math.inf else wait_s
        if setting.speeds:
            chosen["prediction"] = predicted([device_of(index) for index in range(self.devices)], setting.speeds)
        self.spec = job_spec(JOB, device_of(0), setting.sync).model_copy(update=chosen)
        self.sync, self.unapplied_max = setting.sync, setting.unapplied_max
        self.step_s, self.start_s, self.load_s = setting.step_s, setting.start_s, setting.load_s
        self.timeouts = Timeouts(setting.patience_s, setting.rtt_s, setting.partition_wait_s)
        self.space = SampleSpace(total=setting.total, batch=setting.batch, whole_batches=False, drop_last=False)
        self.clock = Clock()
        self._events_max = EVENTS_MAX * max(1, math.comb(self.devices, 2) // EVENTS_LINKS)
        self.network = Network(self.clock, self.random, setting.patience_s, setting.delays_s)
        self.histories = Histories(self.sync.staleness, self.space)
        self.failed: str | None = None
        self.moments = Moments()
        self.calm = False  # failures have stopped
        self.befallen: Counter[str] = Counter()
        self.accused: list[str] = []
        self.transcript: list[str] | None = [] if recording else None
        self.told_lost: list[tuple[int, int]] = []  # rounds that were given up, and for the sake of how many daemons
        self.told_gone_back: set[bytes] = set()  # chain ids of rounds that were given up for a state that was saved
        self._told: set[tuple[str, int]] = set()
        self._first: set[tuple[int, int]] = set()
        self._incarnations = itertools.count(100)
        self._entered: dict[int, set[tuple[str, int]]] = {}  # by generation: who has entered it
        self._lives: dict[int, set[tuple[str, int]]] = {}  # by generation: its members
        self._cuts: dict[int, tuple[int, bytes]] = {}
        self.changes: dict[int, SettingsChanges] = {}  # by generation
        self._told_changes: dict[int, set[SettingsChanges]] = {}  # the same, as any who has entered it was told
        self.periods: dict[tuple[bytes, int], int] = {}  # by base and the round after it: local steps
        self._mixtures: dict[tuple[bytes, bytes, Turn, str], dict[str, float]] = {}  # rows of W, as they came about
        self._starts: dict[int, bytes] = {}  # by generation: whose start its learners' bases are of
        self._found()

    def is_hub(self, number: int) -> bool:
        """Whether this device runs no learner (H1)."""
        return self.setting.founders - self.setting.hubs <= number < self.setting.founders

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def _found(self) -> None:
        founders = self.setting.founders
        incarnations = [next(self._incarnations) for _ in range(self.devices)]
        members = tuple(member_of(at, incarnations[at], hub=self.is_hub(at)) for at in range(founders))
        first = Generation.first(JOB, members[0].device, members)
        self.line = Line(first)
        self._based: dict[tuple[Daemon, bytes], float] = {}  # when each was last seen to have a base of which history
        self._lives[first.hash64()] = self._entered[first.hash64()] = {(m.device, m.incarnation) for m in members}
        for number in range(self.devices):
            daemon = Daemon(self, number, incarnations[number], first if number < founders else None)
            self.daemons.append(daemon)
            self.network.add(daemon, dial=number >= founders)
            if number == founders - 1:
                self.network.found()
                for founder in self.daemons:
                    founder.found()
        while self.setting.begun and any(daemon.founding for daemon in self.daemons[:founders]):
            assert self.now_s < FOUND_S_MAX, "G9: the first round begins when all are ready"
            self.clock.run_until(self.now_s + FOUND_STEP_S, self._events_max)

    @property
    def generations(self) -> int:
        """Those that anybody has entered."""
        return len(self._entered)

    def run_until(self, end_s: float) -> None:
        """Asserts the invariants at every event. Ends early when the job does."""
        while self.now_s < end_s and self.failed is None:
            self.clock.run_until(min(end_s, self.now_s + CALM_S), self._events_max)

    def end(self) -> None:
        """Nothing happens any more; it can still be looked at."""
        self.ended = True
        for daemon in self.daemons:
            daemon.end()

    # What befalls daemons.

    def kill(self, daemon: Daemon, how: str = "is killed", *, silent: bool = False) -> None:
        """kill -9, or with `silent` a power cut: nobody is told."""
        if daemon.alive:
            self.tell(daemon.name, how)
            self.network.end(daemon, silent=silent)
            daemon.end()

    def restart(self, number: int) -> None:
        """A new incarnation, which has nothing."""
        if not self.daemons[number].alive:
            daemon = self.daemons[number] = Daemon(self, number, next(self._incarnations), None)
            self.tell(daemon.name, "is started again")
            self.network.add(daemon)

    def sleep(self, number: int, for_s: float, wake: Wake = Wake.IN_ORDER) -> None:
        """The lid is closed."""
        daemon = self.daemons[number]
        if daemon.alive and not daemon.asleep:
            self.tell(daemon.name, f"sleeps for {for_s:g} s")
            self.network.sleep(daemon)
            self.clock.at(for_s, partial(self._wake, daemon, wake))

    def _wake(self, daemon: Daemon, wake: Wake) -> None:
        if daemon.asleep:
            self.tell(daemon.name, "wakes up")
            self.network.wake(daemon, wake)

    def fail(self, reason: str) -> None:
        """The job ends: by a daemon that knows that nobody can go on. Who leaves it by a person's word is gone."""
        holding = [daemon.name for daemon in self.daemons if daemon.holds_base and not daemon.leaving]
        assert not holding, f"J3: the job ends, and {', '.join(holding)} holds the base"
        self.failed = self.failed or reason

    # What daemons tell.

    def promises(self, daemon: Daemon, generation: Generation) -> None:
        """What it has been told until now goes with its promise (G4, gone)."""
        alive = {one.member for one in self.daemons if one.alive}
        self.line.promised(generation, [other for other in daemon.heard.values() if alive & {*other.live.values()}])
        rounds = daemon.rounds
        held = "without a history" if rounds is None else f"holding {rounds.history.complete} rounds"
        self.tell(daemon.name, f"promises generation {generation.number}, {held}")
        self.moments.come(Moment.PROMISES, daemon.number)

    def breaks_rules(self, daemon: Daemon, number: int, text: str) -> None:
        """What this daemon has against the one of that number."""
        assert number in self.liars, f"{daemon.name}: honest daemons break no rule: peer{number}: {text}"
        self.accused.append(text)
        self.tell(daemon.name, f"refuses peer{number}: {text}")

    def begins_period(self, base: bytes, round_: int, local_steps: int) -> None:
        """A learner begins a step on the base before this round."""
        known = self.periods.setdefault((base, round_), local_steps)
        assert known == local_steps, f"C3: on one base periods have {known} and {local_steps} local steps"

    def mixes(self, where: tuple[bytes, bytes, Turn], learner: str, other: str, weight: float) -> None:
        """A learner is to mix in what another one's weights are apart from this base by, in this turn (R9)."""
        self.befallen["mixed"] += 1
        row = self._mixtures.setdefault((*where, learner), {})
        assert row.setdefault(other, weight) == weight, f"R9: {learner} has mixed {other} in by {row[other]}"
        assert sum(row.values()) <= 1.0, f"R9: by {row} what is apart grows"
        back = self._mixtures.get((*where, other), {}).get(learner, weight)
        assert back == weight, f"R9: {learner} takes {weight} of {other}, and gives {back}: the mean is not kept"

    def entered(self, daemon: Daemon, generation: Generation, enter: Enter) -> None:
        key = generation.hash64()
        cut = enter.cut, enter.chain
        assert self._cuts.setdefault(key, cut) == cut, "G4: one cut for all"
        assert daemon.rounds is not None or daemon.founding
        held = (0, START) if daemon.rounds is None else (daemon.rounds.history.complete, daemon.rounds.history.chain)
        assert held[0] == enter.cut, "G6: whoever enters holds the rounds up to the cut, no more"
        assert held[1] == enter.chain, "G4: whoever enters has the history that is kept"
        agreed = self.changes.setdefault(key, enter.changes) == enter.changes
        assert agreed or self.liars, "C3: all go over at one round"
        self._told_changes.setdefault(key, set()).add(enter.changes)
        lives = {(member.device, member.incarnation) for member in generation.live.values()}
        assert self._lives.setdefault(key, lives) == lives
        hubs = [rank for rank in generation.counted if generation.members[rank].hub]
        assert not (hubs and generation.trainers), "H1: a hub has no vote where a laptop is there"
        self.line.entered(generation)
        self._entered.setdefault(key, set()).add((daemon.member.device, daemon.member.incarnation))
        ranks = ", ".join(f"{rank}" if rank in generation.learning else f"{rank} loading" for rank in generation.ranks)
        self.tell(daemon.name, f"enters generation {generation.number} of {ranks} at the cut {enter.cut}")
        self.moments.come(Moment.ENTERS, daemon.number)

    def resumed(self, daemon: Daemon, generation: Generation) -> None:
        assert self._entered[generation.hash64()] >= self._lives[generation.hash64()]
        by_one_word = len(self._told_changes[generation.hash64()]) == 1
        assert by_one_word or daemon.number in self.liars, "C3, G10: rounds go on by one word"
        held = (other.machine.generation for other in self.daemons if other.alive and other.has_history)
        self.line.went_on(
            generation,
            [other for other in held if other is not None],
            partial(self._is_known_gone, generation),
        )
        self.tell(daemon.name, f"goes on in generation {generation.number}")
        self.moments.come(Moment.GOES_ON, daemon.number)

    def _members(self, generation: Generation) -> list[Daemon]:
        """The processes that are in it, and live."""
        live = generation.live.values()
        return [daemon for daemon in self.daemons if daemon.alive and daemon.member in live]

    def _is_known_gone(self, generation: Generation, life: Life) -> bool:
        """Has this process ended, and does a member know that: by a refused dial, or as another one is there?"""
        lives = {(daemon.member.device, daemon.member.incarnation) for daemon in self.daemons if daemon.alive}
        there = {member.device: member.incarnation for member in generation.live.values()}
        known = there.get(life[0], life[1]) != life[1] or any(d.knows_gone(life) for d in self._members(generation))
        return life not in lives and known

    def completed(self, rounds: WatchedRounds, done: RoundComplete) -> None:
        assert "its process has ended" not in done.reason, "V2: a learner that dies costs no round"
        key = rounds.generation, done.round
        if key not in self._first:
            self._first.add(key)
            self.moments.come(Moment.COMPLETES, rounds.device)
            who = ", ".join(f"{rank}" for rank in done.binds) or "nobody"
            void = f"; it is void: {done.reason}" if done.void else ""
            self.tell(rounds.who, f"is the first that holds round {done.round}, with contributions of {who}{void}")

    def contributes(self, rounds: WatchedRounds, start: bytes) -> None:
        """A learner, whose base is of this start."""
        assert self._starts.setdefault(rounds.generation, start) == start, "G9: all start from the state of one"

    def leaves_history(self, daemon: Daemon, kept: Where) -> None:
        """For another: what is said of it is what is lost."""
        assert daemon.rounds is not None
        chain_ = daemon.rounds.history.chain
        _, cut_chain = self._cuts.get(kept.generation.hash64(), (0, START))
        own, other = self.histories.path(chain_), self.histories.path(cut_chain)
        common = sum(1 for mine, theirs in zip(own, other, strict=False) if mine == theirs)
        on = common  # rounds that were completed in the generation that is kept are in its history, too
        while common == len(other) and on < len(own) and self.histories.generation(own[on]) == kept.generation.hash64():
            on += 1
        late = on - common + 3 * (self.sync.staleness + 1)
        daemon.losses.leave(Left(chain_, len(own), common, late, apart=True))

    def note_base(self, daemon: Daemon) -> None:
        """What it has now, and perhaps no more when others still think so."""
        if daemon.holds_base and daemon.rounds is not None:
            self._based[daemon, daemon.rounds.history.chain] = self.now_s

    def leaves_base(self, daemon: Daemon, kept: Where) -> None:
        """It throws away what it computes with, for a history of which another has a base, or had lately."""
        for other in self.daemons:
            self.note_base(other)
        _, cut_chain = self._cuts.get(kept.generation.hash64(), (0, START))
        since_s = self.now_s - self.timeouts.silence_s - LATE_S
        self._based = {seen: at_s for seen, at_s in self._based.items() if at_s > since_s}
        held = [chain_ for other, chain_ in self._based if other is not daemon]
        path = {START, *self.histories.path(cut_chain)}  # who is on the way to the cut is served what it lacks
        there = any(chain_ in path or cut_chain in self.histories.path(chain_) for chain_ in held)
        assert there or cut_chain == START, (
            f"G4: {daemon.name} gives up its base for {told(kept.generation)}, of which nobody has one"
        )

    def went_back(self, daemon: Daemon, before: WatchedRounds | None, entry: Entry) -> None:
        """J3: every learner is lost, with its base. A daemon goes back from these rounds to a state that was saved."""
        assert before is None or before.path.get(entry.complete, entry.chain) == entry.chain
        self.tell(daemon.name, f"goes back to the state after round {entry.complete}")
        self.befallen["gone back"] += 1

    # Invariants.

    def check_sends(self, daemon: Daemon, generation: int) -> None:
        assert self._entered[generation] >= self._lives[generation], (
            f"{daemon.name} sends in a generation that not all members have entered"
        )

    def check_committed(self, rounds: WatchedRounds, round_: int) -> None:
        """G5: every member of the generation that is left holds it."""
        self.line.committed(rounds.generation, round_, rounds.path[round_])
        for other in self.daemons:
            if other.alive and other.rounds is not None and other.rounds.generation == rounds.generation:
                assert other.rounds.machine.complete >= round_, f"G5: {other.name} does not hold round {round_}"

    def report_of(self, rank: int) -> RankReport:
        """What a rank tells of itself every second, but for what nobody here looks at."""
        if rank not in self._reports:
            self._reports[rank] = RankReport(job=JOB, rank=rank, state="running", metrics=Metrics())
        return self._reports[rank]

    def of_node(self, node: Node) -> Daemon:
        """The daemon at the end of a link."""
        assert isinstance(node, Daemon)
        return node

    def check(self, daemon: Daemon) -> None:
        """After an event at this daemon."""
        if daemon.generation is not None:
            lent = len(daemon.donor._loans)
            assert lent <= len(daemon.generation.ranks), "disk is bounded: states that are lent"
        rounds = daemon.rounds
        if rounds is None:
            return
        state = daemon.donor.newest
        if state is not None and not daemon.has_left:
            assert rounds.path.get(state.round, state.chain) == state.chain, (
                f"G4: {daemon.name} has a state to give that is of another history"
            )
        machine, s = rounds.machine, self.sync.staleness
        assert machine.rounds_kept <= 3 * (s + 1), "memory is bounded: rounds"
        assert rounds.unsent <= 4 * (s + 2), "memory is bounded: unsent messages"
        kept = 3 * (s + 1) + min(self.unapplied_max, machine.complete - machine.applied)
        assert rounds.exchange.rounds_kept <= kept, "memory is bounded: encoded rounds"
        assert rounds.job_rounds.rounds_kept <= kept, "memory is bounded: rounds to be given to a learner"
        learner = daemon.learner
        if learner is not None and learner.alive and learner.rounds is rounds and machine.applied in rounds.path:
            upto = min(machine.applied, learner.applied)
            if upto == learner.applied:
                assert rounds.path[upto] == learner.base, (
                    f"{daemon.name}: what its learner has applied is of the history that is kept"
                )

    # What must come about.

    def well(self) -> bool:
        """All live daemons run in one generation, and all their learners compute."""
        live = [daemon for daemon in self.daemons if daemon.alive]
        if not live or any(daemon.asleep or not daemon.computes for daemon in live):
            return False
        generations = {d.machine.generation.hash64() for d in live if d.machine.generation is not None}
        first = live[0].machine.generation
        return len(generations) == 1 and first is not None and len(first.ranks) == len(live)

    def history_lost(self) -> bool:
        """Nobody is left that has one."""
        return not any(d.alive and d.has_history and d.machine.generation is not None for d in self.daemons)

    def recover(self) -> None:
        """Faults have stopped: within the deadline all is well and goes on."""
        end_s = self.now_s + self.setting.recovery_s
        while not self.well() and not self.over and self.now_s < end_s:
            self.run_until(self.now_s + CALM_S)
        assert self.well() or self.over, f"no progress:\n{self.story()}"
        while not self.over and self.now_s < end_s:
            wanted = self.least_complete + ROUNDS_AFTER
            while self.least_complete < wanted and not self.over and self.now_s < end_s:
                self.run_until(self.now_s + CALM_S)
            assert self.over or self.least_complete >= wanted, f"no more rounds:\n{self.story()}"
            if self.well():
                break
        for daemon in self.daemons if self.well() else ():
            if daemon.alive and daemon.is_in and (known := daemon.machine.generation) is not None and known.learning:
                asked = daemon.machine._state.settings_asked
                assert asked is None, f"C3: {daemon.name} is asked for {asked}, and it is not done:\n{self.story()}"

    @property
    def over(self) -> bool:
        """Nothing can come about any more."""
        return self.failed is not None or self.history_lost()

    @property
    def least_complete(self) -> int:
        """Of the live daemons with a history."""
        return min((d.rounds.machine.complete for d in self.daemons if d.alive and d.rounds is not None), default=0)

    def check_end(self) -> int:
        """Every history that a live daemon has. Returns how many epochs are over in the longest."""
        epochs = 0
        held = [based for daemon in self.daemons if (based := daemon.based)]
        for daemon in self.daemons:
            if daemon.alive and daemon.rounds is not None and daemon.machine.generation is not None:
                rounds = daemon.rounds
                if self.well():
                    self.line.check({*self.histories.path(rounds.history.chain)}, held)
                epochs = max(epochs, self.histories.check(rounds.history.chain, rounds.held()))
        return epochs

    # For people.

    def tell(self, who: str, what: str) -> None:
        """A line of the transcript, if there is one."""
        if self.transcript is not None:
            self.transcript.append(f"{self.now_s:8.3f}  {who}{'' if what.startswith(chr(39)) else ' '}{what}")

    def tell_once(self, who: str, generation: Generation) -> None:
        """A proposal, which goes to every member."""
        if (who, generation.hash64()) not in self._told:
            self._told.add((who, generation.hash64()))
            self.tell(who, f"proposes generation {generation.number} of {list(generation.ranks)}")

    def story(self) -> str:
        """For a failed run: where everybody is."""
        lines = [f"at {self.now_s:.2f} s"]
        for daemon in self.daemons:
            if not daemon.is_in:
                lines.append(f"{daemon.name} is not in the job")
                continue
            machine, rounds = daemon.machine, daemon.rounds
            known = machine.generation
            where = "none" if known is None else f"{known.number} of {known.ranks}, learning {known.learning}"
            alive = "asleep" if daemon.asleep else "up" if daemon.alive else "down"
            lines.append(f"{daemon.name} {alive}, {machine.phase.value}, generation {where}: {machine.waiting()}")
            if rounds is not None:
                held = f"{rounds.machine.complete} complete, {rounds.machine.applied} applied, {rounds.machine.decided}"
                learner = daemon.learner and (
                    daemon.learner.name,
                    daemon.learner.alive,
                    daemon.learner.rounds is rounds,
                )
                lines.append(f"    {held} decided, learner {learner} {rounds.machine.phase.value}")
                lines.append(f"    {rounds.machine.may_start()[1]}; {rounds.machine.waiting()}")
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replays seeds. Returns 1 if one of them breaks a rule."""
    from tests.sim.clusterreplay import replay

    return replay(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
