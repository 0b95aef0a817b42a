"""What is measured in a lab, with plain sockets: TCP goodput, round trips, losses. Both ends are this process's.

Each end's socket is made inside its station; one clock times both.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

from tests.lab.lab import Lab
from tests.lab.namespaces import do

CHUNK_BYTES = 1 << 18
PORT = 5000
TIMEOUT_S = 30.0
CONGESTION = b"cubic"  # what most machines have; where another is the default, the lab still measures this
PING_BYTES = 64
DATAGRAM_BYTES = 1000
SETTLE_S = 0.1  # what is under way after the last one was sent
KNOWN = b"anybody there?"


class Flows:
    """A context manager: TCP connections that send as fast as they can, all at once, while it holds.

    Args:
        flows: (sender, receiver) by station.
    """

    def __init__(self, lab: Lab, flows: Sequence[tuple[int, int]]) -> None:
        self._taken = [0] * len(flows)
        self._last_s = [0.0] * len(flows)
        self.longest_gap_s = [0.0] * len(flows)
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        try:
            for index, (sender, receiver) in enumerate(flows):
                source, target = _connected(lab, sender, receiver, PORT + index)
                self._sockets += [source, target]
                for work, end in ((self._send, source), (self._take, target)):
                    self._threads.append(threading.Thread(target=work, args=(end, index), name=f"flow {index}"))
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "Flows":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for end in self._sockets:
            with contextlib.suppress(OSError):  # its other end is through already
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._close()

    def goodput_mbit(self, seconds: float) -> list[float]:
        """What each flow's receiver gets during the next seconds."""
        before, start_s = list(self._taken), time.monotonic()
        time.sleep(seconds)
        after, took_s = list(self._taken), time.monotonic() - start_s
        return [(now - then) * 8e-6 / took_s for now, then in zip(after, before, strict=True)]

    def _send(self, end: socket.socket, _index: int) -> None:
        chunk = bytes(CHUNK_BYTES)
        with contextlib.suppress(OSError):  # the end of the measurement
            while not self._ended.is_set():
                end.sendall(chunk)

    def _take(self, end: socket.socket, index: int) -> None:
        buffer = bytearray(CHUNK_BYTES)
        self._last_s[index] = time.monotonic()
        with contextlib.suppress(OSError):  # the end of the measurement
            while count := end.recv_into(buffer):
                now_s = time.monotonic()
                self._taken[index] += count
                self.longest_gap_s[index] = max(self.longest_gap_s[index], now_s - self._last_s[index])
                self._last_s[index] = now_s

    def _close(self) -> None:
        for end in self._sockets:
            end.close()


def _connected(lab: Lab, sender: int, receiver: int, port: int) -> tuple[socket.socket, socket.socket]:
    with lab.inside(receiver):
        listener = socket.create_server((lab.host(receiver), port))
    with listener:
        listener.settimeout(TIMEOUT_S)
        with lab.inside(sender):
            source = socket.socket()
        source.settimeout(TIMEOUT_S)
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)
        try:
            source.connect((lab.host(receiver), port))
            target, _ = listener.accept()
        except BaseException:
            source.close()
            raise
        target.settimeout(TIMEOUT_S)
    return source, target


def frames_passed(lab: Lab, station: int) -> int:
    """How many frames a station has sent and received so far."""
    (shown,) = json.loads(do("ip", "-n", lab.namespace(station), "-json", "-stats", "link", "show", "eth0"))
    return int(shown["stats64"]["rx"]["packets"] + shown["stats64"]["tx"]["packets"])


@contextlib.contextmanager
def _datagram_ends(lab: Lab, first: int, second: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two sockets that are connected to each other."""
    with contextlib.ExitStack() as stack:
        ends = []
        for station in (first, second):
            with lab.inside(station):
                ends.append(stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
            ends[-1].bind((lab.host(station), 0))
        ends[0].connect(ends[1].getsockname())
        ends[1].connect(ends[0].getsockname())
        yield ends[0], ends[1]


def _acquaint(near: socket.socket, far: socket.socket) -> None:
    """Until one datagram went there: the question for an address can be lost as well. Raises TimeoutError."""
    deadline_s = time.monotonic() + TIMEOUT_S
    far.settimeout(0.05)
    while time.monotonic() < deadline_s:
        near.send(KNOWN)
        with contextlib.suppress(TimeoutError):
            if far.recv(DATAGRAM_BYTES) == KNOWN:
                time.sleep(0.05)  # what was asked twice comes once more
                return
    raise TimeoutError(f"nothing gets from {near.getsockname()} to {far.getsockname()}")


def _received(end: socket.socket) -> list[bytes]:
    """All that waits there."""
    found = []
    end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(end.recv(DATAGRAM_BYTES))
    return found


def round_trips_ms(lab: Lab, first: int, second: int, count: int, spacing_s: float = 0.01) -> list[float]:
    """How long small datagrams take to another station and back, one after another; a lost one is left out."""
    trips_ms = []
    with _datagram_ends(lab, first, second) as (near, far):
        _acquaint(near, far)
        _acquaint(far, near)
        _received(near)
        _received(far)
        near.settimeout(1.0)
        far.settimeout(1.0)
        for number in range(count):
            message = struct.pack("!i", number).ljust(PING_BYTES)
            start_s = time.monotonic()
            near.send(message)
            with contextlib.suppress(TimeoutError):
                far.send(far.recv(PING_BYTES))
                while near.recv(PING_BYTES) != message:
                    continue
                trips_ms.append((time.monotonic() - start_s) * 1e3)
            time.sleep(spacing_s)
    return trips_ms


def lost_percent(lab: Lab, sender: int, receiver: int, count: int) -> float:
    """How many of so many datagrams of 1000 bytes are lost; they are sent at less than 40 Mbit/s."""
    with _datagram_ends(lab, sender, receiver) as (source, target):
        _acquaint(source, target)
        _received(target)
        got = 0
        for number in range(count):
            source.send(bytes(DATAGRAM_BYTES))
            if number % 4 == 3:
                time.sleep(0.001)
                got += len(_received(target))
        time.sleep(SETTLE_S)
        got += len(_received(target))
    return 100 * (1 - got / count)


def reachable(lab: Lab, first: int, second: int, timeout_s: float = 2.0) -> bool:
    """Whether a datagram gets there."""
    with _datagram_ends(lab, first, second) as (near, far):
        far.settimeout(timeout_s)
        near.send(KNOWN)
        try:
            return far.recv(DATAGRAM_BYTES) == KNOWN
        except TimeoutError:
            return False
