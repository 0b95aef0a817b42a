"""`--sync demo`: plain SGD that steps on the signs of the mean, by O10 (signs).

DeMo (Peng, Quesnelle and Kingma 2024, arXiv 2411.19870, algorithm 1) keeps the momentum on each peer and sends its
largest frequencies. Here the codec `dct` does that in each member's daemon, so the script's optimizer must have no
momentum of its own. Its step is

    p = p * (1 - lr * weight_decay) - lr * sign(mean)

torch's SGD adds the weight decay to the gradient after the sign was taken, so the decay is not rounded to a sign.
"""

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.optim.optimizer_step import OptimizerStep


def check_signs_possible(optimizer: Optimizer) -> None:
    """Raises NotSupported for an optimizer that would not step so."""
    if type(optimizer) is not torch.optim.SGD:
        raise NotSupported(
            f"--sync demo steps on signs, and {type(optimizer).__name__} would not: use torch.optim.SGD without "
            "momentum, with a small lr such as 1e-3"
        )
    for position, group in enumerate(optimizer.param_groups):
        if group["momentum"]:
            raise NotSupported(
                f"param group {position} of SGD has momentum {group['momentum']:g}, and with --sync demo each peer's "
                "daemon keeps it: use momentum=0, and another decay for another one, as in --codec dct:32,decay=0.99"
            )
        if group.get("fused"):
            raise NotSupported(
                f"param group {position} of SGD is fused, and would unscale the signs of --sync demo: omit fused=True"
            )


class OnSigns(OptimizerStep):
    """SGD's step on the signs of the gradients, which replace these in `p.grad`."""

    def around(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        """Raises UsageError when the script has given the optimizer a momentum since `mt.prepare`."""
        for position, group in enumerate(optimizer.param_groups):
            if group["momentum"]:
                raise UsageError(
                    f"the momentum of param group {position} was changed to {group['momentum']:g} after mt.prepare: "
                    "with --sync demo each peer's daemon keeps it, and the optimizer has none"
                )
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.sign_()
        step()
