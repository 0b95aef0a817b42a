"""What was typed wrongly, told as every other error is: `error: …`, and the help that shows how it goes."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from meshtrain.cli.ui.errors import show_error

# Of click, or of the copy of it that later versions of typer bring along; what is raised for a wrong command line.
_USAGE_ERROR: Any = typer.BadParameter.__base__


class MeshtrainGroup(TyperGroup):
    """Commands whose usage errors are shown by `errors.show_error`."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Called by click: reads what stands before the command."""
        with _told():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Called by click: reads the rest, and runs the command."""
        with _told():
            return super().invoke(ctx)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except _USAGE_ERROR as error:
        if type(error).show is _USAGE_ERROR.show:  # else it is no error, but the help of who has typed nothing
            error.show = functools.partial(_show, error)
        raise


def _show(error: Any, file: object = None) -> None:  # noqa: ARG001 - as click calls it
    typed = "meshtrain" if error.ctx is None else error.ctx.command_path
    show_error(error.format_message(), f"{typed} --help")
