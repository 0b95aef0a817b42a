"""The daemon on this device, as commands talk to it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from meshtrain.cli.ui.errors import CliError
from meshtrain.client import Client
from meshtrain.datadir import data_folder
from meshwire.message_base import Wire

REQUEST_TIMEOUT_S = 30.0  # what a daemon answers from memory or from a linked peer

Reply = TypeVar("Reply", bound=Wire)


@contextmanager
def connected(data_dir: Path | None) -> Iterator[Client]:
    """A connection to the daemon of this data folder. Raises DaemonNotRunning."""
    client = Client.connect(data_folder(data_dir))
    try:
        yield client
    finally:
        client.close()


def ask(
    client: Client,
    body: Wire,
    reply_type: type[Reply],
    *,
    name: str,
    timeout_s: float = REQUEST_TIMEOUT_S,
    on_event: Callable[[Wire], None] | None = None,
    silence_s: float | None = None,
) -> Reply:
    """Makes one request. Raises what `Client.request` raises, and CliError when the daemon answers something else."""
    reply = client.request(body, timeout_s=timeout_s, name=name, on_event=on_event, silence_s=silence_s)
    if not isinstance(reply, reply_type):
        raise CliError(
            f"the daemon answered {name} with {type(reply).__name__}; it is of another version than this command",
            "meshtrain down && meshtrain up",
        )
    return reply
