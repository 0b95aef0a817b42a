"""Several learners with dealt loaders in one process, around one ledger, in an order drawn from a seed.

Rounds are those of rules R0 to R5 without bytes. Every learner runs in a thread, and only one at a time: whenever it
waits or has ended a step, the next one is drawn among those that can go on. When nobody can, everybody waits for
somebody else for ever, and that is an error. Learners may be lost and come back, with a script that begins anew.
"""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from meshtrain.train.data.deal import Deal
from meshtrain.train.data.loader import DealtLoader
from meshtrain.train.data.step_samples import StepSamples
from meshwire.message_base import Wire
from meshwire.messages.learner import EpochOver, Grant, StepLost
from meshwire.messages.rounds import Bind, SampleBlock
from meshwire.samples.ledger import Ledger
from meshwire.sync_modes.mode import SyncSettings

NULL_CHANCE = 0.3  # that a computing learner is passed over when the rules allow it
OVERDUE_CHANCE = 0.03  # that it is taken for absent while it computes (R5)
CALL_CHANCE = 0.1  # that a period ends early with a local step, where the mode allows it
SIZES_CHANCE = 0.2  # that a bind of the lowest rank changes the sizes


class Ended(BaseException):
    """Another learner has failed, or this one is lost."""


@dataclass
class Learner:
    """One learner and what its daemon knows of it. `decided`, `base`: as in R0."""

    cluster: "Cluster"
    rank: int
    deal: Deal
    drawn: StepSamples
    speed: float
    loader: DealtLoader = field(init=False)
    thread: threading.Thread = field(init=False)
    dead: bool = False
    step_number: int = 1
    decided: int = 0
    base: int = 0
    computing: bool = True
    overdue: bool = False
    inbox: list[Wire] = field(default_factory=list)
    until: Callable[[], bool] | None = None  # what it waits for
    what: str = ""
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    pending: list[tuple[int, list[int]]] = field(default_factory=list)  # handed out, not bound: epoch, indices
    steps: list[int] = field(default_factory=list)  # samples of each
    lost: int = 0
    idled: int = 0
    taken: int = 0  # local steps of this period
    rehearses: bool = False

    # What its script does

    def read(self, *, count: int | None = None) -> Any:
        """Batches of one iteration, `count` at most."""
        for number, batch in enumerate(self.loader, 1):
            if self.rehearses:
                break
            self.pending[-1][1].extend(batch.tolist())
            yield batch
            if number == count:
                break

    def step(self) -> None:
        """Binds what was handed out, and begins the next step when R1 allows it."""
        self.cluster.contribute(self)
        self.step_number += 1
        self.computing = False
        self.wait(lambda: self.decided - self.cluster.completed <= self.cluster.staleness, "the start of a step")
        self.base = self.cluster.completed
        self.computing, self.overdue = True, False
        self.cluster.pass_on(self)

    def local_step(self) -> None:
        """R9: each H-th ends a period, and so does one behind which another has called it."""
        self.taken += 1
        called = self.cluster.sync.ends_early and self.cluster.random.random() < CALL_CHANCE
        if self.taken == self.cluster.sync.period or called:
            self.end_period()

    def end_period(self) -> bool:
        """Local steps so far become a round."""
        taken, self.taken = self.taken, 0
        if taken:
            self.step()
        return bool(taken)

    def barrier(self) -> None:
        """Waits for all others that have not finished."""
        reached = self.cluster.in_barrier
        reached.add(self.rank)
        self.wait(lambda: reached | self.cluster.finished == set(self.cluster.learners), "the barrier")
        self.base = self.cluster.completed

    # What its loader calls

    def begin_rehearsal(self) -> None:
        self.rehearses = True

    def leave_rehearsal(self) -> None:
        """Its script does not step behind its loops."""

    def end_rehearsal(self) -> None:
        self.rehearses = False

    def add(self, blocks: Sequence[SampleBlock], samples: int) -> None:
        self.drawn.add(blocks, samples)
        self.pending.append((blocks[0].epoch, []))

    def wait(self, until: Callable[[], bool], what: str) -> None:
        self.take_in()
        while not until():
            self.until, self.what = until, what
            self.cluster.pass_on(self)
            self.take_in()
        self.until = None

    def wait_samples(self, until: Callable[[], bool]) -> None:
        self.wait(until, "samples")

    def wait_idle(self, reason: str, until: Callable[[], bool], what: str) -> None:
        self.idled += 1
        self.cluster.idle.add(self.rank)
        self.wait(until, what)
        self.cluster.idle.discard(self.rank)
        self.base = self.cluster.completed

    def take_in(self) -> None:
        """The notices that lie there."""
        inbox, self.inbox = self.inbox, []
        for notice in inbox:
            match notice:
                case Grant(batches=batches, step=step):
                    self.deal.grant(batches, step)
                case EpochOver(epoch=epoch):
                    self.deal.epoch_over(epoch)
                case StepLost(step=step, retry=retry):
                    self.deal.step_lost(step, retry)


