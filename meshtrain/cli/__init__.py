"""The `meshtrain` command. `app.py` holds the list of commands; nothing here imports torch."""

import sys


def main() -> None:
    """Entry point of the `meshtrain` script. Exit codes: 0 done, 1 failed, 2 usage, of followed jobs their outcome."""
    from meshtrain.cli.app import app

    # A name in somebody's log that this terminal cannot encode must not end the command.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="meshtrain")
