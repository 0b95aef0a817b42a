"""AdamW's step with `--codec onebit:momentum,warmup=N`: 1-bit Adam (Tang et al. 2021, arXiv 2102.02888, algorithm 1).

Adam divides by what it has seen last. What error feedback hands over late and in lumps, it divides by moments that have
not seen it coming. So after N steps of plain Adam, whose gradients travel as fp16, second moments stay as they are:
from then on the step is linear in the momentum, and late is all that the rest of an encoding is. Each member adds its
gradient to the momentum that all have in common, and sends that:

    m_i = beta1 * m + (1 - beta1) * g_i

The mean of what is decoded of these is everybody's next m. Error feedback is the codec's, of workers and of owners.

Two things are not as in the paper. Moments keep Adam's correction of their bias, also those that stay. And no step is
larger than Adam's own can be (Kingma and Ba 2015, section 2.1), and none is taken where there was no gradient in the
first N: one bit stands for other values than zero there, and the division would make much of them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from meshtrain.errors import NotSupported
from meshtrain.train.optim.optimizer_step import OptimizerStep


def check_variance_possible(optimizer: Optimizer) -> None:
    """Raises NotSupported for an optimizer whose second moments cannot stay as they are."""
    if type(optimizer) is not torch.optim.AdamW:
        raise NotSupported(
            f"--codec onebit:momentum sends the momentum of AdamW, and {type(optimizer).__name__} is another: use "
            "torch.optim.AdamW, or --codec onebit"
        )
    for position, group in enumerate(optimizer.param_groups):
        for option in ("amsgrad", "fused", "maximize", "differentiable"):
            if group.get(option):
                raise NotSupported(
                    f"param group {position} of AdamW has {option}=True, which --codec onebit:momentum does not know: "
                    "leave it out, or use --codec onebit"
                )


class FrozenVariance(OptimizerStep):
    """AdamW's step while second moments are learnt, and from then on that of a momentum which arrives.

    Args:
        steps: of a parameter, while they are learnt.
    """

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        super().__init__(optimizer)
        self._steps = steps
        self._group_of = {id(each): group for group in optimizer.param_groups for each in group["params"]}

    def contributed(self, parameter: torch.Tensor, gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
        if not self._frozen(parameter):
            return gradient
        beta, momentum = float(self._group_of[id(parameter)]["betas"][0]), self.optimizer.state[parameter]["exp_avg"]
        if gradient is None:
            return torch.mul(momentum, beta * scale)
        return torch.mul(gradient, 1 - beta).add_(momentum, alpha=beta * scale)

    @torch.no_grad()
    def around(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        frozen = [
            (parameter, parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and self._frozen(parameter)
        ]
        for parameter, _ in frozen:
            parameter.grad = None
        try:
            step()
        finally:
            for parameter, momentum in frozen:
                parameter.grad = momentum
        for parameter, momentum in frozen:
            assert momentum is not None
            _step(parameter, momentum, self.optimizer.state[parameter], self._group_of[id(parameter)])

    def _frozen(self, parameter: torch.Tensor) -> bool:
        state = self.optimizer.state.get(parameter)
        return state is not None and "step" in state and int(state["step"]) >= self._steps


def _step(parameter: torch.Tensor, momentum: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One parameter's step.

    Second moments lie in the state as Adam's would after so many steps: divided by 1 - beta2^step they stay as they
    are. So it does not matter here for how many steps they were learnt, nor to plain AdamW that goes on from them.
    """
    state["exp_avg"].copy_(momentum)
    state["step"] += 1
    first, second = (float(beta) for beta in group["betas"])
    rate, moments, step = float(group["lr"]), state["exp_avg_sq"], float(state["step"])
    correction = 1 - second**step
    moments.mul_(correction / (1 - second ** (step - 1)))
    deviation = moments.div(correction).sqrt_()
    change = state["exp_avg"].div(1 - first**step).div_(deviation.add_(group["eps"]))
    bound = max(1.0, (1 - first) / math.sqrt(1 - second))
    change.clamp_(-bound, bound).masked_fill_(moments == 0, 0)
    parameter.mul_(1 - rate * group["weight_decay"]).add_(change, alpha=-rate)
