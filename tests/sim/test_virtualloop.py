"""The event loop in virtual time: its timers, tasks and waits, a process that sleeps, and one that ends."""

import asyncio

import pytest

from tests.sim.clusternetwork import Clock, Node, Wake
from tests.sim.virtualloop import virtual_loop

END_S = 100.0


class Process:
    """A node with its loop, and what its coroutines have told, by time."""

    def __init__(self, clock: Clock) -> None:
        self.node = Node(0)
        self.loop = virtual_loop(clock, self.node)
        self.told: list[tuple[float, str]] = []

    def tell(self, text: str) -> None:
        self.told.append((asyncio.get_running_loop().time(), text))


async def wait_and_tell(process: Process) -> None:
    process.tell("begins")
    await asyncio.sleep(2.0)
    process.tell("has slept")
    try:
        async with asyncio.timeout(3.0):
            await asyncio.Event().wait()
    except TimeoutError:
        process.tell("gives up")
    process.tell(await asyncio.to_thread(str.upper, "done"))


def run(clock: Clock) -> Process:
    process = Process(clock)
    process.loop.run(lambda: process.loop.create_task(wait_and_tell(process)))
    return process


def test_waits_end_at_their_instants_and_take_no_time() -> None:
    clock = Clock()
    process = run(clock)
    clock.run_until(END_S, 100)
    assert process.told == [(0.0, "begins"), (2.0, "has slept"), (5.0, "gives up"), (5.0, "DONE")]
    assert process.loop.faults == []


def test_a_process_that_sleeps_goes_on_when_it_wakes() -> None:
    clock = Clock()
    process = run(clock)
    clock.at(1.0, lambda: setattr(process.node, "asleep", True))
    clock.at(20.0, lambda: process.node.wake(Wake.IN_ORDER))
    clock.run_until(END_S, 100)
    assert process.told == [(0.0, "begins"), (20.0, "has slept"), (23.0, "gives up"), (23.0, "DONE")]


def test_a_process_that_has_ended_does_nothing_more() -> None:
    clock = Clock()
    process = run(clock)
    clock.at(1.0, lambda: setattr(process.node, "alive", False))
    clock.run_until(END_S, 100)
    assert process.told == [(0.0, "begins")]


def test_an_exception_that_nobody_takes_is_told() -> None:
    clock = Clock()
    process = Process(clock)

    def fail() -> None:
        raise ZeroDivisionError

    process.loop.call_later(1.0, fail)
    clock.run_until(END_S, 100)
    assert isinstance(process.loop.faults[0]["exception"], ZeroDivisionError)


@pytest.mark.parametrize("cancel", [True, False])
def test_a_timer_that_was_cancelled_does_nothing(cancel: bool) -> None:
    clock = Clock()
    process = Process(clock)
    timer = process.loop.call_at(4.0, lambda: process.tell("is due"))
    if cancel:
        timer.cancel()
    clock.run_until(END_S, 100)
    assert process.told == ([] if cancel else [(4.0, "is due")])
