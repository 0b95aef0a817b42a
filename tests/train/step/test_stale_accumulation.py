"""Accumulation, schedulers and uneven batches at s = 0, 1, 2 against the rules in one process (O2, O3, O6)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.train.session import LearnerSession
from tests.tiers import mostly_slow
from tests.train.localdaemon import LocalDaemon
from tests.train.replaymodel import Batches, replay

STEPS = 8
BATCH = 4
TOLERANCE = 1e-5
BOUNDS = [0, 1, 2]
ONE_EPOCH = 100 * BATCH  # nobody waits at its end, and lets rounds pass

Schedule = Callable[[torch.optim.Optimizer], LRScheduler]
Options = list[dict[str, Any]]  # of a param group, by calls of the scheduler


def fresh(make: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    return model, make(model.parameters())


def data(total: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(total, 6, generator=generator), torch.randn(total, 3, generator=generator))


momentum = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
adamw = functools.partial(torch.optim.AdamW, lr=0.005)
constant = functools.partial(StepLR, step_size=STEPS * 10)
SCHEDULES: dict[str, Schedule] = {
    "step": functools.partial(StepLR, step_size=2, gamma=0.5),
    "cosine": functools.partial(CosineAnnealingLR, T_max=STEPS),
    "one cycle": functools.partial(OneCycleLR, max_lr=0.1, total_steps=STEPS + 1),  # moves the momentum, too
}


class Run:
    """One training of several learners, and its model.

    Args:
        own: coefficient c, as --own.
        schedules: of the ranks, in turn.
        before: whether schedulers are made before `prepare`.
    """

    def __init__(
        self,
        staleness: int,
        *,
        members: int = 2,
        total: int = 12 * BATCH,
        micro: int = 1,
        make: Callable[..., torch.optim.Optimizer] = momentum,
        schedules: Sequence[Schedule] = (constant,),
        before: bool = True,
        own: str = "1",
        straggler: str = "wait",
    ) -> None:
        self.members, self.total, self.micro = members, total, micro
        self.make, self.before = make, before
        self.schedules = [schedules[rank % len(schedules)] for rank in range(members)]
        self.staleness, self.own, self.straggler = staleness, own, straggler
        self.replicas = [fresh(make) for _ in range(members)]
        self.drawn: dict[tuple[int, int], Batches] = {}

    def daemon(self) -> LocalDaemon:
        """`wait` is made reproducible, so that lateness is what the rules say and not what the machine does."""
        visibility = "fixed" if self.straggler == "wait" and self.staleness else "eager"
        sync = f"ssp:{self.staleness}"
        return LocalDaemon(self.members, sync=sync, own=self.own, straggler=self.straggler, visibility=visibility)

    def script(self, session: LearnerSession, rank: int) -> None:
        model, optimizer = self.replicas[rank]
        scheduler = self.schedules[rank](optimizer) if self.before else None
        loader = DataLoader(data(self.total), batch_size=BATCH, shuffle=True)
        model, optimizer, loader = session.prepare_with_loader(model, optimizer, loader)
        scheduler = scheduler or self.schedules[rank](optimizer)
        batches = (batch for _ in range(STEPS * self.micro) for batch in loader)  # epoch after epoch
        for step in range(1, STEPS + 1):
            drawn = self.drawn[rank, step] = [next(batches) for _ in range(self.micro)]
            for x, y in drawn[:-1]:
                with session.no_sync():
                    (nn.functional.mse_loss(model(x), y) / self.micro).backward()
            x, y = drawn[-1]
            (nn.functional.mse_loss(model(x), y) / self.micro).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def options(self, schedule: Schedule) -> Options:
        """What a scheduler sets."""
        _, optimizer = fresh(self.make)
        scheduler = schedule(optimizer)
        values = []
        for _ in range(STEPS):
            values.append({name: value for name, value in optimizer.param_groups[0].items() if name != "params"})
            optimizer.step()
            scheduler.step()
        return values

    def train(self, plan: Callable[[LocalDaemon], None] | None = None) -> LocalDaemon:
        """Runs all learners, and checks that they end with the model's last base, bit-equal among each other."""
        with self.daemon() as daemon:
            if plan is not None:
                plan(daemon)
            daemon.run(self.script)
        options = [self.options(schedule) for schedule in self.schedules]
        c = {"0": 0.0, "1/m": 1 / self.members, "1": 1.0}[self.own] if self.staleness else 0.0
        bases = replay(*fresh(self.make), daemon.rounds, self.drawn, lambda rank, calls: options[rank][calls], c)
        assert len(daemon.hashes[daemon.round]) == self.members, "O9: all have told the last base"
        for model, _ in self.replicas:
            assert distance(model, self.replicas[0][0]) == 0, "replicas differ"
            assert distance(model, bases[-1]) <= TOLERANCE
        assert distance(bases[0], bases[-1]) > 100 * TOLERANCE, "it has trained"
        return daemon

    def train_reproducibly(self) -> None:
        daemon = self.train()
        assert daemon.round == STEPS
        starts = {start for start in daemon.rounds.starts if start[1] <= STEPS}
        expected = {(rank, step, max(step - 1 - self.staleness, 0)) for rank, step, _ in starts}
        assert starts == expected, "R8: round k exactly before step k+s+1"


