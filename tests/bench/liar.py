"""A paired device that keeps to no rule: the project's own key, TLS, frames and messages, and any content."""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from meshtraind.trust.identity import Identity
from meshtraind.trust.pins import PinTable
from meshtraind.trust.tls import Trust
from meshwire.addresses import Address
from meshwire.frames.header import HEADER_BYTES, Header, Kind, decode_header
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done, Envelope, Failure, Role, decode, encode
from meshwire.messages.job import Fetch
from meshwire.messages.link import Heartbeat, Hello, Software

ANSWER_TIMEOUT_S = 15.0
LINK_TIMEOUT_S = 10.0

Serve = Callable[[Fetch], Wire | None]


def frame(envelope: Envelope, *, job: int = 0, generation: int = 0) -> bytes:
    """A control frame."""
    payload = encode(envelope)
    return Header(Kind.CONTROL, len(payload), job=job, generation=generation).encode() + payload


class LiarLink:
    """One link to a daemon.

    It ends when the daemon has refused it, as every device ends such a link: who refuses reads on until then, for two
    seconds at most.

    Attributes:
        hello: what the daemon said first.
        notices: the newest of what it said besides.
        refused: why it was refused, if the daemon said so.
        stays: it does not end, whatever the daemon says.
        fetches: how often it has asked for a piece of a blob.
        answers: to other requests, by type; else they fail.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, serve: Serve) -> None:
        self.hello: Hello
        self.notices: collections.deque[Wire] = collections.deque(maxlen=1000)
        self.refused = ""
        self.stays = False
        self.fetches = 0
        self.answers: dict[type[Wire], Callable[[Any], Wire]] = {}
        self.writer = writer
        self._reader = reader
        self._serve = serve
        self._answers: dict[int, asyncio.Future[Wire]] = {}
        self._number = 0

    @property
    def open(self) -> bool:
        """Whether the daemon has not closed it."""
        return not self._reading.done()

    async def begin(self, hello: Hello) -> None:
        """Raises OSError or TimeoutError when the daemon makes no link."""
        self.writer.write(frame(Envelope(Role.NOTICE, 0, hello)))
        async with asyncio.timeout(LINK_TIMEOUT_S):
            first = await self._next()
        if first is None or not isinstance(first.body, Hello):
            raise ConnectionError(f"the daemon's first word is {first}")
        self.hello = first.body
        self._reading = asyncio.get_running_loop().create_task(self._read(), name="a liar's link")

    async def end(self) -> None:
        """Leaves without a word."""
        self.writer.transport.abort()
        await asyncio.wait({self._reading})

    def deafen(self) -> None:
        """Reads nothing from now on, so that what the daemon says waits there."""
        transport = self.writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        transport.pause_reading()

    def notify(self, body: Wire, *, job: int = 0, generation: int = 0) -> None:
        """Says something that expects nothing."""
        self.writer.write(frame(Envelope(Role.NOTICE, 0, body), job=job, generation=generation))

    async def ask(self, body: Wire, *, job: int = 0, generation: int = 0) -> Wire:
        """The reply, or the `Failure`. Raises TimeoutError, and ConnectionError when the link ends first."""
        self._number += 1
        answer: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        self.writer.write(frame(Envelope(Role.REQUEST, self._number, body), job=job, generation=generation))
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await answer

    async def _read(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ConnectionError):
            while (self.stays or not self.refused) and (envelope := await self._next()) is not None:
                self._take(envelope)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError(self.refused or "the daemon closed the link"))
                answer.exception()  # nobody may be waiting
        self.writer.transport.abort()

    async def _next(self) -> Envelope | None:
        """The next message; chunks are thrown away. None: it cannot be read."""
        while True:
            header = decode_header(await self._reader.readexactly(HEADER_BYTES))
            if isinstance(header, str):
                return None
            payload = await self._reader.readexactly(header.carried_bytes)
            if header.kind is Kind.CONTROL:
                envelope = decode(payload)
                return envelope if isinstance(envelope, Envelope) else None

    def _take(self, envelope: Envelope) -> None:
        body: Any = envelope.body
        match envelope.role:
            case Role.REQUEST:
                reply: Wire | None = Done() if isinstance(body, Heartbeat) else Failure(error="no")
                if isinstance(body, Fetch):
                    self.fetches += 1
                    reply = self._serve(body)
                elif (answers := self.answers.get(type(body))) is not None:
                    reply = answers(body)
                if reply is not None:
                    role = Role.FAILURE if isinstance(reply, Failure) else Role.REPLY
                    self.writer.write(frame(Envelope(role, envelope.id, reply)))
            case Role.REPLY | Role.FAILURE:
                answer = self._answers.pop(envelope.id, None)
                if answer is not None and not answer.done():
                    answer.set_result(body)
            case Role.NOTICE if type(body).__name__ == "Refuse":
                self.refused = body.reason
            case _:
                self.notices.append(body)


class Liar:
    """A device with a pinned key.

    Args:
        pins: whom it knows; closed by `close`.
    """

    def __init__(self, identity: Identity, pins: PinTable) -> None:
        self.id = identity.device_id
        self.name = identity.name
        self._pins = pins
        self._trust = Trust(identity, pins)
        self._hello = Hello(
            incarnation=1,
            name=identity.name,
            listen_port=1,
            software=Software(meshtrain="0", python="3", torch=None, system="liar"),
            cores=1,
            memory_bytes=1,
        )

    @property
    def hello(self) -> Hello:
        """What it has said first on its newest link."""
        return self._hello

    @property
    def incarnation(self) -> int:
        """Of its newest link."""
        return self._hello.incarnation

    async def connect(
        self, address: Address, serve: Serve = lambda _wanted: None, *, name: str | None = None
    ) -> LiarLink:
        """Makes a link, in the place of the one before. Raises OSError or TimeoutError."""
        said = {"incarnation": self._hello.incarnation + 1, "name": name or self.name}
        self._hello = self._hello.model_copy(update=said)
        async with asyncio.timeout(LINK_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=self._trust.client_context, server_hostname="meshtrain"
            )
        link = LiarLink(reader, writer, serve)
        try:
            await link.begin(self._hello)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            writer.transport.abort()
            raise ConnectionError(f"the daemon at {address} makes no link: {error}") from error
        return link

    @asynccontextmanager
    async def at(
        self, address: Address, serve: Serve = lambda _wanted: None, *, name: str | None = None
    ) -> AsyncIterator[LiarLink]:
        """A link that ends with the context."""
        link = await self.connect(address, serve, name=name)
        try:
            yield link
        finally:
            await link.end()

    def close(self) -> None:
        """Lets go of its pins."""
        self._pins.close()
