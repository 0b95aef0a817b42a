"""What stands in place of `optimizer.step()` where each backward pass is a round: the step boundary."""

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from meshtrain.errors import UsageError
from meshtrain.train.link.channel import Channel
from meshtrain.train.model.frozen_check import FrozenCheck
from meshtrain.train.optim import clipping
from meshtrain.train.optim.momentum_handover import CLIPPED_LATE
from meshtrain.train.optim.step_patch import ReplacedStep
from meshtrain.train.step.boundary import StepBoundary
from meshtrain.train.step.gradients import GradientHooks, StepParts

SCALER_CODE = torch.amp.GradScaler.step.__code__


class GradientStep:
    """One learner's. From its creation on, `optimizer.step()` is this.

    Args:
        original: the optimizer's own `step`.
    """

    def __init__(
        self,
        parts: StepParts,
        original: Callable[..., Any],
        gradients: GradientHooks,
        boundary: StepBoundary,
        channel: Channel,
    ) -> None:
        self._parts = parts
        self._original = original
        self._contribution = parts.contribution
        self._applying = parts.applying
        self._gradients = gradients
        self._boundary = boundary
        self._channel = channel
        self._staleness = parts.staleness
        self._optimizer = parts.base.optimizer
        self._known = FrozenCheck(parts.base.means.tensors, self._optimizer)
        self._replaced = ReplacedStep(self._optimizer, self._step)
        parts.scaling.watch(self._optimizer, self._after_scaler, parts.untouched.remember)

    @property
    def number(self) -> int:
        """Of the step at hand, from 1."""
        return self._contribution.step

    def no_sync(self) -> AbstractContextManager[None]:
        """O6."""
        return self._gradients.no_sync()

    def end_period(self) -> bool:
        """Each step is a round: there is never one under way."""
        return False

    def close(self) -> None:
        """The optimizer steps as it did before."""
        self._gradients.close()
        self._replaced.close()
        self._parts.scaling.close()

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        if self._contribution.sealed:
            self._end_step()
        elif self._staleness == 0:
            self._original()  # without a backward pass there is no step of the mesh
        return loss

    def _after_scaler(self) -> None:
        """A GradScaler that has seen an overflow has not called `optimizer.step()`; the step is over all the same."""
        if self._contribution.sealed:
            self._check()
            self._end_step(skip=True)

    def _end_step(self, *, skip: bool = False) -> None:
        """Returns when the next step may start, with the model as it is to compute with.

        Args:
            skip: the optimizer does not step on the round in `p.grad` (s=0).
        """
        done = self._contribution.done
        self._parts.untouched.note()
        if done is not None:
            if not skip:
                # Equal options may have changed since the bind, alike on all peers, as in a script without a job.
                equal = done.hyperparameters == self._contribution.hyperparameters
                self._applying.step_under(None if equal else self._applying.options(done))
            self._applying.conclude(done)
        self._gradients.next_step()
        self._boundary.end_step()
        self._parts.base.clipping.step_ended()

    def _check(self) -> None:
        self._channel.look()
        if not self._parts.scaling.active and _called_by_scaler():
            raise UsageError(
                "the GradScaler is not known to the mesh: "
                "mt.prepare(model, optimizer, loader, scaler=scaler), or without a loader, scaler=scaler"
            )
        if self._boundary.bases:
            raise UsageError("optimizer.step() inside `with mt.base():`, which is for evaluating and saving: leave it")
        self._known.check()
        self._gradients.check_synchronised()
        if self._staleness:
            self._parts.untouched.check()
        elif self._parts.base.means.tensors.manifest.momentum is not None and (
            changed := self._parts.untouched.changed()
        ):
            raise UsageError(f"{changed} between backward() and optimizer.step(): {CLIPPED_LATE}")

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """O4. With s=0 clips `p.grad`, with s>0 the rounds to come.

        Returns:
            The norm before clipping: with s>0 of the newest round that was applied, 0 before the first one.

        Raises:
            UsageError: with s>0, for some of the trained parameters only.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        trained = self._parts.base.means.parameters()
        covers, done = clipping.covers(given, trained), self._contribution.done
        if self._staleness:
            if not covers:
                raise UsageError(
                    "mt.clip_grad_norm_ of some parameters only: with a bound above 0 rounds are clipped by the norm "
                    "of all of them: give it model.parameters()"
                )
            self._parts.base.clipping.note(max_norm)
            return torch.tensor(math.sqrt(self._applying.squared_norm))
        if not covers or done is None or done.void or self._parts.untouched.changed() is not None:
            return torch.nn.utils.clip_grad_norm_(given, max_norm)
        self._parts.base.clipping.note(max_norm)
        clipping.scale(given, self._parts.base.clipping.coefficient(done.squared_norm, max_norm))
        self._parts.untouched.remember()
        return torch.tensor(math.sqrt(done.squared_norm))


def _called_by_scaler() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is SCALER_CODE:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back  # type: ignore[assignment]
    return False
