"""A step that counts for nothing: the script computes it like any other, and afterwards nothing has changed.

A script that is started again in the middle of a job runs its loop over epochs that are over, and so does one on a
laptop that joins late. If such an epoch gave it no batch at all, the line behind the loop that prints the last loss, or
divides by the number of batches, would end it. So it gets one batch of each, and rehearses a step (X4, epochs).

A script may step on that batch behind its loop: on what is left of accumulated gradients, or because it fetches ahead.
So a rehearsal lasts until the first step behind the loop, or the next loop, whichever comes first.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from meshtrain.train.optim.loss_scaling import LossScaling
from meshtrain.train.optim.optimizer_step import run_closure


class HeldBuffers(Protocol):
    """BatchNorm's statistics and other buffers as the model holds them now."""

    def held(self) -> Mapping[int, torch.Tensor]:
        """Copies of all of them, by index."""

    def show(self, values: Mapping[int, torch.Tensor]) -> None:
        """These values into the model."""


class TakesGradients(Protocol):
    """Whoever hears of gradients as a backward pass makes them.

    Attributes:
        idle: while it is set, they stay where they are.
    """

    idle: bool


class BehindLoop(Protocol):
    """Whoever knows how many steps are rehearsed behind a loop."""

    def rehearsed_behind_loop(self) -> None:
        """A step behind the loop has ended; it counted for nothing."""


class Rehearsal:
    """Keeps what a step would change, from `begin` until `end`. Whoever stands in place of `optimizer.step()` calls
    `step` instead of its own, and `updated` when a scaler has ended it.

    Args:
        parameters: that are trained.
        scaling: of the script's GradScaler.
        taker: is to take no gradients meanwhile.

    Attributes:
        on: a step is rehearsed.
        left: the script has left the loop: the rehearsal ends soon.
        watcher: ends it then; None: it ends with the next step.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: HeldBuffers,
        scaling: LossScaling,
        taker: TakesGradients,
    ) -> None:
        self._taker = taker
        self._parameters = parameters
        self._buffers = buffers
        self._scaling = scaling
        self._gradients: list[torch.Tensor | None] = []
        self._held: Mapping[int, torch.Tensor] = {}
        self._scaler: dict[str, Any] | None = None
        self.on = self.left = False
        self.watcher: BehindLoop | None = None

    def begin(self) -> None:
        """From now on `p.grad` is empty: what was accumulated there, or lies in the result slot, is not touched."""
        assert not self.on
        self._gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._held = self._buffers.held()
        self._scaler = copy.deepcopy(self._scaling.state())
        self._taker.idle = self.on = True

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Instead of the optimizer's: does nothing but run what the script gives it."""
        result = run_closure(closure)
        if not self._scaling.active:
            self.updated()
        return result

    def updated(self) -> None:
        """A step has ended, with a scaler by its `update`. Behind the loop it was the last that is rehearsed, unless
        somebody watches who knows better."""
        if not self.left:
            return
        if self.watcher is None:
            self.end()
        else:
            self.watcher.rehearsed_behind_loop()

    def restore(self) -> None:
        """The model is as it was at `begin`, for whoever evaluates it."""
        self._buffers.show(self._held)

    def leave(self) -> None:
        """The script has left its loop."""
        self.restore()
        self.left = True

    def enter_loop(self) -> None:
        """It goes on, in the next loop."""
        self.restore()
        self.left = False

    def end(self) -> None:
        """All is as it was at `begin`."""
        assert self.on
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self.restore()
        if self._scaler is not None:
            self._scaling.load(self._scaler)
        self._gradients, self._held, self._scaler = [], {}, None
        self._taker.idle = self.on = self.left = False
