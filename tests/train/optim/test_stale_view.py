"""The view (O2): what the script's optimizer makes of the base with own gradients, and that the base never knows."""

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.errors import NotSupported
from meshtrain.train.optim.optimizer_clone import clone_optimizer
from meshtrain.train.session import LearnerSession
from tests.tiers import mostly_slow
from tests.train.localdaemon import LocalDaemon

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "fused adamw": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.01),
}
STEPS = 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(number: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int = 0) -> None:
    x, y = batch(number, rank)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def fresh(make: Make, gamma: float) -> list[list[Tensor]]:
    """The weights after each step of one process without a mesh."""
    model = network()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    after = []
    for number in range(STEPS):
        backward(model, optimizer, number)
        optimizer.step()
        scheduler.step()
        after.append(weights(model))
    return after


def late(make: Make, staleness: int, gamma: float) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """The views and the bases after each step of a single learner, all of whose rounds are late by `staleness`."""
    views, bases = [], []

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = network()
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
        session.prepare(model, optimizer)
        for number in range(STEPS):
            backward(model, optimizer, number)
            optimizer.step()
            scheduler.step()
            views.append(weights(model))
            with session.base():
                bases.append(weights(model))

    with LocalDaemon(1, sync=f"ssp:{staleness}", visibility="fixed", own="1") as daemon:
        daemon.run(script)
    return views, bases


@pytest.mark.parametrize("staleness", mostly_slow([2, 1]))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_alone_the_view_is_the_fresh_model(name: str, staleness: int) -> None:
    """O2, c=1: with m=1 own gradients are the means, so delays cost nothing: every view has the weights of a process
    without a mesh, bit for bit, while the base lags by s."""
    expected = fresh(OPTIMIZERS[name], 0.9)
    views, bases = late(OPTIMIZERS[name], staleness, 0.9)
    for number in range(STEPS):
        assert equal(views[number], expected[number])
        if number >= staleness:
            assert equal(bases[number], expected[number - staleness])


@pytest.mark.parametrize("limit", [0.05, 1e9])
def test_own_gradients_are_clipped_by_the_norm_of_the_newest_round(limit: float) -> None:
    """O2, O4: before there is one, by their own; also in the first step, whose bind cannot say yet that it is clipped.

    With s=1 and m=1 the newest round at the boundary after step k is round k-1, which held step k-1.
    """
    norms: list[float] = []

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for number in range(STEPS):
            backward(model, optimizer, number)
            norms.append(float(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)))
            session.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            view = weights(model)
            with session.base():
                base = weights(model)
            coefficient = min(1.0, limit / (norms[max(number - 1, 0)] + 1e-6))
            for one, before, parameter in zip(view, base, model.parameters(), strict=True):
                assert parameter.grad is not None
                torch.testing.assert_close(one, before - 0.1 * coefficient * parameter.grad, rtol=1e-5, atol=1e-7)

    with LocalDaemon(1, sync="ssp:1", visibility="fixed", own="1") as daemon:
        daemon.run(script)
    assert max(norms[1:]) / min(norms[1:]) > 1.1, "norms differ, so it matters whose is taken"


