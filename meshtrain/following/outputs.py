"""The files that a job's ranks wrote to their output folders, fetched piece by piece from whoever has them."""

from collections.abc import Iterator

from meshtrain.client import Client, ask
from meshtrain.errors import RequestError
from meshtrain.following.log_pieces import PIECE_TIMEOUT_S
from meshwire import limits
from meshwire.messages.job import Fetch, Fetched, OutputFile


class OutputBroken(Exception):
    """A result did not come whole; says why."""


def output_pieces(client: Client, job: str, file: OutputFile) -> Iterator[bytes]:
    """As many bytes as were listed: what grows meanwhile comes as it was, and nobody sends without end.

    Raises OutputBroken.
    """
    offset_bytes = 0
    name = f"rank{file.rank}/{file.path}"
    while offset_bytes < file.size_bytes:
        body = Fetch(
            job=job,
            what="output",
            rank=file.rank,
            path=file.path,
            offset_bytes=offset_bytes,
            max_bytes=min(limits.FETCH_BYTES_MAX, file.size_bytes - offset_bytes),
        )
        try:
            piece = ask(client, body, Fetched, name=name, timeout_s=PIECE_TIMEOUT_S)
        except (RequestError, TimeoutError) as error:
            raise OutputBroken(str(error)) from error
        if not 0 < len(piece.data) <= body.max_bytes:
            raise OutputBroken(f"{name} ended after {offset_bytes} of {file.size_bytes} bytes")
        yield piece.data
        offset_bytes += len(piece.data)
