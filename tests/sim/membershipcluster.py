"""A cluster of membership machines in virtual time: links, an abstract round engine, mishaps, all from one seed.

A round completes at a member when it has the parts of all members of its generation. Every rule that can be seen in one
event is checked at that event; `converged` checks what must come about once failures have stopped.
"""

import hashlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from meshwire.lineage import ballot
from meshwire.membership import Membership
from meshwire.membershipevents import (
    CatchUpFrom,
    Effect,
    EnterGeneration,
    Fence,
    LeftOut,
    Message,
    Phase,
    Refusal,
    Resume,
    Send,
)
from meshwire.messages.generation import Enter, Standing
from meshwire.messages.job import Generation, Member
from meshwire.timeouts import Timeouts

JOB = "j" + "0" * 11
EVENTS_MAX = 200_000  # of one run: more is a livelock
IN_FLIGHT = 2  # rounds that a member has sent its part of and that are not complete
CHAINS = 7  # told in a standing
RTT_S = 0.02
KEYS: dict[int, tuple[Generation, int]] = {}  # by identity; the generation is kept, so that its identity stays its own
DELAYS_S = (0.001, 0.005, 0.005, 0.02, 0.1)  # of one message; links are independent


def key_of(generation: Generation) -> int:
    """Its hash, which every part names: computed once for each."""
    known = KEYS.get(id(generation))
    if known is None or known[0] is not generation:
        known = KEYS[id(generation)] = generation, generation.hash64()
    return known[1]


@dataclass(frozen=True)
class Part:
    """A member's part in a round of a generation. `content` names it for good; empty of a member that loads."""

    generation: int
    round: int
    content: str


@dataclass(frozen=True)
class Result:
    """A complete round, in a history that its chain identifies."""

    chain: bytes
    contents: tuple[str, ...]
    samples: int


@dataclass
class Link:
    """One connection; each side learns of its beginning and end on its own."""

    ends: tuple[int, int]
    up: set[int] = field(default_factory=set)
    closed: bool = False
    deaf: set[int] = field(default_factory=set)  # nothing arrives at these ends
    free_s: dict[int, float] = field(default_factory=dict)


class Daemon:
    """One daemon: its machine, and the rounds as its shell would keep them."""

    def __init__(self, number: int, incarnation: int) -> None:
        self.number = number
        self.member = Member(device=f"{number + 1:064x}", incarnation=incarnation, name=f"peer{number}")
        self.machine: Membership
        self.alive = True
        self.asleep_until_s = 0.0
        self.first = 0  # the history begins after this round
        self.results: list[Result] = []  # of round `first` (its chain alone counts) and those after it
        self.contents: dict[int, str] = {}  # own parts of rounds that are not complete, kept over generations (G6)
        self.generation: Generation | None = None  # whose messages are taken
        self.sending = False
        self.parts: dict[int, dict[int, str]] = {}  # by round, rank
        self.ballots: list[tuple[int, int, int]] = []
        self.fetch = 0  # the newest catch-up
        self.left_out = 0
        self.reloads = 0

    @property
    def complete(self) -> int:
        return self.first + len(self.results) - 1 if self.results else 0

    def chain(self, round_: int) -> bytes:
        return self.results[round_ - self.first].chain


