"""Links that yield: the decision on a path that is played, and what the kernel is told."""

import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest

from meshtraind.transport.connection import Connection
from meshtraind.transport.low_extra_delay import (
    KEPT,
    LOOK_INTERVAL_S,
    PACE_BYTES_S_MIN,
    TARGET_S,
    LowExtraDelay,
    PathSample,
    path_of,
    set_pace,
)
from meshtraind.transport.send_cap import SendCap
from meshwire.frames.header import Header, Kind
from tests.sim.clusternetwork import Clock, Node
from tests.sim.virtualloop import virtual_loop

SHORTEST_S = 0.004
QUEUE_BYTES = 256_000


class Path:
    """The slowest hop of a path, and the queue before it, which a TCP that knows losses alone fills."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self.others = False  # somebody else, who knows losses alone, fills what room there is in the queue
        self.queue_bytes = 0.0
        self.arrived_bytes = 0.0
        self.now_s = 0.0
        self.delay = LowExtraDelay()
        self.held_s = 0.0  # more, for one look: a radio that slept

    @property
    def wait_s(self) -> float:
        return self.queue_bytes / self.bytes_s

    def look(self, *, begins: bool = False) -> None:
        """One interval in which it sends as much as it may."""
        pace = self.delay.pace_bytes_s
        room_bytes = QUEUE_BYTES - self.queue_bytes + self.bytes_s * LOOK_INTERVAL_S
        wanted = pace * LOOK_INTERVAL_S if pace is not None else room_bytes
        own = min(wanted, room_bytes / 2 if self.others and pace is None else room_bytes)
        others = room_bytes - own if self.others else 0.0
        total = self.queue_bytes + own + others
        left = min(total, self.bytes_s * LOOK_INTERVAL_S)
        self.queue_bytes = total - left
        self.arrived_bytes += left * own / (own + others)
        self.now_s += LOOK_INTERVAL_S
        rtt_s = SHORTEST_S + self.wait_s + self.held_s
        self.held_s = 0.0
        self.delay.look(self.now_s, PathSample(rtt_s, SHORTEST_S, int(self.arrived_bytes), True), begins=begins)

    def run(self, seconds: float) -> float:
        """Returns the part of the hop that it had."""
        before = self.arrived_bytes
        for _ in range(round(seconds / LOOK_INTERVAL_S)):
            self.look()
        return (self.arrived_bytes - before) / (self.bytes_s * seconds)


@pytest.mark.parametrize("bytes_s", [0.5e6, 1e6, 2.5e6])
def test_the_queue_becomes_short_and_the_path_stays_full(bytes_s: float) -> None:
    """RFC 6817: what others' packets wait is about the target, and nothing of the rate is given away."""
    path = Path(bytes_s)
    path.run(0.3)
    assert path.wait_s > 1.5 * TARGET_S
    path.run(4)
    waits = []
    for _ in range(100):
        used = path.run(0.3)
        waits.append(path.wait_s)
    assert sorted(waits)[90] < 1.6 * TARGET_S
    assert used > 0.8
    assert path.run(10) > 0.9


def test_a_path_without_a_queue_has_no_pace() -> None:
    """A WiFi that is faster than what is sent, or a queue shorter than the target."""
    path = Path(QUEUE_BYTES / TARGET_S * 1.1)
    assert path.run(20) > 0.99
    assert path.delay.pace_bytes_s is None


def test_packets_that_a_sleeping_radio_holds_are_no_queue() -> None:
    path = Path(QUEUE_BYTES / TARGET_S * 2)
    for _ in range(50):
        path.held_s = 0.3
        path.run(0.2)
    assert path.delay.pace_bytes_s is None


def test_who_yields_to_a_download_keeps_a_part_and_gets_the_rest_back() -> None:
    """Whoever knows losses alone keeps the queue full, however slow this link goes."""
    path = Path(2.5e6)
    path.run(5)
    path.others = True
    path.run(10)
    assert 0.15 < path.run(1) < 1.1 * KEPT
    path.others = False
    path.run(6)
    assert path.run(5) > 0.85


def test_no_pace_is_below_what_others_take_for_a_stall() -> None:
    path = Path(40_000)
    path.run(60)
    assert path.delay.pace_bytes_s == PACE_BYTES_S_MIN


def test_what_is_sent_in_bursts_counts_while_it_is_sent() -> None:
    """A round's exchange, and then a step's computing: pauses are not taken for a slow path."""
    delay, now_s, arrived_bytes = LowExtraDelay(), 0.0, 0
    for wait_s in (0.0, 0.0, 2 * TARGET_S):
        now_s += 60.0
        delay.look(now_s, PathSample(SHORTEST_S, SHORTEST_S, arrived_bytes, True), begins=True)
        for _ in range(6):
            now_s += LOOK_INTERVAL_S
            arrived_bytes += 100_000
            delay.look(now_s, PathSample(SHORTEST_S + wait_s, SHORTEST_S, arrived_bytes, True))
    assert delay.pace_bytes_s == pytest.approx(0.5 * 100_000 / LOOK_INTERVAL_S)


