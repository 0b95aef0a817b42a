"""What stands in place of `optimizer.step()` where learners step on weights of their own between two rounds (R9).

Each takes H steps with the script's own optimizer, whose state stays its own (O8). What they have changed, base minus
local weights, is this learner's contribution to the next round, with the samples of all of these steps as its weight.
The mean goes into the base by the outer optimizer, and the local weights begin again from there.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from meshtrain.errors import UsageError
from meshtrain.train.link.channel import Channel
from meshtrain.train.model.frozen_check import FrozenCheck
from meshtrain.train.model.masks import Masks
from meshtrain.train.optim.amp import LossScaling
from meshtrain.train.optim.local_weights import LocalWeights
from meshtrain.train.optim.step_patch import ReplacedStep
from meshtrain.train.step.apply import Applying, BaseParts
from meshtrain.train.step.boundary import StepBoundary
from meshtrain.train.step.contribution import StepContribution
from meshtrain.train.step.mask_growth import MaskGrowth


@dataclass(frozen=True)
class PeriodParts:
    """What goes with a period.

    Attributes:
        optimizer: the script's own.
        base: with the outer optimizer.
        applying: takes rounds into the base.
        period: H, local steps in a round.
        growth: what stands for the change of weights that are left out.
    """

    optimizer: Optimizer
    base: BaseParts
    contribution: StepContribution
    applying: Applying
    weights: LocalWeights
    scaling: LossScaling
    period: int
    masks: Masks
    growth: MaskGrowth


class LocalStep:
    """One learner's. From its creation on, `optimizer.step()` is a local step, and each H-th of them ends a period.

    A step that a GradScaler skips is one too: every learner's periods take equally many batches.

    Attributes:
        number: of the local step at hand, from 1.
    """

    def __init__(
        self, parts: PeriodParts, original: Callable[..., Any], boundary: StepBoundary, channel: Channel
    ) -> None:
        self._parts = parts
        self._original = original
        self._boundary = boundary
        self._channel = channel
        self._known = FrozenCheck(parts.base.means.tensors, parts.optimizer)
        self._taken = 0  # steps of this period
        self._counted = False  # the optimizer has stepped, and its scaler has not returned yet
        self.number = 1
        self._replaced = ReplacedStep(parts.optimizer, self._step)
        parts.scaling.watch(parts.optimizer, self._after_scaler, lambda: None)

    def close(self) -> None:
        """The optimizer steps as it did before."""
        self._replaced.close()
        self._parts.scaling.close()
        self._parts.growth.close()

    def no_sync(self) -> AbstractContextManager[None]:
        """No backward pass is averaged in any case."""
        return nullcontext()

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Torch's own: gradients are this learner's."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def end_period(self) -> bool:
        """Ends the period with the steps that it has, where no further one can follow soon: at the end of an epoch's
        samples, in a barrier, at the script's end. Returns whether there were any.

        Raises:
            NonFiniteGradient: the round is void, with `--on-nan stop` (V1).
        """
        if not self._taken:
            return False
        self._taken = 0
        contribution, weights, growth = self._parts.contribution, self._parts.weights, self._parts.growth
        spans = self._parts.base.means.plan.spans
        contribution.begin()
        for position, index in enumerate(contribution.trained):
            if index in contribution.spans:
                change = weights.difference(position)
                contribution.write(index, growth.added_to(spans[index].tensor, change))
                contribution.send_full()
        self._boundary.show_own_buffers()
        contribution.seal()
        contribution.sealed = True
        done = contribution.wait_round()
        if done is not None:
            self._parts.applying.apply(done)
        weights.drop(contribution.step)
        growth.forget()
        if done is None or done.void:
            self._forget()
        self._boundary.end_step()
        return True

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self._channel.look()
        if self._boundary.bases:
            raise UsageError("optimizer.step() inside `with mt.base():`, which is for evaluating and saving: leave it")
        self._known.check()
        self._boundary.save_in_period()
        result = self._original(closure)
        self._parts.masks.hold_weights()
        self._counted = self._parts.scaling.active
        self._count()
        return result

    def _after_scaler(self) -> None:
        if not self._counted:
            self._count()
        self._counted = False

    def _count(self) -> None:
        self.number += 1
        self._taken += 1
        if self._taken == self._parts.period:
            self.end_period()

    def _forget(self) -> None:
        """The local steps are lost. What has made the weights infinite or NaN is in the optimizer's state as well."""
        parts = self._parts
        parts.base.buffers.restore()
        if parts.contribution.poisoned:
            parts.optimizer.state.clear()
