"""What commands print: data on stdout, everything said about it on stderr. rich is imported when first needed."""

import json
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwire.text import printable

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 1000  # columns of a table that no terminal shows: nothing is cut off or wrapped

COLOUR_CHARS_MAX = 64  # of one sequence; foreground, background and five attributes take 45
_COLOUR = re.compile(rf"\x1b\[([0-9;:]{{0,{COLOUR_CHARS_MAX - 3}}})m")  # SGR (ECMA-48): all that a terminal may obey
NO_COLOUR = "\x1b[0m"


def printable_lines(text: str) -> str:
    """Makes a text safe to show as `printable` does, with line breaks and tabs kept: for errors of several lines."""
    return "".join(char if char in "\n\t" else printable(char) for char in text)


def script_text(text: str) -> str:
    """What a script wrote, on whichever machine, safe to show: its log, its traceback.

    Line breaks, tabs and colours stay, and no colour outlives its line. All else that a terminal would obey, or that
    would hide or turn text around, is shown as an escape. In linear time; doing it again changes nothing.
    """
    return text if text.isprintable() else "\n".join(map(_script_line, text.split("\n")))


def _script_line(line: str) -> str:
    shown: list[str] = []
    at, coloured = 0, False
    for colour in _COLOUR.finditer(line):
        shown += _escaped(line[at : colour.start()]), colour[0]
        at, coloured = colour.end(), colour[1].strip("0;") != ""
    shown.append(_escaped(line[at:]))
    return "".join(shown) + (NO_COLOUR if coloured else "")


def _escaped(text: str) -> str:
    """Wide and narrow spaces stay, as some languages write numbers with them."""
    if text.isprintable():
        return text
    return "".join(char if char == "\t" or unicodedata.category(char) == "Zs" else printable(char) for char in text)


def cut_at(text: str, chars: int) -> int:
    """The place at which to cut a text that is longer than `chars`, so that no colour's sequence is cut: there, or a
    little before."""
    begin = text.rfind("\x1b", max(0, chars - COLOUR_CHARS_MAX + 1), chars)
    return begin if begin > 0 and _COLOUR.match(text, begin, chars) is None else chars


def console(*, stderr: bool = False) -> "Console":
    """A rich console on this moment's stdout or stderr; NO_COLOR and pipes are honoured."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = PIPE_WIDTH
    return made


def at_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def say(text: str, style: str | None = None) -> None:
    """A line for the person, on stderr."""
    if style is None:
        print(text, file=sys.stderr, flush=True)
    else:
        console(stderr=True).print(text, style=style)


def print_json(value: Any) -> None:
    """The one JSON document of a command."""
    print(json.dumps(value, indent=2, allow_nan=False), flush=True)


def plain(model: "BaseModel") -> Any:
    """A message as JSON values; numbers that JSON does not have (nan, inf) become null."""
    return json.loads(model.model_dump_json())


def made_table(columns: Sequence[str], rows: Sequence[Sequence[str]], wrapping: str | None = None) -> "Table":
    """Aligned columns without lines, as docker and kubectl print them. Cells must be `printable`.

    Args:
        wrapping: the column whose cells take several lines where the terminal is too narrow; others are never broken.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column != wrapping)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], wrapping: str | None = None) -> None:
    """Prints `made_table` to stdout. Where the terminal is too narrow even so, lines run on: nothing is cut off."""
    from rich.measure import Measurement

    to, table = console(), made_table(columns, rows, wrapping)
    needed = Measurement.get(to, to.options.update(max_width=PIPE_WIDTH), table).minimum
    to.width = max(to.width, needed)
    to.print(table, soft_wrap=False)


def human_step(seconds: float) -> str:
    """The time of a step for people: milliseconds where seconds are too coarse."""
    return human_seconds(seconds) if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def human_seconds(seconds: float) -> str:
    """A duration for people, e.g. "3 min", "2.4 s"."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    for unit, length, up_to in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < up_to:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
