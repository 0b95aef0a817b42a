"""The weights that a learner computes with under a bound s > 0: the base, and ahead of it its own gradients on the way.

A gradient takes up to s + 1 steps until its round is applied. Meanwhile the learner goes on, and has a choice: to
compute on the base, as if it had not made these steps (c = 0, a plain delay), or on a base to which they are added.
With c = 1/m they count as much as they will in the mean of m peers (SSP's "read my writes", Ho et al. 2013, section 2);
with c = 1 the own gradient stands for the mean until that is there (delayed gradient averaging, Zhu et al. 2021).
`--own` chooses c; rule O2 (base and view) has the definition, protocol/STALENESS.md a picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.optim.clipping import Clipping
from meshtrain.train.optim.hyperparameters import RoundOptions
from meshtrain.train.optim.leader_options import LeaderOptions
from meshtrain.train.optim.optimizer_clone import clone_optimizer
from meshtrain.train.optim.optimizer_step import OptimizerStep


@dataclass(frozen=True)
class OwnStep:
    """A step of this learner whose round is not applied yet: its gradients, and the options that its bind has told."""

    gradients: list[torch.Tensor | None]
    options: RoundOptions


class StaleView:
    """Puts base or view into the parameters; the other one follows from what lies beside them.

        view = base + c * (ahead - base)

    `ahead` is what the script's optimizer makes of the base by stepping on the own gradients, oldest first, as if each
    were its round's mean: with momentum, second moments and weight decay as they will be, under the options that the
    bind of each has told. A clone of the optimizer takes these steps, so the state of the optimizer itself stays that
    of the base. With c = 1, without clipping, and if nobody else contributes, `ahead` is the base to come, bit for bit.

    The view is always computed anew from the base. To add gradients and subtract them again later would leave rounding
    errors behind, different ones on each peer.

    Args:
        parameters: that are trained.
        step: how the optimizer steps. Where the codec keeps the momentum, own gradients move the view as they are.
        options: what binds have told.
        coefficient: c; with 0 the view is the base, and nothing is kept.
        kept: is told where the base lies.

    Raises:
        NotSupported: the optimizer cannot be copied, and c is not 0.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        step: OptimizerStep,
        options: LeaderOptions,
        coefficient: float,
        kept: NoKeptState,
    ) -> None:
        self._parameters = list(parameters)
        self._step = step
        self._options = options
        self._coefficient = coefficient
        self._base = [p.detach().clone(memory_format=torch.preserve_format) for p in parameters] if coefficient else []
        self._begun: dict[int, OwnStep] = {}  # by step: the one at hand, once its backward pass has ended
        self._own: dict[int, OwnStep] = {}  # by step: those that the view is ahead by
        self._shows_base = True
        self._kept = kept
        if coefficient:
            clone_optimizer(step.optimizer)  # refused now, not at the first step

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
            self._begun[step] = OwnStep(gradients, self._options.hyperparameters.unpack(packed))

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
            self._kept.in_parameters()
        self._shows_base = True

    def begin_step(self, newest_squared_norm: float) -> None:
        """A step begins: the gradients of the one before count from now on, clipped as its round will be, by O4.

        That round's norm is not known yet. The norm of the newest round is a better guess than that of the own
        gradients: these are a mean over fewer samples, hence longer by their noise, and clipping by their norm would
        leave too little of their signal.

        Args:
            newest_squared_norm: of the newest round's means; 0 before the first one.
        """
        for step, own in self._begun.items():
            max_norm = self._options.clip_limit(own.options)
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
        self._kept.beside()
        self._go_ahead()
        if self._coefficient != 1.0:
            for parameter, base in zip(self._parameters, self._base, strict=True):
                parameter.lerp_(base, 1.0 - self._coefficient)

    def _go_ahead(self) -> None:
        ahead = clone_optimizer(self._step.optimizer)
        gradients = [parameter.grad for parameter in self._parameters]
        try:
            for own in self._own.values():
                self._options.hyperparameters.give(ahead, own.options.groups)
                for parameter, gradient in zip(self._parameters, own.gradients, strict=True):
                    parameter.grad = gradient
                self._step.take_with(ahead)
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient


def _squared_norm(gradients: Sequence[torch.Tensor | None]) -> float:
    """The squared norm in double precision, as that of a round."""
    there = [gradient for gradient in gradients if gradient is not None]
    return sum(float(torch.linalg.vector_norm(gradient, dtype=torch.float64).square()) for gradient in there)


def _scale(gradients: Sequence[torch.Tensor | None], factor: float) -> None:
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(factor)
