"""Threads for reading from disks that may hang: neither other work nor the end of the process waits for them."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from meshtraind.runtime.threads import Check, Stopped

T = TypeVar("T")

IDLE_S = 10.0  # then a thread that has nothing to do ends


class DiskThreads:
    """Threads of one kind of work, started when needed. Work beyond `threads_max` waits in line.

    `asyncio.to_thread` is for disks that answer: its threads are shared by all of the daemon, and joined at its end.
    """

    def __init__(self, name: str, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._threads = 0
        self._idle = 0

    async def run(self, work: Callable[[Check], T], *, timeout_s: float, name: str) -> T:
        """Runs `work` in one of the threads.

        A caller who is cancelled, or has waited for `timeout_s`, leaves at once. The thread ends with the call of the
        system that it hangs in.

        Args:
            work: gets a function to call before each block of bytes or other short step. It raises Stopped when nobody
                waits for the result any more.
            name: what is done, for the error.

        Raises:
            TimeoutError: names `name`.
        """
        loop = asyncio.get_running_loop()
        given = _Work(work, loop, loop.create_future())
        with self._changed:
            self._waiting.append(given)
            if len(self._waiting) > self._idle and self._threads < self._threads_max:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._changed.notify()
        try:
            async with asyncio.timeout(timeout_s):
                result: T = await given.result
                return result
        except TimeoutError:
            if given.result.done() and not given.result.cancelled():
                raise  # the work's own
            raise TimeoutError(f"{name} took longer than {timeout_s:g} s: the disk that it lies on hangs") from None
        finally:
            given.stop.set()
            if given.result.done() and not given.result.cancelled():
                given.result.exception()  # the caller may have been cancelled in the same moment
            with self._changed, contextlib.suppress(ValueError):  # it has begun
                self._waiting.remove(given)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                found = self._changed.wait_for(lambda: self._waiting, IDLE_S)
                self._idle -= 1
                if not found:
                    self._threads -= 1
                    return
                given = self._waiting.popleft()
            given.run()
            del given  # not kept while there is nothing to do


class _Work:
    """One piece of work that a caller waits for."""

    def __init__(
        self, work: Callable[[Check], Any], loop: asyncio.AbstractEventLoop, result: "asyncio.Future[Any]"
    ) -> None:
        self._work = work
        self._loop = loop
        self.result = result
        self.stop = threading.Event()

    def run(self) -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            self._check()
            value = self._work(self._check)
        except BaseException as error:  # whatever it is, it is for the caller, who gets it
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
            self._loop.call_soon_threadsafe(self._tell, value, failure)

    def _check(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def _tell(self, value: Any, failure: BaseException | None) -> None:
        if self.result.done():
            return  # nobody waits for it any more
        if failure is None:
            self.result.set_result(value)
        else:
            self.result.set_exception(failure)
