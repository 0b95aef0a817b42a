"""The optimizer of `--sync demo`: plain SGD on the signs of the mean (DeMo).

The momentum is what each member's codec has left out, in its daemon, so the script's optimizer must have none. It steps
p = p * (1 - lr * weight_decay) - lr * sign(mean): torch adds the decay to the gradient, which the sign has gone before.
"""

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from meshtrain.errors import NotSupported, UsageError


def check(optimizer: Optimizer) -> None:
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


def on_signs(optimizer: Optimizer, step: Callable[[], object]) -> Callable[[], None]:
    """That step, on the signs of the gradients, which stand in `p.grad` then. It raises UsageError when the script has
    given the optimizer a momentum since."""

    def step_on_signs() -> None:
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

    return step_on_signs
