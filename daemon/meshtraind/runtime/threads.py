"""Blocking work in a thread that ends when its caller is cancelled."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.5

Check = Callable[[], None]


class Stopped(Exception):
    """The caller of this thread's work was cancelled: nobody wants its result."""


async def in_thread(work: Callable[[Check], T], alive: Callable[[], None] | None = None) -> T:
    """Runs `work` in a worker thread.

    When the caller is cancelled, the work is told so, and this returns only when the thread has ended: nothing that it
    uses is closed beneath it, and nobody waits for it at the end of the process.

    Args:
        work: gets a function to call before each block of bytes or other short step. It raises Stopped when the work
            is to end.
        alive: called on the event loop every POLL_S; what it raises ends the work.
    """
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise Stopped

    future = asyncio.get_running_loop().run_in_executor(None, work, check)
    try:
        while not future.done():
            await asyncio.wait({future}, timeout=POLL_S)
            if alive is not None:
                alive()
    except BaseException:
        stop.set()
        while not future.done():  # a second cancellation changes nothing
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        future.exception()  # the error that ended the wait is the one to tell
        raise
    return future.result()
