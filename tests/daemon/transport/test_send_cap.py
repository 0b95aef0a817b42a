"""A cap on what all links together send, in virtual time: `transport/send_cap.py`, and connections under it."""

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from meshtraind.transport.connection import Connection
from meshtraind.transport.send_cap import BURST_S, SendCap
from meshwire import limits
from meshwire.frames.header import HEADER_BYTES, Header, Kind
from meshwire.messages.link import Heartbeat
from tests.sim.clusternetwork import Clock, Node
from tests.sim.virtualloop import VirtualLoop, virtual_loop

CHUNK = random.Random(1).randbytes(100 * limits.KIB)  # nothing that LZ4 could shrink
MBIT = 8.0
BYTES_PER_S = 1e6


class Wire:
    """A socket that takes everything at once; notes when how many bytes left."""

    def __init__(self, loop: VirtualLoop, remote: str) -> None:
        self.sent: list[tuple[float, bytes]] = []
        self._loop = loop
        self._names = {"sockname": ("10.0.0.1", 1), "peername": (remote, 2)}

    def write(self, data: bytes) -> None:
        self.sent.append((self._loop.time(), bytes(data)))

    def get_extra_info(self, name: str) -> object:
        return self._names.get(name)

    def set_write_buffer_limits(self, **_limits: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        return sum(len(data) for _, data in self.sent)


class Cluster:
    """Links of one daemon to some others, each of which always has another chunk to send."""

    def __init__(self, remotes: tuple[str, ...], mbit: float) -> None:
        self.clock = Clock()
        self.loop = virtual_loop(self.clock, Node(0))
        self.cap = SendCap()
        self.wires = [Wire(self.loop, remote) for remote in remotes]
        self.links = [self.loop.run(lambda wire=wire: self._link(wire)) for wire in self.wires]  # type: ignore[misc]
        self.do(lambda: self.cap.limit(mbit))

    def _link(self, wire: Wire) -> Connection:
        link = Connection(cast(Any, None), name="other")
        link.cap = self.cap
        link.connection_made(cast(Any, wire))
        return link

    def do(self, event: Callable[[], object]) -> None:
        self.loop.run(event)

    def flood(self, chunks: int = 10**6) -> None:
        for link in self.links:
            left = [chunks]

            def pump(link: Connection = link, left: list[int] = left) -> None:
                while left[0] and link.writable:
                    left[0] -= 1
                    link.send_chunk(Header(Kind.CHUNK, len(CHUNK), round=1, segment_count=1), CHUNK)

            link.on_writable(pump)
            self.do(pump)

    def run(self, seconds: float) -> None:
        self.clock.run_until(self.clock.now_s + seconds, 10**6)


@pytest.mark.parametrize("links", [1, 3])
def test_all_links_together_send_at_the_rate_and_share_it(links: int) -> None:
    cluster = Cluster(tuple(f"10.0.0.{number + 2}" for number in range(links)), MBIT)
    cluster.flood()
    cluster.run(20.0)
    sent = [wire.bytes for wire in cluster.wires]
    allowed = 20.0 * BYTES_PER_S + len(CHUNK) + HEADER_BYTES
    assert 0.98 * allowed < sum(sent) <= allowed
    assert max(sent) - min(sent) <= 2 * (len(CHUNK) + HEADER_BYTES)


def test_heartbeats_leave_at_once_and_are_paid_for() -> None:
    """Each at its instant, whole, between two chunks; all together stay below the cap."""
    cluster = Cluster(("10.0.0.2",), MBIT)
    cluster.flood()
    instants = [0.37 + number for number in range(10)]
    for at_s in instants:
        cluster.clock.at_time(at_s, lambda: cluster.do(lambda: cluster.links[0].notify(Heartbeat())))
    cluster.run(12.0)
    small = [(at_s, data) for at_s, data in cluster.wires[0].sent if HEADER_BYTES < len(data) < 1000]
    assert [at_s for at_s, _ in small] == pytest.approx(instants)
    for _, data in small:
        assert data.endswith(b"heartbeat\x80"), "whole"
    assert cluster.wires[0].bytes <= 12.0 * BYTES_PER_S + len(CHUNK) + HEADER_BYTES


def test_another_rate_counts_at_once_and_none_frees_who_waits() -> None:
    cluster = Cluster(("10.0.0.2",), 1.0)
    cluster.flood(chunks=1000)
    cluster.run(10.0)
    before = cluster.wires[0].bytes
    assert before <= 10 * 1e6 / 8 + 2 * len(CHUNK)
    cluster.do(lambda: cluster.cap.limit(10.0))
    cluster.run(10.0)
    assert cluster.wires[0].bytes - before == pytest.approx(12.5e6, rel=0.03)
    cluster.do(lambda: cluster.cap.limit(0.0))
    assert cluster.wires[0].bytes == 1000 * (len(CHUNK) + HEADER_BYTES)


def test_what_stays_on_this_machine_is_free() -> None:
    cluster = Cluster(("10.0.0.2", "10.0.0.1"), 1.0)
    cluster.flood(chunks=100)
    assert cluster.wires[0].bytes == len(CHUNK) + HEADER_BYTES
    assert cluster.wires[1].bytes == 100 * (len(CHUNK) + HEADER_BYTES)


def test_what_shrinks_is_packed_where_the_cap_and_not_the_link_is_slow() -> None:
    """W5."""
    cluster = Cluster(("10.0.0.2",), MBIT)
    zeros = bytes(len(CHUNK))
    cluster.do(lambda: cluster.links[0].send_chunk(Header(Kind.CHUNK, len(zeros), round=1, segment_count=1), zeros))
    assert cluster.wires[0].bytes < len(zeros) / 10


def test_idle_time_is_not_saved_up() -> None:
    cluster = Cluster(("10.0.0.2",), MBIT)
    cluster.run(3600.0)
    cluster.flood()
    cluster.run(1.0)
    assert cluster.wires[0].bytes <= (1 + BURST_S) * BYTES_PER_S + 2 * len(CHUNK)


def test_a_link_that_has_ended_takes_nobodys_turn() -> None:
    cluster = Cluster(("10.0.0.2", "10.0.0.3"), MBIT)
    cluster.flood()
    cluster.run(2.0)
    cluster.links[0]._transport = None
    cluster.run(8.0)
    assert sum(wire.bytes for wire in cluster.wires) > 9.8 * BYTES_PER_S


def test_large_answers_wait_for_their_turn_in_order() -> None:
    """J1: a state that is fetched is sent at the rate, whatever else is; who gives up waiting leaves nothing behind."""
    cluster = Cluster(("10.0.0.2",), MBIT)
    told: list[tuple[int, float]] = []

    async def answer(number: int) -> None:
        await cluster.cap.turn()
        cluster.cap.spend(1_000_000)
        told.append((number, cluster.loop.time()))

    tasks: list[asyncio.Task[None]] = []
    cluster.do(lambda: tasks.extend(cluster.loop.create_task(answer(number)) for number in range(5)))
    cluster.clock.at(0.5, lambda: cluster.do(tasks[3].cancel))
    cluster.run(0.6)
    assert len(cluster.cap._waiting) == 3
    cluster.run(10.0)
    assert [number for number, _ in told] == [0, 1, 2, 4]
    assert [at_s for _, at_s in told] == pytest.approx([0, 1, 2, 3], abs=0.1)
    assert not cluster.cap._waiting
