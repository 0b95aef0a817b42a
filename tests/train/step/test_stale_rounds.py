"""Rounds that are applied late: what is in the base, what learners compute with, what a flush leaves (O, R1)."""

import contextlib
import copy
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from meshtrain.errors import MeshtrainError, NonFiniteGradient, UsageError
from meshtrain.train.optim.hyperparameters import RoundOptions
from meshtrain.train.session import LearnerSession
from tests.tiers import mostly_slow
from tests.train.localdaemon import LocalDaemon

Make = Callable[[Any], torch.optim.Optimizer]
TARGETS = (torch.tensor([1.0, -2.0, 0.5]), torch.tensor([-3.0, 1.0, 4.0]))
CURVATURE = torch.tensor([0.5, 1.0, 2.0])


class Point(nn.Module):
    """A point in a bowl: the gradient is CURVATURE * (x - target)."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(3))

    def forward(self, target: Tensor) -> Tensor:
        return (CURVATURE * (self.x - target).square()).sum() / 2


def sgd(lr: float, **options: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> None:
    optimizer.zero_grad()
    model(*inputs).sum().backward()
    optimizer.step()


def descend(
    staleness: int, make: Make, steps: int, own: str = "0", each: Callable[..., None] = lambda *_: None
) -> tuple[list[Point], LocalDaemon]:
    """Two learners, in the reproducible mode; `each(session, model, optimizer, rank, number)` after each step."""
    models = [Point() for _ in TARGETS]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(models[rank], make(models[rank].parameters()))
        for number in range(1, steps + 1):
            step(model, optimizer, TARGETS[rank])
            each(session, model, optimizer, rank, number)

    with LocalDaemon(2, sync=f"ssp:{staleness}", visibility="fixed", own=own) as daemon:
        daemon.run(script)
        assert daemon.round == steps
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
        assert set(daemon.hashes) == set(range(1, steps + 1))
    return models, daemon


def delayed(staleness: int, make: Make, steps: int) -> Tensor:
    """c=0: round k applies the gradients of the base after k-1-s rounds, by the optimizer (O2)."""
    base = Point()
    optimizer = make(base.parameters())
    bases = [base.x.detach().clone()]
    for number in range(1, steps + 1):
        view = bases[max(number - 1 - staleness, 0)]
        base.x.grad = torch.stack([CURVATURE * (view - target) for target in TARGETS]).mean(0)
        optimizer.step()
        bases.append(base.x.detach().clone())
    return bases[-1]


@pytest.mark.parametrize("staleness", mostly_slow([2, 1, 3]))
@pytest.mark.parametrize(
    "make",
    [
        sgd(0.1),
        sgd(0.05, momentum=0.9, weight_decay=0.1),
        sgd(0.05, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    ],
)
def test_plain_delay(staleness: int, make: Make) -> None:
    """O2, c=0: all of the optimizer's state advances only with the base."""
    models, _ = descend(staleness, make, 20)
    assert torch.equal(models[0].x, models[1].x), "after a flush replicas are bit-equal"
    torch.testing.assert_close(models[0].x.detach(), delayed(staleness, make, 20), rtol=1e-5, atol=1e-6)


def trained_images(channels_last: bool, fused: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3))
    images = torch.randn(2, 3, 8, 8)

    def script(session: LearnerSession, rank: int) -> list[Tensor]:  # noqa: ARG001
        if channels_last:
            for parameter in model.parameters():
                if parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        session.prepare(model, optimizer)
        for _ in range(4):
            step(model, optimizer, images)
        session.finish()
        return [parameter.detach().contiguous() for parameter in model.parameters()]

    with LocalDaemon(1, sync="ssp:2", visibility="fixed") as daemon:
        return daemon.run(script)[0]


@pytest.mark.parametrize("fused", [False, True])
def test_layout_of_parameters_in_memory(fused: bool) -> None:
    """O2: a mean is a gradient like any other, also for a fused optimizer, which goes through memory in its order."""
    for ours, plain in zip(trained_images(True, fused), trained_images(False, False), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)


def test_ssp_0_is_bsp() -> None:
    """One engine: s=0 has no path of its own that differs in a bit."""
    bound_0, _ = descend(0, sgd(0.05, momentum=0.9), 10)
    torch.testing.assert_close(bound_0[0].x.detach(), delayed(0, sgd(0.05, momentum=0.9), 10), rtol=1e-6, atol=1e-7)


