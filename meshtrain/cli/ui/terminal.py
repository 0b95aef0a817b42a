"""What commands print: data on stdout, everything said about it on stderr. rich is imported when first needed."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 1000  # columns of a table that no terminal shows: nothing is cut off or wrapped


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
