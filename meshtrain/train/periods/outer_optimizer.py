"""The optimizer that takes the mean of what local steps have changed into the base, with `--sync local:H`."""

from collections.abc import Sequence

import torch

from meshwire.sync_modes.mode import Outer

# DiLoCo, Douillard et al. 2023, arXiv 2311.08105
NESTEROV_RATE = 0.7
NESTEROV_MOMENTUM = 0.9


def outer_optimizer(outer: Outer, parameters: Sequence[torch.Tensor]) -> torch.optim.SGD:
    """SGD whose gradients are means of base - local weights.

    Args:
        outer: "average": lr 1, so base - mean(base - local) is the mean of the local weights. "nesterov": DiLoCo's
        step.
        parameters: that are trained.
    """
    if outer == "average":
        return torch.optim.SGD(parameters, lr=1.0)
    return torch.optim.SGD(parameters, lr=NESTEROV_RATE, momentum=NESTEROV_MOMENTUM, nesterov=True)
