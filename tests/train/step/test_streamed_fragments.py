"""Parts of a model that take turns (R9, `,stream=P,tau=T`), against streaming DiLoCo in a few lines of torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.train.session import LearnerSession
from tests.tiers import mostly_slow
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import adamw, assert_equal, distance, net, sgd

TOLERANCE = 1e-6  # relative: differences of weights round otherwise than weights do
OWN_PART = 0.5  # alpha of the paper
Make = Callable[[nn.Module], torch.optim.Optimizer]
Vector = list[Tensor]  # by parameter


def batch(rank: int, number: int, count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 2, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, of: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(of[0]), of[1]).backward()
    optimizer.step()


def trained(make: Make, steps: int, *, members: int = 2, norm: bool = False, **spec: Any) -> list[nn.Sequential]:
    replicas = [net(norm=norm) for _ in range(members)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], make(replicas[rank]))
        for number in range(steps):
            step(model, optimizer, batch(rank, number))

    with LocalDaemon(members, **spec) as daemon:
        daemon.run(script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
    assert_equal(replicas)
    return replicas


def parts_of(model: nn.Module, parts: int) -> list[list[int]]:
    """Positions of parameters: cut by hand for `net`, whose tensors have 32, 8, 16 and 2 values (64 with a norm)."""
    assert [p.numel() for p in model.parameters()] == [32, 8, 16, 2]
    return {1: [[0, 1, 2, 3]], 2: [[0], [1, 2, 3]], 4: [[0], [1], [2], [3]]}[parts]


class Streaming:
    """Streaming DiLoCo, algorithm 2 of Douillard et al. 2025 (arXiv 2501.18512), in one process."""

    def __init__(self, make: Make, members: int, parts: int, rate: float, momentum: float) -> None:
        self.learners = [(model := net(), make(model)) for _ in range(members)]
        self.base = net()
        self.parts = parts_of(self.base, parts)
        self.outer = torch.optim.SGD(self.base.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
        self.round = 0
        self.changes: list[tuple[int, Tensor]] = []  # of the round under way, by position

    def local_step(self, number: int) -> None:
        for rank, (model, optimizer) in enumerate(self.learners):
            step(model, optimizer, batch(rank, number))

    def send(self) -> None:
        part = self.parts[self.round % len(self.parts)]
        self.round += 1
        base = list(self.base.parameters())
        local = [list(model.parameters()) for model, _ in self.learners]
        self.changes = [(at, torch.stack([(base[at] - own[at]).detach() for own in local]).mean(0)) for at in part]

    def take_in(self, own_part: float) -> None:
        base = list(self.base.parameters())
        for at, change in self.changes:
            base[at].grad = change
        self.outer.step()
        self.outer.zero_grad()
        for model, _ in self.learners:
            own = list(model.parameters())
            for at, _ in self.changes:
                own[at].data.copy_(own_part * own[at].data + (1 - own_part) * base[at].data)
        self.changes = []


def streamed(
    make: Make, steps: int, h: int, parts: int, tau: int, members: int = 2, rate: float = 0.7, momentum: float = 0.9
) -> nn.Module:
    """The base after so many local steps, and after the rounds that bring what is left of them into it."""
    run = Streaming(make, members, parts, rate, momentum)
    since = 0
    for number in range(steps):
        run.local_step(number)
        since += 1
        if run.changes and since == tau:
            run.take_in(OWN_PART)
        if since == h // parts:
            run.send()
            since = 0
            if not tau:
                run.take_in(0.0)
    left = parts - 1  # the script's end, behind a whole period
    if since:
        left = parts
        if run.changes:
            run.take_in(OWN_PART)
    elif run.changes:
        run.take_in(0.0)
    for _ in range(left):
        run.send()
        run.take_in(0.0)
    return run.base


@pytest.mark.parametrize("make", mostly_slow([adamw, sgd]))
@pytest.mark.parametrize(
    ("h", "parts", "tau", "steps"),
    [(4, 2, 0, 16), (4, 4, 0, 13), (6, 2, 1, 18), (6, 2, 2, 17), (6, 2, 3, 16), (4, 1, 2, 12)],
)
def test_they_are_streaming_diloco(make: Make, h: int, parts: int, tau: int, steps: int) -> None:
    """Whether the script ends behind a period or within one: the model is then the base, and all local steps are in."""
    models = trained(make, steps, sync=f"diloco:{h},stream={parts}" + (f",tau={tau}" if tau else ""))
    assert distance(models[0], streamed(make, steps, h, parts, tau)) <= 10 * TOLERANCE


@pytest.mark.parametrize("tau", [0, 1])
def test_with_plain_averaging_each_part_in_turn_is_averaged(tau: int) -> None:
    """Outer rate 1 without momentum, H = P, so that a period is one step."""
    models = trained(sgd, 12, sync="local:4,stream=4" + (f",tau={tau}" if tau else ""))
    assert distance(models[0], streamed(sgd, 12, 4, 4, tau, rate=1.0, momentum=0.0)) <= TOLERANCE


@pytest.mark.parametrize("sync", ["diloco:3", "local:3"])
def test_one_part_is_the_mode_without_parts(sync: str) -> None:
    """Bit for bit, though local weights are kept otherwise."""
    assert_equal([*trained(adamw, 12, norm=True, sync=f"{sync},stream=1"), *trained(adamw, 12, norm=True, sync=sync)])


@pytest.mark.parametrize("tau", [0, 2])
def test_a_job_of_one_member(tau: int) -> None:
    models = trained(adamw, 15, members=1, sync="diloco:6,stream=2" + (f",tau={tau}" if tau else ""))
    assert distance(models[0], streamed(adamw, 15, 6, 2, tau, members=1)) <= 10 * TOLERANCE
