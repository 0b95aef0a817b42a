"""Refuses parameters that came, or were unfrozen, after `mt.prepare`: a step would change them on this peer alone."""

from torch.optim import Optimizer

from meshtrain.errors import UsageError
from meshtrain.train.model.tensors import ModelTensors


class FrozenCheck:
    """Remembers the parameters that `mt.prepare` has found in model and optimizer, and compares at each step."""

    def __init__(self, tensors: ModelTensors, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._frozen = [(spec.name, tensor) for _, spec, tensor in tensors.kind("frozen")]
        self._ids = {id(tensor) for _, _, tensor in tensors.kind("parameter", "frozen")}

    def check(self) -> None:
        """Compares, before a step. Raises UsageError that names the first parameter that is trained and not
        averaged."""
        for name, tensor in self._frozen:
            if tensor.grad is not None:
                raise UsageError(
                    f"{name} has a gradient, but was frozen when mt.prepare was called, so it is not averaged: "
                    "call requires_grad_(True) on it before mt.prepare"
                )
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._ids:
                    raise UsageError(
                        f"a parameter of shape {tuple(parameter.shape)} was added to the optimizer after mt.prepare, "
                        "so it is not averaged: add it before"
                    )
