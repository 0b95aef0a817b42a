"""One connection over every transport: asyncio and uvloop, with and without TLS."""

import asyncio
import os
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from meshtraind.transport import connection as connection_module
from meshtraind.transport.connection import Connection, ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.frames.header import HEADER_BYTES, Header, Kind
from meshwire.jobs.lifecycle import new_job_id
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done, Envelope, Role, encode
from meshwire.messages.generation import Model
from meshwire.messages.learner import Stop
from meshwire.messages.link import Heartbeat
from meshwire.messages.local import GetJobs, GetStatus, SubmitProgress
from meshwire.model.manifest import ModelManifest, TensorSpec
from tests.daemon.connectionpair import DEADLINE_S, Recorder, chunk, every_transport, pair, run
from tests.daemon.waiting import until


@every_transport
def test_chunks_land_where_the_handler_says(loop_name: str, tls: bool) -> None:
    """M4: payloads go straight into their memory, or to scratch; empty ones need none."""

    async def check() -> None:
        async with pair(tls) as (client, _, _, received):
            memory = bytearray(3 * limits.CHUNK_BYTES)
            for bucket in range(3):
                start = bucket * limits.CHUNK_BYTES
                received.places[bucket] = memoryview(memory)[start : start + limits.CHUNK_BYTES]
            received.places[7] = memoryview(b"")
            payloads = [os.urandom(limits.CHUNK_BYTES) for _ in range(3)]
            client.send_chunk(chunk(5, 1000), bytes(1000))  # nobody wants it
            for bucket in (2, 0, 1):
                client.send_chunk(chunk(bucket, limits.CHUNK_BYTES), memoryview(payloads[bucket]))
            client.send_chunk(chunk(7, 0), None)
            client.notify(Done())
            await until(lambda: received.notices == [Done()])
            assert received.arrived == ["chunk 2", "chunk 0", "chunk 1", "chunk 7", "Done"]
            assert bytes(memory) == b"".join(payloads)
            assert client.chunk_payload_bytes_sent == 1000 + 3 * limits.CHUNK_BYTES

    run(loop_name, check())


@every_transport
def test_requests_events_replies_and_failures(loop_name: str, tls: bool) -> None:
    async def check() -> None:
        async with pair(tls) as (client, _, server, _):
            for one in (client, server):  # both ways
                events: list[Wire] = []
                reply = await one.request(GetJobs(prefix="abc"), timeout_s=5, name="jobs", on_event=events.append)
                assert reply == GetJobs(prefix="cba")
                assert events == [SubmitProgress(text="looking for abc")]
                replies = await asyncio.gather(
                    *(one.request(GetJobs(prefix=f"{n}"), timeout_s=5, name="jobs") for n in range(10, 40))
                )
                assert replies == [GetJobs(prefix=f"{n}"[::-1]) for n in range(10, 40)]
                with pytest.raises(RequestFailed, match="no status today"):
                    await one.request(GetStatus(), timeout_s=5, name="status")

    run(loop_name, check())


@every_transport
def test_messages_overtake_chunks(loop_name: str, tls: bool) -> None:
    """W4: at most LINK_QUEUE_BYTES_MAX (and a frame) is queued before a message, however slow the reader."""

    async def check() -> None:
        async with pair(tls) as (client, _, _, received):
            payload = bytes(limits.CHUNK_BYTES)
            place = memoryview(bytearray(limits.CHUNK_BYTES))
            received.places = dict.fromkeys(range(1000), place)
            resumed = asyncio.Event()
            unsubscribe = client.on_writable(resumed.set)
            sent = 0
            # The server's socket is read only when the loop runs: until then everything piles up.
            while client.writable:
                client.send_chunk(chunk(sent, len(payload)), payload)
                sent += 1
                assert sent < 1000
            assert client._transport is not None
            assert client._transport.get_write_buffer_size() <= limits.LINK_QUEUE_BYTES_MAX + limits.CHUNK_BYTES + 4096
            client.notify(Done())
            async with asyncio.timeout(DEADLINE_S):
                await resumed.wait()
            assert client.writable
            unsubscribe()
            await until(lambda: received.notices == [Done()])
            assert received.arrived.index("Done") == sent

    run(loop_name, check())


