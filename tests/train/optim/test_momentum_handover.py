"""DGC's other half: SGD without the momentum that the codec has taken over (ALGORITHMS section 3, "DGC")."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.optim.leader_options import LeaderOptions
from meshtrain.train.optim.momentum_handover import WithoutMomentum, momentum_of
from meshtrain.train.optim.own_steps import OwnSteps
from meshtrain.train.optim.stale_view import StaleView
from meshtrain.train.session import LearnerSession
from meshwire.model.manifest import Momentum
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import assert_equal
from tests.train.step.test_rounds_numerics import BATCH, Case, distance, mlp

STEPS = 12


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def matrices(of: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in of.parameters() if parameter.dim() > 1]


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(parameter.shape, generator=generator) for parameter in model().parameters()]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": True},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "nesterov": True},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "nesterov": True, "foreach": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_if_all_of_every_velocity_is_sent_it_is_sgd_with_momentum(options: dict[str, Any]) -> None:
    """Also with a weight decay, whose momentum is the optimizer's, and a learning rate that changes; and from a state
    in which SGD has momentum already. Vectors are SGD's alone, to the bit."""
    ours, theirs = model(), model()
    optimizer = SGD(ours.parameters(), lr=0.1, momentum=0.9, **options)
    reference = SGD(theirs.parameters(), lr=0.1, momentum=0.9, **options)
    without = WithoutMomentum(optimizer, matrices(ours), momentum_of(optimizer))
    velocity = [torch.zeros_like(parameter) for parameter in ours.parameters()]
    for step in range(STEPS):
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 0.1 / (1 + step)
        found = gradients(step)
        for mine, other, gradient, buffer in zip(ours.parameters(), theirs.parameters(), found, velocity, strict=True):
            other.grad = gradient.clone()
            buffer.mul_(0.9).add_(gradient)  # at the worker
            sent = gradient + 0.9 * buffer if options.get("nesterov") else buffer
            mine.grad = sent.clone() if mine.dim() > 1 and step >= 3 else gradient.clone()
        reference.step()
        if step < 3:
            optimizer.step()
            for buffer in velocity:
                buffer.zero_()
        else:
            without.take()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            if mine.dim() == 1:
                assert torch.equal(mine, other)
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_nobody_used_stays_and_gradients_stay_in_place() -> None:
    """O5; and `p.grad` is the script's again."""
    ours = model()
    optimizer = SGD(ours.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    without = WithoutMomentum(optimizer, matrices(ours), momentum_of(optimizer))
    first, *others = ours.parameters()
    before = copy.deepcopy(first)
    for parameter, gradient in zip(others, gradients(0)[1:], strict=True):
        parameter.grad = gradient
    held = [parameter.grad for parameter in ours.parameters()]
    without.take()
    assert torch.equal(first, before)
    assert all(parameter.grad is gradient for parameter, gradient in zip(ours.parameters(), held, strict=True))


def test_a_momentum_that_is_changed_later_is_refused() -> None:
    ours = model()
    optimizer = SGD(ours.parameters(), lr=0.1, momentum=0.9)
    without = WithoutMomentum(optimizer, matrices(ours), momentum_of(optimizer))
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(UsageError, match=r"momentum of param group 0 was changed to 0\.5 .* stays 0\.9"):
        without.take()


def test_own_gradients_move_the_view_without_momentum_as_well() -> None:
    """O2: what stands in for a mean is added as a mean would be; what SGD has gathered before goes on, and fades."""
    ours = model()
    optimizer = SGD(ours.parameters(), lr=0.1, momentum=0.9)
    for parameter, gradient in zip(ours.parameters(), gradients(0), strict=True):
        parameter.grad = gradient
    optimizer.step()
    step = WithoutMomentum(optimizer, matrices(ours), momentum_of(optimizer))
    options = LeaderOptions(optimizer)
    view = StaleView(list(ours.parameters()), OwnSteps(list(ours.parameters()), step, options, 1.0), NoKeptState())
    base = [parameter.detach().clone() for parameter in ours.parameters()]
    for number in (1, 2):
        for parameter, gradient in zip(ours.parameters(), gradients(number), strict=True):
            parameter.grad = gradient
        view.keep(number, 1.0, options.pack())
        view.begin_step(0.0)
    view.show_view()
    given = (gradients(number) for number in range(3))
    for parameter, before, gathered, first, second in zip(ours.parameters(), base, *given, strict=True):
        kept = 0.0 if parameter.dim() > 1 else 0.9 * first
        moved = first + 0.9 * gathered + second + kept + 0.81 * gathered
        torch.testing.assert_close(parameter.detach(), before - 0.1 * moved)
    view.show_base()
    assert all(torch.equal(parameter, before) for parameter, before in zip(ours.parameters(), base, strict=True))


class Ours(SGD):
    """Somebody's own."""


def two_groups(of: nn.Module) -> SGD:
    first, *others = of.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "momentum": 0.5}, {"params": others}]
    return SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda of: torch.optim.AdamW(of.parameters()), r"AdamW has another: use torch.optim.SGD"),
        (lambda of: Ours(of.parameters(), lr=0.1, momentum=0.9), r"Ours has another"),
        (lambda of: SGD(of.parameters(), lr=0.1), r"which is 0 here: use torch.optim.SGD\(..., momentum=0.9\)"),
        (lambda of: SGD(of.parameters(), lr=0.1, momentum=1.0), r"which is 1 here"),
        (lambda of: SGD(of.parameters(), lr=0.1, momentum=0.9, dampening=0.1), r"dampening=0.1 \(param group 0"),
        (lambda of: SGD(of.parameters(), lr=0.1, momentum=0.9, fused=True), r"does not go with fused=True"),
        (two_groups, r"one momentum for all param groups, and these have 2"),
    ],
)
def test_any_other_optimizer_is_refused_with_what_to_do(
    make: Callable[[nn.Module], torch.optim.Optimizer], complaint: str
) -> None:
    with pytest.raises(NotSupported, match=complaint):
        momentum_of(make(model()))


