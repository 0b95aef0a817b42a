"""The `meshtrain` command. `app.py` holds the list of commands; nothing here imports torch."""

import os
import sys

from meshtrain.cli.ui.exits import EXIT_INTERRUPTED

COMPLETE_VARIABLE = "_MESHTRAIN_COMPLETE"  # set by the shell that asks what could be typed


def main() -> None:
    """Entry point of the `meshtrain` script. README.md has the exit codes."""
    if COMPLETE_VARIABLE in os.environ:
        # Whoever presses TAB waits: typer would import it to take markup out of what is offered, which has none.
        sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        from meshtrain.cli.app import app
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    # A name in somebody's log that this terminal cannot encode must not end the command.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="meshtrain")
