"""Several learners with claimed loaders in one process, around one ledger, in an order drawn from a seed.

Rounds are those of rules R0 to R5 without bytes. Every learner runs in a thread, and only one at a time: whenever it
waits or has ended a step, the next one is drawn among those that can go on. When nobody can, everybody waits for
somebody else for ever, and that is an error.
"""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from meshtrain.train.claimed import ClaimedDeal, ClaimedLoader
from meshtrain.train.drawn import DrawnSamples
from meshwire.claims import Ledger, first_batches
from meshwire.messages.learner import EpochOver, Grant, StepLost
from meshwire.messages.rounds import Bind, SampleBlock
from meshwire.wiretypes import Wire

NULL_CHANCE = 0.3  # that a computing learner is passed over when the rules allow it
OVERDUE_CHANCE = 0.03  # that it is taken for absent while it computes (R5)
SIZES_CHANCE = 0.2  # that a bind of rank 0 changes the sizes


class Ended(BaseException):
    """Another learner has failed."""


@dataclass
class Learner:
    """One learner and what its daemon knows of it. `decided`, `base`: as in R0."""

    cluster: "Cluster"
    rank: int
    deal: ClaimedDeal
    drawn: DrawnSamples
    speed: float
    loader: ClaimedLoader = field(init=False)
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

    # What its script does

    def read(self, *, count: int | None = None) -> Any:
        """Batches of one iteration, `count` at most."""
        for number, batch in enumerate(self.loader, 1):
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

    def barrier(self) -> None:
        """Waits for all others that have not finished."""
        reached = self.cluster.in_barrier
        reached.add(self.rank)
        everybody = set(range(len(self.cluster.learners)))
        self.wait(lambda: reached | self.cluster.finished == everybody, "the barrier")
        self.base = self.cluster.completed

    # What its loader calls

    def on_batch(self, blocks: Sequence[SampleBlock], samples: int) -> None:
        self.drawn.add(blocks, samples)
        (block,) = blocks
        self.pending.append((block.epoch, []))

    def wait(self, until: Callable[[], bool], what: str) -> None:
        self.take_in()
        while not until():
            self.until, self.what = until, what
            self.cluster.pass_on(self)
            self.take_in()
        self.until = None

    def end_epoch(self, epoch: int) -> None:
        self.cluster.idle.add(self.rank)
        self.wait(lambda: self.deal.is_over(epoch), f"the end of epoch {epoch}")
        self.cluster.idle.discard(self.rank)
        self.base = self.cluster.completed

    def take_in(self) -> None:
        """The notices that lie there."""
        inbox, self.inbox = self.inbox, []
        for notice in inbox:
            match notice:
                case Grant(blocks=blocks):
                    self.deal.grant(blocks)
                case EpochOver(epoch=epoch):
                    self.deal.epoch_over(epoch)
                case StepLost(step=step, retry=retry):
                    self.deal.step_lost(step, retry)


