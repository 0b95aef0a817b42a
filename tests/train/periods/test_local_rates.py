"""O13: how much longer local steps are than the script's, and that periods move as far by them as steps in common."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from meshtrain.train.optim.optimizer_step import OptimizerStep
from meshtrain.train.optim.scaled_rates import BY_SIZE
from meshtrain.train.periods.local_rates import LongerSteps, RoundsTakenIn, local_factor, what_is_longer
from meshtrain.train.session import LearnerSession
from meshwire.sync_modes.rate_rule import parse_rate_rule
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import adamw, batch, distance, momentum, net, step

Make = Callable[[nn.Module], torch.optim.Optimizer]


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.01)


class Rates:
    """Steps of a script that counts what its optimizer's rate is, within its steps and outside of them."""

    def __init__(self, make: Make) -> None:
        self.model = net()
        self.optimizer = make(self.model)
        self.within: list[float] = []
        self.outside: list[float] = []
        self.optimizer.register_step_pre_hook(lambda optimizer, *_: self.within.append(_rate(optimizer)))

    def step(self, of: tuple[Tensor, Tensor]) -> None:
        step(self.model, self.optimizer, of)
        self.outside.append(_rate(self.optimizer))


def _rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def trained(make: Make, members: int, steps: int, sync: str, **spec: Any) -> list[Rates]:
    """Each learner has data of its own. A schedule halves the rate behind the third step."""
    scripts = [Rates(make) for _ in range(members)]

    def run(session: LearnerSession, rank: int) -> None:
        script = scripts[rank]
        session.prepare(script.model, script.optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 3, 0.5)
        for number in range(steps):
            script.step(batch(100 * rank + number))
            schedule.step()

    with LocalDaemon(members, sync=sync, **spec) as daemon:
        daemon.run(run)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
    return scripts


@pytest.mark.parametrize("make", [adamw, rmsprop])
@pytest.mark.parametrize("members", [1, 3])
def test_local_steps_are_the_root_of_m_times_as_long_as_the_script_says(make: Make, members: int) -> None:
    """Against plain torch with that rate, for as long as a step takes; the script and its schedule see their own."""
    scripts = trained(make, members, 6, "local:3")
    own = _rate(make(net()))
    for script in scripts:
        assert script.within == pytest.approx([math.sqrt(members) * own * part for part in (1, 1, 1, 0.5, 0.5, 0.5)])
        assert script.outside == pytest.approx([own, own, own, own / 2, own / 2, own / 2])
    alone = [net() for _ in range(members)]
    optimizers = [make(model) for model in alone]
    for optimizer in optimizers:  # AdamW's decay of weights is rate times decay, and as large as before
        optimizer.param_groups[0]["weight_decay"] /= math.sqrt(members)
    for number in range(6):
        for rank, (model, optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            optimizer.param_groups[0]["lr"] = math.sqrt(members) * own * (1.0 if number < 3 else 0.5)
            step(model, optimizer, batch(100 * rank + number))
        if number % 3 == 2:
            mean = [
                torch.stack([p.data for p in of]).mean(0) for of in zip(*(m.parameters() for m in alone), strict=True)
            ]
            for model in alone:
                for p, value in zip(model.parameters(), mean, strict=True):
                    p.data.copy_(value)
    assert distance(scripts[0].model, alone[0]) < 1e-6


@pytest.mark.parametrize(
    ("make", "spec"),
    [(momentum, {}), (adamw, {"scale_lr": parse_rate_rule("none")}), (adamw, {"sync": "ssp:1"})],
    ids=["SGD steps on a mean as its parts do", "none was typed", "rounds of gradients"],
)
def test_other_steps_are_as_long_as_the_script_says(make: Make, spec: dict[str, Any]) -> None:
    for script in trained(make, 2, 4, **{"sync": "local:2", **spec}):
        assert set(script.within) <= {script.outside[0], script.outside[0] / 2}


def test_it_counts_who_is_in_the_newest_round() -> None:
    """A learner that has left takes its part with it, and what is told at the start counts before the first round."""
    scripts = [Rates(adamw) for _ in range(2)]

    def run(session: LearnerSession, rank: int) -> None:
        script = scripts[rank]
        session.prepare(script.model, script.optimizer)
        for number in range(2 if rank else 6):
            script.step(batch(100 * rank + number))

    with LocalDaemon(2, sync="local:2") as daemon:
        daemon.run(run)
    own = scripts[0].outside[0]
    assert scripts[0].within == pytest.approx([math.sqrt(2) * own] * 4 + [own] * 2)


def test_several_learners_of_a_device_count_each() -> None:
    for script in trained(adamw, 2, 3, "local:1", learners=2):
        assert script.within[0] == pytest.approx(2.0 * script.outside[0])


def test_rank_0_says_so_and_what_to_type(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trained(adamw, 3, 2, "local:2")
    told = (
        "--sync local:2: local steps take 1.73 times the script's learning rate, the root of 3 learners, for AdamW "
        "goes further on their mean than each of them does by itself; --scale-lr none leaves the rate as it is"
    )
    assert [record.getMessage() for record in caplog.records if "learning rate" in record.getMessage()] == [told]
    assert what_is_longer(momentum(net()), 4) is None
    assert what_is_longer(adamw(net()), 1) is None


@pytest.mark.parametrize("kind", BY_SIZE)
@pytest.mark.parametrize("learners", [4, 16])
def test_a_period_moves_as_far_as_steps_on_the_mean_and_as_noisily(kind: Any, learners: int) -> None:
    """The rule itself: gradients of much noise and a little signal, each learner's own; the mean of what local steps
    change, beside steps on the mean. Without the factor it is 1/sqrt(m) of that."""
    count, steps, generator = 20_000, 40, torch.Generator().manual_seed(5)
    signal, rate = 0.02, 1e-3

    def moved(times: float, batches: int) -> tuple[float, float]:
        """Mean and spread of what `steps` steps on the mean of so many batches change."""
        parameter = nn.Parameter(torch.zeros(count))
        optimizer = kind([parameter], lr=rate * times)
        for _ in range(steps):
            noise = torch.randn(count, generator=generator) / math.sqrt(batches)
            parameter.grad = signal + noise
            optimizer.step()
        return -float(parameter.detach().mean()), float(parameter.detach().std())

    far, spread = moved(1.0, learners)
    factor = local_factor(kind([nn.Parameter(torch.zeros(1))], lr=rate), learners)
    each = [moved(factor, 1) for _ in range(learners)]
    mean, mean_spread = sum(one for one, _ in each) / learners, each[0][1] / math.sqrt(learners)
    assert mean == pytest.approx(far, rel=0.1)
    assert mean_spread == pytest.approx(spread, rel=0.1)
    assert mean / factor < 0.6 * far, "without it"


def test_weights_that_decay_beside_the_gradient_decay_as_the_script_says() -> None:
    """AdamW's: alike on all learners, so that the mean of what they change is as far as that of each. Adam's is part of
    the gradient."""
    for kind, decoupled in ((torch.optim.AdamW, True), (torch.optim.Adam, False)):
        seen: list[float] = []

        def make(model: nn.Module, kind: Any = kind, seen: list[float] = seen) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.5)
            optimizer.register_step_pre_hook(
                lambda optimizer, *_: seen.append(optimizer.param_groups[0]["weight_decay"])
            )
            return optimizer

        for script in trained(make, 4, 2, "local:2"):
            assert script.optimizer.param_groups[0]["weight_decay"] == 0.5
            assert script.within[0] == pytest.approx(2 * script.outside[0])
        assert set(seen) == {0.25 if decoupled else 0.5}


def closure_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, note: Callable[[], object]
) -> Callable[[], float]:
    """What a script gives to `optimizer.step`: notes something, computes its gradients, and returns the loss."""

    def closure() -> float:
        note()
        optimizer.zero_grad()
        x, y = batch(rank)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return float(loss.detach())

    return closure


