"""`version`, and `meshtrain --version`: what is installed here."""

import platform
from importlib.metadata import version as installed
from typing import Annotated

import typer

from meshtrain.cli.ui.errors import reported
from meshtrain.cli.ui.options import Json
from meshtrain.cli.ui.terminal import print_json
from meshwire.frames.header import WIRE_VERSION


@reported
def version(as_json: Json = False) -> None:
    """Show what is installed here, and the wire version, which laptops must have in common."""
    if as_json:
        versions = {"meshtrain": installed("meshtraind"), "wire_version": WIRE_VERSION}
        print_json(versions | {"python": platform.python_version()})
        return
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
