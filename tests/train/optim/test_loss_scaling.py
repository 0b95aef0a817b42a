"""O6: with a GradScaler, training is what it is without one, and its skipped steps are steps of the learner."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.errors import UsageError
from meshtrain.train.optim.loss_scaling import LossScaling
from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon

STEPS = 8


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


class Loop:
    """One training loop with a scaler, as a session sees it: `exchange` stands for what happens in backward()."""

    def __init__(self, scaler: torch.amp.GradScaler, make: Callable[[nn.Module], torch.optim.Optimizer] = momentum):
        self.model = net()
        self.optimizer = make(self.model)
        self.scaler = scaler
        self.scaling = LossScaling(scaler)
        self.boundaries = 0
        self.unscaled = 0
        self.steps = 0
        self.optimizer.register_step_post_hook(self._stepped)
        self.scaling.watch(self.optimizer, self._after_step, self._on_unscaled)

    def _stepped(self, *_: object) -> None:
        self.steps += 1

    def _after_step(self) -> None:
        self.boundaries += 1

    @property
    def skips(self) -> int:
        return self.boundaries - self.steps

    def _on_unscaled(self) -> None:
        self.unscaled += 1

    def step(self, number: int, *, clip: float | None = None, exchange: Callable[["Loop"], None] | None = None) -> None:
        loss = self.model(batch(number)).square().mean()
        scale = self.scaling.current_scale()
        self.scaler.scale(loss).backward()
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad = p.grad.div(scale).mul_(scale)  # what is sent is divided, what comes back multiplied
        if exchange is not None:
            exchange(self)
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def plain(steps: list[int], clip: float | None = None, make: Any = momentum) -> nn.Module:
    model = net()
    optimizer = make(model)
    for number in steps:
        model(batch(number)).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def cpu_scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **options})


@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("options", [{}, {"init_scale": 1000.0}, {"growth_interval": 2}, {"enabled": False}])
def test_equals_training_without_a_scaler(make: Any, clip: float | None, options: dict[str, Any]) -> None:
    """To 1e-5; with scales that are no powers of two, that grow, and with explicit unscaling before clipping."""
    loop = Loop(cpu_scaler(**options), make)
    for number in range(STEPS):
        loop.step(number, clip=clip)
    assert_close(loop.model, plain(list(range(STEPS)), clip, make))
    assert loop.steps == STEPS
    assert (loop.boundaries, loop.unscaled) == ((STEPS, STEPS) if loop.scaling.active else (0, 0))


def test_scale_is_that_of_the_step() -> None:
    loop = Loop(cpu_scaler(growth_interval=1))
    assert loop.scaling.active
    seen = []
    for number in range(3):
        seen.append(loop.scaling.current_scale())
        loop.step(number)
    assert seen == [1024.0, 2048.0, 4096.0]


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)])
def test_without_a_scaler(scaler: torch.amp.GradScaler | None) -> None:
    scaling = LossScaling(scaler)
    assert not scaling.active
    assert scaling.current_scale() == 1.0
    scaling.watch(momentum(net()), pytest.fail, pytest.fail)
    scaling.close()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_scaler_of_a_gpu() -> None:
    model = net().cuda()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**127)
    optimizer = momentum(model)
    scaling, boundaries = LossScaling(scaler), [0]

    def boundary() -> None:
        boundaries[0] += 1

    scaling.watch(optimizer, boundary, lambda: None)
    scaler.scale(model(batch(0).cuda()).square().mean() * 1e3).backward()
    scaler.step(optimizer)
    assert boundaries == [1]


def test_overflow_is_a_boundary_too() -> None:
    """The scaler skips optimizer.step(), shrinks, and the loop goes on: only the overflowing steps are missing."""
    loop = Loop(cpu_scaler(init_scale=2.0**127, backoff_factor=2.0**-100))
    loop.step(0, exchange=overflow)
    assert (loop.boundaries, loop.skips, loop.scaling.current_scale()) == (1, 1, 2.0**27)
    for number in (1, 2):
        loop.step(number)
    assert (loop.boundaries, loop.skips) == (3, 1)
    assert_close(loop.model, plain([1, 2]))


def overflow(loop: Loop) -> None:
    """At s=0, what all peers have after a round that overflowed on one of them."""
    for p in loop.model.parameters():
        p.grad = torch.full_like(p, torch.inf)


def test_overflow_of_another_peer_shrinks_all_scalers_alike() -> None:
    loops = [Loop(cpu_scaler(growth_interval=2)) for _ in range(2)]
    for loop in loops:
        for number in range(3):
            loop.step(number, exchange=overflow if number == 1 else None)
    assert [loop.scaling.current_scale() for loop in loops] == [512.0, 512.0]
    assert_close(loops[0].model, plain([0, 2]))


def test_other_optimizers_of_the_same_scaler() -> None:
    """Their steps are no steps of the learner."""
    loop = Loop(cpu_scaler())
    other = net()
    optimizer = momentum(other)
    for number in range(2):
        loop.scaler.scale(other(batch(number)).square().mean()).backward()
        loop.scaler.unscale_(optimizer)
        loop.scaler.step(optimizer)
        assert (loop.boundaries, loop.unscaled) == (number, number)
        optimizer.zero_grad()
        loop.step(number)
    assert_close(other, plain([0, 1]))
    assert_close(loop.model, plain([0, 1]))


def test_step_that_raises_is_no_boundary() -> None:
    loop = Loop(cpu_scaler())
    loop.step(0)
    loop.scaler.scale(loop.model(batch(1)).sum()).backward()
    loop.scaler.step(loop.optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        loop.scaler.step(loop.optimizer)
    assert loop.boundaries == 2


def test_closed_scaler_is_an_ordinary_one() -> None:
    scaler = cpu_scaler()
    before = set(vars(scaler))
    loop = Loop(scaler)
    loop.step(0)
    loop.scaling.close()
    loop.scaling.close()
    assert set(vars(scaler)) == before
    scaler.scale(loop.model(batch(1)).sum() * torch.inf).backward()
    scaler.step(loop.optimizer)
    assert loop.skips == 0


def test_what_is_no_scaler() -> None:
    with pytest.raises(UsageError, match=r"takes a torch\.amp\.GradScaler, not a float"):
        LossScaling(2.0)  # type: ignore[arg-type]


# In a job


def train(
    staleness: int, scaled: bool, infinite: tuple[int, int] = (-1, -1)
) -> tuple[list[nn.Sequential], LocalDaemon]:
    """Two learners; the loss of (rank, step) `infinite` overflows once it is scaled."""
    models = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        optimizer = momentum(models[rank])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        model, optimizer = session.prepare(models[rank], optimizer, scaler=scaler)
        for step in range(1, STEPS + 1):
            loss = model(batch(2 * step + rank)).square().mean()
            scaler.scale(loss * (1e38 if (rank, step) == infinite else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        halved = scaled and (infinite[0] == rank or (staleness == 0 and infinite[0] >= 0))
        assert scaler.get_scale() == ((512.0 if halved else 1024.0) if scaled else 1.0)

    visibility = "fixed" if staleness else "eager"
    with LocalDaemon(2, sync=f"ssp:{staleness}", straggler="wait", visibility=visibility, own="1") as daemon:
        daemon.run(script)
    assert daemon.round == STEPS
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q), "replicas differ"
    return models, daemon


@pytest.mark.parametrize("staleness", [0, 2])
def test_job_with_a_scaler_equals_one_without(staleness: int) -> None:
    assert_close(train(staleness, True)[0][0], train(staleness, False)[0][0])


@pytest.mark.parametrize("staleness", [0, 2])
def test_overflow_of_one_peer_voids_its_round_on_all(staleness: int) -> None:
    """O6: on every peer, nobody stops although --on-nan says so; with s=0 all scales shrink alike."""
    models, daemon = train(staleness, True, infinite=(1, 3))
    verdicts = {number: round_.done for number, round_ in daemon.rounds.rounds.items() if round_.done is not None}
    assert [number for number, done in verdicts.items() if done.void] == [3]
    assert verdicts[3].overflow
    assert not verdicts[3].stop
    assert all(p.isfinite().all() for p in models[0].parameters())
