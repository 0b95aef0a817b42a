"""`init`: a working example in the user's own folder."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshtrain.cli.ui.errors import CliError, reported
from meshtrain.cli.ui.terminal import say
from meshwire.text import printable


class Example(StrEnum):
    GPT = "gpt"
    MLP = "mlp"


@reported
def init(
    example: Annotated[
        Example, typer.Option("--example", help="gpt: text, character by character; mlp: the smallest.")
    ] = Example.GPT,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; this folder without it.")] = Path("."),
) -> None:
    """Write a working train.py, and the data it trains on."""
    from meshtrain.examples.init import write_example

    try:
        written = write_example(example.value, folder)
    except FileExistsError as error:
        raise CliError(str(error), f"meshtrain init --example {example.value} NEW_FOLDER") from error
    for path in written:
        print(printable(str(path)))
    go = "" if folder == Path(".") else f"cd {shlex.quote(str(folder))} && "
    say(f"Next, on all devices:  {go}meshtrain submit train.py")
    say(f"On this one alone:     {go}python train.py")
