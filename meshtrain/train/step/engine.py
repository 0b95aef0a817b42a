"""What a prepared learner consists of, put together."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from meshtrain.train.link.channel import Channel
from meshtrain.train.model.hyperparameters import Hyperparameters
from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.model.state import ReplicaState, RoundProgress
from meshtrain.train.optim.amp import LossScaling
from meshtrain.train.optim.clipping import Clipping, UntouchedGradients
from meshtrain.train.optim.local_weights import LocalWeights
from meshtrain.train.optim.momentum_handover import OptimizerStep, WithoutMomentum
from meshtrain.train.optim.sign_sgd import on_signs
from meshtrain.train.optim.stale_view import StaleView
from meshtrain.train.step.apply import Applying, BaseParts
from meshtrain.train.step.boundary import StepBoundary
from meshtrain.train.step.buffers import ModelBuffers, base_hash
from meshtrain.train.step.contribution import StepContribution
from meshtrain.train.step.gradient_step import GradientStep
from meshtrain.train.step.gradients import GradientHooks, StepParts
from meshtrain.train.step.local_step import LocalStep, PeriodParts
from meshtrain.train.step.mask_growth import MaskGrowth
from meshtrain.train.step.means import RoundMeans
from meshtrain.train.step.saving import StateSaver
from meshtrain.train.step.step_samples import StepSamples
from meshwire.messages.learner import LearnerHash, StepLost


@dataclass(frozen=True)
class EngineSettings:
    """How the members of the job keep in step.

    Attributes:
        staleness: the bound s.
        absent_in_barriers: see `StepBoundary`.
        coefficient: c, of what the learner's own gradients that no round has covered would change (O2).
        hash_every: rounds between two hashes of the base; 0: at the end only.
        period: H, local steps in a round (R9); 0: each step is a round of gradients.
        signs: the optimizer steps on the signs of the means (O10).
    """

    staleness: int
    absent_in_barriers: bool
    coefficient: float
    hash_every: int
    period: int
    signs: bool


class ScriptSteps(Protocol):
    """What the script's steps are."""

    @property
    def number(self) -> int:
        """Of the step at hand, from 1."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate (O6)."""

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """O4. Returns the norm before clipping."""

    def end_period(self) -> bool:
        """Local steps that no round has covered become a round now. Returns whether there were any (R9)."""

    def close(self) -> None:
        """The optimizer steps as it did before."""


