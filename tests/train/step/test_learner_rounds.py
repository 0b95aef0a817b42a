"""What a learner tells its daemon, and when."""

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def test_buckets_leave_before_the_backward_pass_ends() -> None:
    """WFBP: the daemon has the first buckets while the first layer has no gradient yet."""
    model = net()
    with LocalDaemon(1, bucket_bytes=20_000) as daemon:
        seen: list[list[str]] = []

        def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
            session.prepare(model, sgd(model))

            def last_gradient(_: Tensor) -> None:
                with daemon.lock:
                    daemon.lock.wait_for(lambda: len(daemon.events) >= 2, 5.0)
                    seen.append(list(daemon.events))

            model[0].weight.register_hook(last_gradient)  # type: ignore[operator]
            model(torch.randn(4, 64)).sum().backward()

        daemon.run(script)
    assert seen[0][:2] == ["0 bucket 0 of step 1", "0 bucket 1 of step 1"]


def test_weight_is_the_samples_drawn_since_the_last_bind() -> None:
    """R2, X1: also over several micro-batches; a further step on the same batch covers no new samples."""
    with LocalDaemon(1, hash_every=0) as daemon:

        def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
            model = net()
            loader = DataLoader(TensorDataset(torch.randn(20, 64)), batch_size=4)
            model, optimizer, loader = session.prepare_with_loader(model, sgd(model), loader)
            batches = iter(loader)
            for draws in (1, 2, 0, 1):
                (x,) = next(batches) if draws else (torch.randn(4, 64),)
                for _ in range(draws - 1):
                    with session.no_sync():
                        model(x).sum().backward()
                    (x,) = next(batches)
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        daemon.run(script)
        binds = [daemon.buckets[step][0][0] for step in range(1, 5)]
        assert [bind.weight for bind in binds] == [4.0, 8.0, 8.0, 4.0]
        covered = [(block.first, block.end) for bind in binds for block in bind.samples]
        assert covered == [(0, 4), (4, 8), (8, 12), (12, 16)]
        assert [stepped.samples for _, stepped in daemon.stepped] == [4, 8, 0, 4]
        assert [stepped.step for _, stepped in daemon.stepped] == [1, 2, 3, 4]
        assert [applied.round for _, applied in daemon.applied] == [1, 2, 3, 4]
        assert [idle.finished for _, idle in daemon.idle] == [True]
        assert set(daemon.hashes) == {4}, "hash_every=0: at the end only"


