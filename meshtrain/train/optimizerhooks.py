"""The step boundary: what is checked before the prepared optimizer steps, and reported after."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.channel import Channel
from meshtrain.train.gradients import Gradients
from meshtrain.train.tensors import ModelTensors
from meshwire.messages.local import LearnerApplied

SCALER_CODE = torch.amp.GradScaler.step.__code__


class StepBoundary:
    """Hooks of one optimizer.

    Args:
        after_round: called with the number of every round that was applied.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        tensors: ModelTensors,
        gradients: Gradients,
        channel: Channel,
        after_round: Callable[[int], None],
    ) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._channel = channel
        self._after_round = after_round
        self._frozen = [(spec.name, tensor) for _, spec, tensor in tensors.kind("frozen")]
        self._known = {id(tensor) for _, _, tensor in tensors.kind("parameter", "frozen")}
        self._began_s = time.monotonic()
        self._waited_before_s = channel.waited_s
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, *_: Any) -> None:
        self._channel.look()
        if _called_by_scaler():
            raise NotSupported(
                "GradScaler cannot be used in a job yet: train in bfloat16, which needs no scaling: "
                "torch.autocast(..., dtype=torch.bfloat16)"
            )
        for name, tensor in self._frozen:
            if tensor.grad is not None:
                raise UsageError(
                    f"{name} has a gradient, but was frozen when mt.prepare was called, so it is not averaged: "
                    "call requires_grad_(True) on it before mt.prepare"
                )
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._known:
                    raise UsageError(
                        f"a parameter of shape {tuple(parameter.shape)} was added to the optimizer after mt.prepare, "
                        "so it is not averaged: add it before"
                    )
        self._gradients.check_synchronised()

    def _after_step(self, *_: Any) -> None:
        done = self._gradients.done
        if done is None:
            return
        now_s = time.monotonic()
        self._channel.tell(
            LearnerApplied(
                round=done.round,
                step=self._gradients.step,
                samples=sum(block.end - block.first for block in self._gradients.samples),
                step_s=now_s - self._began_s,
                exposed_s=self._channel.waited_s - self._waited_before_s,
            )
        )
        self._began_s, self._waited_before_s = now_s, self._channel.waited_s
        self._gradients.next_step()
        self._after_round(done.round)


def _called_by_scaler() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is SCALER_CODE:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back  # type: ignore[assignment]
    return False
