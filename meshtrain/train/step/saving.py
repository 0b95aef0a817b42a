"""What goes with the base besides its tensors, and the base as files when the daemon asks for a checkpoint."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtrain.errors import NotSupported
from meshtrain.train.link.channel import Channel
from meshtrain.train.model.state import ReplicaState, RoundProgress
from meshtrain.train.optim.loss_scaling import LossScaling
from meshtrain.train.step.base import Base
from meshwire.messages.learner import LearnerSaved, Save


class StateSaver:
    """Writes the state after a round into a folder (J1, state in units), when the learner stands where it can.

    That is at a boundary, where no round is half applied; the files hold the base alone, and training goes on
    afterwards as if nothing had been.

    Args:
        scaling: whose state goes with the base.
    """

    def __init__(self, state: ReplicaState, base: Base, scaling: LossScaling, channel: Channel) -> None:
        self._state = state
        self._base = base
        self._scaling = scaling
        self._channel = channel
        self._asked: deque[Save] = deque()
        self._open = False
        channel.route(Save, self._on_save)

    def go_on_from(self, progress: RoundProgress) -> None:
        """Model and optimizer hold the base that this was saved with."""
        base, clipping = self._base, self._base.options.clipping
        base.applied = progress.round
        base.squared_norm = progress.squared_norm
        base.contributors = progress.contributors
        if self._state.outer is None:  # else what a script clips are its own gradients, never a round (O8, inner state)
            clipping.bound = progress.clip
        clipping.known = progress.clip_known
        base.options.hyperparameters.written = progress.written
        if progress.scaler is not None:
            self._scaling.load(progress.scaler)

    def progress(self) -> RoundProgress:
        """What rounds have left in this learner so far, beside model and optimizer."""
        base, clipping = self._base, self._base.options.clipping
        return RoundProgress(
            round=base.applied,
            squared_norm=base.squared_norm,
            clip=clipping.newest,
            clip_known=clipping.known,
            written=base.options.hyperparameters.written,
            scaler=self._scaling.state(),
            contributors=base.contributors,
        )

    @property
    def due(self) -> bool:
        """Whether something could be saved now."""
        return any(save.after_round <= self._base.applied for save in self._asked)

    @contextmanager
    def possible(self) -> Iterator[None]:
        """Inside, the learner stands at a boundary: whatever is due is saved at once."""
        self._open = True
        try:
            self.save_due()
            yield
        finally:
            self._open = False

    def save_due(self) -> None:
        """Saves what is due, if the learner stands at a boundary. Called whenever a round is in the base."""
        if not self._open:
            return
        due = [save for save in self._asked if save.after_round <= self._base.applied]
        for save in due:
            self._asked.remove(save)
            self._channel.tell(self._save(save))

    def _save(self, save: Save) -> LearnerSaved:
        round_ = self._base.applied
        try:
            self._base.view.show_base()
            left_out = self._state.export(Path(save.folder), self._base.buffers.base, self.progress(), save.digests)
        except (OSError, NotSupported) as error:  # training goes on without this checkpoint
            return LearnerSaved(number=save.number, round=round_, units=0, error=str(error))
        return LearnerSaved(number=save.number, round=round_, units=self._state.count, left_out=left_out)

    def _on_save(self, save: Save) -> None:
        self._asked.append(save)
        self.save_due()