class Cluster:
    """The learners, their rounds and the ledger.

    Args:
        churn: chance that a learner is lost, or a lost one comes back, between two turns; nobody once one has finished.

    Attributes:
        learners: by rank.
        covered: the indices of batches in complete rounds, by epoch.
        unused: what the ledger has said of each epoch when it was over.
        losses: how many learners were lost so far.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        members: int,
        sync: SyncSettings,
        seed: int,
        *,
        speeds: Sequence[float] | None = None,
        churn: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.sync = sync
        self.staleness = sync.staleness
        self.churn = churn
        self._loader = loader
        self._members = members
        self._speeds = speeds or [self.random.uniform(1, 4) for _ in range(members)]
        self.learners: dict[int, Learner] = {}
        self._ended: list[Learner] = []
        self.completed = 0
        self.idle: set[int] = set()
        self.in_barrier: set[int] = set()
        self.finished: set[int] = set()
        self.covered: dict[int, list[int]] = defaultdict(list)
        self.unused: list[int] = []
        self.losses = 0
        self._binds: dict[int, dict[int, Bind]] = defaultdict(dict)
        self._covers: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}  # by round and rank
        self._main = threading.Semaphore(0)
        self._errors: list[BaseException] = []
        for rank in range(members):
            self.learners[rank] = self._learner(rank)
        self.space = self.learners[0].deal.space()
        self.ledger = Ledger(self.space, range(members), sync)
        self._sizes_change = sync.shares == "speed" and not self.space.whole_batches
        for learner in self.learners.values():
            learner.inbox.append(Grant(batches=self.ledger.batches(learner.rank)))

    def _learner(self, rank: int) -> Learner:
        deal = Deal(self._loader, self._members, 7, self.sync)
        drawn = StepSamples(deal)
        learner = Learner(self, rank, deal, drawn, self._speeds[rank], decided=self.completed, base=self.completed)
        learner.loader = DealtLoader(self._loader, deal, learner, torch.device("cpu"), learner)
        return learner

    def run(self, script: Callable[[Learner], None]) -> None:
        """Runs the script on all learners to its end. Raises what a learner has raised; AssertionError if all wait."""
        for learner in self.learners.values():
            self._start(learner, script)
        try:
            while not self._errors and len(self.finished) < len(self.learners):
                ready = [each for each in self._running() if self._can_go_on(each)]
                if not ready:
                    waiting = {each.rank: each.what for each in self._running()}
                    raise AssertionError(f"all wait for ever: {waiting}")
                (learner,) = self.random.choices(ready, [each.speed for each in ready])
                learner.turn.release()
                self._main.acquire()
                self._advance()
                if not self.finished and self.random.random() < self.churn:
                    self._change(script)
                    self._advance()
        finally:
            self._errors.append(Ended())
            for learner in [*self.learners.values(), *self._ended]:
                learner.turn.release()
                learner.thread.join()
                del learner.loader  # it would wait for its workers if it were freed only with the cycle that it is in
        if not isinstance(self._errors[0], Ended):
            raise self._errors[0]

    def _start(self, learner: Learner, script: Callable[[Learner], None]) -> None:
        learner.thread = threading.Thread(target=self._thread, args=(learner, script))
        learner.thread.start()

    def _running(self) -> list[Learner]:
        return [each for each in self.learners.values() if each.rank not in self.finished]

    def _change(self, script: Callable[[Learner], None]) -> None:
        """A generation whose cut is here: one learner is lost, or a lost one is back (X3)."""
        lost = [rank for rank in range(self._members) if rank not in self.learners]
        if lost and (len(self.learners) == 1 or self.random.random() < 0.5):
            rank = self.random.choice(lost)
            learner = self.learners[rank] = self._learner(rank)
            self._enter()
            if self.unused:
                learner.inbox.append(EpochOver(epoch=len(self.unused) - 1, unused=0))
            learner.inbox.append(Grant(batches=self.ledger.batches(rank)))
            self._start(learner, script)
        elif len(self.learners) > 1:
            self.losses += 1
            learner = self.learners.pop(self.random.choice(sorted(self.learners)))
            self._ended.append(learner)
            learner.dead = True
            learner.turn.release()
            self._main.acquire()
            self.idle.discard(learner.rank)
            for binds in self._binds.values():
                binds.pop(learner.rank, None)
            self._enter()

    def _enter(self) -> None:
        known = set(self.ledger.sizes)
        state = self.ledger.state()
        granted = self.ledger.enter(self.learners)
        again = Ledger.restored(self.space, self.sync, state)
        assert again.enter(self.learners) == granted, "a member without history computes the same"
        assert again.state() == self.ledger.state()
        for rank, batches in granted.items():
            if rank in known:
                self.learners[rank].inbox.append(Grant(batches=batches))

    def pass_on(self, learner: Learner) -> None:
        """Lets others run."""
        self._main.release()
        learner.turn.acquire()
        if self._errors or learner.dead:
            raise Ended

    def contribute(self, learner: Learner) -> None:
        """A step's bind, unless its gradient would be too old (R0, R5)."""
        pending, learner.pending = learner.pending, []
        taken = learner.drawn.take(learner.step_number)
        if learner.decided - learner.base > self.staleness:
            learner.lost += 1
            learner.inbox.append(StepLost(step=learner.step_number, reason="too old", retry=True))
            return
        if pending:
            assert taken.weight == sum(len(indices) for _, indices in pending)
        learner.steps.append(sum(len(indices) for _, indices in pending))
        learner.decided += 1
        lowest = learner.rank == min(self.learners)
        changes = lowest and self._sizes_change and self.random.random() < SIZES_CHANCE
        self._covers[learner.decided, learner.rank] = pending
        self._binds[learner.decided][learner.rank] = Bind(
            round=learner.decided,
            step=learner.step_number,
            base=learner.base,
            weight=taken.weight,
            samples=taken.blocks,
            claim=taken.claim,
            sizes=self._other_sizes() if changes else (),
        )

    def _other_sizes(self) -> tuple[int, ...]:
        members = len(self.learners)
        joint = members * self.space.batch
        cuts = sorted(self.random.sample(range(1, joint), members - 1))
        return tuple(high - low for low, high in zip([0, *cuts], [*cuts, joint], strict=True))

    def _thread(self, learner: Learner, script: Callable[[Learner], None]) -> None:
        learner.turn.acquire()
        try:
            if not self._errors and not learner.dead:
                script(learner)
        except Ended:
            pass
        except BaseException as error:
            self._errors.append(error)
        if not learner.dead:
            self.finished.add(learner.rank)
        self._main.release()

    def _can_go_on(self, learner: Learner) -> bool:
        return learner.until is None or bool(learner.inbox) or learner.until()

    def _advance(self) -> None:
        """Nulls, complete rounds, grants, epochs that are over."""
        while (number := self.completed + 1) in self._binds:
            for learner in self.learners.values():
                if learner.decided < number and self._nulls(learner, number):
                    learner.decided = number
            if any(learner.decided < number for learner in self.learners.values()):
                break
            binds = self._binds.pop(number)
            granted = self.ledger.complete(binds)
            assert isinstance(granted, dict), granted
            self.completed = number
            for rank, batches in granted.items():
                for epoch, indices in self._covers[number, rank]:
                    self.covered[epoch] += indices
                self.learners[rank].inbox.append(Grant(batches=batches, step=binds[rank].step))
        while (unused := self.ledger.over(len(self.unused), self.finished | self.in_barrier)) is not None:
            for learner in self.learners.values():
                learner.inbox.append(EpochOver(epoch=len(self.unused), unused=unused))
            self.unused.append(unused)

    def _nulls(self, learner: Learner, number: int) -> bool:
        if learner.rank in self.idle | self.finished | self.in_barrier or learner.overdue:
            return True
        if not learner.computing or self.sync.straggler == "wait":
            return False
        learner.overdue = self.random.random() < OVERDUE_CHANCE
        return learner.overdue or (number <= learner.base + self.staleness and self.random.random() < NULL_CHANCE)