class Cluster:
    """The learners, their rounds and the ledger.

    Attributes:
        covered: the indices of bound batches, by epoch.
        unused: what the ledger has said of each epoch when it was over.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        members: int,
        staleness: int,
        seed: int,
        *,
        speeds: Sequence[float] | None = None,
        sizes_change: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.staleness = staleness
        speeds = speeds or [self.random.uniform(1, 4) for _ in range(members)]
        self.learners: list[Learner] = []
        for rank in range(members):
            deal = ClaimedDeal(loader, members, 7, staleness)
            drawn = DrawnSamples()
            drawn.start_counting(deal.bind)
            self.learners.append(Learner(self, rank, deal, drawn, speeds[rank]))
        for learner in self.learners:
            learner.loader = ClaimedLoader(
                loader, learner.deal, learner.on_batch, torch.device("cpu"), learner.wait, learner.end_epoch
            )
        self.space = self.learners[0].deal.space()
        self.ledger = Ledger(self.space, members, first_batches(staleness))
        self._sizes_change = sizes_change and not self.space.whole_batches
        for learner in self.learners:
            learner.inbox.append(Grant(blocks=self.ledger.initial(learner.rank)))
        self.completed = 0
        self.idle: set[int] = set()
        self.in_barrier: set[int] = set()
        self.finished: set[int] = set()
        self.covered: dict[int, list[int]] = defaultdict(list)
        self.unused: list[int] = []
        self._binds: dict[int, dict[int, Bind]] = defaultdict(dict)
        self._main = threading.Semaphore(0)
        self._errors: list[BaseException] = []

    def run(self, script: Callable[[Learner], None]) -> None:
        """Runs the script on all learners to its end. Raises what a learner has raised; AssertionError if all wait."""
        threads = [threading.Thread(target=self._thread, args=(learner, script)) for learner in self.learners]
        for thread in threads:
            thread.start()
        try:
            while not self._errors and len(self.finished) < len(self.learners):
                ready = [each for each in self.learners if each.rank not in self.finished and self._can_go_on(each)]
                if not ready:
                    waiting = {each.rank: each.what for each in self.learners if each.rank not in self.finished}
                    raise AssertionError(f"all wait for ever: {waiting}")
                (learner,) = self.random.choices(ready, [each.speed for each in ready])
                learner.turn.release()
                self._main.acquire()
                self._advance()
        finally:
            self._errors.append(Ended())
            for learner in self.learners:
                learner.turn.release()
            for learner, thread in zip(self.learners, threads, strict=True):
                thread.join()
                del learner.loader  # it would wait for its workers if it were freed only with the cycle that it is in
        if not isinstance(self._errors[0], Ended):
            raise self._errors[0]

    def pass_on(self, learner: Learner) -> None:
        """Lets others run."""
        self._main.release()
        learner.turn.acquire()
        if self._errors:
            raise Ended

    def contribute(self, learner: Learner) -> None:
        """A step's bind, unless its gradient would be too old (R0, R5)."""
        pending, learner.pending = learner.pending, []
        taken = learner.drawn.take(learner.step_number)
        if learner.decided - learner.base > self.staleness:
            learner.lost += 1
            learner.inbox.append(StepLost(step=learner.step_number, reason="too old", retry=True))
            return
        for epoch, indices in pending:
            self.covered[epoch] += indices
        if pending:
            assert taken.weight == sum(len(indices) for _, indices in pending)
        learner.steps.append(sum(len(indices) for _, indices in pending))
        learner.decided += 1
        changes = learner.rank == 0 and self._sizes_change and self.random.random() < SIZES_CHANCE
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
            if not self._errors:
                script(learner)
        except Ended:
            pass
        except BaseException as error:
            self._errors.append(error)
        self.finished.add(learner.rank)
        self._main.release()

    def _can_go_on(self, learner: Learner) -> bool:
        return learner.until is None or bool(learner.inbox) or learner.until()

    def _advance(self) -> None:
        """Nulls, complete rounds, grants, epochs that are over."""
        while binds := self._binds.get(self.completed + 1):
            number = self.completed + 1
            for learner in self.learners:
                if learner.decided < number and self._nulls(learner, number):
                    learner.decided = number
            if any(learner.decided < number for learner in self.learners):
                break
            granted = self.ledger.complete(binds)
            assert isinstance(granted, dict), granted
            self.completed = number
            del self._binds[number]
            for rank, blocks in granted.items():
                self.learners[rank].inbox.append(Grant(blocks=blocks))
        while (unused := self.ledger.over(len(self.unused), self.finished | self.in_barrier)) is not None:
            for learner in self.learners:
                learner.inbox.append(EpochOver(epoch=len(self.unused), unused=unused))
            self.unused.append(unused)

    def _nulls(self, learner: Learner, number: int) -> bool:
        if learner.rank in self.idle | self.finished | self.in_barrier or learner.overdue:
            return True
        if not learner.computing or not self.staleness:
            return False
        learner.overdue = self.random.random() < OVERDUE_CHANCE
        return learner.overdue or (number <= learner.base + self.staleness and self.random.random() < NULL_CHANCE)
