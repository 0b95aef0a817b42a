"""The membership machines alone, cut in two at every instant of a change of generation, and in two others after it.

`python -m tests.sim.cuts --members 4` goes through all of them. A message is delivered at a time, in the order sent; a
cut loses those that would cross it. Rounds are as short as can be: when all members of a generation run in it, each
completes one and knows that all have.
"""

import argparse
import itertools
import sys
from collections import deque
from collections.abc import Iterator, Sequence

from meshwire.membership.effects import (
    CatchUpFrom,
    EnterGeneration,
    Fence,
    HistoryLeft,
    MembershipPhase,
    Message,
    Resume,
    Send,
)
from meshwire.membership.inputs import (
    CannotCatchUp,
    CaughtUpToCut,
    Input,
    LinkDown,
    LinkUp,
    MessageFrom,
    RequestMade,
    RoundsCounted,
    TimerDue,
)
from meshwire.membership.machine import Membership
from meshwire.messages.generation import Holding, Standing
from meshwire.messages.job import Generation, Member
from meshwire.rounds.chain import START
from meshwire.timeouts import Timeouts
from tests.computing import computing
from tests.sim.clusterline import Line

JOB = "j" + "0" * 11
TIMEOUTS = Timeouts(5.0, 0.01)
CUT_S = 10.0  # longer than a change takes, shorter than who is not entitled waits
LONG_S = CUT_S + TIMEOUTS.provisional_s
STEPS_MAX = 20_000  # messages and timers of one run: more is a livelock

Side = frozenset[int]
Run = tuple[int, int | None, int, list[tuple[Side, float]]]  # members, who is lost, when the first cut, the cuts


class Peer:
    """One daemon: its machine, and the history that it holds, by chain ids; None if it brings none."""

    def __init__(self, mesh: "Mesh", rank: int, first: Generation) -> None:
        self._mesh = mesh
        self.rank = rank
        self.member = first.members[rank]
        self.history: list[bytes] | None = []
        known = [member.device for member in first.members]
        self.machine = Membership(self.member, JOB, TIMEOUTS, 0.0, generation=first, known=known)
        self._waits_for: CatchUpFrom | None = None

    @property
    def generation(self) -> Generation | None:
        """Where it runs."""
        return self.machine.generation if self.machine.phase is MembershipPhase.RUNNING else None

    def take(self, input_: Input) -> None:
        """Hands it to the machine, and performs what that decides."""
        for effect in self.machine.handle(input_, self._mesh.now_s):
            match effect:
                case Send(device, message):
                    self._mesh.send(self.rank, int(device, 16) - 1, message)
                case Fence():
                    self._waits_for = None
                    self.take(self._standing())
                case CatchUpFrom(rank, _, _, _, _):
                    if self._mesh.linked(self.rank, rank):
                        self._mesh.send(self.rank, rank, effect)
                        self._waits_for = effect
                case EnterGeneration(generation, _):
                    self._mesh.line.entered(generation)
                case Resume(generation, _):
                    if self.rank not in generation.learning:
                        self.take(RequestMade("learn"))
                case HistoryLeft():
                    self.history, self._waits_for = None, None

    def caught_up(self, effect: CatchUpFrom, history: list[bytes] | None) -> None:
        """The source's answer: it is what the source held when it was asked."""
        if self._waits_for is not effect:
            return
        if history is None or len(history) < effect.enter.cut:
            self.take(CannotCatchUp("the source has left it"))
        else:
            self.history = history[: effect.enter.cut]
            self.take(CaughtUpToCut())

    def _standing(self) -> Standing:
        if self.history is None:
            return Standing(generation=None, number=0, complete=0, chains=(), samples=0, linked=())
        chains, complete = (START, *self.history)[-9:], len(self.history)
        return Standing(
            generation=0,
            number=0,
            complete=complete,
            chains=chains,
            samples=complete,
            linked=(),
            holding=Holding(base=True),
        )


