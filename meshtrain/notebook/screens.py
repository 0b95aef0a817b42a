"""Where a run is shown: below the cell of a notebook, drawn anew in place; or as lines of text, anywhere else."""

import importlib
import sys
import time
from html import escape
from typing import Any, Protocol

from meshtrain.notebook.outcome import image

LINE_EVERY_S = 10.0  # as text


class RunScreen(Protocol):
    """What a run is shown on."""

    def show(self, line: str, svg: str | None) -> None:
        """Shows where it stands, and a plot where there is one; replaces what was shown before."""

    def write(self, text: str) -> None:
        """Adds lines of its log."""

    def say(self, line: str) -> None:
        """Adds a line for the person."""


class TextScreen:
    """Logs on stdout, all else on stderr; where it stands every ten seconds."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._shown = ""

    def show(self, line: str, svg: str | None) -> None:
        """Shows the line, but not too often; plots are for notebooks."""
        if time.monotonic() >= self._next_s and line != self._shown:
            self._next_s = time.monotonic() + LINE_EVERY_S
            self._shown = line
            self.say(line)

    def write(self, text: str) -> None:
        """Adds lines of the log."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def say(self, line: str) -> None:
        """Adds a line for the person."""
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class CellScreen(TextScreen):
    """A display of the cell that runs: the line and the plot, updated in place; logs follow below."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None

    def show(self, line: str, svg: str | None) -> None:
        """Draws the display anew."""
        display: Any = importlib.import_module("IPython.display").display  # which a kernel has
        picture = image(svg) if svg is not None else ""
        shown = {"text/plain": line, "text/html": f'<pre style="margin:0">{escape(line)}</pre>{picture}'}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def screen_here() -> RunScreen:
    """A cell's where a notebook's kernel runs this, else text."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return CellScreen() if getattr(shell, "kernel", None) is not None else TextScreen()
