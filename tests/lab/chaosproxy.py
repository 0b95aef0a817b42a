"""A TCP proxy in user space between real daemons: it delays, throttles, cuts and stalls links, each direction alone.

A route says where one node finds another, and from which address it then comes: a node that learns where somebody came
from learns a proxied address. What a link does at a moment is set by its verbs; jitter is drawn from the seed, for each
direction in the order of its chunks. Root is not needed.
"""

import asyncio
import contextlib
import itertools
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self, TypeVar

from meshtraind.runtime.tasks import TaskSet, told_elsewhere

CHUNK_BYTES = 64 * 1024
QUEUE_BYTES_MAX = 4 * 1024 * 1024  # under way in one direction of one connection: 40 ms at 800 Mbit/s
SOCKET_BUFFER_BYTES = 256 * 1024  # what a home router queues: a throttled sender is to feel it
BURST_S = 0.005  # of a throttled direction: what the timer oversleeps is made up for
FIN_GRACE_S = 1.0
CALL_TIMEOUT_S = 30.0
BACKLOG = 64

T = TypeVar("T")
HostPort = tuple[str, int]


class Cut(StrEnum):
    """How a connection ends."""

    RST = "rst"  # a process that crashed, a router that forgot the connection
    FIN = "fin"  # an orderly end


@dataclass(frozen=True)
class Route:
    """How one node reaches another.

    Attributes:
        listen: where `dialler` dials.
        to: where `target` listens.
        source: the address from which `target` sees `dialler` come; any port.
    """

    dialler: str
    target: str
    listen: HostPort
    to: HostPort
    source: str

    @property
    def link(self) -> frozenset[str]:
        """The two nodes."""
        return frozenset((self.dialler, self.target))


class Pace:
    """Bytes a second that several flows may share, first come, first served."""

    def __init__(self, bytes_per_s: float) -> None:
        assert bytes_per_s > 0
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def take(self, size_bytes: int, now_s: float) -> float:
        """When the last of these bytes has passed."""
        self._free_s = max(self._free_s, now_s - BURST_S) + size_bytes / self._bytes_per_s
        return self._free_s


