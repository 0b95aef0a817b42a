"""One round into the base, by the script's own optimizer (O2 to O5)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim import Optimizer

from meshtrain.errors import MeshtrainError, NonFiniteGradient
from meshtrain.train.link.channel import Channel
from meshtrain.train.model.hyperparameters import Hyperparameters, RoundOptions
from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.model.optimizers import SCALER_ATTRIBUTES
from meshtrain.train.optim.clipping import Clipping
from meshtrain.train.step.buffers import ModelBuffers
from meshtrain.train.step.means import RoundMeans
from meshwire.messages.learner import LearnerApplied, RoundDone


class WorkingWeights(Protocol):
    """What a learner computes with, where that is not the base itself; one of both is in the parameters."""

    def show_base(self) -> None:
        """The parameters hold the base, and may be stepped."""

    def show_view(self) -> None:
        """The parameters hold the view, made of the base as they hold it now, if they do."""

    def drop(self, step: int) -> None:
        """The step is in the base, or will never be."""

    def clear(self) -> None:
        """No step is on its way any more."""


@dataclass(frozen=True)
class BaseParts:
    """What a round changes, and what it is read from."""

    optimizer: Optimizer
    means: RoundMeans
    buffers: ModelBuffers
    view: WorkingWeights
    hyperparameters: Hyperparameters
    clipping: Clipping


class Applying:
    """Takes rounds into the base, strictly in order.

    Args:
        step: the optimizer's own `step`.
        named: adds the peers' names to a reason that names ranks.
        after_round: called with the number of every round that is in the base, which the parameters then hold.

    Attributes:
        applied: the newest round in the base.
        squared_norm: of the means of the newest one that was not void.
        kept: is told when the base changes.
    """

    def __init__(
        self,
        parts: BaseParts,
        step: Callable[[], object],
        channel: Channel,
        named: Callable[[str], str],
        after_round: Callable[[int], None],
    ) -> None:
        self._parts = parts
        self._step = step
        self._channel = channel
        self._named = named
        self._after_round = after_round
        self.applied = 0
        self.squared_norm = 0.0
        self.kept = NoKeptState()

    def apply(self, done: RoundDone) -> None:
        """A round that this learner's script does not step on itself. `p.grad` stays the script's.

        Raises:
            NonFiniteGradient: for a void round with `--on-nan stop` (V1).
            MeshtrainError: the round is not the next one, or its options do not suit the optimizer.
        """
        self.check(done)
        parts = self._parts
        parts.view.show_base()
        if not done.void:
            self.decide_masks(done)
            options = self.options(done)
            with self._lent_means(done, options), self._without_scaler():
                self.step_under(options)
            parts.buffers.take(parts.means.slots.result, done.integers, parts.means.plans.of(done.round))
        self.conclude(done)

    def check(self, done: RoundDone) -> None:
        """Raises what `apply` raises before it changes anything."""
        if done.round != self.applied + 1:
            raise MeshtrainError(f"the daemon gave round {done.round} after round {self.applied}: versions differ")
        if done.void and done.stop:
            raise NonFiniteGradient(done.round, self._named(done.reason))

    def decide_masks(self, done: RoundDone) -> None:
        """Which weights are kept after a round that is not void. The parameters hold the base before it."""
        self._parts.means.masks.decide(done.round, self._parts.means.whole(done))

    def options(self, done: RoundDone) -> RoundOptions | None:
        """What the round's leader has sent (O3); None when nobody has sent any. Raises MeshtrainError."""
        return self._parts.hyperparameters.unpack(done.hyperparameters) if done.hyperparameters else None

    def step_under(self, options: RoundOptions | None) -> None:
        """The optimizer steps on the gradients in place, with a round's options (O3); None: with its own."""
        self.kept.dirty()
        with nullcontext() if options is None else self._parts.hyperparameters.in_force(options.groups):
            self._step()
        self._parts.means.masks.hold()

    def conclude(self, done: RoundDone) -> None:
        """The round is in the base: the result slot is the daemon's again."""
        self.applied = done.round
        if not done.void:
            self.squared_norm = done.squared_norm
        if done.step:
            self._parts.view.drop(done.step)
        self.kept.clean(done.round)
        self._channel.tell(LearnerApplied(round=done.round))
        self._after_round(done.round)

    @contextmanager
    def _lent_means(self, done: RoundDone, options: RoundOptions | None) -> Iterator[None]:
        """Inside, `p.grad` is the mean, clipped as the round says (O4). On the CPU it lies in the result slot."""
        clipping = self._parts.clipping
        told = options or RoundOptions(groups=())
        max_norm = clipping.ruling(told.clip, known=told.clip_known)
        coefficient = 1.0 if max_norm is None else clipping.coefficient(done.squared_norm, max_norm)
        own = []
        try:
            for parameter, mean in self._parts.means.of(done):
                own.append((parameter, parameter.grad))
                if mean is not None and coefficient != 1.0:
                    mean.mul_(coefficient)
                parameter.grad = None if mean is None else _laid_out(mean, parameter)
            yield
        finally:
            for parameter, gradient in own:
                parameter.grad = gradient

    @contextmanager
    def _without_scaler(self) -> Iterator[None]:
        """Means are not scaled, whatever this learner's scaler has told the optimizer for its own gradients."""
        optimizer = self._parts.optimizer
        told = {name: getattr(optimizer, name) for name in SCALER_ATTRIBUTES if hasattr(optimizer, name)}
        for name in told:
            delattr(optimizer, name)
        try:
            yield
        finally:
            for name, value in told.items():
                setattr(optimizer, name, value)


def _laid_out(mean: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The mean as a gradient of this parameter; without a copy if it is like it. Fused optimizers take both, value by
    value, as they lie in memory."""
    if mean.stride() == parameter.stride():
        return mean.to(parameter)
    return torch.empty_like(parameter).copy_(mean)
