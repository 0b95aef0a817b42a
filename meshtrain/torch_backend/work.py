"""What a collective returns at once: torch.distributed's `Work`, with its wait and its future."""

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

JOIN_TIMEOUT_S = 5.0  # for operations that were told to give up

Operate = Callable[[], Callable[[], None]]  # runs an operation, and returns what tells of its end

_Work: Any = dist.Work  # as of MeshProcessGroup


class GroupWork(_Work):  # type: ignore[misc]
    """An operation that runs, or has ended.

    Args:
        result: what its future yields, usually the list of its output tensors.
        what: as errors call it.
    """

    def __init__(self, result: Any, what: str) -> None:
        super().__init__()
        self._result = result
        self._what = what
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._checked: torch.futures.Future[Any] | None = None
        self._source = -1

    def end(self, error: Exception | None = None, source: int = -1) -> None:
        """Called once."""
        self._error = error
        self._source = source
        with self._lock:
            self._ended.set()
            future = self._future
        if future is not None:
            future.set_result(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the end. Raises dist.DistBackendError, which names the rank that is to blame."""
        limit_s = timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
        if not self._ended.wait(limit_s):
            raise dist.DistBackendError(f"{self._what}: not done after {limit_s:g} s")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Yields the result. torch's C++ takes no exception that Python sets there, but one that a callback raises."""
        with self._lock:
            if self._checked is None:
                self._future = torch.futures.Future()
                self._checked = self._future.then(self._check)
                if self._ended.is_set():
                    self._future.set_result(self._result)
            return self._checked

    def _check(self, future: torch.futures.Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return future.value()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """By which it has ended."""
        return self._error

    def result(self) -> Any:
        """What it was to fill."""
        return self._result

    def synchronize(self) -> None:
        """As `wait`: there are no streams."""
        self.wait()

    def source_rank(self) -> int:
        """The rank in its group that has sent what a receive got; -1 of every other operation."""
        return self._source

    _source_rank = source_rank


class OperationThreads:
    """Runs the operations of one group in the order in which they were put, two at a time, as gloo does.

    One alone would leave the link empty between two operations. What follows on an operation, callbacks of its future,
    may wait for another one of the same group, as PowerSGD's do: while it runs, its thread is not one of the two.
    """

    AT_ONCE = 2

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[Operate] = deque()
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._running = 0
        self._closed = False

    def put(self, operate: Operate) -> None:
        """Runs it behind all that were put before, and then what it returns; once closed at once, for it will fail."""
        if self._closed:
            operate()()
            return
        with self._changed:
            self._waiting.append(operate)
            self._see_to_next()

    def close(self) -> None:
        """Ends once nothing is left. A thread that Python finds in torch when it ends would take the process down.

        What waits may start threads of its own while it ends: those are waited for as well.
        """
        until_s = time.monotonic() + JOIN_TIMEOUT_S
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while others := self._others():
            for thread in others:
                thread.join(max(0.0, until_s - time.monotonic()))
            if time.monotonic() >= until_s:
                return

    def _others(self) -> set[threading.Thread]:
        with self._changed:
            return {each for each in self._threads if each.is_alive()} - {threading.current_thread()}

    def _see_to_next(self) -> None:
        """Has a thread take the next operation, if one may run now. Called with the lock."""
        if not self._waiting or self._running == self.AT_ONCE:
            return
        if self._idle:
            self._changed.notify()
            return
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        while (operate := self._next()) is not None:
            finish = operate()
            with self._changed:
                self._running -= 1
                self._see_to_next()
            finish()
        with self._changed:
            self._threads.discard(threading.current_thread())

    def _next(self) -> Operate | None:
        """The next operation, when one may run; None: this thread is not needed any more."""
        with self._changed:
            while not self._waiting or self._running == self.AT_ONCE:
                if self._idle == self.AT_ONCE or (self._closed and not self._waiting):
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            self._running += 1
            operate = self._waiting.popleft()
            self._see_to_next()
            return operate
