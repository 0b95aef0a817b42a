"""`version`: what is installed here."""

import platform
from importlib.metadata import version as installed

from meshtrain.cli.ui.errors import reported
from meshwire.frames.header import WIRE_VERSION


@reported
def version() -> None:
    """Show what is installed."""
    print(f"meshtrain {installed('meshtraind')} (wire version {WIRE_VERSION}, Python {platform.python_version()})")
