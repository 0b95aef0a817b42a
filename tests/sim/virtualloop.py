"""The event loop of one daemon in virtual time: the shells that ship run on it unchanged, and take no time.

A callback is an event of the cluster's clock, at its instant and in its order, and happens to the daemon's process as
all else does: not while it sleeps, and never after it has ended.
"""

import asyncio
import contextlib
import inspect
from asyncio import events
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from tests.sim.clusternetwork import Clock, Node

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Fault = dict[str, Any]
_UNFINISHED = (inspect.CORO_CREATED, inspect.CORO_SUSPENDED)


class VirtualLoop(asyncio.AbstractEventLoop):
    """What asyncio's tasks, futures and timers need of a loop, on the time of a `Clock`.

    Threads do not exist here: what a shell gives to one is done at once, and told after a time.

    Args:
        node: the process whose loop this is.
        thread_s: that time.

    Attributes:
        faults: exceptions that nobody has taken, as asyncio tells them; whoever runs the cluster looks at them.
    """

    def __init__(self, clock: Clock, node: Node, thread_s: float) -> None:
        self._clock = clock
        self._node = node
        self._thread_s = thread_s
        self._ends = False
        self.faults: list[Fault] = []

    def run(self, event: Callable[[], T]) -> T:
        """Calls into the daemon, whose code finds this loop running."""
        outer = events._get_running_loop()
        events._set_running_loop(self)
        try:
            return event()
        finally:
            events._set_running_loop(outer)

    def end(self) -> None:
        """The process is killed: its tasks are thrown away, and their last words, the `finally` of each, with them.

        Call it when nothing that these do is seen any more; here, and not whenever they are collected.
        """
        self._ends = True
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            while isinstance(coroutine, Coroutine) and inspect.getcoroutinestate(coroutine) in _UNFINISHED:
                with contextlib.suppress(RuntimeError):  # it awaits something in its `finally`
                    self.run(coroutine.close)

    # Time and callbacks

    def time(self) -> float:
        return self._clock.now_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._clock.at(0.0, partial(self._node.do, partial(self._run_handle, handle)))
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._clock.at_time(when, partial(self._node.do, partial(self._run_handle, handle)))
        return handle

    def _run_handle(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            self.run(handle._run)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays with the clock, and does nothing there."""

    # Tasks and futures

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], *, name: str | None = None, **kwargs: Any
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, **kwargs)

    def run_in_executor(self, executor: object, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            tell = partial(future.set_result, func(*args))
        except Exception as error:  # it is raised where the future is awaited
            tell = partial(future.set_exception, error)
        if self._ends:
            tell()
        else:
            self.call_later(self._thread_s, lambda: None if future.done() else tell())
        return future

    def call_exception_handler(self, context: Fault) -> None:
        self.faults.append(context)

    # What asyncio asks of any loop

    def is_running(self) -> bool:
        return events._get_running_loop() is self

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False


def virtual_loop(clock: Clock, node: Node, thread_s: float = 0.0) -> VirtualLoop:
    """A new loop. What no shell here asks of asyncio (sockets, signals, processes) raises NotImplementedError."""
    return VirtualLoop(clock, node, thread_s)  # type: ignore[abstract]
