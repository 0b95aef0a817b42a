"""The event loop, and what not every loop can wait for: signals, standard input, somebody who calls."""

import asyncio
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from meshtraind.machine.portable import portable

READ_BYTES = 1024
CALL_POLL_S = 0.25  # so long a thread may wait for callers after whoever wanted them has gone
STOPPING = ("SIGTERM", "SIGINT", "SIGBREAK")  # the last one is Windows' word for "the window was closed"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it exists, else asyncio's own."""
    if portable():
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def on_stop_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Has `stop` called in the loop whenever the system, or ctrl-C, asks this process to end."""
    if not portable():
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        return

    def heard(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        loop.call_soon_threadsafe(stop)

    for name in STOPPING:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), heard)


def on_end_of_stdin(loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
    """Has `ended` called in the loop, once, when standard input ends. What it says is not looked at."""
    descriptor = sys.stdin.fileno()
    if not portable():

        def readable() -> None:
            if not os.read(descriptor, READ_BYTES):
                loop.remove_reader(descriptor)
                ended()

        loop.add_reader(descriptor, readable)
        return

    def read() -> None:
        while os.read(descriptor, READ_BYTES):
            pass
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended)

    threading.Thread(target=read, name="standard input", daemon=True).start()


async def serve_locally(
    loop: asyncio.AbstractEventLoop, protocol: Callable[[], asyncio.BaseProtocol], path: Path | None
) -> tuple[asyncio.Server, str]:
    """Listens for programs of this machine.

    Args:
        path: of a Unix socket, in a folder that only this user may enter; None: loopback TCP, which every user of the
            machine reaches.

    Returns:
        The server, and its address: `unix:PATH` or `tcp:HOST:PORT`.

    Raises:
        OSError.
    """
    if sys.platform != "win32" and path is not None:
        server = await loop.create_unix_server(protocol, path)
        path.chmod(0o600)
        return server, f"unix:{path}"
    server = await loop.create_server(protocol, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    return server, f"tcp:{host}:{port}"


async def connect_locally(
    loop: asyncio.AbstractEventLoop, protocol: Callable[[], asyncio.BaseProtocol], address: str
) -> None:
    """Connects to a program of this machine, by the address that `serve_locally` has given it. Raises OSError."""
    kind, _, where = address.partition(":")
    if sys.platform != "win32" and kind == "unix":
        await loop.create_unix_connection(protocol, where)
        return
    host, _, port = where.rpartition(":")
    if kind != "tcp" or not port.isdigit():
        raise OSError(f"{address!r} is no address of this system's")
    await loop.create_connection(protocol, host, int(port))


async def accepted(listener: socket.socket) -> tuple[socket.socket, str]:
    """Waits for a caller. Not `loop.sock_accept`: what that has accepted is lost, and stays open, where the task is
    cancelled before it has heard of it. Yields in any case: a flood of callers must not stop the whole process.

    Returns:
        The caller's socket, which does not block, and its host.

    Raises:
        BlockingIOError: who called has gone again.
        OSError: no descriptor is free, for example.
    """
    loop = asyncio.get_running_loop()
    if portable():
        while not (await asyncio.to_thread(select.select, [listener], [], [], CALL_POLL_S))[0]:
            pass
    else:
        called = asyncio.Event()
        loop.add_reader(listener, called.set)
        try:
            await called.wait()
        finally:
            loop.remove_reader(listener)
    caller, (host, *_) = listener.accept()
    caller.setblocking(False)
    return caller, host
