"""O2: what a learner computes with: its base, ahead by its own gradients that no applied round covers yet."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from meshtrain.train.model.hyperparameters import Hyperparameters, RoundOptions
from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.optim.clipping import Clipping
from meshtrain.train.optim.momentum_handover import OptimizerStep
from meshtrain.train.optim.optimizer_clone import clone_optimizer


@dataclass(frozen=True)
class OwnStep:
    """A step of the learner's own on its way into a round: its gradients, and the options in its bind (O3)."""

    gradients: list[torch.Tensor | None]
    options: RoundOptions


class StaleView:
    """Keeps the base beside the parameters, which hold it or the view.

    The view is base + c * (ahead - base). `ahead` is what the script's optimizer makes of the base by stepping on the
    own gradients, one after the other, as if each were its round's mean: with its momentum, its second moments and
    weight decay as they will be, under the round's options. With c=1 and without clipping it is the base to come, bit
    for bit, if nobody else contributes. A twin of the optimizer does it: the state of the base's own stays as it is.

    The view is always made anew from the base: adding something and taking it off again would drift.

    Args:
        parameters: that are trained.
        coefficient: c; with 0 the view is the base, and nothing is kept.
        step: how an optimizer steps. Where the codec keeps the momentum, own gradients move the view as they are.

    Attributes:
        kept: is told where the base lies.

    Raises:
        NotSupported: the optimizer cannot be copied, and c is not 0.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        optimizer: Optimizer,
        hyperparameters: Hyperparameters,
        clipping: Clipping,
        coefficient: float,
        step: OptimizerStep,
    ) -> None:
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._hyperparameters = hyperparameters
        self._clipping = clipping
        self._coefficient = coefficient
        self._step = step
        self._base = [p.detach().clone(memory_format=torch.preserve_format) for p in parameters] if coefficient else []
        self._begun: dict[int, OwnStep] = {}  # by step: the one at hand, once its backward pass has ended
        self._own: dict[int, OwnStep] = {}
        self._shows_base = True
        self.kept = NoKeptState()
        if coefficient:
            clone_optimizer(optimizer)

    @property
    def beside(self) -> list[torch.Tensor]:
        """The base beside the parameters; empty where they always hold it. Whoever replaces one gives an equal one."""
        return self._base

    def keep(self, step: int, scale: float, packed: bytes) -> None:
        """The gradients of the step at hand, which is on its way into a round. They count from the next step on.

        Args:
            scale: of a GradScaler, which they are multiplied by.
            packed: the options in its bind.
        """
        if self._coefficient:
            gradients = [None if p.grad is None else p.grad.detach().div(scale) for p in self._parameters]
            self._begun[step] = OwnStep(gradients, self._hyperparameters.unpack(packed))

    def drop(self, step: int) -> None:
        """The step is in the base, or will never be."""
        self._begun.pop(step, None)
        self._own.pop(step, None)

    def clear(self) -> None:
        """No step is on its way any more."""
        self._begun.clear()
        self._own.clear()

    @torch.no_grad()
    def show_base(self) -> None:
        """The parameters hold the base, and may be stepped."""
        if self._coefficient and not self._shows_base:
            for parameter, base in zip(self._parameters, self._base, strict=True):
                parameter.copy_(base)
            self.kept.in_parameters()
        self._shows_base = True

    def step_over(self, newest_squared_norm: float) -> None:
        """At a boundary: the gradients of the step that has ended are clipped, as those of its round will be (O4).

        That round's norm is not known yet. The newest one's is the better guess than that of the own gradients, which
        are a mean over fewer samples, hence longer by their noise: clipped by that, their signal would be too short.

        Args:
            newest_squared_norm: of the newest round's means; 0 before the first one.
        """
        for step, own in self._begun.items():
            max_norm = self._clipping.ruling(own.options.clip, known=own.options.clip_known)
            if max_norm is not None:
                squared_norm = newest_squared_norm or _squared_norm(own.gradients)
                _scale(own.gradients, Clipping.coefficient(squared_norm, max_norm))
            self._own[step] = own
        self._begun.clear()

    @torch.no_grad()
    def show_view(self) -> None:
        """The parameters hold the view, made anew: of the base as they hold it now, if they do."""
        self.show_base()
        if not self._own:
            return
        for parameter, base in zip(self._parameters, self._base, strict=True):
            base.copy_(parameter)
        self._shows_base = False
        self.kept.beside()
        self._go_ahead()
        if self._coefficient != 1.0:
            for parameter, base in zip(self._parameters, self._base, strict=True):
                parameter.lerp_(base, 1.0 - self._coefficient)

    def _go_ahead(self) -> None:
        ahead = clone_optimizer(self._optimizer)
        gradients = [parameter.grad for parameter in self._parameters]
        try:
            for own in self._own.values():
                self._hyperparameters.give(ahead, own.options.groups)
                for parameter, gradient in zip(self._parameters, own.gradients, strict=True):
                    parameter.grad = gradient
                self._step.take(ahead, lambda: type(ahead).step(ahead))
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient


def _squared_norm(gradients: Sequence[torch.Tensor | None]) -> float:
    """In double precision, as that of a round."""
    there = [gradient for gradient in gradients if gradient is not None]
    return sum(float(torch.linalg.vector_norm(gradient, dtype=torch.float64).square()) for gradient in there)


def _scale(gradients: Sequence[torch.Tensor | None], factor: float) -> None:
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(factor)
