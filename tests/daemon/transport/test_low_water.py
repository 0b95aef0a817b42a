"""Being woken for a part of a chunk: the kernel's own promise, and that nothing ever waits for more than is to come."""

import fcntl
import os
import select
import socket
import struct
import sys
import termios

import pytest

from meshtraind.transport import connection as connection_module
from meshtraind.transport.low_water import LOW_WATER_BYTES, RECORD_BYTES_MAX, LowWater
from meshwire import limits
from meshwire.frames.header import HEADER_BYTES
from meshwire.messages.envelope import Done
from tests.daemon.connectionpair import DEADLINE_S, chunk, every_transport, pair, run
from tests.daemon.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SO_RCVLOWAT was tried on Linux alone")
ENOUGH_BYTES = LOW_WATER_BYTES + RECORD_BYTES_MAX


def level_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def arrived_bytes(sock: socket.socket) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))
    return int(count)


def readable(sock: socket.socket, wait_s: float = 0.0) -> bool:
    return bool(select.select([sock], [], [], wait_s)[0])


def test_the_kernel_wakes_for_so_much_and_for_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        low_water = LowWater(receiver)
        low_water.expect(ENOUGH_BYTES)
        for sent in range(1024, LOW_WATER_BYTES, 1024):
            sender.sendall(bytes(1024))
            while arrived_bytes(receiver) < sent:
                select.select([], [], [], 0.001)
            assert not readable(receiver)
        sender.sendall(bytes(1024))
        assert readable(receiver, DEADLINE_S)
        receiver.recv(LOW_WATER_BYTES, socket.MSG_WAITALL)
        sender.sendall(bytes(1))
        low_water.expect(ENOUGH_BYTES - 1)
        assert readable(receiver, DEADLINE_S), "what is left may be a record whose beginning was read"
        low_water.expect(ENOUGH_BYTES)
        sender.close()
        assert readable(receiver, DEADLINE_S)


def test_a_socket_that_is_gone_or_of_another_kind_has_no_level() -> None:
    one, other = socket.socketpair()
    with one, other:
        LowWater(one).expect(ENOUGH_BYTES)
        assert level_of(one) == 1
    gone = socket.socket()
    low_water = LowWater(gone)
    gone.close()
    for _ in range(2):
        low_water.expect(ENOUGH_BYTES)
    LowWater().expect(ENOUGH_BYTES)


@every_transport
def test_whatever_is_sent_arrives(loop_name: str, tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks around the level, wanted or not, packed with a message behind each; of links that leave the machine."""
    monkeypatch.setattr(connection_module, "same_host", lambda _here, _there: False)
    sizes = [ENOUGH_BYTES + more for more in (-HEADER_BYTES, -1, 0, 1, LOW_WATER_BYTES)] + [limits.CHUNK_BYTES, 1]

    async def check() -> None:
        async with pair(tls) as (client, _, server, received):
            assert server._transport is not None
            sock = server._transport.get_extra_info("socket")
            for bucket, size in enumerate(sizes * 2):
                place = bytearray(size)
                if bucket < len(sizes):
                    received.places[bucket] = memoryview(place)
                sent = os.urandom(size)
                client.send_chunk(chunk(bucket, size), sent)
                client.notify(Done())
                await until(lambda n=bucket: len(received.notices) == n + 1)  # type: ignore[misc]
                assert bucket >= len(sizes) or bytes(place) == sent
                assert level_of(sock) == 1, "what comes next wakes at once"

    run(loop_name, check())


@pytest.mark.parametrize("before_bytes", [1, LOW_WATER_BYTES, ENOUGH_BYTES])
@every_transport
def test_a_sender_that_ends_within_a_chunk_is_noticed(
    loop_name: str, tls: bool, before_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "same_host", lambda _here, _there: False)

    async def check() -> None:
        async with pair(tls) as (client, _, server, received):
            received.places[0] = memoryview(bytearray(limits.CHUNK_BYTES))
            assert client._transport is not None
            assert server._transport is not None
            client._transport.write(chunk(0, limits.CHUNK_BYTES).encode() + bytes(before_bytes))
            sock = server._transport.get_extra_info("socket")
            await until(lambda: level_of(sock) == LOW_WATER_BYTES)
            client.abort("as a process that is killed")
            await until(lambda: bool(received.losses))

    run(loop_name, check())
