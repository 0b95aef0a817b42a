"""A codec that takes over the optimizer's momentum (DGC): whose momentum that can be, and how the optimizer then steps.

What arrives are means of velocities: momentum is in them. So the optimizer adds them as they are. Weight decay is
different: it follows from the base, which all peers have alike, and its momentum stays with the optimizer. As both are
linear, gradient and weight decay move the parameters as SGD with momentum would, if nothing were left out for later.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.model.optimizers import Options
from meshwire.model.manifest import Momentum

CLIPPED_LATE = (
    "with --codec dgc each peer clips its gradients before momentum gathers them, for what is clipped later is lost: "
    "give the codec clip=MAX_NORM, as in --codec dgc:0.001,clip=1, and leave clip_grad_norm_ out of the script"
)
_INSTEAD = "use torch.optim.SGD(..., momentum=0.9), or another codec, e.g. --codec topk"


def momentum_of(optimizer: Optimizer) -> Momentum:
    """What the codec takes over. Raises NotSupported, with what to do, for any other optimizer than torch's SGD with
    one momentum for all of its param groups."""
    if type(optimizer) is not SGD:
        raise NotSupported(
            f"--codec dgc takes over the momentum of SGD, and {_name(optimizer)} has another: {_INSTEAD}"
        )
    found = {(float(group["momentum"]), bool(group["nesterov"])) for group in optimizer.param_groups}
    if len(found) > 1:
        raise NotSupported(
            f"--codec dgc keeps one momentum for all param groups, and these have {len(found)}: give all of them the "
            "same momentum and nesterov, or use another codec"
        )
    ((factor, nesterov),) = found
    if not 0 < factor < 1:
        raise NotSupported(f"--codec dgc takes over SGD's momentum, which is {factor:g} here: {_INSTEAD}")
    for position, group in enumerate(optimizer.param_groups):
        for option in ("dampening", "fused", "differentiable"):
            if group.get(option):
                raise NotSupported(
                    f"--codec dgc does not go with {option}={group[option]} (param group {position} of SGD): leave it "
                    "out, or use another codec"
                )
    return Momentum(factor=factor, nesterov=nesterov)


class OptimizerStep:
    """How an optimizer steps on the gradients in place: by itself."""

    def take(self, optimizer: Optimizer, own: Callable[[], object]) -> None:
        """One step.

        Args:
            own: the optimizer's.
        """
        own()


class WithoutMomentum(OptimizerStep):
    """SGD adds the gradients of some parameters without momentum, and steps on all others by itself: its hooks see the
    gradients of those alone.

    Args:
        parameters: whose momentum is the codec's. What `momentum_buffer` holds of them is that of weight decay.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], momentum: Momentum) -> None:
        self._parameters = list(parameters)
        self._ids = {id(parameter) for parameter in parameters}
        self._momentum = momentum

    @torch.no_grad()
    def take(self, optimizer: Optimizer, own: Callable[[], object]) -> None:
        """Raises UsageError when the script has changed the momentum."""
        self._check(optimizer)
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            own()
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._ids and parameter.grad is not None:
                    _add(parameter, optimizer.state[parameter], group)

    def _check(self, optimizer: Optimizer) -> None:
        for position, group in enumerate(optimizer.param_groups):
            if group["momentum"] != self._momentum.factor or bool(group["nesterov"]) != self._momentum.nesterov:
                raise UsageError(
                    f"the momentum of param group {position} was changed to {group['momentum']:g} after mt.prepare: "
                    f"with --codec dgc it is the codec's, and stays {self._momentum.factor:g}"
                )


def _add(parameter: torch.Tensor, state: dict[str, Any], group: Options) -> None:
    """One parameter's step, as SGD's in all but the momentum of its gradient."""
    assert parameter.grad is not None
    rate, decay, momentum = float(group["lr"]), group["weight_decay"], group["momentum"]
    pull = parameter * decay
    parameter.add_(parameter.grad, alpha=rate if group["maximize"] else -rate)
    buffer = state.get("momentum_buffer")
    if buffer is None and not decay:
        return
    if buffer is None:
        buffer = state["momentum_buffer"] = torch.zeros_like(parameter)
    buffer.mul_(momentum).add_(pull)
    parameter.add_(pull.add_(buffer, alpha=momentum) if group["nesterov"] else buffer, alpha=-rate)


def _name(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"
