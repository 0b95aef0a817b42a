"""The chaos proxy: bytes pass unharmed, each verb does what it says in its direction alone, and nothing stays."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest

from meshtraind.peers.refused_dial import refuses
from meshwire.addresses import Address
from tests.lab.chaosproxy import ChaosProxy, Cut, HostPort, Pace, ProxyThread, Route, Way

TIMEOUT_S = 20.0
pytestmark = pytest.mark.timeout(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Pair:
    """anna, a client, and bert, a server, with what each of them has."""

    def __init__(self, proxy: ChaosProxy, route: Route, arrived: "asyncio.Queue[Stream]") -> None:
        self.proxy = proxy
        self.route = route
        self._arrived = arrived
        self._streams: list[Stream] = []

    async def connected(self) -> tuple["Stream", "Stream"]:
        """Both ends of a new connection."""
        mine = Stream(*await asyncio.open_connection(*self.route.listen))
        self._streams.append(mine)
        other = await asyncio.wait_for(self._arrived.get(), TIMEOUT_S)
        self._streams.append(other)
        return mine, other

    async def close(self) -> None:
        for stream in self._streams:
            stream.writer.transport.abort()
        while not self._arrived.empty():
            self._arrived.get_nowait().writer.transport.abort()


class Stream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await asyncio.wait_for(self.writer.drain(), TIMEOUT_S)

    async def receive(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), TIMEOUT_S)

    async def rest(self) -> bytes:
        """Until the end; raises ConnectionResetError at a reset."""
        return await asyncio.wait_for(self.reader.read(-1), TIMEOUT_S)


@asynccontextmanager
async def pair(admit: bool = True) -> AsyncIterator[Pair]:
    arrived: asyncio.Queue[Stream] = asyncio.Queue()
    server = await asyncio.start_server(lambda r, w: arrived.put_nowait(Stream(r, w)), "127.0.0.1", 0)
    to = server.sockets[0].getsockname()
    forth = Route("anna", "bert", ("127.0.0.1", free_port()), to, "127.77.2.1")
    async with server, ChaosProxy([forth], admit=lambda _route, _client: admit) as proxy:
        made = Pair(proxy, forth, arrived)
        try:
            yield made
        finally:
            await made.close()


@pytest.mark.asyncio
async def test_bytes_pass_both_ways_and_so_does_an_orderly_end() -> None:
    data = bytes(range(256)) * 20_000  # beyond all buffers on the way
    async with pair() as two:
        anna, bert = await two.connected()
        sending = asyncio.get_running_loop().create_task(anna.send(data))
        assert await bert.receive(len(data)) == data
        await sending
        anna.writer.write_eof()
        assert await bert.rest() == b""
        await bert.send(data)  # the other direction is open still
        assert await anna.receive(len(data)) == data
        bert.writer.write_eof()
        assert await anna.rest() == b""


@pytest.mark.asyncio
async def test_the_target_sees_the_dialler_come_from_where_it_could_be_dialled() -> None:
    async with pair() as two:
        _, bert = await two.connected()
        assert bert.writer.get_extra_info("peername")[0] == "127.77.2.1"


@pytest.mark.asyncio
async def test_a_stalled_direction_is_deaf_and_the_other_is_not() -> None:
    async with pair() as two:
        anna, bert = await two.connected()
        two.proxy.stall("anna", "bert")
        await anna.send(b"lost?")
        for _ in range(5):
            await bert.send(b"answer")
            assert await anna.receive(6) == b"answer"
        receiving = asyncio.get_running_loop().create_task(bert.receive(5))
        await asyncio.sleep(0)
        assert not receiving.done()
        two.proxy.heal("anna", "bert")
        assert await receiving == b"lost?"


@pytest.mark.asyncio
async def test_an_end_does_not_travel_on_a_stalled_link() -> None:
    """A peer that dies behind a dead access point sends no FIN: the other side learns of it when the link heals."""
    async with pair() as two:
        anna, bert = await two.connected()
        two.proxy.stall("anna", "bert")
        two.proxy.stall("bert", "anna")
        anna.writer.transport.abort()
        ending = asyncio.get_running_loop().create_task(bert.rest())
        again = Stream(*await asyncio.open_connection(*two.route.listen))  # accepted, and then silent
        assert two.proxy.connections("anna", "bert") <= 2
        assert not ending.done()
        two.proxy.heal("anna", "bert")
        assert await ending == b""
        again.writer.transport.abort()


@pytest.mark.asyncio
@pytest.mark.parametrize("how", [Cut.RST, Cut.FIN])
async def test_a_cut_ends_both_sides_and_drops_what_comes_until_healed(how: Cut) -> None:
    """G1: nobody is to think that the other has ended."""
    async with pair() as two:
        anna, bert = await two.connected()
        two.proxy.cut("anna", "bert", how)
        for stream in (anna, bert):
            if how is Cut.RST:
                with pytest.raises(ConnectionResetError):
                    await stream.rest()
            else:
                assert await stream.rest() == b""
            stream.writer.close()
        with pytest.raises(ConnectionResetError):  # perhaps before the connect has returned
            await Stream(*await asyncio.open_connection(*two.route.listen)).rest()
        assert not await refuses(Address(host=two.route.listen[0], port=two.route.listen[1]), 0.1)
        with pytest.raises(ConnectionResetError):  # behind that one, which may still have stood in the queue
            await Stream(*await asyncio.open_connection(*two.route.listen)).rest()
        two.proxy.heal("anna", "bert")
        anna, bert = await two.connected()
        await anna.send(b"again")
        assert await bert.receive(5) == b"again"


@pytest.mark.asyncio
async def test_who_is_not_the_routes_dialler_is_reset() -> None:
    async with pair(admit=False) as two:
        with pytest.raises(ConnectionResetError):  # perhaps before the connect has returned
            await Stream(*await asyncio.open_connection(*two.route.listen)).rest()


@pytest.mark.asyncio
async def test_a_delay_is_of_its_direction_and_keeps_the_order() -> None:
    async with pair() as two:
        anna, bert = await two.connected()
        two.proxy.shape("anna", "bert", delay_s=0.2, jitter_s=0.15)
        began_s = time.monotonic()
        for number in range(20):
            await anna.send(bytes([number]))
            await asyncio.sleep(0)
        assert await bert.receive(20) == bytes(range(20))
        assert time.monotonic() - began_s >= 0.05
        two.proxy.heal("anna", "bert")
        await anna.send(b"x")
        assert await bert.receive(1) == b"x"


@pytest.mark.asyncio
async def test_a_throttle_lets_no_more_pass() -> None:
    size_bytes, bytes_per_s = 400_000, 1_000_000
    async with pair() as two:
        anna, bert = await two.connected()
        two.proxy.shape("anna", "bert", bytes_per_s=bytes_per_s)
        began_s = time.monotonic()
        sending = asyncio.get_running_loop().create_task(anna.send(bytes(size_bytes)))
        await bert.receive(size_bytes)
        await sending
        assert time.monotonic() - began_s >= 0.9 * size_bytes / bytes_per_s


def test_a_pace_is_shared_and_lends_nothing() -> None:
    pace = Pace(1000)
    assert pace.take(100, now_s=10.0) == pytest.approx(10.1, abs=0.006)
    assert pace.take(100, now_s=10.0) == pytest.approx(10.2, abs=0.006)
    assert pace.take(100, now_s=20.0) == pytest.approx(20.1, abs=0.006), "an idle time is not saved up"


@pytest.mark.asyncio
async def test_jitter_follows_from_the_seed() -> None:
    def drawn(seed: str) -> list[float]:
        way = Way(seed)
        way.shape(delay_s=0.1, jitter_s=0.05)
        return [way.delayed_s() for _ in range(10)]

    assert drawn("1 anna bert") == drawn("1 anna bert") != drawn("2 anna bert")
    assert all(0.05 <= delay_s <= 0.15 for delay_s in drawn("1 anna bert"))


def test_a_proxy_in_a_thread_serves_callers_that_block() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        to: HostPort = server.getsockname()
        listen = ("127.0.0.1", free_port())
        route = Route("anna", "bert", listen, to, "127.0.0.1")
        with (
            ProxyThread(lambda: ChaosProxy([route])) as proxy,
            socket.create_connection(listen, TIMEOUT_S) as anna,
            closing(server.accept()[0]) as bert,
        ):
            bert.settimeout(TIMEOUT_S)
            anna.sendall(b"hello")
            assert bert.recv(5) == b"hello"
            proxy.do(lambda chaos: chaos.cut("anna", "bert", Cut.RST))
            with pytest.raises(ConnectionResetError):
                bert.recv(5)