def test_a_closure_sees_the_scripts_rate() -> None:
    seen: list[float] = []
    losses: list[Any] = []

    def run(session: LearnerSession, rank: int) -> None:
        script = Rates(adamw)
        session.prepare(script.model, script.optimizer)

        closure = closure_of(script.model, script.optimizer, rank, lambda: seen.append(_rate(script.optimizer)))
        losses.append(script.optimizer.step(closure))

    with LocalDaemon(2, sync="local:1") as daemon:
        daemon.run(run)
    own = _rate(adamw(net()))
    assert seen == [own, own]
    assert all(isinstance(loss, float) for loss in losses)


@pytest.mark.parametrize(("applied", "contributors", "factor"), [(0, 0, 4.0), (7, 0, 1.0), (7, 2, 2.0), (0, 2, 2.0)])
def test_a_state_that_does_not_tell_of_its_round_is_gone_on_from_at_the_scripts_rate(
    applied: int, contributors: int, factor: float
) -> None:
    """How many they are is not known before a round of theirs is taken in; 8 devices of 2 learners began."""
    script = Rates(adamw)
    rounds = cast(RoundsTakenIn, SimpleNamespace(applied=applied, contributors=contributors))
    LongerSteps(own := OptimizerStep(script.optimizer), rounds, 8, 2)
    own.original()
    assert script.within == pytest.approx([factor * _rate(script.optimizer)])


def test_whoever_goes_on_from_a_state_takes_steps_as_long_as_those_of_its_newest_round(tmp_path: Path) -> None:
    """The first period, too: two of the three that began were in that round."""

    def run(daemon: LocalDaemon, first: int, steps: int) -> list[Rates]:
        scripts = [Rates(adamw) for _ in range(3)]

        def script(session: LearnerSession, rank: int) -> None:
            session.prepare(scripts[rank].model, scripts[rank].optimizer)
            if rank == 0 and not first:
                daemon.save(0, 3, tmp_path)
            for number in range(first, 2 if rank == 2 and not first else steps):
                scripts[rank].step(batch(100 * rank + number))

        daemon.run(script)
        return scripts

    with LocalDaemon(3, sync="local:2") as daemon:
        run(daemon, 0, 8)
        ((_, saved),) = daemon.saved
    assert saved.round == 3
    with LocalDaemon(3, sync="local:2") as daemon:
        daemon.begin_from(tmp_path, 3, saved.units)
        resumed = run(daemon, 6, 10)
    own = _rate(adamw(net()))
    for script in resumed:
        assert script.within == pytest.approx([math.sqrt(2) * own] * 2 + [math.sqrt(3) * own] * 2)


def test_a_closure_is_the_optimizers_own_where_nothing_is_multiplied() -> None:
    """Some steps take it twice, or will not do without."""

    class TwoLosses(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert closure is not None
            closure()
            return super().step(closure)

    calls: list[int] = []

    def run(session: LearnerSession, rank: int) -> None:
        model = net()
        session.prepare(model, optimizer := TwoLosses(model.parameters(), lr=0.1))

        optimizer.step(closure_of(model, optimizer, rank, lambda: calls.append(rank)))

    with LocalDaemon(2, sync="local:1") as daemon:
        daemon.run(run)
    assert sorted(calls) == [0, 0, 1, 1]
