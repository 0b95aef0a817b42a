"""A copy of an optimizer that steps on the same parameters, so that steps can be tried without touching its state."""

import copy
from collections import OrderedDict
from typing import Any

from torch.optim import Optimizer

from meshtrain.errors import NotSupported
from meshtrain.train.model.optimizers import SCALER_ATTRIBUTES

# Of the script's own steps alone: what stands in place of `step`, hooks, and what a GradScaler has told them.
LEFT_OUT = frozenset({"step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", *SCALER_ATTRIBUTES})


def clone_optimizer(optimizer: Optimizer) -> Optimizer:
    """Another optimizer of the same parameters, whose state, options and attributes are copies of this one's.

    Its step does what this one's would do now, by the step of the class, and changes nothing else than the parameters.
    It costs the memory of the state for as long as it lives.

    Raises:
        NotSupported: something in it cannot be copied.
    """
    made = type(optimizer).__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): made}
    memo.update((id(parameter), parameter) for group in optimizer.param_groups for parameter in group["params"])
    attributes = {name: value for name, value in vars(optimizer).items() if name not in LEFT_OUT}
    try:
        copied = copy.deepcopy(attributes, memo)
    except (TypeError, RuntimeError) as error:
        raise NotSupported(
            f"{type(optimizer).__name__} cannot be copied ({error}), and with a bound above 0 a copy of it takes this "
            "peer's own gradients ahead of their rounds: submit with --own 0, or with --sync bsp"
        ) from error
    vars(made).update(copied, _optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    return made
