"""`Save`: the state of the base as files, at a boundary at which no round is half applied."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtrain.errors import NotSupported
from meshtrain.train.link.channel import Channel
from meshwire.messages.learner import LearnerSaved, Save


class StateSaver:
    """What the daemon has asked to be saved, and when it can be done: O7, with the base alone.

    Args:
        applied: the newest round in the base.
        write: shows the base and writes all of its units into a folder; returns how many.
    """

    def __init__(self, channel: Channel, applied: Callable[[], int], write: Callable[[Path], int]) -> None:
        self._channel = channel
        self._applied = applied
        self._write = write
        self._asked: deque[Save] = deque()
        self._open = False
        channel.route(Save, self._on_save)

    @property
    def due(self) -> bool:
        """Whether something could be saved now."""
        return any(save.after_round <= self._applied() for save in self._asked)

    @contextmanager
    def possible(self) -> Iterator[None]:
        """Inside, the learner stands at a boundary: whatever is due is saved at once."""
        self._open = True
        try:
            self.do_due()
            yield
        finally:
            self._open = False

    def do_due(self) -> None:
        """Whenever a round is in the base."""
        if not self._open:
            return
        due = [save for save in self._asked if save.after_round <= self._applied()]
        for save in due:
            self._asked.remove(save)
            self._channel.tell(self._saved(save))

    def _saved(self, save: Save) -> LearnerSaved:
        round_ = self._applied()
        try:
            units = self._write(Path(save.folder))
        except (OSError, NotSupported) as error:  # training goes on without this checkpoint
            return LearnerSaved(number=save.number, round=round_, units=0, error=str(error))
        return LearnerSaved(number=save.number, round=round_, units=units)

    def _on_save(self, save: Save) -> None:
        self._asked.append(save)
        self.do_due()