def delayed_gradient_averaging(delay: int, rate: float, steps: int) -> NDArray[np.float64]:
    """DGA with K=1 (Zhu 2021): each steps on its own gradient at once; `delay` steps later that becomes the mean."""
    targets, curvature = np.array([t.numpy() for t in TARGETS], np.float64), CURVATURE.numpy()
    w = np.zeros_like(targets)
    sent: list[NDArray[np.float64]] = []
    for number in range(steps + delay):
        if number < steps:
            sent.append(curvature * (w - targets))
            w = w - rate * sent[-1]
        if number >= delay:
            arrived = sent[number - delay]
            w = w - rate * (arrived.mean(0) - arrived)
    return w


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_c_1_is_delayed_gradient_averaging(staleness: int) -> None:
    """O2: fixed with c=1 is DGA(K=1, D=s), which is computed in fp64; after the flush all w are equal."""
    models, _ = descend(staleness, sgd(0.1), 20, own="1")
    expected = delayed_gradient_averaging(staleness, 0.1, 20)
    np.testing.assert_allclose(expected[0], expected[1], rtol=1e-12)
    trained = models[0].x.detach().numpy()
    assert np.linalg.norm(trained - expected[0]) <= 1e-6 * np.linalg.norm(expected[0])
    assert torch.equal(models[0].x, models[1].x)


@pytest.mark.parametrize(
    ("make", "own", "coefficient"),
    [
        (sgd(0.1), "0", 0.0),
        (sgd(0.1), "1/m", 0.5),
        (sgd(0.1, maximize=True), "1", 1.0),
    ],
)
def test_view_of_plain_sgd_is_the_base_less_own_gradients(make: Make, own: str, coefficient: float) -> None:
    """O2: with SGD base - eta*c*(own gradients not yet covered), at every step; maximize turns it round."""
    gradients: dict[int, list[Tensor]] = {0: [], 1: []}
    seen = []

    def each(session: LearnerSession, model: Point, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
        assert model.x.grad is not None
        gradients[rank].append(model.x.grad.clone())
        view = model.x.detach().clone()
        with session.base():
            base = model.x.detach().clone()
        assert torch.equal(model.x, view), "O7: the view is back, bit for bit"
        sign = -1.0 if optimizer.param_groups[0]["maximize"] else 1.0
        uncovered = torch.stack(gradients[rank][max(number - 2, 0) :]).sum(0)
        torch.testing.assert_close(view, base - sign * 0.1 * coefficient * uncovered)
        seen.append(number)

    descend(2, make, 6, own, each)
    assert len(seen) == 12


@pytest.mark.parametrize("staleness", mostly_slow([2, 1, 3, 4]))
@pytest.mark.parametrize("converges", [True, False])
def test_stability_bound(staleness: int, converges: bool) -> None:
    """A delay of s in x' = x - eta*lambda*x(t-s) is stable iff eta*lambda < 2 sin(pi / (2 (2s+1)))."""
    bound = 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))
    rate = bound * (0.95 if converges else 1.05)
    distances: list[float] = []

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        session.prepare(model, optimizer)
        for _ in range(400):
            step(model, optimizer, model.weight.detach())  # whose gradient is the weight, as of w*w/2
            distances.append(abs(model.weight.item()))

    with LocalDaemon(1, sync=f"ssp:{staleness}", visibility="fixed", own="0", hash_every=0) as daemon:
        daemon.run(script)
    first, last = max(distances[20:60]), max(distances[-40:])
    assert (last < first) is converges


# Which rounds are there at a boundary


def test_no_round_is_no_step() -> None:
    """O2: without a complete round `optimizer.step()` changes nothing: no weight decay, no momentum, no state."""
    with LocalDaemon(1, sync="ssp:2", own="0") as daemon:

        def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
            model = nn.Linear(2, 2)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
            session.prepare(model, optimizer)
            before = copy.deepcopy(model.state_dict())
            for _ in range(2):
                step(model, optimizer, torch.ones(1, 2))
                assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
                assert not optimizer.state
            daemon.release(1)
            session.barrier()
            assert not torch.equal(before["weight"], model.weight)
            assert optimizer.state[model.weight]["step"] == 2

        daemon.hold(1)
        daemon.run(script)


