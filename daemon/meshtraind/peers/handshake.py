"""The first moments of a connection between daemons: the key is verified, both say hello, and it becomes a link.

Or, on the listener, a guest of a pairing: `Doorway` tells the two apart.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol, cast

from meshtraind.runtime.log_limit import caused_by
from meshtraind.transport.connection import Connection, ConnectionEnded, Emit, RequestFailed
from meshtraind.trust.tls import PAIRING_ALPN, NotPinnedError
from meshwire import limits
from meshwire.addresses import Address
from meshwire.frames.header import Header
from meshwire.message_base import Wire
from meshwire.messages.link import Hello

log = logging.getLogger(__name__)


class LinkMaker(Protocol):
    """Whoever owns the links: says whether a caller is to be trusted, and makes a link of one that has said hello."""

    def verify_peer(self, connection: Connection) -> None:
        """Notes on the connection whose key the other end has. Raises NotPinnedError if that is not pinned now."""

    def make_link(self, connection: Connection, hello: Hello, dialled: Address | None) -> str:
        """Makes a link to a verified peer that has said hello; returns its device id. Raises ConnectionEnded."""

    def note_other_version(self, connection: Connection, version: int) -> str:
        """A verified peer speaks another wire version (W6). Returns what to tell it."""

    def left(self, connection: Connection) -> None:
        """Hears that a connection which may have been told to end has ended."""


class Greeting:
    """Hears a connection until its hello has come, which makes it a link.

    Whoever was dialled says hello first. Whoever dials answers only where it makes a link: of several dials to one
    device the other end then links the same one.

    The hello makes the link at once, in the call that brings it: what follows it may arrive in the same read. It comes
    in time or not: before the deadline it ends that, and the link stays; after it, and after the task of the handshake
    was cancelled for another reason, no link is made, even if that task has not heard of it yet.

    Attributes:
        other_version: the other end speaks another wire version, and that was told.
    """

    def __init__(self, links: LinkMaker, dialled: Address | None) -> None:
        self.connection = Connection(self, name=str(dialled) if dialled is not None else "a new connection")
        self.connection.on_other_version = self._speaks
        self.other_version = False
        self._links = links
        self._dialled = dialled
        self._device: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._deadline: asyncio.Timeout | None = None  # while the handshake lasts
        self._task: asyncio.Task[Any] | None = None

    @contextlib.asynccontextmanager
    async def within(self, timeout_s: float) -> AsyncIterator[None]:
        """The handshake, which the current task makes, and its deadline. What is no link when this is left ends at
        once: uvloop, cancelled between TCP's handshake and TLS's, closes the socket and still hands over what was
        read.
        """
        self._task = asyncio.current_task()
        try:
            async with asyncio.timeout(timeout_s) as self._deadline:
                yield
        except BaseException as error:
            if not self._device.done() or self._device.cancelled():
                self.connection.abort(str(error) or "no hello in time")
            raise

    async def finish(self, hello: Hello | None) -> str:
        """Verifies the other end, says `hello` if given, waits `within` a deadline for its hello. Returns the device.

        Raises NotPinnedError or ConnectionEnded.
        """
        self._links.verify_peer(self.connection)
        if hello is not None:
            self.connection.notify(hello)
        return await self._device

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        return "the first message must be a hello"

    def chunk_received(self, conn: Connection, header: Header) -> None:
        raise AssertionError("no chunk is accepted here")

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        if not isinstance(body, Hello):
            conn.refuse("the first message must be a hello")
            return
        if self._deadline is None or self._task is None or self._task.cancelling():
            conn.abort("no hello in time")
            return
        try:
            self._links.verify_peer(conn)
            device = self._links.make_link(conn, body, self._dialled)
            self._deadline.reschedule(None)
            self._device.set_result(device)
            conn.on_other_version = None
        except (NotPinnedError, ConnectionEnded) as error:
            log.warning("%s: %s", conn.name, error, extra=caused_by(conn.remote_host))
            conn.refuse(str(error))

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Emit) -> Wire:
        conn.refuse("the first message must be a hello")
        raise RequestFailed("the first message must be a hello")

    def _speaks(self, version: int) -> str:
        """Compares wire versions (W6), before any hello of the other end could be read."""
        self.other_version = True
        try:
            self._links.verify_peer(self.connection)
        except (NotPinnedError, ConnectionEnded) as error:
            return str(error)
        return self._links.note_other_version(self.connection, version)

    def lost(self, conn: Connection, reason: str) -> None:
        self._links.left(conn)
        if not self._device.done():
            self._device.set_exception(ConnectionEnded(reason))
            self._device.exception()  # nobody may be waiting


class Doorway(asyncio.Protocol):
    """An accepted connection while its handshake lasts; what the caller named there decides who reads it.

    Pairing's ALPN makes it a guest's stream, which knows no message of links. All else becomes a link's connection,
    whose key is verified here, in the call that tells of the handshake and therefore before a byte is read.

    Attributes:
        greeting: of the link that it may become.
        guest: the stream of a guest, once it is one.
        made: there is a transport, which closes the socket from now on.
    """

    def __init__(self, links: LinkMaker) -> None:
        self.greeting = Greeting(links, None)
        self.guest: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.made = False
        self._links = links

    def connection_made(self, made: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, made)
        self.made = True
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == PAIRING_ALPN:
            reader = asyncio.StreamReader(limit=limits.PAIRING_FRAME_BYTES_MAX)
            stream = asyncio.StreamReaderProtocol(reader)
            self.guest = reader, asyncio.StreamWriter(transport, stream, reader, asyncio.get_running_loop())
            transport.set_protocol(stream)
            stream.connection_made(transport)
            return
        connection = self.greeting.connection
        transport.set_protocol(connection)
        connection.connection_made(transport)
        try:
            self._links.verify_peer(connection)
        except NotPinnedError as error:
            connection.close(str(error), now=True)
