"""--codec onebit:momentum (1-bit Adam): what learners send and how they step, where nothing is lost on the way."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.errors import NotSupported
from meshtrain.train.optim.frozen_variance import FrozenVariance
from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon

RATE, DECAY, LEARNT, STEPS, MEMBERS = 0.02, 0.1, 3, 8, 2
CODEC = f"onebit:momentum,warmup={LEARNT}"
TOLERANCE = 1e-6


class Net(nn.Module):
    """Of its two branches, a rank may use one alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.side = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor, *, sideways: bool) -> Tensor:
        hidden = torch.tanh(self.first(x))
        made: Tensor = self.second(hidden) + self.side(hidden) if sideways else self.second(hidden)
        return made


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, **options)


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    """From step 5 on rank 1 does not use the side branch."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
    return nn.functional.mse_loss(model(x, sideways=rank == 0 or number < 5), y)


def trained(numbers: range, daemon: LocalDaemon, scaler: Any = None, save: Path | None = None) -> list[Net]:
    """The members' models after these steps; where there is a folder, rank 0 writes the state after round 5 there."""
    replicas = [Net() for _ in range(MEMBERS)]

    def script(session: LearnerSession, rank: int) -> None:
        scaled = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaler is not None)
        model, optimizer = session.prepare(replicas[rank], adamw(replicas[rank]), scaled)
        if rank == 0 and save is not None:
            daemon.save(0, 5, save)
        for number in numbers:
            optimizer.zero_grad()
            scaled.scale(loss_of(model, rank, number)).backward()
            scaled.step(optimizer)
            scaled.update()

    daemon.run(script)
    return replicas