def test_several_rounds_at_one_boundary() -> None:
    """R1, O2: one step of the optimizer for each, in order, and a hash of the base after each."""
    orders = []
    with LocalDaemon(1, sync="ssp:2", own="1") as daemon:

        def script(session: LearnerSession, rank: int) -> Tensor:  # noqa: ARG001
            model = Point()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer.register_step_post_hook(lambda *_: orders.append(len(daemon.applied)))
            session.prepare(model, optimizer)
            for number in range(3):
                if number == 2:
                    daemon.release(1)
                step(model, optimizer, TARGETS[0])
            return model.x.detach().clone()

        daemon.hold(1)
        daemon.run(script)
        assert orders[:2] == [0, 1], "the user's hook ran once for each round, before the next one was given"
        assert [applied.round for _, applied in daemon.applied] == [1, 2, 3]
        assert set(daemon.hashes) == {1, 2, 3}
        bases = [base for _, _, base in daemon.rounds.starts]
        assert bases[:3] == [0, 0, 0]
        assert bases[3] >= 2


def test_passed_over_learner_lands_later() -> None:
    """R4, O2: a round without this learner is applied as any other; its own gradient comes with a later one."""
    with LocalDaemon(2, sync="ssp:2", own="1") as daemon:

        def script(session: LearnerSession, rank: int) -> tuple[Tensor, Tensor]:
            model = Point()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer)
            if rank == 1:
                daemon.pass_over(1, 1)
                daemon.wait_until(lambda: daemon.round >= 1)
            step(model, optimizer, TARGETS[rank])
            session.barrier()
            return model.x.detach().clone(), TARGETS[rank]

        (first, _), (second, _) = daemon.run(script)
        assert torch.equal(first, second)
        x = 0.1 * CURVATURE * TARGETS[0]  # round 1 was rank 0's alone, round 2 rank 1's, with a gradient of the start
        torch.testing.assert_close(first, x + 0.1 * CURVATURE * TARGETS[1])


@pytest.mark.parametrize("retry", [True, False])
def test_lost_step_leaves_the_view(retry: bool) -> None:
    """V2, R5: its gradient will never be in the base, and that is known before its round is."""
    with LocalDaemon(1, sync="ssp:3", own="1") as daemon:

        def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
            model = Point()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer)
            step(model, optimizer, TARGETS[0])
            assert torch.count_nonzero(model.x) == 0
            step(model, optimizer, TARGETS[0])
            assert torch.count_nonzero(model.x) == 3
            daemon.release(1)

        daemon.hold(1)
        daemon.lose(0, 1, retry=retry)
        daemon.run(script)
        assert daemon.round == (1 if retry else 2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.norm(x))
        return result


FAR_FROM_ZERO = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) + 5


def stepped(session: LearnerSession) -> tuple[Normed, torch.optim.Optimizer]:
    """A prepared model whose first step is on its way into a round."""
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    step(model, optimizer, FAR_FROM_ZERO)
    return model, optimizer


@pytest.mark.parametrize("retry", [True, False])
def test_lost_step_leaves_the_buffers(retry: bool) -> None:
    """V2, R5, O5: the next step does not begin ahead by what it has moved."""
    with LocalDaemon(1, sync="ssp:3") as daemon:

        def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
            model, optimizer = stepped(session)
            assert torch.count_nonzero(model.norm.running_mean) == 0  # type: ignore[arg-type]
            step(model, optimizer, FAR_FROM_ZERO)
            torch.testing.assert_close(model.norm.running_mean, 0.1 * FAR_FROM_ZERO.mean(0))
            daemon.release(1)

        daemon.hold(1)
        daemon.lose(0, 1, retry=retry)
        daemon.run(script)


# Base and view


