"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from meshtrain.cli.ui.completion import complete_jobs
from meshwire.memory_layout.shared_slots import DATA_DIR_VARIABLE

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
LatestJob = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="Id, a prefix of it, or name; else the latest.", autocompletion=complete_jobs),
]
AsModule = Annotated[
    bool,
    typer.Option(
        "--module",
        "-m",
        help="SCRIPT is a module's name, package.train: it runs as by python -m, from the working directory.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class Grouped(TyperCommand):
    """A command whose help shows the options with a `rich_help_panel` under that title, after the others: plain help
    has no panels of its own."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Called by click."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                title = getattr(parameter, "rich_help_panel", None) or kind
                groups.setdefault(title, []).append(record)
        own = [title for title in groups if title not in ("Arguments", "Options")]
        for title in ("Arguments", "Options", *own):
            if title in groups:
                with formatter.section(title):
                    formatter.write_dl(groups[title])