def by_hand() -> Net:
    """Adam, then the same with second moments as they are: a mean of gradients makes the momentum that a mean of
    momenta is, where nothing is lost."""
    model = Net()
    m, v = ([torch.zeros_like(each) for each in model.parameters()] for _ in "mv")
    for number in range(STEPS):
        model.zero_grad()
        (sum(loss_of(model, rank, number) for rank in range(MEMBERS)) / MEMBERS).backward()  # type: ignore[union-attr]
        for parameter, first, second in zip(model.parameters(), m, v, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            first.mul_(0.9).add_(gradient, alpha=0.1)
            if number < LEARNT:
                second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            deviation = (second / (1 - 0.999 ** min(number + 1, LEARNT))).sqrt() + 1e-8
            change = first / (1 - 0.9 ** (number + 1)) / deviation
            with torch.no_grad():
                parameter.mul_(1 - RATE * DECAY).sub_(RATE * change.clamp(-(10**0.5), 10**0.5))
    return model


@pytest.mark.parametrize("scaled", [False, True])
def test_steps_are_those_of_a_momentum_that_all_have(scaled: bool) -> None:
    """Also where a member has not used a parameter: it counts with the common momentum, as with a gradient of zero.
    And with a GradScaler, which multiplies gradients and not momenta."""
    with LocalDaemon(MEMBERS, codec=CODEC) as daemon:
        models = trained(range(STEPS), daemon, scaler=scaled or None)
    for (name, p), q, wanted in zip(
        models[0].named_parameters(), models[1].parameters(), by_hand().parameters(), strict=True
    ):
        assert torch.equal(p, q), name
        assert float((p - wanted).detach().norm() / wanted.detach().norm()) <= TOLERANCE, name


def test_moments_are_state_of_the_base(tmp_path: Path) -> None:
    """J1: who begins from a state, after the warm-up, goes on as all others do."""
    with LocalDaemon(MEMBERS, codec=CODEC) as daemon:
        whole = trained(range(STEPS), daemon, save=tmp_path)
        ((_, saved),) = daemon.saved
    with LocalDaemon(MEMBERS, codec=CODEC) as daemon:
        daemon.begin_from(tmp_path, 5, saved.units)
        again = trained(range(5, STEPS), daemon)
    for p, q in zip(whole[0].parameters(), again[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_had_no_gradient_does_not_move_and_nothing_moves_further_than_by_adam() -> None:
    """One bit says of a row that nobody has used that it is as large as the mean of others. A second moment of nearly
    nothing makes no leap of it."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=RATE, weight_decay=0)
    step = FrozenVariance(optimizer, 1)
    parameter.grad = torch.tensor([0.0, 1e-12, 1.0])
    step.take()
    before = parameter.detach().clone()
    parameter.grad = torch.full((3,), 0.5)
    step.take()
    moved = ((before - parameter.detach()) / RATE).tolist()
    assert moved[0] == 0
    assert moved[1] == pytest.approx(0.1 / math.sqrt(0.001), rel=1e-4)
    assert moved[2] == pytest.approx(0.5 / (1 - 0.9**2), rel=1e-4)


def steady(optimizer: torch.optim.AdamW, step: FrozenVariance | None, steps: int) -> float:
    """The length of the last of so many steps, in learning rates, where every gradient is 1: of Adam that is 1."""
    (parameter,) = optimizer.param_groups[0]["params"]
    before = parameter.detach().clone()
    for _ in range(steps):
        before.copy_(parameter.detach())
        parameter.grad = torch.ones(1)
        if step is None:
            optimizer.step()
            continue
        parameter.grad = step.contributed(parameter, parameter.grad, 1.0)
        step.take()
    return float(before - parameter.detach()) / RATE


@pytest.mark.parametrize("learnt", [10, 40])
def test_other_settings_go_on_with_steps_of_the_same_length(learnt: int) -> None:
    """J1, `submit --resume`: from a state of plain AdamW that has learnt for longer than the warm-up, and back to it.
    Adam divides second moments by what so many steps have taught them."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=RATE, weight_decay=0)
    assert steady(optimizer, None, learnt) == pytest.approx(1, rel=1e-3)
    frozen = FrozenVariance(optimizer, 10)
    assert steady(optimizer, frozen, 1) == pytest.approx(1, rel=1e-3)
    assert steady(optimizer, frozen, 30) == pytest.approx(1, rel=1e-3)
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=RATE, weight_decay=0)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert steady(plain, None, 1) == pytest.approx(1, rel=1e-3)


def test_a_hook_of_the_scripts_sees_its_own_gradient() -> None:
    """What is sent is made of it, and does not take its place."""
    parameter = nn.Parameter(torch.ones(2))
    step = FrozenVariance(torch.optim.AdamW([parameter], lr=RATE), 1)
    parameter.grad = torch.ones(2)
    assert step.contributed(parameter, parameter.grad, 1.0) is parameter.grad
    step.take()
    gradient = torch.full((2,), 3.0)
    added = step.contributed(parameter, gradient, 2.0)
    assert added is not None
    assert added.tolist() == pytest.approx([0.1 * 3.0 + 2.0 * 0.9 * 0.1] * 2)
    assert gradient.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            r"SGD is another: use torch\.optim\.AdamW, or --codec",
        ),
        (lambda model: torch.optim.Adam(model.parameters()), "Adam is another"),
        (lambda model: adamw(model, amsgrad=True), "group 0 of AdamW has amsgrad=True"),
        (lambda model: adamw(model, fused=True), "group 0 of AdamW has fused=True"),
    ],
)
def test_other_optimizers_are_refused_by_name(made: Any, complaint: str) -> None:
    def script(session: LearnerSession, _rank: int) -> None:
        model = Net()
        session.prepare(model, made(model))

    with LocalDaemon(1, codec=CODEC) as daemon, pytest.raises(NotSupported, match=complaint):
        daemon.run(script)


def test_a_state_dict_of_the_scripts_can_be_loaded() -> None:
    """It is plain AdamW's."""
    model = Net()
    optimizer = adamw(model)
    loss_of(model, 0, 0).backward()
    FrozenVariance(optimizer, 0).take()
    adamw(model).load_state_dict(copy.deepcopy(optimizer.state_dict()))