class Way:
    """One direction of a link: what it does to bytes now."""

    def __init__(self, seed: str, stations: Iterable[Pace] = ()) -> None:
        self._random = random.Random(seed)
        self._stations = tuple(stations)
        self._throttle: Pace | None = None
        self._delay_s = 0.0
        self._jitter_s = 0.0
        self.flowing = asyncio.Event()
        self.flowing.set()

    def shape(self, *, delay_s: float = 0.0, jitter_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        """From the next chunk on."""
        self._delay_s, self._jitter_s = delay_s, jitter_s
        self._throttle = Pace(bytes_per_s) if bytes_per_s is not None else None

    def passed_s(self, size_bytes: int, now_s: float) -> float:
        """When a chunk read now has left the narrowest part, and the next one may be read."""
        paces = (*self._stations, *([self._throttle] if self._throttle is not None else []))
        return max((pace.take(size_bytes, now_s) for pace in paces), default=now_s)

    def delayed_s(self) -> float:
        """How long the next chunk travels."""
        if not self._jitter_s:
            return self._delay_s
        return max(0.0, self._delay_s + self._random.uniform(-self._jitter_s, self._jitter_s))


class ChaosProxy:
    """All routes between some nodes. Its methods belong to the event loop that entered it.

    Args:
        routes: with both directions of a link, two.
        seed: of the jitter.
        station_bytes_per_s: what each node can send, and receive, over all its links together; None: no limit.
        admit: whether the client at this address is the route's dialler. A node may hear from others at which address
            they find somebody: dialling it would go around a link that is cut.
    """

    def __init__(
        self,
        routes: Iterable[Route],
        *,
        seed: int = 0,
        station_bytes_per_s: float | None = None,
        admit: Callable[[Route, HostPort], bool] = lambda _route, _client: True,
    ) -> None:
        self.routes = tuple(routes)
        self._admit = admit
        self._listeners: dict[Route, socket.socket] = {}
        self._accepting: dict[Route, asyncio.Task[None]] = {}
        self._connections: dict[asyncio.Task[None], tuple[Route, list[Cut]]] = {}
        self._cut: set[frozenset[str]] = set()  # links
        self._tasks = TaskSet("chaos proxy")
        nodes = {node for route in self.routes for node in route.link}
        paces: dict[tuple[str, str], list[Pace]] = {}
        for node in nodes:
            for use in ("out", "in"):
                paces[node, use] = [Pace(station_bytes_per_s)] if station_bytes_per_s is not None else []
        pairs = {pair for route in self.routes for pair in itertools.permutations(route.link)}
        self._ways = {
            (src, dst): Way(f"{seed} {src} {dst}", (*paces[src, "out"], *paces[dst, "in"])) for src, dst in pairs
        }

    async def __aenter__(self) -> Self:
        try:
            for route in self.routes:
                self._listen(route)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        for route in list(self._listeners):
            self._deafen(route)
        await self._tasks.close()

    # The verbs

    def shape(
        self, src: str, dst: str, *, delay_s: float = 0.0, jitter_s: float = 0.0, bytes_per_s: float | None = None
    ) -> None:
        """Delays by `delay_s` +- `jitter_s`, in order, and throttles one direction; what is not given is off."""
        self._ways[src, dst].shape(delay_s=delay_s, jitter_s=jitter_s, bytes_per_s=bytes_per_s)

    def stall(self, src: str, dst: str) -> None:
        """Nothing passes from `src` to `dst`, the end of a connection neither; sockets stay open."""
        self._ways[src, dst].flowing.clear()

    def cut(self, one: str, other: str, how: Cut) -> None:
        """Ends every connection between the two, and drops new ones. They are not refused: that would say that nobody
        listens there any more (G1), and the other lives."""
        link = frozenset((one, other))
        self._cut.add(link)
        for task, (route, ending) in list(self._connections.items()):
            if route.link == link:
                ending[0] = how
                task.cancel()

    def heal(self, one: str, other: str) -> None:
        """As new in both directions. Connections that are stalled go on."""
        for src, dst in ((one, other), (other, one)):
            self._ways[src, dst].shape()
            self._ways[src, dst].flowing.set()
        self._cut.discard(frozenset((one, other)))

    def connections(self, one: str, other: str) -> int:
        """How many the proxy holds between the two."""
        return sum(route.link == frozenset((one, other)) for route, _ in self._connections.values())

    # Accepting

    def _listen(self, route: Route) -> None:
        listener = socket.create_server(route.listen, backlog=BACKLOG)
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        self._listeners[route] = listener
        self._accepting[route] = self._tasks.spawn(
            self._accept_all(route, listener), f"{route.dialler} to {route.target}"
        )

    def _deafen(self, route: Route) -> None:
        self._accepting.pop(route).cancel()
        self._listeners.pop(route).close()

    async def _accept_all(self, route: Route, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, client = await loop.sock_accept(listener)
            near.setblocking(False)
            if route.link in self._cut or not self._admit(route, client):
                _end(near, Cut.RST)
                continue
            ending = [Cut.RST]
            carrying = _Carrying(near, self._ways[route.dialler, route.target], self._ways[route.target, route.dialler])
            task = self._tasks.spawn(carrying.run(route, ending), f"connection {client}")
            self._connections[task] = (route, ending)
            task.add_done_callback(carrying.ended)
            task.add_done_callback(self._connections.pop)


class _Carrying:
    """One connection: `near` is the dialler's side, `far` the target's."""

    def __init__(self, near: socket.socket, forth: Way, back: Way) -> None:
        self._near = near
        self._far = socket.socket(near.family, socket.SOCK_STREAM)
        self._forth = forth
        self._back = back

    async def run(self, route: Route, ending: list[Cut]) -> None:
        """Until both sides have ended; `ending[0]` says how when it is cancelled."""
        loop = asyncio.get_running_loop()
        flows = TaskSet("flows", told_elsewhere)
        try:
            await self._forth.flowing.wait()  # the handshake's packets go there
            await self._back.flowing.wait()
            self._far.setblocking(False)
            self._far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            self._far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            self._far.bind((route.source, 0))
            await loop.sock_connect(self._far, route.to)
            for end in (self._near, self._far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            forth = flows.spawn(_Flow(self._near, self._far, self._forth).run(), "forth")
            back = flows.spawn(_Flow(self._far, self._near, self._back).run(), "back")
            ended, _ = await asyncio.wait((forth, back), return_when=asyncio.FIRST_EXCEPTION)
            if all(flow.result() for flow in ended) and len(ended) == 2:
                ending[0] = Cut.FIN
        except OSError:
            # Whoever is left learns of the end only where news can travel.
            await self._forth.flowing.wait()
            await self._back.flowing.wait()
        finally:
            await flows.close()
            if ending[0] is Cut.FIN:
                await _finish(self._near, self._far)

    def ended(self, _task: "asyncio.Task[None]") -> None:
        """Also when it was cancelled before its first step."""
        for end in (self._near, self._far):
            if end.fileno() >= 0:
                _end(end, Cut.RST)


class _Flow:
    """Bytes from one socket to the other, as their direction of the link has it."""

    def __init__(self, reading: socket.socket, writing: socket.socket, way: Way) -> None:
        self._reading = reading
        self._writing = writing
        self._way = way
        self._queue: deque[tuple[float, bytes]] = deque()  # due at, what; b"" is the end
        self._queued_bytes = 0
        self._changed = asyncio.Event()

    async def run(self) -> bool:
        """Returns True at an orderly end. Raises OSError when either side broke."""
        async with contextlib.AsyncExitStack() as stack:
            halves = TaskSet("halves", told_elsewhere)
            stack.push_async_callback(halves.close)
            tasks = [halves.spawn(self._read(), "read"), halves.spawn(self._write(), "write")]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        return True

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = 0.0
        while True:
            await self._way.flowing.wait()
            data = await loop.sock_recv(self._reading, CHUNK_BYTES)
            passed_s = self._way.passed_s(len(data), time.monotonic())
            due_s = max(due_s, passed_s + self._way.delayed_s())  # never overtaking
            self._queue.append((due_s, data))
            self._queued_bytes += len(data)
            self._changed.set()
            if not data:
                return
            await _until(passed_s)
            while self._queued_bytes > QUEUE_BYTES_MAX:
                await self._next_change()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                await self._next_change()
            due_s, data = self._queue[0]
            await _until(due_s)
            await self._way.flowing.wait()
            if not data:
                self._writing.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._writing, data)
            self._queue.popleft()
            self._queued_bytes -= len(data)
            self._changed.set()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


async def _until(at_s: float) -> None:
    wait_s = at_s - time.monotonic()
    if wait_s > 0:
        await asyncio.sleep(wait_s)


async def _finish(*ends: socket.socket) -> None:
    """Ends sockets with a FIN: what they still receive is read, or the kernel would answer it with a reset."""
    loop = asyncio.get_running_loop()
    for end in ends:
        with contextlib.suppress(OSError):  # it is ended already
            end.shutdown(socket.SHUT_WR)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIN_GRACE_S):
            for end in ends:
                with contextlib.suppress(OSError):
                    while await loop.sock_recv(end, CHUNK_BYTES):
                        pass
    for end in ends:
        end.close()


def _end(end: socket.socket, how: Cut) -> None:
    if how is Cut.RST:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


class ProxyThread:
    """A proxy with an event loop and a thread of its own, for callers that block. A context manager."""

    def __init__(self, make: Callable[[], ChaosProxy]) -> None:
        self._make = make
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos proxy")
        self._proxy: ChaosProxy

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(CALL_TIMEOUT_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._proxy.__aexit__(None, None, None), self._loop).result(CALL_TIMEOUT_S)
        finally:
            self._stop()

    def do(self, verb: Callable[[ChaosProxy], T]) -> T:
        """Calls `verb` in the proxy's thread; it has happened when this returns."""

        async def call() -> T:
            return verb(self._proxy)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(CALL_TIMEOUT_S)

    async def _open(self) -> None:
        self._proxy = await self._make().__aenter__()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()
