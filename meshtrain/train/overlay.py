"""O2: what a learner computes with: the base, less its own gradients that no applied round covers yet."""

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

Gradients = list[torch.Tensor | None]


class Overlay:
    """Keeps the base beside the parameters, which hold it or the view: base - c * lr * (sum of own gradients).

    The view is always made anew from the base: adding a gradient and taking it off again would drift. Momentum and
    weight decay belong to the base alone.

    Args:
        parameters: that are trained.
        coefficient: c; with 0 the view is the base, and nothing is kept.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Optimizer, coefficient: float) -> None:
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._coefficient = coefficient
        self._base = [p.detach().clone(memory_format=torch.preserve_format) for p in parameters] if coefficient else []
        self._own: dict[int, Gradients] = {}  # by step
        self._rates: list[float] = []
        self._shows_base = True

    def keep(self, step: int, scale: float) -> None:
        """The gradients of a step of its own, which is on its way into a round.

        Args:
            scale: of a GradScaler, which they are multiplied by.
        """
        if self._coefficient:
            self._own[step] = [None if p.grad is None else p.grad.detach().div(scale) for p in self._parameters]

    def drop(self, step: int) -> None:
        """The step is in the base, or will never be."""
        self._own.pop(step, None)

    def clear(self) -> None:
        """No step is on its way any more."""
        self._own.clear()

    @torch.no_grad()
    def show_base(self) -> None:
        """The parameters hold the base, and may be stepped."""
        if self._coefficient and not self._shows_base:
            for parameter, base in zip(self._parameters, self._base, strict=True):
                parameter.copy_(base)
        self._shows_base = True

    def step_over(self) -> None:
        """At a boundary: from now on a view has the learning rates of now."""
        rates = {
            id(parameter): self._coefficient * float(group["lr"]) * (-1.0 if group.get("maximize") else 1.0)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        self._rates = [rates.get(id(parameter), 0.0) for parameter in self._parameters]

    @torch.no_grad()
    def show_view(self) -> None:
        """The parameters hold the view, made anew: of the base as they hold it now, if they do."""
        self.show_base()
        if not self._own:
            return
        for parameter, base in zip(self._parameters, self._base, strict=True):
            base.copy_(parameter)
        self._shows_base = False
        for gradients in self._own.values():
            for parameter, gradient, rate in zip(self._parameters, gradients, self._rates, strict=True):
                if gradient is not None:
                    parameter.sub_(gradient, alpha=rate)
