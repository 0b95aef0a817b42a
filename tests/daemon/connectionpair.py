"""Two connected connections over every transport, and what arrives on either."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from meshtraind.transport.connection import Connection, RequestFailed
from meshtraind.trust.identity import load_or_create
from meshtraind.trust.pins import Pin, PinTable
from meshtraind.trust.tls import Trust
from meshwire.frames.header import Header, Kind
from meshwire.message_base import Wire
from meshwire.messages.link import Heartbeat
from meshwire.messages.local import GetJobs, GetStatus, SubmitProgress
from tests.daemon.waiting import until

if os.name == "posix":
    import uvloop

    LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop,
        "uvloop": uvloop.new_event_loop,
    }
else:
    LOOPS = {"asyncio": asyncio.new_event_loop}

DEADLINE_S = 10.0


@dataclass
class Recorder:
    """Notes what arrives; lands chunks in `places`, by bucket."""

    places: dict[int, memoryview] = field(default_factory=dict)
    chunks: list[Header] = field(default_factory=list)
    notices: list[Wire] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    arrived: list[str] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0

    def chunk_announced(self, _conn: Connection, header: Header) -> memoryview | str | None:
        if header.step == 99:
            return "there is no step 99"
        return self.places.get(header.bucket)

    def chunk_received(self, _conn: Connection, header: Header) -> None:
        self.chunks.append(header)
        self.arrived.append(f"chunk {header.bucket}")

    def notice(self, _conn: Connection, _header: Header, body: Wire) -> None:
        self.notices.append(body)
        self.arrived.append(type(body).__name__)

    async def request(self, _conn: Connection, _header: Header, body: Wire, emit: Callable[[Wire], None]) -> Wire:
        if isinstance(body, GetStatus):
            raise RequestFailed("no status today")
        if isinstance(body, Heartbeat):
            raise ZeroDivisionError
        assert isinstance(body, GetJobs)
        if body.prefix == "wait":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        emit(SubmitProgress(text=f"looking for {body.prefix}"))
        return GetJobs(prefix=body.prefix[::-1])

    def lost(self, _conn: Connection, reason: str) -> None:
        self.losses.append(reason)


@cache
def trusts() -> tuple[Trust, Trust]:
    """Two devices that are paired with each other."""
    folders = [Path(mkdtemp()), Path(mkdtemp())]
    identities = [load_or_create(folder, "device") for folder in folders]
    made = []
    for folder, identity, other in zip(folders, identities, reversed(identities), strict=True):
        pins = PinTable(folder / "pins.db")
        pins.add(Pin(other.device_id, other.name, other.certificate_pem, 0.0, identity.device_id))
        made.append(Trust(identity, pins))
        pins.close()
    return made[0], made[1]


@asynccontextmanager
async def pair(
    tls: bool, make: Callable[[], Recorder] = Recorder
) -> AsyncIterator[tuple[Connection, Recorder, Connection, Recorder]]:
    """A client and a server over TCP, and what each of them received."""
    loop = asyncio.get_running_loop()
    client_side, server_side = make(), make()
    server_connection = Connection(server_side, name="client")
    contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None] = (None, None)
    if tls:
        contexts = trusts()[0].server_context, trusts()[1].client_context
    server = await loop.create_server(lambda: server_connection, "127.0.0.1", 0, ssl=contexts[0])
    port = server.sockets[0].getsockname()[1]
    client = Connection(client_side, name="server")
    await loop.create_connection(
        lambda: client, "127.0.0.1", port, ssl=contexts[1], server_hostname="meshtrain" if tls else None
    )
    await until(lambda: server_connection.writable)  # the last flight of the handshake
    try:
        yield client, client_side, server_connection, server_side
    finally:
        server.close()
        for connection in (client, server_connection):
            connection.close("the test has ended")
            async with asyncio.timeout(DEADLINE_S):
                await connection.closed()
        assert len(client_side.losses) == len(server_side.losses) == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a closed connection leaves no task"


def run(loop_name: str, test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(debug=True, loop_factory=LOOPS[loop_name]) as runner:
        runner.run(test)


every_transport = pytest.mark.parametrize(
    ("loop_name", "tls"), [(name, tls) for name in LOOPS for tls in (False, True)], ids=lambda value: str(value)
)


def chunk(bucket: int, payload_bytes: int, step: int = 0) -> Header:
    return Header(Kind.CHUNK, payload_bytes, bucket=bucket, round=1, step=step, segment_count=1)
