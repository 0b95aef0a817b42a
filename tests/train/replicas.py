"""A small model, how it is optimized, and how two of its replicas are compared."""

from collections.abc import Sequence

import torch
from torch import nn


def net(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def distance(a: nn.Module, b: nn.Module) -> float:
    """Largest relative distance of any tensor."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((p.double() - q.double()).norm() / q.double().norm().clamp_min(1e-12)) for p, q in pairs)


def assert_equal(models: Sequence[nn.Module]) -> None:
    """Bit for bit."""
    for model in models[1:]:
        for (name, p), q in zip(models[0].state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(p, q), f"replicas differ in {name}"
