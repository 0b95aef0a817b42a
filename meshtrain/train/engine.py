"""What a prepared learner consists of, put together."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.optim import Optimizer

from meshtrain.train.applying import Applying, BaseParts
from meshtrain.train.boundary import Boundary
from meshtrain.train.buffers import Buffers, base_hash
from meshtrain.train.channel import Channel
from meshtrain.train.clipping import Clipping, Untouched
from meshtrain.train.drawn import DrawnSamples
from meshtrain.train.gradients import Gradients, StepParts
from meshtrain.train.hyperparameters import Hyperparameters
from meshtrain.train.means import Means
from meshtrain.train.overlay import Overlay
from meshtrain.train.saving import Saving
from meshtrain.train.scaling import Scaling
from meshtrain.train.state import Progress, ReplicaState
from meshwire.messages.learner import LearnerHash


@dataclass(frozen=True)
class EngineSettings:
    """How the members of the job keep in step.

    Attributes:
        staleness: the bound s.
        absent_in_barriers: see `StepParts`.
        coefficient: c, of what the learner's own gradients that no round has covered would change (O2).
        hash_every: rounds between two hashes of the base; 0: at the end only.
    """

    staleness: int
    absent_in_barriers: bool
    coefficient: float
    hash_every: int


class Engine:
    """From the backward pass to the base, of one model and optimizer.

    Args:
        state: of this model and optimizer, which hold the base after `progress.round`.
        named: adds the peers' names to a reason that names ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        state: ReplicaState,
        progress: Progress,
        means: Means,
        channel: Channel,
        drawn: DrawnSamples,
        scaling: Scaling,
        settings: EngineSettings,
        named: Callable[[str], str],
    ) -> None:
        self._channel = channel
        self._settings = settings
        self._state = state
        self._scaling = scaling
        self._begun = progress
        self._hashed = 0
        original = optimizer.step
        hyperparameters, clipping = Hyperparameters(optimizer), Clipping()
        base = self._base = BaseParts(
            optimizer=optimizer,
            means=means,
            buffers=Buffers(means.tensors, means.plan, settings.staleness),
            overlay=Overlay(means.parameters(), optimizer, hyperparameters, clipping, settings.coefficient),
            hyperparameters=hyperparameters,
            clipping=clipping,
        )
        self._applying = Applying(base, original, channel, named, self._after_round)
        step = StepParts(
            means=means,
            buffers=base.buffers,
            overlay=base.overlay,
            applying=self._applying,
            drawn=drawn,
            scaling=scaling,
            untouched=Untouched([(spec.name, tensor) for _, spec, tensor in means.tensors.kind("parameter")]),
            staleness=settings.staleness,
            absent_in_barriers=settings.absent_in_barriers,
            pack=lambda step: base.hyperparameters.pack(base.clipping.bound, clip_known=self._clip_known(step)),
        )
        self.gradients = Gradients(step, channel)
        saving = Saving(channel, lambda: self._applying.applied, self._save)
        self.boundary = Boundary(base, step, original, self.gradients, saving, channel)
        self._go_on_from(progress)

    def flush(self) -> None:
        """At the end: takes every round that anybody has contributed to, unless this learner is in all of them.

        Between backward() and step() of s=0 it leaves at once, as where no learner is ever absent: the round in hand is
        the script's, which will not step on it, and none can follow before.
        """
        if self._settings.absent_in_barriers and self.gradients.done is None:
            self.boundary.flush()

    def tell_last_hash(self) -> None:
        """Of the final base, which the model then holds."""
        if self._settings.staleness:
            self.boundary.show_base_for_good()
        # Between backward() and step() of s=0 there is no base: buffers are of the new round, parameters are not.
        if self.gradients.done is None and self._applying.applied > self._hashed:
            self._tell_hash(self._applying.applied)

    def close(self) -> None:
        """Model and optimizer are ordinary ones again."""
        self.gradients.close()
        self.boundary.close()

    def _go_on_from(self, progress: Progress) -> None:
        self._applying.applied = progress.round
        self._applying.squared_norm = progress.squared_norm
        self._base.clipping.bound = progress.clip
        self._base.hyperparameters.written = progress.written
        if progress.scaler is not None:
            self._scaling.load(progress.scaler)

    def _progress(self) -> Progress:
        return Progress(
            round=self._applying.applied,
            squared_norm=self._applying.squared_norm,
            clip=self._base.clipping.newest,
            clip_known=self._clip_known(self.gradients.step),
            written=self._base.hyperparameters.written,
            scaler=self._scaling.state(),
        )

    def _clip_known(self, step: int) -> bool:
        return step > 1 or self._begun.clip_known

    def _save(self, folder: Path) -> int:
        self._base.overlay.show_base()
        return self._state.export_all(folder, self._base.buffers.base, self._progress())

    def _after_round(self, round_: int) -> None:
        if self._settings.hash_every and round_ % self._settings.hash_every == 0:
            self._tell_hash(round_)

    def _tell_hash(self, round_: int) -> None:
        self._hashed = round_
        base = self._base
        self._channel.tell(LearnerHash(round=round_, sha256=base_hash(base.means.tensors, base.buffers)))