def test_base_shows_parameters_and_buffers_of_the_base() -> None:
    """O7: nested, and when its inside raises; afterwards all is as it was."""
    torch.manual_seed(0)
    models = [Normed(), Normed()]
    models[1].load_state_dict(models[0].state_dict())

    def script(session: LearnerSession, rank: int) -> list[dict[str, Tensor]]:
        model, seen = models[rank], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session.prepare(model, optimizer)
        for number in range(5):
            step(model, optimizer, torch.randn(4, 3) + rank + number)
            optimizer.param_groups[0]["lr"] /= 2  # counts for the next view only
            model(torch.randn(4, 3))  # moves the buffers
            view = copy.deepcopy(model.state_dict())
            with contextlib.suppress(ZeroDivisionError), session.base():
                base = copy.deepcopy(model.state_dict())
                with session.base():
                    assert all(torch.equal(base[name], value) for name, value in model.state_dict().items())
                assert all(torch.equal(base[name], value) for name, value in model.state_dict().items())
                model(torch.randn(4, 3))
                raise ZeroDivisionError
            assert not torch.equal(base["out.weight"], view["out.weight"])
            assert all(torch.equal(view[name], value) for name, value in model.state_dict().items())
            seen.append(base)
        return seen

    with LocalDaemon(2, sync="ssp:2", visibility="fixed", own="1") as daemon:
        first, second = daemon.run(script)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())
    assert not torch.equal(first[-1]["norm.running_mean"], first[0]["norm.running_mean"])


def test_buffers_at_a_bound() -> None:
    """O5: float buffers start each step where the own ones that no round covers have brought them; integer ones never
    go back, and agree after a flush."""
    torch.manual_seed(0)
    models = [Normed(), Normed()]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(2, 4, 3)

    def script(session: LearnerSession, rank: int) -> None:
        model = models[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        session.prepare(model, optimizer)
        for number in range(1, 5):
            step(model, optimizer, x[rank])
            assert int(model.norm.num_batches_tracked) == number  # type: ignore[arg-type]
            if number <= 2:
                own = (1 - 0.9**number) * x[rank].mean(0)  # no round is visible yet
                torch.testing.assert_close(model.norm.running_mean, own)

    with LocalDaemon(2, sync="ssp:2", visibility="fixed") as daemon:
        daemon.run(script)
    for model in models:
        torch.testing.assert_close(model.norm.running_mean, (1 - 0.9**4) * x.mean((0, 1)))
        assert int(model.norm.num_batches_tracked) == 4  # type: ignore[arg-type]


def test_barrier_is_a_flush() -> None:
    """After it the view is the base and equal on all peers; then the steps go on."""

    def each(session: LearnerSession, model: Point, _: torch.optim.Optimizer, rank: int, number: int) -> None:
        if number % 3 == 0:
            session.barrier()
            flushed[rank].append(model.x.detach().clone())
            with session.base():
                assert torch.equal(model.x, flushed[rank][-1])

    flushed: dict[int, list[Tensor]] = {0: [], 1: []}
    descend(3, sgd(0.1), 9, "1", each)
    assert len(flushed[0]) == 3
    assert all(torch.equal(one, other) for one, other in zip(flushed[0], flushed[1], strict=True))
    assert not torch.equal(flushed[0][0], flushed[0][1])


def test_base_stays_shown_through_a_flush() -> None:
    """A barrier inside mt.base(): the new base is shown, and the view comes back only at the end."""
    with LocalDaemon(1, sync="ssp:2", visibility="fixed", own="0") as daemon:

        def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
            model = Point()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer)
            step(model, optimizer, TARGETS[0])
            with session.base():
                assert torch.count_nonzero(model.x) == 0
                session.barrier()
                assert torch.count_nonzero(model.x) == 3
            step(model, optimizer, TARGETS[0])

        daemon.run(script)


def test_base_stays_shown_where_a_step_begins_anew() -> None:
    """A wait inside mt.base() begins the next step again: its statistics are ahead, those that are shown are not."""
    with LocalDaemon(1, sync="ssp:3") as daemon:

        def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
            model, _ = stepped(session)
            ahead = model.norm.running_mean.clone()  # type: ignore[union-attr]
            assert torch.count_nonzero(ahead) == 3
            with session.base():
                assert session._engine is not None
                session._engine.wait_idle("a pause", lambda: True, "nothing")
                assert torch.count_nonzero(model.norm.running_mean) == 0  # type: ignore[arg-type]
            assert torch.equal(model.norm.running_mean, ahead)  # type: ignore[arg-type]
            daemon.release(1)

        daemon.hold(1)
        daemon.run(script)


# Void rounds


