"""The first moments of a connection between daemons: the key is verified, both say hello, and it becomes a link."""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshtraind.connection import Connection, ConnectionLost, RequestError
from meshtraind.loglimit import caused_by
from meshtraind.tls import NotPinnedError
from meshwire.addresses import Address
from meshwire.header import Header
from meshwire.messages.link import Hello
from meshwire.wiretypes import Wire

if TYPE_CHECKING:
    from meshtraind.links import Links

log = logging.getLogger(__name__)


class Greeting:
    """Handler of a connection before its hello.

    Whoever was dialled says hello first. Whoever dials answers only where it makes a link: of several dials to one
    device the other end then links the same one.

    The hello makes the link at once, in the call that brings it: what follows it may arrive in the same read.
    """

    def __init__(self, links: "Links", dialled: Address | None) -> None:
        self.connection = Connection(self, name=str(dialled) if dialled is not None else "a new connection")
        self._links = links
        self._dialled = dialled
        self._device: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def finish(self, hello: Hello | None) -> str:
        """Verifies the other end, says `hello` if given, and waits for its hello. Returns the device.

        Raises NotPinnedError or ConnectionLost; the caller sets the deadline. The connection is closed unless linked.
        """
        try:
            self._links.verify(self.connection)
            if hello is not None:
                self.connection.notify(hello)
            return await self._device
        except BaseException as error:
            self.connection.close(str(error) or "no hello in time")
            raise

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        return "the first message must be a hello"

    def chunk_received(self, conn: Connection, header: Header) -> None:
        raise AssertionError("no chunk is accepted here")

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        if not isinstance(body, Hello):
            conn.refuse("the first message must be a hello")
            return
        try:
            self._links.verify(conn)
            self._device.set_result(self._links.greeted(conn, body, self._dialled))
        except (NotPinnedError, ConnectionLost) as error:
            log.warning("%s: %s", conn.name, error, extra=caused_by(conn.remote_host))
            conn.refuse(str(error))

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Callable[[Wire], None]) -> Wire:
        conn.refuse("the first message must be a hello")
        raise RequestError("the first message must be a hello")

    def lost(self, conn: Connection, reason: str) -> None:
        if not self._device.done():
            self._device.set_exception(ConnectionLost(reason))
            self._device.exception()  # nobody may be waiting
