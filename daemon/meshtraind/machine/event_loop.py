"""The event loop, and what not every loop can wait for: signals, standard input, somebody who calls."""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

from meshtraind.machine.portable import portable

READ_BYTES = 1024
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


async def accepted(listener: socket.socket) -> tuple[socket.socket, str]:
    """Waits for a caller. Yields in any case: a flood of callers must not stop the whole process.

    Returns:
        The caller's socket, which does not block, and its host.

    Raises:
        BlockingIOError: who called has gone again.
        OSError: no descriptor is free, for example.
    """
    loop = asyncio.get_running_loop()
    if portable():
        # A caller that comes in the moment in which this is cancelled is dropped; whoever cancels this stops listening.
        caller, (host, *_) = await loop.sock_accept(listener)
        await asyncio.sleep(0)
        return caller, host
    called = asyncio.Event()
    loop.add_reader(listener, called.set)  # not sock_accept: see above
    try:
        await called.wait()
    finally:
        loop.remove_reader(listener)
    caller, (host, *_) = listener.accept()
    caller.setblocking(False)
    return caller, host