@every_transport
def test_a_lost_connection_fails_what_waits_and_stops_what_answers(loop_name: str, tls: bool) -> None:
    async def check() -> None:
        async with pair(tls) as (client, sent, server, received):
            waiting = [client.request(GetJobs(prefix="wait"), timeout_s=60, name="jobs of server") for _ in range(3)]
            tasks = [asyncio.get_running_loop().create_task(one) for one in waiting]
            await until(lambda: len(server._answering) == 3)
            server.close("enough")
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, ConnectionEnded)
                assert "the connection to server has ended" in str(outcome)
            await server.closed()
            assert received.cancelled == 3
            assert received.losses == ["enough"]
            assert sent.losses == ["the other side closed the connection"]
            with pytest.raises(ConnectionEnded, match="later: "):
                await client.request(GetJobs(prefix=""), timeout_s=1, name="later")
            client.notify(Done())  # dropped
            assert not client.writable

    async def client_reaches(server: Connection, count: int) -> None:
        await until(lambda: len(server._answering) == count)

    run(loop_name, check())


@pytest.mark.asyncio
async def test_a_deadline_has_a_name() -> None:
    async with pair(False) as (client, _, _, received):
        with pytest.raises(TimeoutError, match=r"jobs of server: no answer from server within 0.05 s"):
            await client.request(GetJobs(prefix="wait"), timeout_s=0.05, name="jobs of server")
        received.release.set()  # its late reply harms nobody
        assert await client.request(GetJobs(prefix="x"), timeout_s=5, name="jobs") == GetJobs(prefix="x")


@pytest.mark.asyncio
async def test_an_error_of_ours_is_logged_here_and_told_without_details(caplog: pytest.LogCaptureFixture) -> None:
    async with pair(False) as (client, _, _, _):
        with pytest.raises(RequestFailed, match=r"meshtraind failed on Heartbeat \(ZeroDivisionError\); its log"):
            await client.request(Heartbeat(), timeout_s=5, name="heartbeat")
    assert "cannot answer Heartbeat of client" in caplog.text


@pytest.mark.asyncio
async def test_concurrent_requests_are_bounded() -> None:
    async with pair(False) as (client, _, server, received):
        count = limits.REQUESTS_PER_CONNECTION_MAX
        requests = [client.request(GetJobs(prefix="wait"), timeout_s=5, name="jobs") for _ in range(count)]
        waiting = asyncio.gather(*requests)
        await until(lambda: len(server._answering) == count)
        with pytest.raises(RequestFailed, match="being answered already"):
            await client.request(GetJobs(prefix=""), timeout_s=5, name="jobs")
        received.release.set()
        assert len(await waiting) == count


@pytest.mark.asyncio
async def test_a_violation_is_refused_and_reported_on_both_sides() -> None:
    """The wrong side learns why its connection was closed."""
    async with pair(False) as (client, sent, _, received):
        client.send_chunk(chunk(0, 0, step=99), None)
        await until(lambda: bool(sent.losses))
        await until(lambda: bool(received.losses))
        assert received.losses == ["protocol violation: there is no step 99"]
        assert sent.losses == ["server refused: protocol violation: there is no step 99"]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(HEADER_BYTES), "not a meshtrain frame"),
        (Header(Kind.CONTROL, limits.FRAME_PAYLOAD_BYTES_MAX + 1).encode(), "exceeds the limit"),
        (Header(Kind.CONTROL, 4).encode() + b"\xc1\xc1\xc1\xc1", "not msgpack"),
        (Header(Kind.CONTROL, 0).encode(), "empty control message"),
        (
            Header(Kind.CONTROL, len(encode(Envelope(Role.REPLY, 5, Done())))).encode()
            + encode(Envelope(Role.REPLY, 5, Done())),
            "answer to request 5, which was never made",
        ),
    ],
    ids=["http", "oversize", "no msgpack", "empty", "answer to nothing"],
)
@pytest.mark.asyncio
async def test_bytes_that_are_not_ours_close_the_connection(sent: bytes, reason: str) -> None:
    async with raw_client() as (client, received):
        await asyncio.get_running_loop().sock_sendall(client, sent)
        assert b"refuse" in await read_all(client)
        client.close()
        await until(lambda: bool(received.losses))
        assert reason in received.losses[0]