@torch.no_grad()
def distance(a: nn.Module, b: nn.Module) -> float:
    """Largest relative distance of any parameter."""
    return max(float((p - q).norm() / q.norm()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("staleness", BOUNDS)
@pytest.mark.parametrize("make", mostly_slow([adamw, momentum]))
def test_accumulation(staleness: int, make: Any) -> None:
    """O6: a step of three micro-batches, of which the last one leaves."""
    Run(staleness, micro=3, make=make).train_reproducibly()


@pytest.mark.parametrize("staleness", mostly_slow([2, 0, 1]))
@pytest.mark.parametrize("make", mostly_slow([adamw, momentum]))
@pytest.mark.parametrize("own", ["0", "1/m", "1"])
def test_own_gradients(staleness: int, own: str, make: Any) -> None:
    """O2: the view is the base, ahead by c of what the optimizer makes of own gradients that are not yet covered."""
    Run(staleness, make=make, own=own).train_reproducibly()


@pytest.mark.parametrize("staleness", mostly_slow([2, 0, 1]))
@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("before", mostly_slow([True, False]))
def test_schedulers(staleness: int, schedule: str, before: bool) -> None:
    """O3: a round is applied with the options of its own step, however late; no warning of torch's on the way."""
    Run(staleness, schedules=[SCHEDULES[schedule]], before=before).train_reproducibly()


@pytest.mark.parametrize("staleness", BOUNDS)
@pytest.mark.parametrize("members", mostly_slow([3, 2]))
def test_uneven_batches(staleness: int, members: int) -> None:
    """W3: the last round of an epoch splits what is left unevenly, and weighs by samples."""
    run = Run(staleness, members=members, total=2 * members * BATCH + members + 1)
    run.train_reproducibly()
    sizes = {len(batch[0]) for batches in run.drawn.values() for batch in batches}
    assert len(sizes) > 1


@pytest.mark.parametrize("staleness", BOUNDS)
def test_schedules_that_differ_between_peers(staleness: int) -> None:
    """O3: of equal steps the lowest rank rules, so bases stay equal; each view has its own learner's."""
    schedules = [SCHEDULES["step"], SCHEDULES["cosine"]]
    Run(staleness, schedules=schedules).train_reproducibly()


@pytest.mark.parametrize("staleness", mostly_slow([2, 3]))
@pytest.mark.parametrize("own", ["0", "1/m", "1"])
def test_late_learner(staleness: int, own: str) -> None:
    """R4, O2, O3: rank 0 is passed over, its step lands in a later round, and from then on rank 1 leads."""

    def plan(daemon: LocalDaemon) -> None:
        daemon.pass_over(0, 2)

    schedules = [SCHEDULES["step"], SCHEDULES["cosine"]]
    run = Run(staleness, total=ONE_EPOCH, own=own, straggler="carry", schedules=schedules)
    daemon = run.train(plan)
    assert daemon.rounds.rounds[2].steps == {1: 2}
    assert daemon.rounds.rounds[3].steps == {0: 2, 1: 3}
    assert daemon.round == STEPS + 1


@pytest.mark.parametrize("retry", [True, False])
def test_lost_step(retry: bool) -> None:
    """V2, R5, O2: a step that is in no round leaves neither base nor view a trace, and the others go on."""

    def plan(daemon: LocalDaemon) -> None:
        daemon.lose(1, 3, retry=retry)

    run = Run(2, total=ONE_EPOCH, own="1", straggler="carry")
    daemon = run.train(plan)
    void = [number for number, round_ in daemon.rounds.rounds.items() if round_.done and round_.done.void]
    assert void == ([] if retry else [3])
    third, fourth = (daemon.buckets[number][1][0].samples for number in (3, 4))
    assert (third == fourth) is retry, "R5: what was dropped before it bound is handed out again"