class Engine:
    """From the backward pass to the base, of one model and optimizer.

    Args:
        state: of this model and optimizer, which hold the base after `progress.round`.
        named: adds the peers' names to a reason that names ranks.
        enter_round: called with the round that a step is for, before it begins; with s>0 it is a guess.
        kept: where the base lies, if it is to outlive this process (J3); where there is a period nothing is.
    """

    def __init__(
        self,
        state: ReplicaState,
        progress: RoundProgress,
        means: RoundMeans,
        channel: Channel,
        drawn: StepSamples,
        scaling: LossScaling,
        settings: EngineSettings,
        named: Callable[[str], str],
        enter_round: Callable[[int], None],
        kept: NoKeptState,
    ) -> None:
        self._channel = channel
        self._kept = kept
        self._enter_round = enter_round
        self._settings = settings
        self._state = state
        self._scaling = scaling
        self._begun = progress
        self._hashed = 0
        self._means = means
        self._masks = state.masks
        self._masks.begin([state.optimizer] if state.outer is None else [state.optimizer, state.outer])
        self._buffers = ModelBuffers(means.tensors, means.plan, settings.staleness)
        self._hyperparameters, self._clipping = Hyperparameters(state.optimizer), Clipping()
        self._untouched = UntouchedGradients(
            [(spec.name, tensor) for _, spec, tensor in means.tensors.kind("parameter")]
        )
        self._steps: ScriptSteps
        self._beside: list[torch.Tensor] | None = None
        if settings.period:
            self._put_together_periods(drawn, named)
        else:
            self._put_together_gradients(drawn, named)
        self._go_on_from(progress)
        if self._beside is not None:
            kept.begin(self._beside, self._buffers.watched, self._progress)

    def _put_together_gradients(self, drawn: StepSamples, named: Callable[[str], str]) -> None:
        """Each backward pass is a round."""
        optimizer, means, channel, settings = self._state.optimizer, self._means, self._channel, self._settings
        momentum = means.tensors.manifest.momentum
        step = OptimizerStep() if momentum is None else WithoutMomentum(means.coded(), momentum)
        overlay = StaleView(
            means.parameters(), optimizer, self._hyperparameters, self._clipping, settings.coefficient, step
        )
        base = BaseParts(optimizer, means, self._buffers, overlay, self._hyperparameters, self._clipping)
        self._contribution = StepContribution(means, self._buffers, drawn, self._pack, channel, "gradient")
        original = optimizer.step
        stepped = on_signs(optimizer, original) if settings.signs else original
        self._applying = Applying(base, lambda: step.take(optimizer, stepped), channel, named, self._after_round)
        self._applying.kept = overlay.kept = self._kept
        self._beside = overlay.beside

        def before_view() -> None:
            self._enter_round(self.boundary.decided + 1)
            if settings.staleness:
                overlay.step_over(self._applying.squared_norm)
                self._buffers.restore()

        self.boundary = self._boundary(base, before_view)
        parts = StepParts(
            base=base,
            overlay=overlay,
            contribution=self._contribution,
            applying=self._applying,
            scaling=self._scaling,
            untouched=self._untouched,
            staleness=settings.staleness,
        )
        self._steps = GradientStep(parts, original, GradientHooks(parts), self.boundary, channel)
        self._base = base

    def _put_together_periods(self, drawn: StepSamples, named: Callable[[str], str]) -> None:
        """Rounds are of what local steps have changed (R9)."""
        means, channel, outer = self._means, self._channel, self._state.outer
        assert outer is not None
        weights = LocalWeights(means.parameters())
        base = BaseParts(outer, means, self._buffers, weights, self._hyperparameters, self._clipping)
        # Options of the script's optimizer are its learner's own, as its state is; those of the outer one are constant.
        self._contribution = StepContribution(
            means, self._buffers, drawn, lambda _: b"", channel, "change by local steps"
        )
        self._applying = Applying(base, outer.step, channel, named, self._after_round)

        def before_view() -> None:
            self._enter_round(self.boundary.decided + 1)
            weights.clear()

        self.boundary = self._boundary(base, before_view)
        parts = PeriodParts(
            optimizer=self._state.optimizer,
            base=base,
            contribution=self._contribution,
            applying=self._applying,
            weights=weights,
            scaling=self._scaling,
            period=self._settings.period,
            masks=self._masks,
            growth=MaskGrowth(self._masks, means.tensors, self._scaling, lambda: self._applying.applied + 1),
        )
        self._steps = LocalStep(parts, self._state.optimizer.step, self.boundary, channel)
        self._base = base

    def _boundary(self, base: BaseParts, before_view: Callable[[], None]) -> StepBoundary:
        return StepBoundary(
            base,
            self._applying,
            self._contribution,
            self._untouched,
            StateSaver(self._channel, lambda: self._applying.applied, self._save),
            self._channel,
            before_view,
            absent_in_barriers=self._settings.absent_in_barriers,
        )

    @property
    def steps(self) -> ScriptSteps:
        """What stands in place of the optimizer's own."""
        return self._steps

    def lost(self, notice: StepLost) -> None:
        """A step of this learner is in no round (V2, R5)."""
        self._base.view.drop(notice.step)
        self._contribution.lost(notice)

    def barrier(self, number: int) -> None:
        """Waits for all peers' barriers of this number. Raises as `StepBoundary.barrier`."""
        self._steps.end_period()
        self.boundary.barrier(number)

    def flush(self) -> None:
        """At the end: takes every round that anybody has contributed to, unless this learner is in all of them.

        Between backward() and step() of s=0 it leaves at once, as where no learner is ever absent: the round in hand is
        the script's, which will not step on it, and none can follow before.
        """
        self._steps.end_period()
        if self._settings.absent_in_barriers and self._contribution.done is None:
            self.boundary.flush()

    def tell_last_hash(self) -> None:
        """Of the final base, which the model then holds."""
        if self._settings.staleness or self._settings.period:
            self.boundary.show_base_for_good()
        # Between backward() and step() of s=0 there is no base: buffers are of the new round, parameters are not.
        if self._contribution.done is None and self._applying.applied > self._hashed:
            self._tell_hash(self._applying.applied)

    def close(self) -> None:
        """Model and optimizer are ordinary ones again."""
        self._steps.close()
        self.boundary.close()

    def _go_on_from(self, progress: RoundProgress) -> None:
        self._applying.applied = progress.round
        self._applying.squared_norm = progress.squared_norm
        if not self._settings.period:  # else what a script clips are its own gradients, never a round (O8)
            self._clipping.bound = progress.clip
        self._hyperparameters.written = progress.written
        if progress.scaler is not None:
            self._scaling.load(progress.scaler)

    def _progress(self) -> RoundProgress:
        return RoundProgress(
            round=self._applying.applied,
            squared_norm=self._applying.squared_norm,
            clip=self._clipping.newest,
            clip_known=self._clip_known(self._contribution.step),
            written=self._hyperparameters.written,
            scaler=self._scaling.state(),
        )

    def _pack(self, step: int) -> bytes:
        return self._hyperparameters.pack(self._clipping.bound, clip_known=self._clip_known(step))

    def _clip_known(self, step: int) -> bool:
        return step > 1 or self._begun.clip_known

    def _save(self, folder: Path) -> int:
        self._base.view.show_base()
        return self._state.export_all(folder, self._buffers.base, self._progress())

    def _after_round(self, round_: int) -> None:
        if self._settings.hash_every and round_ % self._settings.hash_every == 0:
            self._tell_hash(round_)

    def _tell_hash(self, round_: int) -> None:
        self._hashed = round_
        self._channel.tell(LearnerHash(round=round_, sha256=base_hash(self._means.tensors, self._buffers, self._masks)))
