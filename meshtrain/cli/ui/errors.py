"""How a command fails: `error: …` and `try: …` on stderr, and the exit code."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer
from pydantic import ValidationError

from meshtrain.cli.ui.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from meshtrain.cli.ui.terminal import say
from meshtrain.errors import ConnectionLost, DaemonNotRunning, MeshtrainError, OtherVersion, UnexpectedReply
from meshtrain.following.shown_text import printable_lines

P = ParamSpec("P")
R = TypeVar("R")


class CliError(Exception):
    """What went wrong, for a person; `hint` is the command or deed that helps."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class BadCommandLine(CliError):
    """The command line itself does not make sense."""

    exit_code = EXIT_USAGE


def show_error(message: str, hint: str | None = None) -> None:
    """Prints one error to stderr."""
    say(f"error: {printable_lines(message)}", style="red")
    if hint is not None:
        say(f"try: {printable_lines(hint)}")


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Ends a command with its exit code and without a traceback for everything that is not a bug."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except CliError as error:
            show_error(str(error), error.hint)
            raise typer.Exit(error.exit_code) from None
        except DaemonNotRunning as error:
            show_error(str(error), "meshtrain up")
        except (OtherVersion, UnexpectedReply) as error:
            show_error(str(error), "meshtrain down && meshtrain up")
        except ConnectionLost as error:
            show_error(f"the daemon on this device went away: {error}", "meshtrain status")
        except MeshtrainError as error:
            show_error(str(error))
        except BrokenPipeError:
            raise  # typer ends quietly, as `| head` expects
        except OSError as error:
            show_error(str(error))
        except ValidationError as error:  # what was typed does not fit into the message that asks for it
            first = error.errors(include_url=False, include_input=False)[0]
            show_error(f"{' '.join(str(part) for part in first['loc'])}: {first['msg']}")
            raise typer.Exit(EXIT_USAGE) from None
        except UnicodeEncodeError:
            show_error("an argument is not valid Unicode")
            raise typer.Exit(EXIT_USAGE) from None
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise typer.Exit(EXIT_FAILED)

    return run
