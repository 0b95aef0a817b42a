"""BSP on m learners equals one process on the joint batch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.errors import UsageError
from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import assert_equal

STEPS = 8
BATCH = 4

Train = Callable[[nn.Module, torch.optim.Optimizer, list[Tensor], Tensor], None]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def data(seed: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def distance(a: nn.Module, b: nn.Module) -> float:
    """Largest relative distance of any tensor."""
    worst = 0.0
    for (name, p), (_, q) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        if p.is_floating_point():
            assert torch.isfinite(p).all(), name
            worst = max(worst, float((p - q).norm() / q.norm().clamp_min(1e-12)))
        else:
            assert torch.equal(p, q), name
    return worst


class Case:
    """One kind of model and step; `micro` batches of a step are accumulated."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        *,
        micro: int = 1,
        steps: int = STEPS,
        clip: float | None = None,
        autocast: bool = False,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.micro, self.steps, self.clip, self.autocast = micro, steps, clip, autocast

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return loss_of(model, x, y)

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.model()
        return model, self.optimizer(model)

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], self.clip)
        optimizer.step()
        optimizer.zero_grad()

    def alone(self, order: list[list[tuple[Tensor, Tensor]]]) -> nn.Module:
        """`order[step]`: micro-batches, whose losses are weighted by their samples."""
        model, optimizer = self.fresh()
        for batches in order:
            samples = sum(len(x) for x, _ in batches)
            for x, y in batches:
                (self.loss(model, x, y) * (len(x) / samples)).backward()
            self.apply(model, optimizer)
        return model

    def together(self, members: int, total: int, **spec: Any) -> tuple[list[nn.Module], list[Any]]:
        """Models of all ranks, and what each rank drew, by step."""
        dataset = TensorDataset(*data(1, total))
        replicas = [self.fresh() for _ in range(members)]

        def script(session: LearnerSession, rank: int) -> list[list[tuple[Tensor, Tensor]]]:
            model, optimizer = replicas[rank]
            loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
            model, optimizer, loader = session.prepare_with_loader(model, optimizer, loader)
            drawn: list[list[tuple[Tensor, Tensor]]] = []
            while len(drawn) < self.steps:
                batches: list[tuple[Tensor, Tensor]] = []
                for x, y in loader:
                    batches.append((x, y))
                    if len(batches) < self.micro:
                        with session.no_sync():
                            (self.loss(model, x, y) / self.micro).backward()
                        continue
                    (self.loss(model, x, y) / self.micro).backward()
                    self.apply(model, optimizer)
                    drawn.append(batches)
                    batches = []
                    if len(drawn) == self.steps:
                        break
            return drawn

        with LocalDaemon(members, **spec) as daemon:
            drawn = daemon.run(script)
            assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
            assert len(daemon.hashes) == self.steps
        return [model for model, _ in replicas], drawn

    def check(self, members: int, total: int, tolerance: float) -> None:
        models, drawn = self.together(members, total)
        joint = [[batch for rank in drawn for batch in rank[step]] for step in range(self.steps)]
        assert_equal(models)
        assert distance(models[0], self.alone(joint)) <= tolerance


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class Tied(nn.Module):
    """The output layer is the input layer transposed, and a parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 20, bias=False)
        self.scale = nn.Parameter(torch.full((20,), 1.5), requires_grad=False)
        self.hidden = nn.Linear(20, 20)
        self.out = nn.Linear(20, 6, bias=False)
        self.out.weight = nn.Parameter(self.embed.weight.detach().T.contiguous())
        self.again = nn.Linear(20, 20)
        self.again.weight = self.hidden.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.again(torch.tanh(self.hidden(self.embed(x) * self.scale)))
        result: Tensor = self.head(self.out(hidden))
        return result


class Normed(nn.Module):
    """BatchNorm over fixed statistics: its running means must not depend on how a batch is split."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.last = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x)))
        return result


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("optimizer", [sgd, momentum])
def test_equals_one_process_on_the_joint_batch(members: int, optimizer: Any) -> None:
    """W3, O1: to 1e-6 relative in fp32."""
    Case(mlp, optimizer).check(members, 12 * BATCH, 1e-6)


@pytest.mark.parametrize("members", [2, 3])
def test_uneven_batches_weigh_by_their_samples(members: int) -> None:
    """R2, W3: the last round of an epoch splits what is left unevenly."""
    Case(mlp, momentum).check(members, 2 * members * BATCH + members + 1, 1e-6)


def test_accumulation_averages_the_sum() -> None:
    """O6: backward passes under no_sync are part of the next one outside."""
    Case(mlp, momentum, micro=3).check(2, 3 * 2 * BATCH * 4, 1e-6)


def test_clipping_sees_the_average() -> None:
    """O1: the script's own clipping works on p.grad after backward()."""
    Case(mlp, momentum, clip=0.05).check(3, 12 * BATCH, 1e-6)


def test_tied_and_frozen_parameters() -> None:
    Case(Tied, lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)).check(
        2, 12 * BATCH, 1e-6
    )


