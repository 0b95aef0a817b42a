"""Pinned TLS on real sockets, on both event loops: who is paired gets in, nobody else does, and unpairing revokes."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshtraind.trust.identity import Identity, load_or_create
from meshtraind.trust.pins import Pin, PinTable
from meshtraind.trust.tls import NotPinnedError, Trust

DEADLINE_S = 10.0


def _uvloop() -> asyncio.AbstractEventLoop:
    return pytest.importorskip("uvloop").new_event_loop()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", autouse=True)
def signal_pipe() -> None:
    """libuv opens one pipe for signals with its first loop and keeps it: no leak of the test that comes first."""
    _uvloop().close()


@pytest.fixture(params=[asyncio.new_event_loop, _uvloop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    def run_to_end(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(debug=True, loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(work, DEADLINE_S))

    return run_to_end


class Device:
    """An identity with its own table of pins."""

    def __init__(self, folder: Path, name: str) -> None:
        self.identity: Identity = load_or_create(folder, name)
        self.pins = PinTable(folder / "pins.db")
        self.trust = Trust(self.identity, self.pins)

    @property
    def id(self) -> str:
        return self.identity.device_id

    def pin(self, other: "Device") -> None:
        self.pins.add(Pin(other.id, other.identity.name, other.identity.certificate_pem, 0.0, self.id))


Devices = tuple[Device, Device, Device]
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[Devices]:
    made = (
        Device(tmp_path / "server", "server"),
        Device(tmp_path / "client", "client"),
        Device(tmp_path / "stranger", "stranger"),
    )
    yield made
    for device in made:
        device.pins.close()


@contextlib.asynccontextmanager
async def serving(device: Device) -> AsyncIterator[tuple[int, list[str]]]:
    """Answers `hello` to whoever gets in; yields the port and the ids of those who did."""
    welcomed: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            welcomed.append(device.trust.verify_peer(writer.get_extra_info("ssl_object")))
            writer.write(b"hello\n")
            await writer.drain()
            await reader.read()
        except NotPinnedError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=device.trust.server_context)
    try:
        yield server.sockets[0].getsockname()[1], welcomed
    finally:
        server.close()
        await server.wait_closed()


async def greeting(port: int, context: ssl.SSLContext) -> tuple[bytes, ssl.SSLObject]:
    """What the server says first; b"" when it refuses (a TLS 1.3 client learns of it only then)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    tls = writer.get_extra_info("ssl_object")
    try:
        return await reader.readline(), tls
    except (ssl.SSLError, ConnectionError):
        return b"", tls
    finally:
        writer.transport.abort()


def test_paired_devices_know_each_other_by_id(run: Run, devices: Devices) -> None:
    server, client, _ = devices
    server.pin(client)
    client.pin(server)

    async def work() -> None:
        async with serving(server) as (port, welcomed):
            said, tls = await greeting(port, client.trust.client_context)
            assert (said, welcomed) == (b"hello\n", [client.id])
            assert client.trust.verify_peer(tls) == server.id
            assert tls.version() == "TLSv1.3"

    run(work())


def test_a_stranger_is_refused_in_the_handshake(run: Run, devices: Devices) -> None:
    server, client, stranger = devices
    server.pin(client)
    stranger.pin(server)

    async def work() -> None:
        async with serving(server) as (port, welcomed):
            assert (await greeting(port, stranger.trust.client_context))[0] == b""
            assert welcomed == []

    run(work())


def test_a_client_without_a_certificate_is_refused(run: Run, devices: Devices) -> None:
    server, client, _ = devices
    server.pin(client)

    async def work() -> None:
        anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anonymous.check_hostname = False
        anonymous.verify_mode = ssl.CERT_NONE
        async with serving(server) as (port, welcomed):
            assert (await greeting(port, anonymous))[0] == b""
            assert welcomed == []

    run(work())


def test_tls_before_1_3_is_refused(run: Run, devices: Devices) -> None:
    server, client, _ = devices
    server.pin(client)
    client.pin(server)

    async def work() -> None:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname = False
        old.verify_mode = ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        client.identity.load_into(old)
        async with serving(server) as (port, _):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await greeting(port, old)

    run(work())


def test_an_impostor_server_is_refused_by_the_client(run: Run, devices: Devices) -> None:
    server, client, stranger = devices
    client.pin(server)
    stranger.pin(client)

    async def work() -> None:
        async with serving(stranger) as (port, welcomed):
            with pytest.raises(ssl.SSLCertVerificationError):
                await greeting(port, client.trust.client_context)
            assert welcomed == []

    run(work())


def test_without_pins_everybody_is_refused(run: Run, devices: Devices) -> None:
    server, client, _ = devices
    client.pin(server)

    async def work() -> None:
        async with serving(server) as (port, welcomed):
            assert (await greeting(port, client.trust.client_context))[0] == b""
            with pytest.raises(ssl.SSLCertVerificationError):
                await greeting(port, server.trust.client_context)
            assert welcomed == []

    run(work())


def test_a_running_listener_follows_the_pins(run: Run, devices: Devices) -> None:
    """Pinning lets in at once; unpinning refuses in the handshake, and `verify_peer` catches what was open before."""
    server, client, other = devices
    client.pin(server)
    server.pin(other)

    async def work() -> None:
        async with serving(server) as (port, welcomed):
            assert (await greeting(port, client.trust.client_context))[0] == b""
            server.pin(client)
            said, tls = await greeting(port, client.trust.client_context)
            assert (said, welcomed) == (b"hello\n", [client.id])
            server.pins.remove(client.id)
            assert (await greeting(port, client.trust.client_context))[0] == b""
            assert welcomed == [client.id]
            assert client.trust.verify_peer(tls) == server.id
            client.pins.remove(server.id)
            with pytest.raises(NotPinnedError, match=server.id[:8]):
                client.trust.verify_peer(tls)

    run(work())


def test_a_handshake_that_began_before_the_unpairing_is_caught_after_it(devices: Devices) -> None:
    """The trust store of a handshake is the one it began with; the hash decides, on both ends."""
    server, client, _ = devices
    server.pin(client)
    client.pin(server)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving_end = server.trust.server_context.wrap_bio(to_server, to_client, server_side=True)
    dialling_end = client.trust.client_context.wrap_bio(to_client, to_server)
    ends = [dialling_end, serving_end]
    for step in range(20):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        if step == 0:
            server.pins.remove(client.id)
    assert serving_end.getpeercert(binary_form=True) == client.identity.certificate_der
    with pytest.raises(NotPinnedError):
        server.trust.verify_peer(serving_end)


def test_thirty_peers_of_one_subject_name_are_told_apart(run: Run, devices: Devices, tmp_path: Path) -> None:
    server = devices[0]
    many = [Device(tmp_path / str(number), "same") for number in range(30)]
    for device in many:
        server.pin(device)
    many[-1].pin(server)

    async def work() -> None:
        async with serving(server) as (port, welcomed):
            assert (await greeting(port, many[-1].trust.client_context))[0] == b"hello\n"
            assert welcomed == [many[-1].id]

    run(work())
    for device in many:
        device.pins.close()