def test_all_start_from_the_first_ones_state() -> None:
    """J1: parameters, buffers, frozen tensors, optimizer state and options of rank 0."""

    class Model(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.net, self.norm = net(seed), nn.BatchNorm1d(64)
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
            self.register_buffer("mask", torch.rand(5) > 0.5)
            self.register_buffer("limits", torch.tensor([-math.inf, math.inf]))
            self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.norm(self.net(x))
            return result

    models = [Model(seed) for seed in range(3)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1 * 2**rank) for rank, model in enumerate(models)]
    for _ in range(2):
        models[0](torch.randn(4, 64)).square().sum().backward()
        optimizers[0].step()

    def script(session: LearnerSession, rank: int) -> None:
        session.prepare(models[rank], optimizers[rank])
        models[rank](torch.randn(4, 64)).square().sum().backward()
        optimizers[rank].step()

    before = optimizers[0].state_dict()["state"][1]["exp_avg"].clone()
    with LocalDaemon(3) as daemon:
        daemon.run(script)
        assert len(set(daemon.hashes[1].values())) == 1
    for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
        for (name, p), q in zip(models[0].state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(p, q), name
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        for index, state in optimizers[0].state_dict()["state"].items():
            other = optimizer.state_dict()["state"][index]
            assert set(state) == set(other)
            assert all(torch.equal(state[name], other[name]) for name in state)
    assert not torch.equal(before, optimizers[1].state_dict()["state"][1]["exp_avg"]), "it has stepped"


def test_equal_start_moves_nothing() -> None:
    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = model_of[threading.get_ident()] = net()
        session.prepare(model, sgd(model))

    model_of: dict[int, Any] = {}
    with LocalDaemon(1) as daemon:
        daemon.run(script)
        assert list((daemon.folder / "state").iterdir()) == []


def test_momentum_of_a_fresh_optimizer_is_not_kept_where_rank_0_has_none() -> None:
    """J1: a member that trained before starts from rank 0's empty state, too."""
    models = [net(0), net(0)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    models[1](torch.randn(2, 64)).sum().backward()
    optimizers[1].step()

    def script(session: LearnerSession, rank: int) -> None:
        session.prepare(models[rank], optimizers[rank])

    with LocalDaemon(2) as daemon:
        daemon.run(script)
    assert all(state.get("momentum_buffer") is None for state in optimizers[1].state.values())
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_log_and_barrier() -> None:
    with LocalDaemon(2) as daemon:

        def script(session: LearnerSession, rank: int) -> int:
            session.log({"loss": torch.tensor(1.5, requires_grad=True), "epoch": rank})
            session.barrier()
            session.barrier()
            return len(daemon.logs)

        assert daemon.run(script) == [2, 2], "both had logged when the barrier opened"
        assert sorted(log.values for _, log in daemon.logs) == [
            (("loss", 1.5), ("epoch", 0.0)),
            (("loss", 1.5), ("epoch", 1.0)),
        ]


def test_closure_that_is_called_once_works() -> None:
    def script(session: LearnerSession, rank: int) -> float:  # noqa: ARG001
        model = net()
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        x = torch.ones(2, 64)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.item()

        losses = [optimizer.step(closure) for _ in range(3)]
        assert losses[2] is not None
        assert losses[0] is not None
        return float(losses[2] - losses[0])

    with LocalDaemon(2) as daemon:
        falls = daemon.run(script)
        assert all(fall < 0 for fall in falls)
        assert len(daemon.applied) == 6


def test_one_learner_stops_early_and_the_other_goes_on() -> None:
    """R5: who has finished is idle; the rounds go on without it."""

    def script(session: LearnerSession, rank: int) -> int:
        model = net()
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        for _ in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        session.finish()
        return 0

    with LocalDaemon(2) as daemon:
        daemon.run(script)
        assert daemon.round == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_finite_check_sees_every_bad_value(value: float) -> None:
    """V1."""
    from meshtrain.train.step.finite import PIECE_VALUES, are_finite, write_scaled

    values = torch.zeros(1000)
    assert are_finite(values)
    values[637] = value
    assert not are_finite(values)
    for size in (1, PIECE_VALUES - 1, PIECE_VALUES, 2 * PIECE_VALUES + 3):
        for place in {0, size // 2, size - 1}:
            values, out = torch.ones(size), torch.full((size,), -1.0)
            assert write_scaled(values, 3.0, out)
            values[place] = value
            assert not write_scaled(values, 3.0, out), (size, place)
            assert torch.equal(torch.nan_to_num(out), torch.nan_to_num(values * 3.0)), "all of it is written"


def test_finite_check_takes_large_values_whose_squares_overflow_for_finite() -> None:
    """V1: a sum of squares that overflows is no infinity, but a product with the weight that does is one."""
    from meshtrain.train.step.finite import PIECE_VALUES, are_finite, write_scaled

    values = torch.full((PIECE_VALUES + 1000,), 1e30)
    values[-1] = torch.finfo(torch.float32).max
    assert torch.dot(values, values).isinf()
    assert are_finite(values)
    out = torch.zeros_like(values)
    assert write_scaled(values, 1.0, out)
    assert torch.equal(out, values)
    assert not write_scaled(values, 2.0, out)


@pytest.mark.parametrize("turned", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_the_bucket_that_is_not_finite_is_poisoned_and_no_other(value: float, turned: bool) -> None:
    """V1: by bucket, naming the parameter. Large values, whose squares overflow, are none of that."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            form = torch.channels_last if turned else torch.contiguous_format
            values = (torch.zeros(16, 8, 4, 4).to(memory_format=form) for _ in range(5))
            self.weights = nn.ParameterList(nn.Parameter(each) for each in values)

        def forward(self, factors: list[float]) -> Tensor:
            return sum((w[3, 2, 1, 1] * f for w, f in zip(self.weights, factors, strict=True)), torch.zeros(()))

    with LocalDaemon(1, bucket_bytes=10_000, on_nan="skip") as daemon:

        def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
            model = Model()
            optimizer = sgd(model)
            session.prepare(model, optimizer)
            for factors in ([1.0, 1.0, value, 1.0, 1.0], [1.0] * 5):
                optimizer.zero_grad()
                model(factors).backward()
                optimizer.step()

        daemon.run(script)
        first, second = ([bucket.poison for bucket in daemon.buckets[step][0]] for step in (1, 2))
        assert len(first) == 5, "a bucket each"
        assert [poison and poison.parameter for poison in first] == (
            [None] * 5 if math.isfinite(value) else [None, None, "weights.2", None, None]
        )
        assert second == [None] * 5, "the next step is looked at anew"
