"""DGC takes the optimizer's momentum over into its codec: which optimizers allow that, and how they step from then on.

Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887, section 3.2, "momentum correction") sends few values of a
gradient at a time. Were momentum applied to what arrives, values that waited long would miss the momentum that they had
gathered. So each peer applies momentum before it selects: its daemon keeps the velocity u = m u + g, and sends parts of
what velocities add up to. What arrives are means of velocities, with momentum in them, and the optimizer only adds
them.

Weight decay is different: it follows from the base, which all peers have alike, so nothing of it has to travel, and its
momentum stays with the optimizer. SGD's step is linear, so a gradient's part and weight decay's part can be kept in two
places: together they move the parameters as SGD with momentum does, but for what the codec still holds back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.model.optimizers import Options
from meshtrain.train.optim.optimizer_step import OptimizerStep
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


class WithoutMomentum(OptimizerStep):
    """SGD's step with `--codec dgc`: what arrives for the matrices is velocity already, so SGD's momentum must not be
    applied to it a second time.

    Those parameters are stepped here; SGD steps on all others by itself, and its hooks see the gradients of these
    others alone.

    Args:
        parameters: whose momentum is the codec's. What `momentum_buffer` holds of them is that of weight decay.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], momentum: Momentum) -> None:
        super().__init__(optimizer)
        self._parameters = list(parameters)
        self._ids = {id(parameter) for parameter in parameters}
        self._momentum = momentum

    @torch.no_grad()
    def around(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        """Raises UsageError when the script has changed the momentum."""
        self._check(optimizer)
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            step()
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
    """One parameter's step: p -= lr * (velocity + decay part), where only the second has a momentum buffer here.

    With d = weight_decay * p, as in torch's SGD: buffer = m * buffer + d, and the decay part is that buffer, or
    d + m * buffer with Nesterov.
    """
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
