"""Progress of what takes long, on stderr: a bar on a terminal once it took 2 s, else a line per stage."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from meshtrain.cli.ui.terminal import console, say
from meshtrain.following.shown_text import printable_lines

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SHOW_AFTER_S = 2.0


class Stages:
    """Work in stages of bytes; use as a context so that the bar is gone afterwards."""

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._started_s = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._of_bytes = False
        self._text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, text: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Shows which stage the work is in, and how far it is. A stage without bytes has `total_bytes` 0."""
        text = printable_lines(text)
        if not self._console.is_terminal:
            if text != self._text:
                say(text)
        elif time.monotonic() - self._started_s >= SHOW_AFTER_S:
            self._show_bar(text, done_bytes, total_bytes)
        self._text = text

    def _show_bar(self, text: str, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None or self._of_bytes != (total_bytes > 0):
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                SpinnerColumn,
                TextColumn,
                TransferSpeedColumn,
            )

            if self._bar is not None:
                self._bar.stop()
            self._of_bytes = total_bytes > 0
            told = TextColumn("{task.description}", markup=False)
            columns = (told, BarColumn(), DownloadColumn(True), TransferSpeedColumn())
            kinds = columns if self._of_bytes else (SpinnerColumn(), told)
            self._bar = Progress(*kinds, console=self._console, transient=True)
            self._task = self._bar.add_task(text, total=None)
            self._bar.start()
        assert self._task is not None
        if text != self._text:
            self._bar.reset(self._task)
        self._bar.update(self._task, description=text, completed=done_bytes, total=total_bytes or None)
