"""A learner whose gradients are made on a GPU: kernels run behind the program, and what leaves for the daemon is what
they end with.

The cases on the CPU, where nothing runs behind the program, show that the tests are right. Those on a GPU are skipped
where there is none (`pytest -m "cuda or mps"`).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.train.device import DEVICE_VARIABLE, moved
from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon
from tests.train.session.test_training_api import SCRIPT, start_learner

ON_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON_MPS = [pytest.mark.mps, pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")]
GPUS = [pytest.param("cuda", marks=ON_CUDA), pytest.param("mps", marks=ON_MPS)]
DEVICES = ["cpu", *GPUS]
BUSY_CYCLES = 200_000_000  # about a tenth of a second
STEPS = 3
# In-process learners are one each: those of one process share autograd's thread of a GPU, which waits for a round.


class Behind(torch.autograd.Function):
    """Its input, and in the backward pass the gradient, made behind kernels that keep the GPU busy for a while."""

    @staticmethod
    def forward(_ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        keep_busy(gradient.device)
        return gradient.clone()


class AfterTheFirstBucket(torch.autograd.Function):
    """Its input, and in the backward pass the gradient, once the daemon has the first bucket of the step."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, daemon: LocalDaemon) -> Tensor:
        ctx.daemon = daemon
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.daemon.wait_until(lambda: bool(ctx.daemon.buckets.get(1, {}).get(0)))
        return gradient.clone(), None


def keep_busy(device: torch.device) -> None:
    """Whatever is asked of the current stream from now on has to wait."""
    if device.type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)


def own_stream(device: str) -> AbstractContextManager[object]:
    """Not the default one: what is not ordered behind it is not ordered behind its kernels."""
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()


class Net(nn.Module):
    """Two layers of 8,000 values each, so that they are buckets of their own; between them a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor, between: Any = Behind.apply, *more: Any) -> Tensor:
        out: Tensor = self.second(between(torch.tanh(self.first(x)), *more))
        return out


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS * 8, 64, generator=generator), torch.randn(STEPS * 8, 64, generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone() -> Net:
    """The steps in one process on the CPU."""
    model = Net()
    optimizer = sgd(model)
    for x, y in zip(*(each.split(8) for each in samples()), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("device", DEVICES)
def test_what_leaves_is_what_the_kernels_end_with(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O1: a gradient is copied behind the kernels that make it, and an optimizer's kernels run behind the copy of the
    means, on whatever stream a script computes."""
    monkeypatch.setenv(DEVICE_VARIABLE, device)
    model = Net()

    def script(session: LearnerSession, _rank: int) -> list[str]:
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        with own_stream(device):
            for batch in zip(*(each.split(8) for each in samples()), strict=True):
                x, y = moved(batch, torch.device(device))
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return [parameter.device.type for parameter in model.parameters()]

    with LocalDaemon(1) as daemon:
        assert set(daemon.run(script)[0]) == {device}
    for parameter, expected in zip(model.parameters(), alone().parameters(), strict=True):
        torch.testing.assert_close(parameter.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_pinned_batches_arrive_whole(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied while the program goes on, and kernels that read them wait for that."""
    monkeypatch.setenv(DEVICE_VARIABLE, device)
    model, (x, y) = Net(), samples()
    drawn: list[Tensor] = []

    def script(session: LearnerSession, _rank: int) -> None:
        optimizer = sgd(model)
        loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, pin_memory=device == "cuda")
        _, _, prepared = session.prepare_with_loader(model, optimizer, loader)
        with own_stream(device):
            keep_busy(torch.device(device))
            for inputs, labels in prepared:
                drawn.append(inputs.clone())
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), labels).backward()
                optimizer.step()

    with LocalDaemon(1) as daemon:
        daemon.run(script)
    assert {each.device.type for each in drawn} == {device}
    rows = torch.cat(drawn).cpu()
    assert torch.equal(rows[rows[:, 0].argsort()], x[x[:, 0].argsort()])


@pytest.mark.parametrize("device", DEVICES)
def test_buckets_leave_while_the_backward_pass_goes_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait-free backpropagation: the pass waits in its middle until the daemon has what was ready before."""
    monkeypatch.setenv(DEVICE_VARIABLE, device)
    model, (x, _) = Net(), samples()

    with LocalDaemon(1) as daemon:

        def script(session: LearnerSession, _rank: int) -> None:
            optimizer = sgd(model)
            session.prepare(model, optimizer)
            model(x.to(device), AfterTheFirstBucket.apply, daemon).square().mean().backward()
            optimizer.step()

        daemon.run(script)
        assert len(daemon.buckets[1][0]) > 1


@pytest.mark.parametrize("device", GPUS)
def test_replicas_on_gpus_are_equal(device: str) -> None:
    """O9 (bit-equality), of two learners in processes of their own, on one GPU if there is no second one."""
    with LocalDaemon(2) as daemon:
        script = SCRIPT + f"\nassert mt.device().type == {device!r}\n"
        processes = [start_learner(script, daemon, rank) for rank in range(2)]
        outputs = [process.communicate(timeout=100) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        assert daemon.hashes
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values())
