"""A daemon that lies: `python -m tests.bench.lyingdaemon LIE ROUND ..`, with the command of a daemon behind it.

From that round on it tells its job's members one of `tests.daemon.lies`, or is `killed`, and does not come back.
"""

import os
import sys
from typing import Any

from meshtraind.cli import main
from meshtraind.transport.connection import Connection
from meshwire.frames.header import Header, Kind
from meshwire.message_base import Wire
from meshwire.messages.generation import AskIn
from meshwire.messages.rounds import Bind
from tests.daemon.liarmesh import Lie, at_round
from tests.daemon.lies import LIES


def no_block(payload: memoryview | bytes, _capped_bytes_per_s: float | None = None) -> bytes | None:
    """What is said to be an LZ4 block."""
    return b"\xff" * min(100, len(payload) - 1)


def killed(_header: Header, content: bytes | Wire | None) -> Any:
    """Before it says the first word of the round."""
    if isinstance(content, Bind):
        os._exit(9)
    return [(_header, content)]


def lie_with(name: str, number: int) -> None:
    """From now on, on every link."""
    lie: Lie = at_round(number, killed if name == "killed" else LIES[name][1])
    send_chunk, notify = Connection.send_chunk, Connection.notify

    def false_chunk(self: Connection, header: Header, payload: memoryview | bytes | None) -> None:
        told = lie(header, None if payload is None else bytes(payload))
        if isinstance(told, str):  # what nobody can read
            self.lossless.packed = no_block  # type: ignore[assignment,method-assign]
            told = [(header, bytes(header.payload_bytes))]
        for said, content in told:
            assert content is None or isinstance(content, bytes)
            send_chunk(self, said, content)

    def false_word(self: Connection, body: Wire, **fields: int) -> None:
        if isinstance(body, AskIn):
            return
        told = lie(Header(Kind.CONTROL, 1), body)
        assert not isinstance(told, str)
        for _, content in told:
            assert isinstance(content, Wire)
            notify(self, content, **fields)

    Connection.send_chunk = false_chunk  # type: ignore[method-assign]
    Connection.notify = false_word  # type: ignore[method-assign]


if __name__ == "__main__":
    lie_with(sys.argv[1], int(sys.argv[2]))
    run = sys.argv.index("meshtraind")  # behind it, what the daemon is to do
    sys.argv = ["meshtraind", *sys.argv[run + 1 :]]
    sys.exit(main())