@pytest.mark.parametrize("own", ["0", "1"])
def test_nan_is_skipped_and_forgotten(own: str) -> None:
    """V1 with skip: neither base nor view ever holds it."""

    class Broken(Point):
        def forward(self, target: Tensor) -> Tensor:
            return super().forward(target) * (math.nan if target.isnan().any() else 1.0)

    def script(session: LearnerSession, rank: int) -> Tensor:
        model = Broken()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for number in range(6):
            step(model, optimizer, TARGETS[rank] * (math.nan if (rank, number) == (1, 2) else 1.0))
            assert torch.isfinite(model.x).all()
        session.barrier()
        return model.x.detach().clone()

    with LocalDaemon(2, sync="ssp:2", visibility="fixed", own=own, on_nan="skip") as daemon:
        first, second = daemon.run(script)
        assert [done.done.void for _, done in sorted(daemon.rounds.rounds.items())] == [n == 2 for n in range(6)]  # type: ignore[union-attr]
    assert torch.equal(first, second)


def test_nan_stops_at_the_boundary() -> None:
    """V1 with stop."""

    def script(session: LearnerSession, rank: int) -> None:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for number in range(5):
            step(model, optimizer, TARGETS[rank] * (math.nan if (rank, number) == (1, 1) else 1.0))

    told = pytest.raises(NonFiniteGradient, match=r"round 2.*rank 1 \(bert\): x")
    with LocalDaemon(2, sync="ssp:1", visibility="fixed") as daemon, told:
        daemon.run(script)


# Options (O3), schedulers, clipping (O4)


