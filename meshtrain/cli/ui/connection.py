"""The daemon on this device, as commands talk to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtrain.client import Client
from meshtrain.datadir import data_folder


@contextmanager
def connected(data_dir: Path | None) -> Iterator[Client]:
    """A connection to the daemon of this data folder. Raises DaemonNotRunning."""
    client = Client.connect(data_folder(data_dir))
    try:
        yield client
    finally:
        client.close()