class Cluster:
    """`members` daemons in the first generation of a job. Inject mishaps, `run_until`, read the records."""

    def __init__(self, seed: int, members: int, *, newcomers: int = 0, delays_s: tuple[float, ...] = DELAYS_S) -> None:
        KEYS.clear()
        self.random = Random(seed)
        self.job = JOB
        self.timeouts = Timeouts(rtt_s=RTT_S)
        self.delays_s = delays_s
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._incarnations = itertools.count(100)
        self.blocked: set[frozenset[int]] = set()
        self.links: dict[frozenset[int], Link] = {}
        self.entered: dict[int, set[tuple[str, int]]] = {}  # by generation: who has entered it
        self.cuts: dict[int, bytes] = {}  # chain of the cut by generation
        self.chains: dict[tuple[int, int], bytes] = {}  # by generation, round
        self.refusals: list[Refusal] = []
        self.resumed: list[tuple[float, int, int]] = []  # at, daemon, generation number
        self.daemons = [Daemon(n, next(self._incarnations)) for n in range(members + newcomers)]
        first = Generation.first(JOB, self.daemons[0].member.device, tuple(d.member for d in self.daemons[:members]))
        self.entered[first.hash64()] = {(d.member.device, d.member.incarnation) for d in self.daemons[:members]}
        for daemon in self.daemons:
            founder = daemon.number < members
            daemon.machine = self._machine(daemon, first if founder else None)
            if founder:
                daemon.generation, daemon.sending = first, True
                daemon.results = [Result(bytes(16), (), 0)]
        for one, other in itertools.combinations(self.daemons, 2):
            self._founded(one, other)
        for daemon in self.daemons[:members]:
            self.work(daemon, first)

    def _machine(self, daemon: Daemon, generation: Generation | None) -> Membership:
        known = [other.member.device for other in self.daemons]
        return Membership(daemon.member, JOB, self.timeouts, self.now_s, generation=generation, known=known)

    # Time.

    def at(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._order), do))

    def run_until(self, end_s: float) -> None:
        for _ in range(EVENTS_MAX):
            if not self._queue or self._queue[0][0] > end_s:
                self.now_s = end_s
                return
            self.now_s, _, do = heapq.heappop(self._queue)
            do()
        raise AssertionError("livelock")

    def _for(self, daemon: Daemon, do: Callable[[], None]) -> None:
        """On this very process, once it is awake."""
        if self.daemons[daemon.number] is not daemon or not daemon.alive:
            return
        if self.now_s < daemon.asleep_until_s:
            self.at(daemon.asleep_until_s - self.now_s + self.random.uniform(0, 0.01), partial(self._for, daemon, do))
        else:
            do()

    def _delay_s(self) -> float:
        return self.random.choice(self.delays_s)

    # Links and mishaps.

    def connect(self, one: int, other: int) -> None:
        """Dials until there is a link."""
        pair = frozenset((one, other))
        ends = self.daemons[one], self.daemons[other]
        if pair in self.blocked or not all(d.alive and d.asleep_until_s <= self.now_s for d in ends):
            self.at(1.0, partial(self.connect, one, other))
            return
        if pair in self.links and not self.links[pair].closed and not self.links[pair].deaf:
            return
        link = self.links[pair] = Link((one, other))
        incarnations = {d.number: d.member.incarnation for d in ends}
        for daemon, peer in (ends, ends[::-1]):
            self.at(self._delay_s(), partial(self._open, link, daemon, peer, incarnations[peer.number]))

    def _founded(self, one: Daemon, other: Daemon) -> None:
        link = self.links[frozenset((one.number, other.number))] = Link((one.number, other.number))
        for daemon, peer in ((one, other), (other, one)):
            self._open(link, daemon, peer, peer.member.incarnation)

    def _open(self, link: Link, daemon: Daemon, peer: Daemon, incarnation: int) -> None:
        if not link.closed and self.daemons[daemon.number] is daemon and daemon.alive:
            link.up.add(daemon.number)
            self._perform(daemon, daemon.machine.linked(peer.member.device, incarnation, self.now_s))

    def cut(self, one: int, other: int, *, silent: bool = False) -> None:
        """The link closes: at once, or each side notices the silence."""
        link = self.links.get(frozenset((one, other)))
        if link is not None and not link.closed:
            link.deaf = {one, other}
            for number in (one, other):
                wait_s = self.timeouts.silence_s if silent else 0.0
                self.at(wait_s + self._delay_s(), partial(self._close, link, number, "silent" if silent else "closed"))

    def deafen(self, one: int, other: int) -> None:
        """Half-open: nothing arrives at `one` any more; it notices the silence, and `other` then that it was closed."""
        link = self.links.get(frozenset((one, other)))
        if link is not None and not link.closed:
            link.deaf.add(one)
            self.at(self.timeouts.silence_s, partial(self._close, link, one, "silent"))

    def _close(self, link: Link, number: int, reason: str) -> None:
        link.closed = True
        pair = frozenset(link.ends)
        for end in link.ends:
            if end not in link.up:
                continue
            link.up.discard(end)
            daemon, other = self.daemons[end], link.ends[end == link.ends[0]]
            device = self.daemons[other].member.device
            delay_s = 0.0 if end == number else self._delay_s()

            def tell(daemon: Daemon = daemon, device: str = device) -> None:
                if self.links[pair] is link:
                    self._perform(daemon, daemon.machine.unlinked(device, reason, self.now_s))

            self.at(delay_s, partial(self._for, daemon, tell))
        self.at(self.random.choice([0.15, 0.25, 0.5]), partial(self.connect, *link.ends))

    def block(self, side: set[int]) -> None:
        """A partition: `side` and the others do not reach each other."""
        for one, other in itertools.combinations(range(len(self.daemons)), 2):
            if (one in side) != (other in side):
                self.blocked.add(frozenset((one, other)))
                self.cut(one, other, silent=self.random.random() < 0.5)

    def heal(self) -> None:
        self.blocked.clear()

    def crash(self, number: int, *, silent: bool = False) -> None:
        daemon = self.daemons[number]
        if daemon.alive:
            daemon.alive = False
            for pair in list(self.links):
                if number in pair:
                    self.links[pair].up.discard(number)
                    self.cut(*pair, silent=silent)

    def restart(self, number: int) -> None:
        if not self.daemons[number].alive:
            daemon = self.daemons[number] = Daemon(number, next(self._incarnations))
            daemon.machine = self._machine(daemon, None)
            for other in range(len(self.daemons)):
                if other != number:
                    self.at(self.random.uniform(0.0, 0.3), partial(self.connect, number, other))

    def sleep(self, number: int, for_s: float) -> None:
        """The lid is closed: nothing happens here, and others notice the silence."""
        daemon = self.daemons[number]
        if daemon.alive:
            daemon.asleep_until_s = max(daemon.asleep_until_s, self.now_s + for_s)
            if for_s > self.timeouts.silence_s:
                for pair in list(self.links):
                    if number in pair:
                        self.cut(*pair, silent=True)

    # The shell.

    def _send(self, daemon: Daemon, device: str, body: Message | Part) -> None:
        other = int(device, 16) - 1
        link = self.links.get(frozenset((daemon.number, other)))
        if link is None or daemon.number not in link.up:
            return
        arrival_s = max(self.now_s + self._delay_s(), link.free_s.get(other, 0.0))
        link.free_s[other] = arrival_s
        self.at(arrival_s - self.now_s, partial(self._deliver, link, daemon.number, self.daemons[other], body))

    def _deliver(self, link: Link, sender: int, daemon: Daemon, body: Message | Part) -> None:
        if link.closed or daemon.number in link.deaf or self.daemons[daemon.number] is not daemon or not daemon.alive:
            return
        if daemon.number not in link.up or self.now_s < daemon.asleep_until_s:  # keeps the order
            retry_s = max(0.005, daemon.asleep_until_s - self.now_s)
            link.free_s[daemon.number] = max(link.free_s.get(daemon.number, 0.0), self.now_s + retry_s)
            self.at(retry_s, partial(self._deliver, link, sender, daemon, body))
        elif isinstance(body, Part):
            self._take_part(daemon, self.daemons[sender], body)
        else:
            device = self.daemons[sender].member.device
            self._perform(daemon, daemon.machine.receive(device, body, self.now_s))

    def _perform(self, daemon: Daemon, effects: list[Effect]) -> None:
        promised = daemon.machine.promised
        if promised is not None and (not daemon.ballots or ballot(promised) != daemon.ballots[-1]):
            daemon.ballots.append(ballot(promised))
            assert daemon.ballots == sorted(set(daemon.ballots)), "G2: promises have rising ballots"
        for effect in effects:
            self._perform_one(daemon, effect)
        if (at_s := daemon.machine.deadline()) is not None:
            self.at(max(0.0, at_s - self.now_s), partial(self._for, daemon, partial(self._timer, daemon, at_s)))

    def _timer(self, daemon: Daemon, at_s: float) -> None:
        if daemon.machine.deadline() == at_s:
            effects = daemon.machine.timer(self.now_s)
            assert effects or daemon.machine.deadline() != at_s, f"a timer does nothing: {daemon.machine.waiting()}"
            self._perform(daemon, effects)

    def _perform_one(self, daemon: Daemon, effect: Effect) -> None:
        match effect:
            case Send(device, message):
                self._send(daemon, device, message)
            case Fence():
                daemon.fetch += 1
                self.fence(daemon)
                self._perform(daemon, daemon.machine.standing(self.standing(daemon), self.now_s))
            case CatchUpFrom(_, device, _, enter, reload):
                daemon.fetch += 1
                daemon.reloads += reload
                if reload:
                    daemon.results, daemon.contents = [], {}
                fetched = partial(self._fetched, daemon, device, enter, daemon.fetch)
                self.at(self._delay_s() * 4, partial(self._for, daemon, fetched))
            case EnterGeneration(generation, enter):
                self._enter(daemon, generation, enter)
            case Resume(generation):
                assert generation == daemon.generation == daemon.machine.generation
                daemon.sending = True
                self.resumed.append((self.now_s, daemon.number, generation.number))
                for round_ in sorted(daemon.contents):
                    self._contribute(daemon, generation, round_)
                self.work(daemon, generation)
            case LeftOut():
                daemon.fetch += 1
                daemon.left_out += 1
                daemon.generation, daemon.sending, daemon.results, daemon.contents = None, False, [], {}
            case Refusal():
                self.refusals.append(effect)

    def fence(self, daemon: Daemon) -> None:
        """G2: nothing older is sent, completed or applied."""
        daemon.generation, daemon.sending = None, False

    def standing(self, daemon: Daemon) -> Standing:
        if not daemon.results:
            return Standing(generation=None, number=0, complete=0, chains=(), samples=0, linked=())
        chains = tuple(result.chain for result in daemon.results[-CHAINS:])
        samples = daemon.results[-1].samples
        return Standing(generation=0, number=0, complete=daemon.complete, chains=chains, samples=samples, linked=())

    def _fetched(self, daemon: Daemon, device: str, enter: Enter, fetch: int) -> None:
        source = self.daemons[int(device, 16) - 1]
        link = self.links.get(frozenset((daemon.number, source.number)))
        whole = link is not None and not link.closed and daemon.number in link.up and source.number in link.up
        if daemon.fetch != fetch or not whole or not source.results or not source.alive:
            return
        assert source.first <= enter.cut <= source.complete, "the source holds the cut"
        if not daemon.results:
            daemon.first, daemon.results = enter.cut, [source.results[enter.cut - source.first]]
        else:
            assert source.chain(daemon.complete) == daemon.chain(daemon.complete), "G4: what is served continues"
            daemon.results += source.results[daemon.complete + 1 - source.first : enter.cut + 1 - source.first]
        self._perform(daemon, daemon.machine.caught_up(self.now_s))

    def _enter(self, daemon: Daemon, generation: Generation, enter: Enter) -> None:
        key = key_of(generation)
        assert daemon.complete == enter.cut, "G6: whoever enters holds the rounds up to the cut, and none above"
        assert daemon.chain(enter.cut) == enter.chain, "G4: whoever enters has the history that is kept"
        assert self.cuts.setdefault(key, enter.chain) == enter.chain, "one cut for all"
        self.entered.setdefault(key, set()).add((daemon.member.device, daemon.member.incarnation))
        daemon.generation, daemon.sending, daemon.parts = generation, False, {}
        daemon.contents = {round_: c for round_, c in daemon.contents.items() if round_ > enter.cut}
        if daemon.machine.generation is generation:
            rank = [member.device for member in generation.members].index(daemon.member.device)
            if rank not in generation.learning:
                wish = partial(self._learns, daemon)
                self.at(self.random.choice([0.5, 3.0]), partial(self._for, daemon, wish))

    def _learns(self, daemon: Daemon) -> None:
        if daemon.machine.phase is not Phase.OUT:
            self._perform(daemon, daemon.machine.wish("learn", self.now_s))

    # Rounds.

    def work(self, daemon: Daemon, generation: Generation) -> None:
        """A step of the learner ends, if the generation is still the same."""
        if daemon.generation is not generation or not daemon.sending:
            return
        round_ = max(daemon.contents, default=daemon.complete) + 1
        if round_ <= daemon.complete + IN_FLIGHT:
            rank = generation.ranks[[m.device for m in generation.live.values()].index(daemon.member.device)]
            daemon.contents[round_] = f"{daemon.number}.{next(self._names)}" if rank in generation.learning else ""
            self._contribute(daemon, generation, round_)
        self.at(self.random.uniform(0.1, 0.3), partial(self._for, daemon, partial(self.work, daemon, generation)))

    def _contribute(self, daemon: Daemon, generation: Generation, round_: int) -> None:
        lives = {(member.device, member.incarnation) for member in generation.live.values()}
        assert lives <= self.entered[key_of(generation)], "nobody sends in a generation before all have entered it"
        part = Part(key_of(generation), round_, daemon.contents[round_])
        for device, _ in sorted(lives):
            if device != daemon.member.device:
                self._send(daemon, device, part)
        self._take_part(daemon, daemon, part)

    def _take_part(self, daemon: Daemon, sender: Daemon, part: Part) -> None:
        if daemon.generation is None or key_of(daemon.generation) != part.generation:
            promised = daemon.machine.promised
            early = (
                promised is not None and key_of(promised) == part.generation and daemon.machine.phase is not Phase.OUT
            )
            entered = (daemon.member.device, daemon.member.incarnation) in self.entered[part.generation]
            assert entered or not early, "nothing arrives early"
            return
        daemon.parts.setdefault(part.round, {})[sender.number] = part.content
        numbers = {int(member.device, 16) - 1 for member in daemon.generation.live.values()}
        while {*daemon.parts.get(daemon.complete + 1, {})} >= numbers:
            self._complete(daemon, daemon.generation)

    def _complete(self, daemon: Daemon, generation: Generation) -> None:
        """G3, and within a generation a round has one result."""
        round_ = daemon.complete + 1
        parts = daemon.parts.pop(round_)
        contents = tuple(content for _, content in sorted(parts.items()) if content)
        key = key_of(generation)
        before = daemon.results[-1]
        text = f"{before.chain.hex()} {key} {contents}"
        chain = hashlib.blake2b(text.encode(), digest_size=16).digest()
        assert self.chains.setdefault((key, round_), chain) == chain, "chains are equal at equal rounds in a generation"
        daemon.contents.pop(round_, None)
        daemon.results.append(Result(chain, contents, before.samples + len(contents)))
        daemon.machine.note_progress(daemon.results[-1].samples)

    # What must come about.

    def converged(self) -> bool:
        """All live daemons are awake and run in one generation."""
        if any(daemon.asleep_until_s > self.now_s for daemon in self.daemons):
            return False
        live = [daemon for daemon in self.daemons if daemon.alive]
        generations = {d.machine.generation.hash64() if d.machine.generation else None for d in live}
        listed = live[0].machine.generation
        running = all(daemon.machine.phase is Phase.RUNNING and daemon.sending for daemon in live)
        return running and len(generations) == 1 and listed is not None and len(listed.ranks) == len(live)

    def history_lost(self) -> bool:
        """Nobody is left that has one: all have crashed, or were left out by somebody who then crashed."""
        return not any(daemon.alive and daemon.results for daemon in self.daemons)

    def story(self) -> str:
        """For a failed run."""
        lines = [f"at {self.now_s:.2f} s"]
        for daemon in self.daemons:
            machine = daemon.machine
            where = machine.generation and (machine.generation.number, machine.generation.ranks)
            promised = machine.promised and (machine.promised.number, machine.promised.ranks)
            alive = "up" if daemon.alive else "down"
            lines.append(f"{daemon.number} {alive} {machine.phase.value} in {where}, promised {promised}, complete")
            lines.append(f"    {daemon.complete}, waits for: {machine.waiting()}")
        return "\n".join(lines)

    def check_history(self) -> None:
        """A contribution is counted once, in the history of everybody who runs."""
        for daemon in self.daemons:
            contents = [content for result in daemon.results for content in result.contents]
            assert len(contents) == len(set(contents)), "a contribution is counted once"
