"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from meshwire.local import DATA_DIR_VARIABLE

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar=DATA_DIR_VARIABLE,
        metavar="DIR",
        show_envvar=True,
        help="Folder of the daemon's keys, jobs and logs.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
