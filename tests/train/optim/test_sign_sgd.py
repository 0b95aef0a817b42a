"""O10, --sync demo: plain SGD that steps on the signs of the mean (ALGORITHMS section 5, DeMo)."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon

RATE, DECAY, STEPS, MEMBERS = 0.01, 0.1, 4, 2


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def net() -> nn.Sequential:
    """Equal on all learners, which are threads here and share torch's generator."""
    return copy.deepcopy(MODEL)


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, **options)


def test_members_step_on_the_signs_of_the_mean_and_decay_apart_from_it() -> None:
    """p = p * (1 - lr * wd) - lr * sign(mean), whatever the script clips."""

    def script(session: LearnerSession, rank: int) -> list[torch.Tensor]:
        model = net()
        model, optimizer = session.prepare(model, sgd(model, weight_decay=DECAY))
        for step in range(STEPS):
            optimizer.zero_grad()
            model(inputs(rank, step)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        session.finish()
        return [parameter.detach().clone() for parameter in model.parameters()]

    with LocalDaemon(MEMBERS, sync="demo") as daemon:
        trained = daemon.run(script)

    model = net()
    for step in range(STEPS):
        model.zero_grad()
        sum(model(inputs(rank, step)).square().sum() for rank in range(MEMBERS)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.mul_(1 - RATE * DECAY).sub_(RATE * parameter.grad.sign())
    for of_member in trained:
        for got, expected in zip(of_member, model.parameters(), strict=True):
            assert torch.allclose(got, expected, atol=1e-6)


class Lookahead(torch.optim.SGD):
    """Does something else in its step."""


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda model: torch.optim.AdamW(model.parameters()), "AdamW would not: use torch.optim.SGD without momentum"),
        (lambda model: Lookahead(model.parameters(), lr=0.1), "Lookahead would not"),
        (lambda model: sgd(model, momentum=0.9), "momentum 0.9, and with --sync demo each peer's daemon keeps it"),
        (lambda model: sgd(model, fused=True), "group 0 of SGD is fused"),
    ],
)
def test_other_optimizers_are_refused_by_name(made: Any, complaint: str) -> None:
    def script(session: LearnerSession, _rank: int) -> None:
        model = net()
        session.prepare(model, made(model))

    with LocalDaemon(1, sync="demo") as daemon, pytest.raises(NotSupported, match=complaint):
        daemon.run(script)


def test_a_momentum_that_is_set_later_is_refused() -> None:
    """It would be a second one, beside that which the daemon keeps."""

    def script(session: LearnerSession, _rank: int) -> None:
        model = net()
        model, optimizer = session.prepare(model, sgd(model))
        optimizer.param_groups[0]["momentum"] = 0.5
        model(inputs(0, 0)).sum().backward()
        optimizer.step()

    with (
        LocalDaemon(1, sync="demo") as daemon,
        pytest.raises(UsageError, match=r"param group 0 was changed to 0\.5 after mt\.prepare"),
    ):
        daemon.run(script)