@every_transport
def test_whoever_is_refused_while_it_sends_learns_why(loop_name: str, tls: bool) -> None:
    """What it has sent meanwhile is unread, and a close would turn that into a reset, which overtakes the reason."""

    async def check() -> None:
        async with pair(tls) as (client, sent, server, received):
            assert client._transport is not None
            client._transport.pause_reading()  # it is busy
            client.send_chunk(chunk(0, 0, step=99), None)
            for _ in range(64):
                client.send_chunk(chunk(1, limits.CHUNK_BYTES), bytes(limits.CHUNK_BYTES))
            await until(lambda: server.closing)
            for _ in range(100):
                await asyncio.sleep(0)
                client.send_chunk(chunk(1, limits.CHUNK_BYTES), bytes(limits.CHUNK_BYTES))
            client._transport.resume_reading()
            await until(lambda: bool(sent.losses and received.losses))
            assert sent.losses == ["server refused: protocol violation: there is no step 99"]
            assert received.losses == ["protocol violation: there is no step 99"]

    run(loop_name, check())


@every_transport
def test_a_message_of_many_frames_arrives_between_those_that_know_each_other(loop_name: str, tls: bool) -> None:
    """W1: the description of a model of 20,000 tensors, from a member or to one that joins."""
    tensors = tuple(
        TensorSpec(name=f"layers.{of}.experts.{of}.weight", shape=(64, 256), dtype="float32", kind="parameter")
        for of in range(20_000)
    )
    manifest = ModelManifest(tensors=tensors, optimizer="AdamW")
    model = Model(job=new_job_id(bytes(8)), rank=0, manifest=manifest, plan=bytes(32))

    async def check() -> None:
        async with pair(tls) as (client, _, server, received):
            server.device = "of a pinned key"
            client.notify(model)
            client.notify(Done())
            await until(lambda: len(received.notices) == 2)
            assert received.notices == [model, Done()]
        async with pair(tls) as (client, sent, _, received):
            client.notify(model)
            await until(lambda: bool(sent.losses))
            assert not received.notices
            assert "message of more than" in sent.losses[0]

    run(loop_name, check())


@pytest.mark.asyncio
async def test_a_refused_side_that_neither_reads_nor_closes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT_S", 0.05)
    async with raw_client() as (client, received):
        await asyncio.get_running_loop().sock_sendall(client, b"x" * HEADER_BYTES)
        await until(lambda: bool(received.losses))
    async with raw_client() as (client, received):
        monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT_S", 60.0)
        await asyncio.get_running_loop().sock_sendall(client, b"x" * HEADER_BYTES)
        await until(lambda: received.connections[0].closing)
        assert not received.losses
        received.connections[0].close("the daemon stops")  # which waits no longer for it
        await until(lambda: bool(received.losses))


@pytest.mark.asyncio
async def test_a_frame_may_come_byte_by_byte() -> None:
    async with raw_client() as (client, received):
        payload = encode(Envelope(Role.NOTICE, 0, Stop(reason="tired")))
        for byte in Header(Kind.CONTROL, len(payload)).encode() + payload:
            await asyncio.get_running_loop().sock_sendall(client, bytes([byte]))
        await until(lambda: received.notices == [Stop(reason="tired")])
        client.close()
        await until(lambda: bool(received.losses))
        assert received.losses == ["the other side closed the connection"]