def test_a_path_that_becomes_slower_is_followed_at_once() -> None:
    path = Path(5e6)
    path.run(5)
    path.bytes_s = 0.5e6
    path.run(3)
    assert path.wait_s < 2 * TARGET_S


def test_a_path_that_becomes_faster_is_used() -> None:
    path = Path(0.5e6)
    path.run(5)
    path.bytes_s = 5e6
    path.run(15)
    assert path.run(5) > 0.9


# What the kernel says and is told


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        yield one, other


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the system does not tell of paths")
def test_the_kernel_tells_of_a_path_and_takes_a_pace(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    one.sendall(bytes(100_000))
    assert len(other.recv(100_000, socket.MSG_WAITALL)) == 100_000
    path = path_of(one)
    assert path is not None
    assert 0 < path.shortest_s <= path.rtt_s < 1
    assert 0 < path.arrived_bytes <= 100_001
    for pace in (200_000.0, 1e12, None):
        set_pace(one, pace)
        told = int.from_bytes(one.getsockopt(socket.SOL_SOCKET, 47, 8), "little") & 0xFFFFFFFF
        assert told == (0xFFFFFFFF if pace is None else min(int(pace), 0xFFFFFFFE))


def test_a_socket_that_is_gone_tells_nothing_and_takes_nothing() -> None:
    with socket.socket() as gone:
        pass
    assert path_of(gone) is None
    assert path_of(None) is None
    set_pace(gone, 1e6)


class Wire:
    """A transport over a path of which its socket tells."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked = 0
        self.paces: list[int] = []
        self.under_way = True
        self.family = socket.AF_INET

    def get_extra_info(self, name: str) -> object:
        return {"sockname": ("10.0.0.1", 1), "peername": ("10.0.0.2", 2), "socket": self}.get(name)

    def getsockopt(self, _level: int, name: int, size: int) -> bytes:
        if name == getattr(socket, "TCP_CONGESTION", None):
            return b"cubic"
        info = bytearray(size)
        info[24:28] = self.under_way.to_bytes(4, "little")
        info[68:72] = int((SHORTEST_S + self.path.wait_s) * 1e6).to_bytes(4, "little")
        info[120:128] = int(self.path.arrived_bytes).to_bytes(8, "little")
        info[148:152] = int(SHORTEST_S * 1e6).to_bytes(4, "little")
        self.asked += 1
        return bytes(info)

    def setsockopt(self, _level: int, name: int, value: bytes) -> None:
        if name == 47:
            self.paces.append(int.from_bytes(value, "little"))

    def write(self, data: bytes) -> None: ...

    def set_write_buffer_limits(self, **_limits: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the system does not tell of paths")
def test_a_connection_follows_its_path_while_the_owner_wants_it() -> None:
    """`yield_to_calls`: off, nothing is asked; turned off, the kernel's pace ends; nothing outlives the connection."""
    clock = Clock()
    loop = virtual_loop(clock, Node(0))
    path, cap = Path(1e6), SendCap()
    wire = Wire(path)
    conn = Connection(cast(Any, Silent()), name="bert")
    conn.cap = cap
    loop.run(lambda: conn.connection_made(cast(Any, wire)))
    chunk = Header(Kind.CHUNK, 4, job=1, generation=1, round=1, segment_count=1)

    def send(times: int) -> None:
        for _ in range(times):
            loop.run(lambda: conn.send_chunk(chunk, b"1234"))
            path.arrived_bytes += 1e5
            clock.run_until(clock.now_s + LOOK_INTERVAL_S, 10**6)

    def yields(wanted: bool) -> None:
        loop.run(lambda: cap.limit(0, low_delay=wanted))

    path.queue_bytes = 200_000
    send(10)
    assert not wire.asked
    yields(True)
    send(20)
    assert wire.paces
    assert wire.paces[-1] < 1e6
    yields(False)
    send(3)
    assert wire.paces[-1] == 0xFFFFFFFF
    asked = wire.asked
    send(10)
    assert wire.asked == asked
    yields(True)
    send(1)
    asked = wire.asked
    clock.run_until(clock.now_s + 10 * LOOK_INTERVAL_S, 10**6)
    assert wire.asked >= asked + 9, "while something is under way"
    wire.under_way = False
    clock.run_until(clock.now_s + 2 * LOOK_INTERVAL_S, 10**6)
    asked = wire.asked
    clock.run_until(clock.now_s + 1.0, 10**6)
    assert wire.asked == asked
    send(1)
    loop.run(lambda: conn.connection_lost(None))
    asked = wire.asked
    clock.run_until(clock.now_s + 1.0, 10**6)
    assert wire.asked == asked


class Silent:
    """Hears of the end."""

    def lost(self, conn: Connection, reason: str) -> None: ...
