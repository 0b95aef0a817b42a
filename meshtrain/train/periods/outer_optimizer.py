"""The optimizer that takes the mean of what local steps have changed into the base, with `--sync local:H`."""

from collections.abc import Sequence

import torch

from meshwire.sync_modes.mode import SyncSettings


def outer_optimizer(sync: SyncSettings, parameters: Sequence[torch.Tensor]) -> torch.optim.SGD:
    """SGD whose gradients are means of base - local weights: with lr 1 and no momentum base - mean(base - local) is the
    mean of the local weights; `diloco:H` has 0.7 and Nesterov momentum of 0.9 (Douillard et al. 2023, arXiv
    2311.08105); `sma:H` has 1 and plain momentum (`central_average`).

    Args:
        parameters: that are trained.
    """
    momentum = sync.outer_momentum
    return torch.optim.SGD(
        parameters, lr=sync.outer_rate, momentum=momentum, nesterov=momentum > 0 and not sync.central
    )
