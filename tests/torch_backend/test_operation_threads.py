"""The threads that run a group's operations: in order, two at a time, whatever follows on each of them."""

import threading
import time
from collections.abc import Callable

from meshtrain.torch_backend.work import OperationThreads

TIMEOUT_S = 10.0


def nothing() -> None:
    """Nobody waits for the operation."""


def test_what_follows_on_an_operation_may_wait_for_another_one() -> None:
    """As PowerSGD's callback does in every bucket: it sends the second factor when the first one is there."""
    threads = OperationThreads("test")
    ended = [threading.Event() for _ in range(6)]

    def first(number: int) -> Callable[[], None]:
        def follow() -> None:
            second = threading.Event()

            def operate() -> Callable[[], None]:
                return second.set

            threads.put(operate)
            assert second.wait(TIMEOUT_S)
            ended[number].set()

        return follow

    for number in range(len(ended)):
        threads.put(lambda number=number: first(number))  # type: ignore[misc]
    assert all(event.wait(TIMEOUT_S) for event in ended)
    threads.close()
    assert not threads._threads


def test_operations_begin_in_order_and_two_run_at_a_time() -> None:
    threads = OperationThreads("test")
    begun: list[int] = []
    running = most = 0
    lock = threading.Lock()
    gates = [threading.Event() for _ in range(8)]

    def operation(number: int) -> Callable[[], Callable[[], None]]:
        def operate() -> Callable[[], None]:
            nonlocal running, most
            with lock:
                begun.append(number)
                running += 1
                most = max(most, running)
            assert gates[number].wait(TIMEOUT_S)
            with lock:
                running -= 1
            return nothing

        return operate

    for number in range(len(gates)):
        threads.put(operation(number))
    until_s = time.monotonic() + TIMEOUT_S
    for number, gate in enumerate(gates):
        while len(begun) < min(number + 2, len(gates)) and time.monotonic() < until_s:
            time.sleep(0.001)
        assert len(begun) == min(number + 2, len(gates)), "two at a time, and no more"
        gate.set()
    threads.close()
    assert begun == sorted(begun)
    assert most == 2
    assert not threads._threads


def test_an_operation_that_waits_until_the_others_end_is_waited_for_too() -> None:
    """Its thread begins after `close`; left alone it would run in whatever world of the group has begun meanwhile."""
    threads = OperationThreads("test")
    running, gate, third_began, closed = threading.Semaphore(0), threading.Event(), threading.Event(), threading.Event()
    after_close: list[bool] = []

    def of_before() -> Callable[[], None]:
        running.release()
        assert gate.wait(TIMEOUT_S)
        return wait_for_third

    def wait_for_third() -> None:
        assert third_began.wait(TIMEOUT_S)

    def third() -> Callable[[], None]:
        third_began.set()
        after_close.append(closed.wait(0.3))
        return nothing

    def open_gate() -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not threads._closed and time.monotonic() < until_s:
            time.sleep(0.001)
        gate.set()

    for _ in range(2):
        threads.put(of_before)
        assert running.acquire(timeout=TIMEOUT_S)
    threads.put(third)
    opener = threading.Thread(target=open_gate)
    opener.start()
    threads.close()
    closed.set()
    opener.join(TIMEOUT_S)
    assert after_close == [False]
