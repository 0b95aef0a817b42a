"""`config`: how much of this machine meshtrain may take, shown and set."""

from typing import Annotated

import typer

from meshtrain.cli.ui.completion import complete_settings
from meshtrain.cli.ui.connection import connected
from meshtrain.cli.ui.errors import BadCommandLine, CliError, reported
from meshtrain.cli.ui.options import DataDir, Json
from meshtrain.cli.ui.terminal import plain, print_json, print_table, say
from meshtrain.client import ask
from meshtrain.following.shown_text import printable_lines
from meshwire.messages.config import ConfigEntry, ConfigShown, GetConfig, SetConfig, SettingValue
from meshwire.text import printable


@reported
def config(
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="The setting to show or set; else all.", autocompletion=complete_settings),
    ] = None,
    value: Annotated[str | None, typer.Argument(metavar="VALUE", help="What it is to be from now on.")] = None,
    unset: Annotated[bool, typer.Option("--unset", help="Take KEY back to its default.")] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show or set how much of this device meshtrain may take.

    Counts at once, and for this device alone. It is kept in config.toml in the data folder, which may be edited, too: a
    daemon that runs notices it. How the daemon is named, found and started is said to `meshtrain up`.
    """
    if unset and (key is None or value is not None):
        raise BadCommandLine("--unset takes one KEY and no VALUE", "meshtrain config nice --unset")
    sets = key is not None and (unset or value is not None)
    with connected(data_dir) as client:
        request = SetConfig(key=key, value=value) if key is not None and sets else GetConfig()
        reply = ask(client, request, ConfigShown, name="config")
    entries = reply.entries if key is None else (_entry(reply, key),)
    if json:
        print_json(plain(reply if key is None else entries[0]))
    elif sets:
        print(f"{printable(entries[0].key)} = {_shown(entries[0].value)}")
    else:
        rows = [(entry.key, _shown(entry.value), _shown(entry.default), entry.about) for entry in entries]
        shown = [tuple(map(printable, row)) for row in rows]
        print_table(("KEY", "VALUE", "DEFAULT", "WHAT IT DOES"), shown, wrapping="WHAT IT DOES")
        say(f"In {printable(reply.path)}. To set one: meshtrain config KEY VALUE")
    if reply.problem is not None:
        say(
            f"warning: what counts is as it was before the file was changed: {printable_lines(reply.problem)}",
            style="yellow",
        )


def _entry(reply: ConfigShown, key: str) -> ConfigEntry:
    for entry in reply.entries:
        if entry.key == key:
            return entry
    keys = ", ".join(entry.key for entry in reply.entries)
    raise CliError(f"no setting is called {printable(key)}; there are: {keys}", "meshtrain config")


def _shown(value: SettingValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else printable(str(value))
