"""`dashboard`: the daemon's page in the browser."""

import webbrowser
from typing import Annotated

import typer

from meshtrain.cli.ui.connection import ask, connected
from meshtrain.cli.ui.errors import reported
from meshtrain.cli.ui.options import DataDir, Json
from meshtrain.cli.ui.terminal import human_seconds, plain, print_json, say
from meshwire.messages.local import DashboardOpened, OpenDashboard


@reported
def dashboard(
    data_dir: DataDir = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, and start no browser.")] = False,
    json: Json = False,
) -> None:
    """Open the dashboard. This device's links, devices and jobs, live, in the browser of this machine.

    The daemon serves it from now on until it ends, to this machine alone. The address that is printed lets one browser
    in, once, within a minute; type the command again for another one, or when the page says that its session is over.
    With --json nothing is opened either.
    """
    with connected(data_dir) as client:
        reply = ask(client, OpenDashboard(), DashboardOpened, name="dashboard")
    if json:
        print_json(plain(reply))
        return
    print(reply.url)
    if no_open or not webbrowser.open(reply.url):
        say(f"Open this address in a browser on this machine. It lets one in, within {human_seconds(reply.expires_s)}.")
