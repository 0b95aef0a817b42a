"""How much is asked of one peer at once: enough to hide the network's delay, and never all that it answers at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from meshtraind.transport.connection import Connection
from meshwire import limits

PIECES_PER_PEER = limits.REQUESTS_PER_CONNECTION_MAX // 4  # of all jobs together; the rest is for who asks other things
BYTES_PER_PEER = 4 * limits.FETCH_BYTES_MAX  # what a message of another job may find queued in front of it


class FetchWindow:
    """The pieces that are asked of one peer at this moment."""

    def __init__(self) -> None:
        self._pieces = 0
        self._bytes = 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def room_for(self, piece_bytes: int) -> AsyncIterator[None]:
        """Waits until a piece of at most FETCH_BYTES_MAX may be asked for. Whoever is in front has a deadline."""
        while self._pieces >= PIECES_PER_PEER or self._bytes + piece_bytes > BYTES_PER_PEER:
            await self._changed.wait()
        self._pieces += 1
        self._bytes += piece_bytes
        try:
            yield
        finally:
            self._pieces -= 1
            self._bytes -= piece_bytes
            self._changed.set()
            self._changed = asyncio.Event()


_windows: WeakKeyDictionary[Connection, FetchWindow] = WeakKeyDictionary()


def window_of(peer: Connection) -> FetchWindow:
    """The one of this connection, which all jobs share."""
    return _windows.setdefault(peer, FetchWindow())