@pytest.mark.parametrize("staleness", [0, 2])
def test_options_of_a_round_are_its_leaders(staleness: int) -> None:
    """O3: schedules that differ give equal bases: those of the largest step, here equal, so of the lowest rank."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.9))

    def each(_: LearnerSession, __: Point, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
        group = optimizer.param_groups[0]
        assert group["lr"] == (0.1 if number == 1 else 0.1 / (number - 1 + rank * 7)), "its own are back"
        group["lr"] = 0.1 / (number + rank * 7)
        group["betas"] = (0.8, 0.9 + 0.01 * rank)

    models, _ = descend(staleness, make, 8, each=each)
    assert torch.equal(models[0].x, models[1].x)

    base = Point()
    optimizer = make(base.parameters())
    bases = [base.x.detach().clone()]
    for number in range(1, 9):
        optimizer.param_groups[0]["lr"] = 0.1 / max(number - 1, 1)
        view = bases[max(number - 1 - staleness, 0)]
        base.x.grad = torch.stack([CURVATURE * (view - target) for target in TARGETS]).mean(0)
        optimizer.step()
        bases.append(base.x.detach().clone())
    torch.testing.assert_close(models[0].x, base.x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("before", [True, False])
def test_schedulers_are_content(staleness: int, before: bool) -> None:
    """No warning of torch's that the optimizer has not stepped, whether the scheduler was made before or after."""
    with LocalDaemon(1, sync=f"ssp:{staleness}", visibility="fixed") as daemon:

        def script(session: LearnerSession, rank: int) -> list[float]:  # noqa: ARG001
            model = Point()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            kind = type(optimizer)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if before else None
            session.prepare(model, optimizer)
            if scheduler is None:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            rates = []
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for _ in range(3):
                    step(model, optimizer, TARGETS[0])
                    scheduler.step()
                    rates.append(optimizer.param_groups[0]["lr"])
            assert type(optimizer) is kind
            session.finish()
            optimizer.step()  # an ordinary one again
            return rates

        assert daemon.run(script) == [[0.05, 0.025, 0.0125]]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_clipping_by_the_norm_of_the_means(staleness: int) -> None:
    """O4: every round is clipped by the norm of its own means, equally on all peers."""
    norms: dict[int, list[float]] = {0: [], 1: []}
    models = [Point() for _ in TARGETS]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(models[rank], torch.optim.SGD(models[rank].parameters(), lr=0.5))
        for _ in range(6):
            optimizer.zero_grad()
            model(TARGETS[rank]).backward()
            norms[rank].append(float(session.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()

    with LocalDaemon(2, sync=f"ssp:{staleness}", visibility="fixed", own="0") as daemon:
        daemon.run(script)
    base = Point()
    optimizer = torch.optim.SGD(base.parameters(), lr=0.5)
    bases, expected = [base.x.detach().clone()], []
    for number in range(1, 7):
        view = bases[max(number - 1 - staleness, 0)]
        base.x.grad = torch.stack([CURVATURE * (view - target) for target in TARGETS]).mean(0)
        expected.append(float(nn.utils.clip_grad_norm_(base.parameters(), 0.5)))
        optimizer.step()
        bases.append(base.x.detach().clone())
    torch.testing.assert_close(models[0].x, base.x, rtol=1e-5, atol=1e-6)
    assert torch.equal(models[0].x, models[1].x)
    told = expected if staleness == 0 else ([0.0] * (staleness + 1) + expected)[:6]
    assert norms[0] == pytest.approx(told, rel=1e-5)
    assert norms[0] == norms[1]
    binds = [RoundOptions.load(msgpack.unpackb(daemon.buckets[number][0][0].hyperparameters)) for number in range(1, 7)]
    assert [(bind.clip_known, bind.clip) for bind in binds] == [(False, None)] + 5 * [(True, 0.5)]


# Ends and errors


def test_finish_between_backward_and_step() -> None:
    """What was sent is in the base of all, and the model holds it."""

    def script(session: LearnerSession, rank: int) -> Tensor:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        step(model, optimizer, TARGETS[rank])
        optimizer.zero_grad()
        model(TARGETS[rank]).backward()
        session.finish()
        return model.x.detach().clone()

    with LocalDaemon(2, sync="ssp:2", own="1") as daemon:
        first, second = daemon.run(script)
        assert daemon.round == 2
    assert torch.equal(first, second)


def test_finish_between_backward_and_step_of_a_claimed_epoch() -> None:
    """With s=0 the script has not stepped on the round in hand: nothing more can be applied, and nobody waits."""

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = Mean()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(SAMPLES, batch_size=4)
        model, optimizer, loader = session.prepare_with_loader(model, optimizer, loader)
        for number, (x,) in enumerate(loader):
            optimizer.zero_grad()
            model(x).backward()
            if number == 2:
                break
            optimizer.step()
        session.finish()

    with LocalDaemon(2, shares="speed") as daemon:
        daemon.run(script)
        assert set(daemon.hashes) == {1, 2}


def test_script_that_raises_does_not_wait_for_the_others() -> None:
    """A flush would wait for peers that go on; finish() in a `finally` must not."""
    ended = threading.Event()

    def script(session: LearnerSession, rank: int) -> None:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        step(model, optimizer, TARGETS[rank])
        if rank == 0:
            assert ended.wait(20), "rank 1 waits for rank 0"
            return
        with contextlib.suppress(ZeroDivisionError):
            try:
                raise ZeroDivisionError
            finally:
                session.finish()
                ended.set()

    with LocalDaemon(2, sync="ssp:2") as daemon:
        daemon.run(script)


def test_late_learner_takes_fewer_steps_than_there_are_rounds() -> None:
    """X6: mt.steps counts rounds, so all end together."""
    with LocalDaemon(2, sync="ssp:2") as daemon:

        def script(session: LearnerSession, rank: int) -> list[int]:
            model = Point()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer)
            if rank == 1:
                daemon.pass_over(1, 1)
                daemon.wait_until(lambda: daemon.round >= 1)
            taken = []
            for number in session.steps(5):
                step(model, optimizer, TARGETS[rank])
                taken.append(number)
            return taken

        assert daemon.run(script) == [[1, 2, 3, 4, 5], [1, 2, 3, 4]]


def refused(script: Callable[[LearnerSession, Point, torch.optim.Optimizer], Any], text: str) -> None:
    def prepared(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        script(session, model, optimizer)

    with LocalDaemon(1, sync="ssp:2", visibility="fixed") as daemon, pytest.raises(UsageError, match=text):
        daemon.run(prepared)


def test_second_backward_names_no_sync() -> None:
    """O6."""

    def script(_session: LearnerSession, model: Point, _optimizer: torch.optim.Optimizer) -> None:
        model(TARGETS[0]).backward()
        model(TARGETS[0]).backward()

    refused(script, r"second backward\(\).*no_sync")


def test_plain_clipping_names_mt_clip_grad_norm() -> None:
    """O4: it would change a gradient that has been sent already."""

    def script(_session: LearnerSession, model: Point, optimizer: torch.optim.Optimizer) -> None:
        model(TARGETS[0]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()

    refused(script, r"mt\.clip_grad_norm_")


def test_clipping_of_some_parameters_is_refused() -> None:
    def script(session: LearnerSession, model: Point, _optimizer: torch.optim.Optimizer) -> None:
        model(TARGETS[0]).backward()
        session.clip_grad_norm_([], 1.0)

    refused(script, r"some parameters only.*model\.parameters\(\)")


def test_step_on_the_base_is_refused() -> None:
    def script(session: LearnerSession, model: Point, optimizer: torch.optim.Optimizer) -> None:
        with session.base():
            step(model, optimizer, TARGETS[0])

    refused(script, r"inside `with mt\.base\(\):`")


def test_barrier_inside_a_step_is_refused() -> None:
    def script(session: LearnerSession, model: Point, _optimizer: torch.optim.Optimizer) -> None:
        model(TARGETS[0]).backward()
        session.barrier()

    refused(script, r"barrier\(\) between backward")


def test_rounds_without_a_prepared_model_are_not_counted() -> None:
    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        list(session.steps(1))

    with LocalDaemon(1, sync="ssp:2") as daemon, pytest.raises(MeshtrainError, match=r"before mt\.prepare"):
        daemon.run(script)


# Epochs of claimed samples (X4)

SAMPLES = torch.utils.data.TensorDataset(torch.arange(44.0).view(44, 1) / 44)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))

    def forward(self, sample: Tensor) -> Tensor:
        return 5 * (self.x - sample).square().mean()


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("own", ["0", "1"])
def test_epoch_ends_with_the_rounds_of_others(staleness: int, own: str) -> None:
    """X4, R5: who has no samples left applies the rounds of the others, clipped alike (O4), as its base."""
    models = [Mean() for _ in range(3)]
    drawn: list[float] = []

    def script(session: LearnerSession, rank: int) -> None:
        optimizer = torch.optim.SGD(models[rank].parameters(), lr=0.1, momentum=0.5)
        loader = torch.utils.data.DataLoader(SAMPLES, batch_size=4)
        model, optimizer, loader = session.prepare_with_loader(models[rank], optimizer, loader)
        for _ in range(2):
            for (x,) in loader:
                drawn.extend(x.flatten().tolist())
                optimizer.zero_grad()
                model(x).backward()
                session.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()

    with LocalDaemon(3, sync=f"ssp:{staleness}", own=own, shares="speed") as daemon:
        daemon.run(script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
        assert set(daemon.hashes) == set(range(1, daemon.round + 1))
    assert sorted(drawn) == sorted(SAMPLES.tensors[0].flatten().tolist() * 2)
    assert models[0].x.item() == models[1].x.item() == models[2].x.item() != 0.0


@pytest.mark.parametrize("staleness", [0, 2])
def test_idle_learner_keeps_what_it_has_accumulated_and_sent(staleness: int) -> None:
    """O1, O6: it fetches the next batch between backward() and step(), as prefetching loops do, at an epoch's end."""
    models = [Mean() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        optimizer = torch.optim.SGD(models[rank].parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(SAMPLES, batch_size=4)
        model, optimizer, loader = session.prepare_with_loader(models[rank], optimizer, loader)
        batches = iter(loader)
        batch = next(batches, None)
        while batch is not None:
            optimizer.zero_grad()
            model(batch[0]).backward()
            assert model.x.grad is not None
            before = model.x.grad.clone()
            batch = next(batches, None)
            assert torch.equal(model.x.grad, before)
            optimizer.step()

    with LocalDaemon(2, sync=f"ssp:{staleness}", shares="speed") as daemon:
        daemon.run(script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
    assert models[0].x.item() == models[1].x.item() != 0.0


def test_clipping_of_its_own_cannot_be_done_by_who_is_idle() -> None:
    """With s=0 torch's clipping works on the average in p.grad, which a learner without samples has not in hand."""

    def script(session: LearnerSession, rank: int) -> None:
        model = Mean()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(SAMPLES, batch_size=4)
        model, optimizer, loader = session.prepare_with_loader(model, optimizer, loader)
        for number, (x,) in enumerate(loader):
            if rank == 1 and number == 0:
                continue  # so it has used its samples a step before the other
            optimizer.zero_grad()
            model(x).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()

    told = pytest.raises(UsageError, match=r"clip with mt\.clip_grad_norm_$")
    with LocalDaemon(2) as daemon, told:
        daemon.run(script)
