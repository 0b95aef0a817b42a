"""The last instant of a handshake: a hello comes in time and stays a link, or late and makes none."""

import asyncio
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.peers.handshake import Greeting
from meshtraind.peers.links import Links
from meshtraind.transport.connection import Connection
from meshtraind.trust.tls import Trust
from meshwire.addresses import Address
from meshwire.discovery.addressbook import AddressBook
from meshwire.frames.header import HEADER_BYTES, Header, Kind
from meshwire.messages.envelope import Envelope, Role, encode
from meshwire.messages.link import Hello, Software

ADDRESS = Address(host="127.0.0.1", port=29610)
HELLO = Hello(
    incarnation=1,
    name="bert",
    listen_port=0,
    software=Software(meshtrain="0", python="3", torch=None, system="test"),
    cores=1,
    memory_bytes=1,
)


class Transport:
    """Notes how it ends. `gone`: uvloop has closed the socket, and whatever would write raises."""

    def __init__(self, *, gone: bool = False) -> None:
        self.ended: list[str] = []
        self.gone = gone

    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else None

    def set_write_buffer_limits(self, **_limits: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, _data: bytes) -> None:
        if self.gone:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    def close(self) -> None:
        self.write(b"TLS's goodbye")
        self.ended.append("closed")

    def abort(self) -> None:
        self.ended.append("aborted")


def read(connection: Connection) -> None:
    """The other end's hello comes from the socket."""
    body = encode(Envelope(Role.NOTICE, 0, HELLO))
    said = Header(Kind.CONTROL, len(body)).encode() + body
    while said:
        place = connection.get_buffer(-1)
        piece = said[: min(len(place), HEADER_BYTES)]
        place[: len(piece)] = piece
        connection.buffer_updated(len(piece))
        said = said[len(piece) :]


def _nothing() -> None:
    pass


class Handshake:
    """Of one dial; in the place of `Links` something that notes which links it has made."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.transport = Transport()
        links = SimpleNamespace(verify_peer=lambda _connection: None, make_link=self._greeted)
        self.greeting = Greeting(cast(Links, links), ADDRESS)
        self.greeting.connection.connection_made(cast(Any, self.transport))

    def _greeted(self, _connection: Connection, hello: Hello, _dialled: Address | None) -> str:
        self.made.append(hello.name)
        return "device"

    async def run(
        self, *, before: Callable[[], None] = _nothing, after: Callable[[], None] = _nothing, deadline_s: float = 0.0
    ) -> str:
        """With a deadline of now, `before` and `after` which something happens in the same turn of the loop."""
        loop = asyncio.get_running_loop()
        loop.call_soon(before)
        async with self.greeting.within(deadline_s):
            loop.call_soon(after)
            return await self.greeting.finish(None)


@pytest.mark.asyncio
async def test_a_hello_just_after_the_deadline_makes_no_link(caplog: pytest.LogCaptureFixture) -> None:
    """The task that waits is cancelled and has not heard of it: the link would be torn as soon as it was made."""
    late = Handshake()
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        await late.run(after=lambda: read(late.greeting.connection))
    assert late.made == []
    assert late.transport.ended == ["aborted"]
    assert not caplog.records


@pytest.mark.asyncio
async def test_a_hello_just_before_the_deadline_makes_a_link_that_stays() -> None:
    timely = Handshake()
    assert await timely.run(before=lambda: read(timely.greeting.connection)) == "device"
    assert timely.made == ["bert"]
    assert not timely.greeting.connection.closing
    assert timely.transport.ended == []


@pytest.mark.asyncio
async def test_a_link_is_not_torn_by_what_ends_the_handshakes_task() -> None:
    """E.g. the flood in which room is made for other callers."""
    timely = Handshake()
    task = asyncio.get_running_loop().create_task(timely.run(deadline_s=60.0), name="handshake")
    await asyncio.sleep(0)
    read(timely.greeting.connection)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert timely.made == ["bert"]
    assert timely.transport.ended == []


@pytest.mark.asyncio
async def test_a_dial_that_is_given_up_hears_no_more_of_its_socket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """uvloop, cancelled between TCP's handshake and TLS's, closes the socket and hands over what it had read of it;
    an answer to that, or a goodbye of TLS, would be a "Fatal error on SSL protocol" in the log."""
    transport = Transport(gone=True)
    protocols: list[Connection] = []
    begun = asyncio.Event()

    async def create_connection(factory: Callable[[], Connection], *_address: object, **_tls: object) -> None:
        protocols.append(factory())
        protocols[0].connection_made(cast(Any, transport))
        begun.set()
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "create_connection", create_connection)
    trust = cast(Trust, SimpleNamespace(client_context=None, verify_peer=lambda _tls: "d" * 64))
    book = AddressBook("a" * 64)
    links = Links("a" * 64, trust, book, hello=HELLO, host="127.0.0.1", port=0)
    book.configure(ADDRESS, time.monotonic())
    dial = book.next_dial(time.monotonic())
    assert dial is not None
    task = loop.create_task(links._dial(dial), name="dial")
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with caplog.at_level(logging.WARNING):
        read(protocols[0])
    assert transport.ended == ["aborted"]
    assert not links.linked
    assert not caplog.records
