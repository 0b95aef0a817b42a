"""Steps of a learner that no round in the base covers yet (s > 0), and what an optimizer makes of the base by them.

A gradient takes up to s + 1 steps until its round is applied. Meanwhile the learner goes on, and has a choice: to
compute on the base, as if it had not made these steps (c = 0, a plain delay), or on a base to which they are added.
With c = 1/m they count as much as they will in the mean of m peers (SSP's "read my writes", Ho et al. 2013, section 2);
with c = 1 the own gradient stands for the mean until that is there (delayed gradient averaging, Zhu et al. 2021).
`--own` chooses c; rule O2 (base and view) has the definition, protocol/STALENESS.md a picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshtrain.train.optim.clipping import Clipping
from meshtrain.train.optim.hyperparameters import RoundOptions
from meshtrain.train.optim.leader_options import LeaderOptions
from meshtrain.train.optim.optimizer_clone import clone_optimizer
from meshtrain.train.optim.optimizer_step import OptimizerStep
from meshtrain.train.optim.scaled_rates import rates_times


@dataclass(frozen=True)
class OwnStep:
    """A step of this learner whose round is not applied yet: its gradients, and the options that its bind has told;
    None: it has told none, for those of the optimizer never change."""

    gradients: list[torch.Tensor | None]
    options: RoundOptions | None


class OwnSteps:
    """What a learner is ahead of the base by.

        view = base + c * (ahead - base)

    `ahead` is what the optimizer makes of the base by stepping on the own gradients, oldest first, as if each were its
    round's mean: with momentum, second moments and weight decay as they will be, under the options that the bind of
    each has told, at rates multiplied as in the newest round (O12). A clone of the optimizer takes these steps, so the
    state of the optimizer itself stays that of the base. With c = 1, without clipping, and if nobody else contributes,
    `ahead` is the base to come, bit for bit.

    Args:
        parameters: that are trained.
        step: how the optimizer steps that rounds are applied with. Where the codec keeps the momentum, own gradients
            move the view as they are.
        options: what binds have told.
        coefficient: c; with 0 nothing is kept.

    Raises:
        NotSupported: the optimizer cannot be copied, and c is not 0.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], step: OptimizerStep, options: LeaderOptions, coefficient: float
    ) -> None:
        self._parameters = list(parameters)
        self._step = step
        self._options = options
        self.coefficient = coefficient
        self._begun: dict[int, OwnStep] = {}  # by step: the one at hand, once its backward pass has ended
        self._own: dict[int, OwnStep] = {}  # by step: those that the view is ahead by
        if coefficient:
            clone_optimizer(step.optimizer)  # refused now, not at the first step

    def __bool__(self) -> bool:
        """Whether view and base differ."""
        return bool(self._own)

    def keep(self, step: int, gradients: Sequence[torch.Tensor | None], packed: bytes) -> None:
        """The gradients of the step at hand, which is on its way into a round. They count from the next step on.

        Args:
            gradients: by parameter; nobody else has them.
            packed: the options in its bind.
        """
        if self.coefficient:
            self._begun[step] = OwnStep(list(gradients), self._options.unpack(packed))

    def drop(self, step: int) -> None:
        """The step is in the base, or will never be."""
        self._begun.pop(step, None)
        self._own.pop(step, None)

    def clear(self) -> None:
        """No step is on its way any more."""
        self._begun.clear()
        self._own.clear()

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
    def go_ahead(self, base: Sequence[torch.Tensor]) -> None:
        """The parameters, which hold the base as `base` does, hold the view."""
        ahead, rates = clone_optimizer(self._step.optimizer), self._options.rates
        gradients = [parameter.grad for parameter in self._parameters]
        try:
            for own in self._own.values():
                if own.options is not None:
                    self._options.hyperparameters.give(ahead, own.options.groups)
                for parameter, gradient in zip(self._parameters, own.gradients, strict=True):
                    parameter.grad = gradient
                with rates_times(ahead, rates.newest):
                    self._step.take_with(ahead)
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        if self.coefficient != 1.0:
            for parameter, of_base in zip(self._parameters, base, strict=True):
                parameter.lerp_(of_base, 1.0 - self.coefficient)


def _squared_norm(gradients: Sequence[torch.Tensor | None]) -> float:
    """The squared norm in double precision, as that of a round."""
    there = [gradient for gradient in gradients if gradient is not None]
    return sum(float(torch.linalg.vector_norm(gradient, dtype=torch.float64).square()) for gradient in there)


def _scale(gradients: Sequence[torch.Tensor | None], factor: float) -> None:
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(factor)
