"""`version`, and `meshtrain --version`: what is installed here."""

import platform
from importlib.metadata import version as installed
from typing import Annotated

import typer

from meshtrain.cli.ui.errors import reported
from meshwire.frames.header import WIRE_VERSION


@reported
def version() -> None:
    """Show what is installed."""
    print(f"meshtrain {installed('meshtraind')} (wire version {WIRE_VERSION}, Python {platform.python_version()})")


def _show(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def root(
    wanted: Annotated[
        bool, typer.Option("--version", callback=_show, is_eager=True, help="Show what is installed.")
    ] = False,
) -> None:
    """What `meshtrain` takes before a command."""
