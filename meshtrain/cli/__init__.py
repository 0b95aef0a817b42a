"""The `meshtrain` command. `app.py` holds the list of commands; nothing here imports torch."""

import sys

from meshtrain.cli.ui.exits import EXIT_INTERRUPTED


def main() -> None:
    """Entry point of the `meshtrain` script. README.md has the exit codes."""
    try:
        from meshtrain.cli.app import app
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    # A name in somebody's log that this terminal cannot encode must not end the command.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="meshtrain")