def test_autocast_to_bfloat16() -> None:
    """AMP on the CPU: parameters and their gradients are fp32, the micro-batches are the same as alone."""
    Case(mlp, momentum, autocast=True).check(2, 12 * BATCH, 1e-6)


def test_bfloat16_parameters_stay_equal_on_all_peers() -> None:
    """Means arrive in fp32 and are rounded alike."""
    models, _ = Case(lambda: BFloat(), sgd).together(2, 12 * BATCH)
    assert_equal(models)
    assert all(p.dtype is torch.bfloat16 for p in models[0].parameters())


class BFloat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x.bfloat16()).float()
        return result


def test_adamw_is_no_further_than_orders_of_addition_are() -> None:
    """After the steps, at most twice the largest distance of one-process runs in different orders of micro-batches."""
    case = Case(mlp, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), steps=50)
    models, drawn = case.together(3, 12 * BATCH)
    assert_equal(models)
    joint = [[batch for rank in drawn for batch in rank[step]] for step in range(case.steps)]
    reference = case.alone(joint)
    orders = [(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    spread = max(distance(case.alone([[step[i] for i in order] for step in joint]), reference) for order in orders)
    assert distance(models[0], reference) <= 2 * spread


def test_batch_norm_buffers_are_averaged() -> None:
    """O5: floats by their weighted differences from the base, integers by their maximum."""
    models, drawn = Case(Normed, sgd).together(2, 12 * BATCH)
    assert_equal(models)
    norm = models[0].norm
    assert isinstance(norm, nn.BatchNorm1d)
    assert int(norm.num_batches_tracked) == STEPS  # type: ignore[arg-type]
    assert norm.running_mean is not None
    # one step: mean of what both ranks' own BatchNorm had made of it
    replicas = [Case(Normed, sgd).fresh() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> Tensor:
        model, optimizer = replicas[rank]
        lone = copy.deepcopy(model)
        session.prepare(model, optimizer)
        x, y = drawn[rank][0][0]
        loss_of(lone, x, y)
        loss_of(model, x, y).backward()
        optimizer.step()
        mean: Tensor = lone.norm.running_mean  # type: ignore[union-attr, assignment]
        return mean

    with LocalDaemon(2) as daemon:
        own = daemon.run(script)
    got = replicas[0][0].norm.running_mean  # type: ignore[union-attr]
    torch.testing.assert_close(got, (own[0] + own[1]) / 2)


class Branching(nn.Module):
    """Uses `left`, `right` or none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.all = nn.Linear(6, 3)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        result: Tensor = self.all(x) + getattr(self, branch)(x)
        return result


def test_unused_parameters() -> None:
    """O5: used by one peer: the mean with zero of the other; used by nobody: p.grad stays None, no weight decay."""
    torch.manual_seed(0)
    models = [Branching() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x, _ = data(3, 4)

    def script(session: LearnerSession, rank: int) -> dict[str, Tensor | None]:
        model = models[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        session.prepare(model, optimizer)
        model(x, "left" if rank == 0 else "all").sum().backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        return gradients

    before = copy.deepcopy(models[0])
    with LocalDaemon(2) as daemon:
        first, second = daemon.run(script)
    assert_equal(list(models))
    for unused in ("right.weight", "never.bias"):
        assert first[unused] is None
        assert second[unused] is None
    assert torch.equal(models[0].never.weight, before.never.weight)
    lone = copy.deepcopy(before)
    lone(x, "left").sum().backward()
    assert first["left.weight"] is not None
    assert second["left.weight"] is not None
    torch.testing.assert_close(second["left.weight"], lone.left.weight.grad / 2)  # type: ignore[operator]


def test_rate_set_after_backward_counts_at_once() -> None:
    """O3 at s=0: equal scripts set it equally on all peers, as in one process, although the bind has left before."""

    def script(session: LearnerSession, rank: int) -> Tensor:  # noqa: ARG001
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
        session.prepare(model, optimizer)
        for lr in (1.0, 0.5):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        return model.weight.detach()

    with LocalDaemon(2) as daemon:
        assert [weight.item() for weight in daemon.run(script)] == [-1.5, -1.5]


def test_a_rate_that_binds_do_not_tell_is_refused_where_rounds_are_applied_alone() -> None:
    """O3 at s=0: who is idle knows of the others' steps what their binds have told; with another rate its base would
    not be theirs any more."""

    def script(session: LearnerSession, rank: int) -> None:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
        session.prepare(model, optimizer)
        engine: Any = session._engine
        for step in range(1, 4):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.param_groups[0]["lr"] = 1.0 / step
            optimizer.step()
            if rank == 1:
                engine.wait_idle("a pause", lambda: engine._base.applied >= 3, "others")

    with (
        LocalDaemon(2) as daemon,
        pytest.raises(UsageError, match=r"round 2 was averaged .* sets the learning rate, .* set it before that"),
    ):
        daemon.run(script)