@pytest.mark.parametrize(("own", "coefficient"), [("0", 0.0), ("1/m", 0.5), ("1", 1.0)])
@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_the_coefficient_is_of_what_the_optimizer_would_change(name: str, own: str, coefficient: float) -> None:
    """O2: view = base + c * (ahead - base), where `ahead` is made by the optimizer; two learners, late by one."""
    made = {rank: network() for rank in range(2)}

    def script(session: LearnerSession, rank: int) -> None:
        model = made[rank]
        optimizer = OPTIMIZERS[name](model.parameters())
        session.prepare(model, optimizer)
        for number in range(STEPS):
            backward(model, optimizer, number, rank)
            optimizer.step()
            view = weights(model)
            with session.base():
                alone, ahead = copy.deepcopy((model, optimizer))  # hooks and the mesh's step stay behind
                base = weights(model)
            for parameter, copied in zip(model.parameters(), alone.parameters(), strict=True):
                assert parameter.grad is not None
                copied.grad = parameter.grad.clone()  # the only step that is uncovered
            type(ahead).step(ahead)
            for one, before, after in zip(view, base, weights(alone), strict=True):
                torch.testing.assert_close(one, before + coefficient * (after - before), rtol=1e-5, atol=1e-6)

    with LocalDaemon(2, sync="ssp:1", visibility="fixed", own=own) as daemon:
        daemon.run(script)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_base_never_knows(name: str) -> None:
    """O2, O9: bases are bit-equal between peers; options, state and gradients are as the last round left them, and
    hooks see the steps of the base alone."""
    states: dict[int, list[Any]] = {0: [], 1: []}
    calls = {0: 0, 1: 0}
    lock = threading.Lock()

    def script(session: LearnerSession, rank: int) -> None:
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())

        def count(*_: object) -> None:
            with lock:
                calls[rank] += 1

        optimizer.register_step_post_hook(count)
        session.prepare(model, optimizer)
        for number in range(STEPS):
            backward(model, optimizer, number, rank)
            gradients = [parameter.grad for parameter in model.parameters()]
            values = [gradient.clone() for gradient in gradients if gradient is not None]
            optimizer.step()
            assert all(p.grad is own for p, own in zip(model.parameters(), gradients, strict=True))
            assert equal(values, [gradient for gradient in gradients if gradient is not None])
            with session.base():
                states[rank].append((weights(model), copy.deepcopy(optimizer.state_dict())))
            assert calls[rank] == max(number - 1, 0), "rounds that are visible"

    with LocalDaemon(2, sync="ssp:2", visibility="fixed", own="1") as daemon:
        daemon.run(script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
    assert states[0][1][1]["state"] == {}, "nothing was applied, so the optimizer has no state"
    for (base, state), (other_base, other_state) in zip(states[0], states[1], strict=True):
        assert equal(base, other_base)
        assert state["param_groups"] == other_state["param_groups"]
        for parameter, kept in state["state"].items():
            for key, value in kept.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other_state["state"][parameter][key]))


def test_inside_a_step_the_view_does_not_move() -> None:
    """O7: the gradients of the step at hand count from the next one on."""

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = network()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        session.prepare(model, optimizer)
        for number in range(STEPS):
            before = weights(model)
            backward(model, optimizer, number)
            with session.base():
                pass
            assert equal(weights(model), before)
            optimizer.step()
            assert not equal(weights(model), before)

    with LocalDaemon(1, sync="ssp:1", visibility="fixed", own="1") as daemon:
        daemon.run(script)


class Extra(torch.optim.SGD):
    """Keeps something beside state and options, as optimizers outside of torch do."""

    def __init__(self, parameters: Any, extra: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.extra = extra

    def step(self, closure: Any = None) -> Any:
        self.extra.append(len(self.extra))
        return super().step(closure)


def test_a_twin_has_copies_of_all_but_the_parameters() -> None:
    model = network()
    optimizer = Extra(model.parameters(), [])
    backward(model, optimizer, 0)
    optimizer.step()
    ahead = clone_optimizer(optimizer)
    ahead.step()
    assert optimizer.extra == [0]
    assert ahead.extra == [0, 1]  # type: ignore[attr-defined]
    own = [p for group in ahead.param_groups for p in group["params"]]
    assert all(one is other for one, other in zip(own, model.parameters(), strict=True))


def test_an_optimizer_that_cannot_be_copied_is_refused_by_name() -> None:
    """With c=0 nothing is copied, and it may train."""

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = network()
        session.prepare(model, Extra(model.parameters(), threading.Lock()))

    with LocalDaemon(1, sync="ssp:1", own="0") as daemon:
        daemon.run(script)
    told = pytest.raises(NotSupported, match=r"Extra cannot be copied .*--own 0")
    with LocalDaemon(1, sync="ssp:1") as daemon, told:
        daemon.run(script)
