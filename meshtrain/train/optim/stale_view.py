"""The weights that a learner computes with under a bound s > 0: the base, or what its own steps on their way make of it
(`own_steps`).
"""

from collections.abc import Sequence

import torch

from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.optim.own_steps import OwnSteps
from meshwire.messages.learner import RoundDone


class StaleView:
    """Puts base or view into the parameters; the other one follows from what lies beside them.

    The view is always computed anew from the base. To add gradients and subtract them again later would leave rounding
    errors behind, different ones on each peer.

    Args:
        parameters: that are trained.
        own: what the view is ahead by. With c = 0 the view is the base, and nothing is kept.
        kept: is told where the base lies.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], own: OwnSteps, kept: NoKeptState) -> None:
        self._parameters = list(parameters)
        self._own = own
        copies = own.coefficient != 0
        self._base = [p.detach().clone(memory_format=torch.preserve_format) for p in parameters] if copies else []
        self._shows_base = True
        self._kept = kept

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
        if self._base:
            gradients = [None if p.grad is None else p.grad.detach().div(scale) for p in self._parameters]
            self._own.keep(step, gradients, packed)

    def follow(self, done: RoundDone) -> None:
        """Nothing: the view is made of the base anew when a step begins."""

    def drop(self, step: int) -> None:
        """The step is in the base, or will never be."""
        self._own.drop(step)

    def clear(self) -> None:
        """No step is on its way any more."""
        self._own.clear()

    def begin_step(self, newest_squared_norm: float) -> None:
        """A step begins: the gradients of the one before count from now on."""
        self._own.begin_step(newest_squared_norm)

    @torch.no_grad()
    def show_base(self, round_: int | None = None) -> None:
        """The parameters hold the base, and may be stepped."""
        if self._base and not self._shows_base:
            for parameter, base in zip(self._parameters, self._base, strict=True):
                parameter.copy_(base)
            self._kept.in_parameters()
        self._shows_base = True

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
        self._own.go_ahead(self._base)
