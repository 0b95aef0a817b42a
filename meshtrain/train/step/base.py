"""The base, the state that all replicas have in common, and how one round gets into it.

Rounds are applied strictly in order, each by the same optimizer with the same options and the same means: so replicas
that started equal stay equal bit for bit (rules O2 to O5).
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch

from meshtrain.errors import MeshtrainError, NonFiniteGradient
from meshtrain.train.link.channel import Channel
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.model.optimizers import SCALER_ATTRIBUTES
from meshtrain.train.model.state import feed
from meshtrain.train.optim.hyperparameters import RoundOptions
from meshtrain.train.optim.leader_options import LeaderOptions
from meshtrain.train.optim.optimizer_step import OptimizerStep
from meshtrain.train.optim.scaled_rates import rates_times
from meshtrain.train.step.buffers import ModelBuffers
from meshtrain.train.step.means import RoundMeans
from meshwire.messages.learner import LearnerApplied, LearnerHash, RoundDone


class WorkingWeights(Protocol):
    """The weights that a learner computes with, where these are not the base itself.

    The parameters of the model hold either the base or these. With a bound s > 0 they are the base ahead by own
    gradients (`StaleView`), with a period the weights that local steps have moved (`LocalWeights`).
    """

    def show_base(self, round_: int | None = None) -> None:
        """From now on the parameters hold the base, and an optimizer may step on it. `round_`: those that travel in
        this round are enough."""

    def show_view(self) -> None:
        """From now on the parameters hold the working weights. If they held the base, these are made of it anew."""

    def begin_step(self, newest_squared_norm: float) -> None:
        """A step, or a period, is about to begin at a boundary.

        Args:
            newest_squared_norm: of the means of the newest round; 0 before the first one.
        """

    def follow(self, done: RoundDone) -> None:
        """The base is that after this round, and the parameters that travel in it hold it."""

    def drop(self, step: int) -> None:
        """This step of the learner is in the base, or never will be: it counts no more beside the base."""

    def clear(self) -> None:
        """No step is on its way any more."""


class Base:
    """The base of one learner. Nothing else changes it.

    Args:
        step: of the optimizer that rounds are applied with: the script's, with a period (R9, period) the outer one.
        means: where the means of a round are.
        buffers: BatchNorm's statistics and the like.
        view: what the learner computes with.
        options: which options a round is applied with.
        kept: the memory that outlives this process (J3, kept base): is told when the base changes.
        channel: to the daemon.
        hash_every: rounds between two hashes of the base that the daemons compare; 0: at the end only.

    Attributes:
        applied: number of the newest round in the base.
        squared_norm: of the means of the newest round that was not void.
        contributors: devices in the newest round of the base that was not nobody's; 0 before the first one.
    """

    def __init__(
        self,
        step: OptimizerStep,
        means: RoundMeans,
        buffers: ModelBuffers,
        view: WorkingWeights,
        options: LeaderOptions,
        kept: NoKeptState,
        channel: Channel,
        hash_every: int,
    ) -> None:
        self.step = step
        self.means = means
        self.buffers = buffers
        self.view = view
        self.options = options
        self.kept = kept
        self._channel = channel
        self._hash_every = hash_every
        self._hashed = 0
        self.applied = 0
        self.squared_norm = 0.0
        self.contributors = 0

    def begin_step(self) -> None:
        """At a boundary, behind all rounds that are there: the next step is about to begin."""
        self.view.begin_step(self.squared_norm)
        self.buffers.begin_step()

    def apply(self, done: RoundDone) -> None:
        """Takes a round into the base whose means are in the result slot; `p.grad` holds them meanwhile, and is the
        script's again afterwards.

        With s=0 the script steps on its round itself (`GradientHooks`, `GradientStep`); this is for all other rounds.

        Raises:
            NonFiniteGradient: for a void round with `--on-nan stop` (V1, non-finite values).
            MeshtrainError: the round is not the next one, or its options do not suit the optimizer.
        """
        self.check(done)
        self.view.show_base(done.round)
        if not done.void:
            self.decide_masks(done)
            told = self.options.unpack(done.hyperparameters)
            with self._lent_means(done, told), self._without_scaler():
                self.step_under(done, told)
            self.buffers.take(self.means.slots.result, done.integers, self.means.plans.of(done.round))
        self.conclude(done)

    def check(self, done: RoundDone) -> None:
        """Raises what `apply` raises before it changes anything."""
        if done.round != self.applied + 1:
            raise MeshtrainError(f"the daemon gave round {done.round} after round {self.applied}: versions differ")
        if done.void and done.stop:
            raise NonFiniteGradient(done.round, self._channel.with_names(done.reason))

    def decide_masks(self, done: RoundDone) -> None:
        """Which weights are kept after a round that is not void. The parameters hold the base before it."""
        self.means.masks.decide(done.round, self.means.whole_tensors(done))

    def step_under(self, done: RoundDone, told: RoundOptions | None) -> None:
        """The optimizer steps on the gradients in `p.grad`, with a round's options (O3, leader's options; None: with
        its own), and rates that follow the samples in it (O12, scaled rates)."""
        self.kept.dirty()
        if isinstance(self.step.optimizer, JointOptimizer):
            self.step.optimizer.turn_to(self.applied + 1)
        factor = self.options.rate_factor(done)
        with (
            nullcontext() if told is None else self.options.hyperparameters.in_force(told.groups),
            rates_times(self.step.optimizer, factor),
        ):
            self.step.take()
        self.means.masks.hold()

    def conclude(self, done: RoundDone) -> None:
        """The round is in the base, and its parameters hold it: the daemon may use the result slot again."""
        self.applied = done.round
        self.contributors = done.contributors.bit_count() or self.contributors
        if not done.void:
            self.squared_norm = done.squared_norm
        self.view.follow(done)
        if done.step:
            self.drop(done.step)
        self.kept.clean(done.round)
        self._channel.tell(LearnerApplied(round=done.round), more=True)  # the step's end follows, or a wait
        if self._hash_every and done.round % self._hash_every == 0:
            self.view.show_base()
            self._tell_hash()

    def drop(self, step: int) -> None:
        """This step of the learner is in the base, or never will be: it counts no more beside the base."""
        self.view.drop(step)
        self.buffers.drop(step)

    def tell_last_hash(self) -> None:
        """At the end, of the base that the parameters hold, unless it was told already."""
        if self.applied > self._hashed:
            self._tell_hash()

    def _tell_hash(self) -> None:
        """O9 (bit-equality): SHA-256 of trainable parameters, which of their values are kept, and buffers, in the
        manifest's order."""
        digest = hashlib.sha256()
        for index, _, tensor in self.means.tensors.kind("parameter", "buffer"):
            of_base = self.buffers.base(index)
            feed(digest, tensor if of_base is None else of_base)
            if (places := self.means.masks.places(index)) is not None:
                feed(digest, places)
        self._hashed = self.applied
        self._channel.tell(LearnerHash(round=self.applied, sha256=digest.digest()))

    @contextmanager
    def _lent_means(self, done: RoundDone, told: RoundOptions | None) -> Iterator[None]:
        """Inside, `p.grad` is the mean, clipped as the round says (O4, clipping). On the CPU it lies in the result
        slot."""
        max_norm = self.options.clip_limit(told)
        factor = 1.0 if max_norm is None else self.options.clipping.coefficient(done.squared_norm, max_norm)
        own = []
        try:
            for parameter, mean in self.means.by_parameter(done):
                own.append((parameter, parameter.grad))
                if mean is not None and factor != 1.0:
                    mean.mul_(factor)
                parameter.grad = None if mean is None else _laid_out(mean, parameter)
            yield
        finally:
            for parameter, gradient in own:
                parameter.grad = gradient

    @contextmanager
    def _without_scaler(self) -> Iterator[None]:
        """Means are not scaled, whatever this learner's scaler has told the optimizer for its own gradients."""
        optimizer = self.step.optimizer
        told = {name: getattr(optimizer, name) for name in SCALER_ATTRIBUTES if hasattr(optimizer, name)}
        for name in told:
            delattr(optimizer, name)
        try:
            yield
        finally:
            for name, value in told.items():
                setattr(optimizer, name, value)


def _laid_out(mean: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The mean with its values in the same order in memory as the parameter's, which fused optimizers rely on; without
    a copy if it is so already."""
    if mean.stride() == parameter.stride():
        return mean.to(parameter)
    return torch.empty_like(parameter).copy_(mean)