class Mesh:
    """All of them, in one job, and whom the network lets talk to whom."""

    def __init__(self, members: int) -> None:
        self.now_s = 0.0
        self.steps = 0
        self._links: set[frozenset[int]] = set()
        self._queue: deque[tuple[int, int, Message | CatchUpFrom]] = deque()
        listed = tuple(Member(device=f"{n + 1:064x}", incarnation=n + 10, name=f"peer{n}") for n in range(members))
        first = computing(JOB, listed[0].device, listed)
        self.line = Line(first)
        self._went_on = {first.hash64()}
        self.peers = [Peer(self, rank, first) for rank in range(members)]
        self.let(frozenset())

    def let(self, side: Side) -> None:
        """From now on only those on the same side can talk; the empty side: all."""
        pairs = {frozenset(pair) for pair in itertools.combinations(range(len(self.peers)), 2)}
        wanted = {pair for pair in pairs if len(pair & side) != 1}
        lost, new = self._links - wanted, wanted - self._links
        self._links -= lost
        self._queue = deque(each for each in self._queue if frozenset(each[:2]) not in lost)
        for pair in sorted(lost, key=sorted):
            for one, other in (sorted(pair), sorted(pair)[::-1]):
                self.peers[one].take(LinkDown(self.peers[other].member.device, "silent"))
        self._links |= new
        for pair in sorted(new, key=sorted):
            for one, other in (sorted(pair), sorted(pair)[::-1]):
                peer = self.peers[other].member
                self.peers[one].take(LinkUp(peer.device, peer.incarnation))

    def linked(self, one: int, other: int) -> bool:
        return frozenset((one, other)) in self._links

    def send(self, sender: int, receiver: int, message: Message | CatchUpFrom) -> None:
        if self.linked(sender, receiver):
            self._queue.append((sender, receiver, message))

    def step(self, until_s: float) -> bool:
        """The next message, or the next timer up to then. Returns whether there was one."""
        self.steps += 1
        assert self.steps < STEPS_MAX, "livelock"
        if self._queue:
            sender, receiver, message = self._queue.popleft()
            if isinstance(message, CatchUpFrom):
                history = self.peers[receiver].history
                self.peers[sender].caught_up(message, None if history is None else [*history])
            else:
                device = self.peers[sender].member.device
                self.peers[receiver].take(MessageFrom(device, message))
            self._complete()
            return True
        due = [(at_s, peer.rank) for peer in self.peers if (at_s := peer.machine.deadline()) is not None]
        at_s, rank = min(due, default=(until_s, -1))
        if rank < 0 or at_s > until_s:
            self.now_s = until_s
            return False
        self.now_s = max(self.now_s, at_s)
        self.peers[rank].take(TimerDue())
        return True

    def run(self, for_s: float) -> None:
        until_s = self.now_s + for_s
        while self.step(until_s):
            pass

    def _complete(self) -> None:
        """A round in every generation in which all run and are linked."""
        for peer in self.peers:
            generation = peer.generation
            if generation is None or generation.ranks[0] != peer.rank or generation.hash64() in self._went_on:
                continue
            there = [self.peers[rank] for rank in generation.ranks]
            if any(other.generation != generation for other in there):
                continue
            held = [other.machine.generation for other in self.peers if other.history is not None]
            there_too = [other for other in held if other is not None]
            self.line.went_on(generation, there_too, lambda _life: False)  # nobody ends
            self._went_on.add(generation.hash64())
            for other in there:
                assert other.history is not None
                other.history.append(generation.hash64().to_bytes(16, "little"))
                other.take(RoundsCounted(len(other.history)))
                assert other.history == there[0].history, "G4: whoever goes on together holds the same"
            assert there[0].history is not None
            self.line.committed(generation.hash64(), len(there[0].history), there[0].history[-1])

    def check(self) -> None:
        """All are together again, and nothing that was committed by an entitled part is lost."""
        generations = {None if peer.generation is None else peer.generation.hash64() for peer in self.peers}
        first = self.peers[0]
        story = [(peer.machine.phase.value, peer.machine.waiting()) for peer in self.peers]
        assert len(generations) == 1, f"they do not come together: {story}"
        assert first.generation is not None, f"they do not go on: {story}"
        assert first.generation.ranks == tuple(range(len(self.peers))), "somebody is left out"
        assert not first.generation.provisional, "all together are entitled"
        for peer in self.peers:
            assert peer.history is not None
            self.line.check(peer.history)


def sides(members: int) -> Iterator[Side]:
    """All ways to cut them in two."""
    for count in range(1, members // 2 + 1):
        for side in itertools.combinations(range(members), count):
            if 2 * count < members or 0 in side:
                yield frozenset(side)


def changing(members: int, lost: int | None) -> Mesh:
    """A change of generation begins: a member is lost, or (None) the last one's learner has died."""
    mesh = Mesh(members)
    if lost is None:
        mesh.peers[-1].take(RequestMade("rest"))
    else:
        mesh.let(frozenset([lost]))
        mesh.step(TIMEOUTS.relink_grace_s)  # the first one has proposed
    return mesh


def instants(members: int, lost: int | None) -> int:
    """How many messages and timers the change takes that nothing disturbs."""
    mesh = changing(members, lost)
    while mesh.step(TIMEOUTS.patience_s):
        pass
    return mesh.steps


def run(members: int, lost: int | None, instant: int, cuts: Sequence[tuple[Side, float]]) -> None:
    """The first cut at this instant of the change; each lasts so long; then all can talk again."""
    mesh = changing(members, lost)
    for _ in range(instant):
        mesh.step(TIMEOUTS.patience_s)
    for side, for_s in cuts:
        mesh.let(side)
        mesh.run(for_s)
    mesh.let(frozenset())
    mesh.run(2 * LONG_S + 200.0)
    mesh.check()


def all_runs(members: int) -> Iterator[Run]:
    """Every instant of every change, both cuts every way; each ends before who is not entitled goes on, or after it."""
    for lost in (None, 0, members - 1):
        for instant in range(instants(members, lost)):
            for first, second in itertools.product(sides(members), repeat=2):
                for first_s, second_s in itertools.product((CUT_S, LONG_S), repeat=2):
                    yield members, lost, instant, [(first, first_s), (second, second_s)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.cuts")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--every", type=int, default=1, help="so many are passed over for one that is run")
    options = parser.parse_args()
    runs = failed = 0
    for one in itertools.islice(all_runs(options.members), 0, None, options.every):
        runs += 1
        try:
            run(*one)
        except AssertionError as error:
            failed += 1
            sys.stdout.write(f"{one}: {error}\n")
    sys.stdout.write(f"{runs} runs, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
