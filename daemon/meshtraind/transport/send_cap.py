"""A cap on what this daemon sends to other machines, all links together: a bucket of bytes that fills at a rate.

Frames are whole, so that messages can pass between them: one leaves when the bucket is not in debt, and is then paid
for. Messages never wait; they are paid for, too, so what waits does so a little longer. Large answers (pieces of files
and states) wait for their turn like chunks, first come, first served.
"""

import asyncio
from collections.abc import Callable

BURST_S = 0.05  # what may be saved up while nobody sends: timers are as late as that


class SendCap:
    """What may leave now. Calls belong to the event loop, whose clock it goes by.

    Attributes:
        bytes_per_s: None: as much as the links take.
        low_delay: whether each link also goes slower where it makes others' packets wait (`low_extra_delay.py`).
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self.low_delay = False
        self._bytes = 0.0  # in the bucket; below 0 are a debt
        self._counted_s = 0.0
        self._waiting: dict[Callable[[], None], None] = {}  # in order
        self._timer: asyncio.TimerHandle | None = None

    def limit(self, mbit_per_s: float, *, low_delay: bool = False) -> None:
        """Sets the rate, of now on; 0: none. Who waits goes on if it may."""
        self.low_delay = low_delay
        self._fill()
        self.bytes_per_s = mbit_per_s * 1e6 / 8 or None
        self._bytes = 0.0 if self.bytes_per_s is None else self._bytes
        self._wake()

    def may_send(self, free: Callable[[], None]) -> bool:
        """Whether a frame may leave now. If not, `free` is called once, when one may; equal ones are called as one."""
        if self._is_open():
            return True
        self._waiting.setdefault(free)
        self._plan()
        return False

    async def turn(self) -> None:
        """Waits until a frame may leave."""
        while not self._is_open():
            come = asyncio.get_running_loop().create_future()
            free = _Once(come)
            self._waiting[free] = None
            self._plan()
            try:
                await come
            finally:
                self._waiting.pop(free, None)

    def spend(self, size_bytes: int) -> None:
        """Pays for what leaves."""
        if self.bytes_per_s is not None:
            self._fill()
            self._bytes -= size_bytes

    def _is_open(self) -> bool:
        self._fill()
        return self.bytes_per_s is None or self._bytes >= 0

    def _fill(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self.bytes_per_s is not None:
            come = (now_s - self._counted_s) * self.bytes_per_s
            self._bytes = min(self._bytes + come, self.bytes_per_s * BURST_S)
        self._counted_s = now_s

    def _plan(self) -> None:
        if self._timer is None and self.bytes_per_s is not None:
            wait_s = max(0.0, -self._bytes / self.bytes_per_s)
            # A little later, lest rounding wakes somebody for a fraction of a byte that is still owed.
            self._timer = asyncio.get_running_loop().call_later(wait_s + 1e-6, self._wake)

    def _wake(self) -> None:
        """Those that wait send, in order, until the bucket is in debt again; who has more to send waits behind all."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for free in tuple(self._waiting):
            if not self._is_open():
                break
            if free in self._waiting:
                del self._waiting[free]
                free()
        if self._waiting:
            self._plan()


class _Once:
    """Wakes one task."""

    def __init__(self, come: "asyncio.Future[None]") -> None:
        self._come = come

    def __call__(self) -> None:
        if not self._come.done():
            self._come.set_result(None)
