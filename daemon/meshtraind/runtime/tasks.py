"""Named tasks that somebody owns: the only place that starts one."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0


def told_elsewhere(name: str, error: BaseException) -> None:
    """The `on_error` of tasks whose errors somebody else gets: whoever awaits them; of those that nobody awaits any
    more they are unwanted."""


class TaskSet:
    """The tasks of one owner. Their errors are reported once, and `close` leaves none behind.

    Args:
        owner: prefix of every task's name, as it appears in logs.
        on_error: called with (task name, error) when a task fails; without it the error is logged.
    """

    def __init__(self, owner: str, on_error: Callable[[str, BaseException], None] | None = None) -> None:
        self._owner = owner
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
        """Starts `work` as a task named `owner/name`."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._owner}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if self._on_error is not None:
            self._on_error(task.get_name(), error)
        else:
            log.error("%s failed", task.get_name(), exc_info=error)

    async def close(self) -> None:
        """Cancels what still runs and waits for it, except for the task that calls this."""
        pending = self._tasks - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        if pending:
            _, stuck = await asyncio.wait(pending, timeout=STOP_TIMEOUT_S)
            for task in stuck:
                log.error("%s ignored its cancellation for %.0f s", task.get_name(), STOP_TIMEOUT_S)
