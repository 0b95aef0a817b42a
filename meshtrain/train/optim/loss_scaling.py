"""torch's GradScaler in a job: gradients leave unscaled, and a step also ends where it skips the optimizer (O6)."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from meshtrain.errors import UsageError

WRAPPED = ("step", "unscale_", "update")
SCALER_CODE = torch.amp.GradScaler.step.__code__
UNKNOWN_SCALER = (
    "the GradScaler is not known to the mesh: mt.prepare(model, optimizer, loader, scaler=scaler), or without a "
    "loader, scaler=scaler"
)


class LossScaling:
    """The scaler given to `mt.prepare`; without one, or with one that is not enabled, nothing is scaled.

    What is sent is divided by the scale, so that every learner may have its own. A scaler skips the steps in which
    `p.grad` is not finite: with s=0 those of void rounds, which all peers see alike, with s>0 those of its own
    overflows.

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

    def current_scale(self) -> float:
        """The factor of the gradients of a backward pass that begins. Waits for the device."""
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def state(self) -> dict[str, float | int] | None:
        """The scaler's state, as torch's own `state_dict`; None without a scaler."""
        return None if self._scaler is None else self._scaler.state_dict()

    def load(self, state: dict[str, float | int]) -> None:
        """Takes over what another learner's `state` gave, if there is a scaler."""
        if self._scaler is not None:
            self._scaler.load_state_dict(state)

    def watch(
        self,
        optimizer: Optimizer,
        after_step: Callable[[], None],
        after_update: Callable[[], None],
        unscaled: Callable[[], None] | None = None,
    ) -> None:
        """Takes the scaler's steps for the learner's steps from now on.

        Args:
            optimizer: the prepared one. The scaler may serve others besides.
            after_step: called after the scaler's `step`, which has called `optimizer.step()` or skipped it.
            after_update: called after the scaler's `update`.
            unscaled: called after the scaler has divided `p.grad` by the scale.
        """
        if self._scaler is None:
            return
        step, unscale, update = self._scaler.step, self._scaler.unscale_, self._scaler.update

        def watched_step(stepped: Optimizer, *args: Any, **options: Any) -> Any:
            result = step(stepped, *args, **options)
            if stepped is optimizer:
                after_step()
            return result

        def watched_unscale(divided: Optimizer) -> None:
            unscale(divided)
            if divided is optimizer and unscaled is not None:
                unscaled()

        def watched_update(*args: Any, **options: Any) -> None:
            update(*args, **options)
            after_update()

        vars(self._scaler).update(step=watched_step, unscale_=watched_unscale, update=watched_update)

    def close(self) -> None:
        """The scaler is an ordinary one again."""
        if self._scaler is not None:
            for name in WRAPPED:
                vars(self._scaler).pop(name, None)


def called_by_scaler() -> bool:
    """Whether the optimizer's step that runs was called by a GradScaler that is enabled: it stands on the stack."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is SCALER_CODE:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back  # type: ignore[assignment]
    return False