def test_what_is_taken_over_is_told() -> None:
    optimizer = SGD(model().parameters(), lr=0.1, momentum=0.8, nesterov=True)
    assert momentum_of(optimizer) == Momentum(factor=0.8, nesterov=True)


def with_momentum(of: nn.Module) -> SGD:
    return SGD(of.parameters(), lr=0.05, momentum=0.9)


def for_vectors_alone(of: nn.Module) -> SGD:
    vectors = [parameter for parameter in of.parameters() if parameter.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices(of)}, {"params": vectors, "momentum": 0.9}]
    return SGD(groups, lr=0.05)


@pytest.mark.parametrize(("codec", "same_as"), [("dgc:1+fp32", with_momentum), ("dgc:0.01", for_vectors_alone)])
def test_a_job_steps_with_the_momentum_that_is_left_to_it(
    codec: str, same_as: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    """With ratio 1 that is all of it: SGD with momentum. Below, the means of matrices are added as they arrive; the
    daemon of this test adds no momentum and leaves nothing out."""
    case = Case(mlp, with_momentum)
    models, drawn = case.together(2, 12 * BATCH, codec=codec)
    joint = [[batch for rank in drawn for batch in rank[step]] for step in range(case.steps)]
    assert_equal(models)
    assert distance(models[0], Case(mlp, same_as).alone(joint)) <= 1e-6


def test_a_job_refuses_what_would_lose_momentum() -> None:
    """At mt.prepare, and clipping of means that hold what has gathered for a hundred rounds."""

    def script(session: LearnerSession, _: int) -> None:
        ours = model()
        with pytest.raises(NotSupported, match="AdamW has another"):
            session.prepare(ours, torch.optim.AdamW(ours.parameters()))
        optimizer = session.prepare(ours, with_momentum(ours))[1]
        with pytest.raises(UsageError, match="give the codec clip=MAX_NORM"):
            session.clip_grad_norm_(ours.parameters(), 1.0)
        session.clip_grad_norm_(ours.parameters(), float("inf"))
        ours(torch.randn(2, 6)).sum().backward()
        nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
        with pytest.raises(UsageError, match=r"the gradient of 0\.weight was changed between .* clip=MAX_NORM"):
            optimizer.step()

    with LocalDaemon(1, codec="dgc") as daemon:
        daemon.run(script)
