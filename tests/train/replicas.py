"""A small model, how it is optimized, and how two of its replicas are compared."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def net(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def batch(seed: int, count: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 2, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, of: Batch) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(of[0]), of[1]).backward()
    optimizer.step()


def distance(a: nn.Module, b: nn.Module) -> float:
    """Largest relative distance of any tensor."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((p.double() - q.double()).norm() / q.double().norm().clamp_min(1e-12)) for p, q in pairs)


def assert_equal(models: Sequence[nn.Module]) -> None:
    """Bit for bit."""
    for model in models[1:]:
        for (name, p), q in zip(models[0].state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(p, q), f"replicas differ in {name}"
