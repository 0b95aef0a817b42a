"""O6: a GradScaler beside rounds: by what gradients are scaled, and a boundary also where it skips the optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from meshtrain.errors import UsageError

WRAPPED = ("step", "unscale_", "update")


class Scaling:
    """The scaler given to `mt.prepare`; without one, or with one that is not enabled, nothing is scaled.

    What is sent is divided by the scale, so that every learner may have its own. It skips the steps in which its
    `p.grad` is not finite: with s=0 those of rounds that anybody's overflow made void, which all scalers see, with s>0
    those of its own overflows.

    Raises:
        UsageError: what was given is no GradScaler.

    Attributes:
        active: whether gradients are scaled.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise UsageError(f"mt.prepare(..., scaler=...) takes a torch.amp.GradScaler, not a {type(scaler).__name__}")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.active = self._scaler is not None
        self._optimizer: Optimizer | None = None
        self._stepped = False  # inside scaler.step: optimizer.step was called
        self._checked = False  # since the last update: the scaler has looked for infinities
        self._empty = False  # since the last update: there was a step without any gradient

    def begin(self) -> float:
        """When a backward pass begins: by what its gradients are multiplied. Waits for the device."""
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def stepped(self) -> None:
        """Called by whoever wraps the optimizer's `step`: the boundary is its business then."""
        self._stepped = True

    def watch(self, optimizer: Optimizer, boundary: Callable[[], None], unscaled: Callable[[], None]) -> None:
        """From now on the scaler's steps are the learner's steps.

        Args:
            optimizer: the prepared one. The scaler may serve others besides.
            boundary: called when the scaler has skipped `optimizer.step()`.
            unscaled: called after the scaler has divided `p.grad` by the scale.
        """
        if self._scaler is None:
            return
        self._optimizer, self._boundary, self._unscaled = optimizer, boundary, unscaled
        self._original = {name: getattr(self._scaler, name) for name in WRAPPED}
        vars(self._scaler).update(step=self._step, unscale_=self._unscale, update=self._update)

    def close(self) -> None:
        """The scaler is an ordinary one again."""
        if self._scaler is not None and self._optimizer is not None:
            self._optimizer = None
            for name in WRAPPED:
                vars(self._scaler).pop(name)

    # In place of the scaler's methods

    def _step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._stepped = False
        if self._nothing_to_do(optimizer):
            self._empty = True
            result = None
        else:
            self._checked = True
            result = self._original["step"](optimizer, *args, **kwargs)
        if optimizer is self._optimizer and not self._stepped:
            self._boundary()
        return result

    def _unscale(self, optimizer: Optimizer) -> None:
        if self._nothing_to_do(optimizer):
            return
        self._checked = True
        self._original["unscale_"](optimizer)
        if optimizer is self._optimizer:
            self._unscaled()

    def _update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """torch asserts that it has looked for infinities since the last update; after a void round it had nowhere."""
        if self._checked or new_scale is not None or not self._empty:
            self._original["update"](new_scale)
        self._checked = self._empty = False

    def _nothing_to_do(self, optimizer: Optimizer) -> bool:
        """O1: a void round that is no overflow's leaves `p.grad` None everywhere."""
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        return optimizer is self._optimizer and all(gradient is None for gradient in gradients)