@pytest.mark.asyncio
async def test_whoever_does_not_read_is_dropped() -> None:
    """Messages queued for a peer are bounded even where chunks are not involved."""
    async with raw_client() as (_, received):
        connection = received.connections[0]
        for _ in range(2 * limits.LINK_BACKLOG_BYTES_MAX // 16_000):
            connection.notify(Stop(reason="x" * 16_000))
        await until(lambda: bool(received.losses))
        assert received.losses == ["client does not read what it is sent"]


@pytest.mark.asyncio
async def test_closing_does_not_wait_for_a_reader() -> None:
    async with raw_client() as (_, received):
        connection = received.connections[0]
        for _ in range(limits.LINK_BACKLOG_BYTES_MAX * 3 // 4 // 16_000):
            connection.notify(Stop(reason="x" * 16_000))
        before_s = time.monotonic()
        connection.close("enough")
        await connection.closed()
        assert time.monotonic() - before_s < 5
        assert received.losses == ["enough"]


@pytest.mark.asyncio
async def test_a_handler_that_fails_costs_the_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    async with pair(False) as (client, sent, _, received):
        received.places[0] = memoryview(bytearray(10))  # a place of the wrong size is an error of ours
        client.send_chunk(chunk(0, 20), bytes(20))
        await until(lambda: bool(sent.losses))
        assert "meshtraind failed on what it received" in sent.losses[0]
    assert "cannot handle what client sent" in caplog.text


def sent_again(connection: Connection) -> int:
    """Bytes: on a busy machine TCP takes a late acknowledgement for a loss, and probes with the last segment again."""
    assert connection._transport is not None
    sock = connection._transport.get_extra_info("socket")
    (count,) = struct.unpack("208xQ", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216))
    return int(count)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="TCP_INFO")
@every_transport
def test_sent_bytes_are_what_the_kernel_counted(loop_name: str, tls: bool) -> None:
    """TLS and framing are included, and the count outlives the connection."""

    async def check() -> None:
        async with pair(tls) as (client, _, _, received):
            before, counter = client.socket_bytes_sent()
            assert counter == "kernel"
            received.places[0] = memoryview(bytearray(100_000))
            client.send_chunk(chunk(0, 100_000), bytes(100_000))
            await until(lambda: bool(received.chunks))
            grown = client.socket_bytes_sent()[0] - before - sent_again(client)
            least = 100_000 + HEADER_BYTES
            assert least + (22 if tls else 0) <= grown <= least * 1.01 + 100
            client.close("done")
            assert client.socket_bytes_sent()[0] >= before + grown

    run(loop_name, check())


@every_transport
def test_small_frames_do_not_wait_for_company(loop_name: str, tls: bool) -> None:
    async def check() -> None:
        async with pair(tls) as (client, _, _, _):
            assert client._transport is not None
            sock = client._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert client.same_host

    run(loop_name, check())


class Server(Recorder):
    """A recorder that keeps its connections."""

    def __init__(self) -> None:
        super().__init__()
        self.connections: list[Connection] = []

    def accept(self) -> Connection:
        self.connections.append(Connection(self, name="client"))
        return self.connections[-1]


@asynccontextmanager
async def raw_client() -> AsyncIterator[tuple[socket.socket, Server]]:
    """A socket whose other end is a connection."""
    loop = asyncio.get_running_loop()
    received = Server()
    server = await loop.create_server(received.accept, "127.0.0.1", 0)
    client = socket.socket()
    client.setblocking(False)
    await loop.sock_connect(client, server.sockets[0].getsockname())
    await until(lambda: bool(received.connections) and received.connections[0].writable)
    try:
        yield client, received
    finally:
        client.close()
        server.close()
        received.connections[0].close("the test has ended")
        async with asyncio.timeout(DEADLINE_S):
            await received.connections[0].closed()
        assert len(received.losses) == 1


async def read_all(client: socket.socket) -> bytes:
    data = b""
    async with asyncio.timeout(DEADLINE_S):
        while piece := await asyncio.get_running_loop().sock_recv(client, 65536):
            data += piece
    return data
