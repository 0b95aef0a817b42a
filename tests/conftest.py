"""After every test: no task, file descriptor or child process is left that was not there before.

Nothing here waits for luck: what ends by itself within GRACE_S (a thread that closes its socket, a process
that is being reaped) is no leak, and only a test that is about to fail waits that long.
"""

import asyncio
import contextlib
import gc
import os
import re
import time
import traceback
from asyncio import constants
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import psutil
import pytest
import pytest_asyncio
from xdist.scheduler import LoadScopeScheduling

# Read when torch and numpy are imported. Threads that share a core with those of another test mostly wait.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

ALLOCATIONS_BETWEEN_COLLECTIONS = 20_000

# In its debug mode asyncio notes with every callback who asked for it: the caller, not ten frames of pytest.
setattr(constants, "DEBUG_STACK_DEPTH", 1)  # noqa: B010 - a constant to mypy
# Tasks and futures that are written in C ask this instead, for all frames; two of them hold a task's own caller.
traceback.extract_stack.__defaults__ = (None, 2)

# A busy machine is slow, and no example is wrong for that.
hypothesis.settings.register_profile("meshtrain", deadline=None)
hypothesis.settings.load_profile("meshtrain")

GRACE_S = 3.0
POLL_S = 0.02
DESCRIPTORS = "/proc/self/fd"  # these are looked at before and after each of thousands of tests: text, no Path
CHILDREN_OF_THREADS = "/proc/self/task"

# Opened once in a process by a library and kept by design; each would be blamed on the test that came first.
KEPT_TARGETS = (
    "/dev/null",  # torch and subprocess helpers
    "/dev/random",
    "/dev/urandom",  # CPython and OpenSSL
    "/proc/",  # psutil
    "/sys/",  # psutil, torch's count of cores
)
STANDARD_STREAMS = {"0", "1", "2"}  # pytest's capture exchanges what they lead to
KEPT_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

T = TypeVar("T")

# Tests that start no daemon: whole folders of them, and the command against an endpoint in its own process.
PURE = (
    "wire",
    "sim",
    "codecs",
    "contributions",
    "executor",
    "projection",
    "replay",
    "bench",
    "cli",
    "doctor",
    "runtime",
)
SINGLE = ("sim", "executor")  # of these, tests that take long: dealt one by one, and last, so that no process waits
LEARNERS_AT_ONCE = 2
LEARNING = ("test_real", "test_upstream")  # and of those whose learners keep all cores busy; in train/ most do
LONGEST = ("/test_real_return", "/test_upstream", "/test_real_groups", "/real/", "/demo/")  # in paths
DAEMONS, LEARNERS = "daemons", "learners "  # how the groups are called; the latter, and the file's path

# How a module says that it holds tests of a tier.
TIERS = {
    "slow": re.compile(r"\bmark\.slow\b|\bmostly_slow\("),
    "long": re.compile(r"\bmark\.long\b|\bmostly_long\("),
}

failed = pytest.StashKey[bool]()


class Groups(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Never more than LEARNERS_AT_ONCE tests that start learners, and one that starts daemons alone, run at once.

    By path, and not by xdist's marks: those are lost where pytest and xdist do not suit each other.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        folders, name = path.split("/")[1:-1], path.rpartition("/")[2]  # below tests
        if folders[:1] == ["train"] or name.startswith(LEARNING):
            return LEARNERS + path
        if folders and not set(folders).intersection(PURE):
            return DAEMONS
        return nodeid if set(folders).intersection(SINGLE) else path  # to deal thousands one by one takes half a minute

    def _assign_work_unit(self, node: Any) -> None:
        """Gives a process what takes longest of what may begin now."""
        learning = [other for other, units in self.assigned_work.items() if other is not node and _learns(units)]
        free = [scope for scope in self.workqueue if len(learning) < LEARNERS_AT_ONCE or not scope.startswith(LEARNERS)]
        if free:
            self.workqueue.move_to_end(min(free, key=_turn), last=False)
            super()._assign_work_unit(node)
        else:  # files of learners alone are left: the others go through them
            node.shutdown()


def _learns(units: dict[str, dict[str, bool]]) -> bool:
    """Whether a process that has been given these, each with its tests and whether they are over, is not yet through
    with those of learners."""
    return any(scope.startswith(LEARNERS) and not all(tests.values()) for scope, tests in units.items())


def _turn(scope: str) -> int:
    """When it is dealt: first the daemons, which wait in a row, then learners, from those that take minutes."""
    if scope == DAEMONS:
        return 0
    if scope.startswith(LEARNERS):
        return 1 + next((at for at, part in enumerate(LONGEST) if part in scope), len(LONGEST))
    return 2 + len(LONGEST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)


@cache
def holds(module: Path, tier: str) -> bool:
    """Whether a module's text says that it holds tests of a tier."""
    return TIERS[tier].search(module.read_text("utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest -m slow` and `pytest -m long` import no module without such tests: with all of them that is a good part
    of what each of their processes does."""
    tier = config.option.markexpr
    if tier not in TIERS or not collection_path.match("test_*.py") or holds(collection_path, tier):
        return None
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Neither plain `pytest` nor `pytest -m slow` runs what is marked long: `pytest -m long` does."""
    for item in items:
        for tier in TIERS:
            if item.get_closest_marker(tier) and not holds(item.path, tier):
                raise pytest.UsageError(f"{item.nodeid} is {tier}, and its module does not say so: mark it there")
    long = [item for item in items if item.get_closest_marker("long")]
    if long and "long" not in config.option.markexpr:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All modules are imported here, and nothing of that is garbage: a collector that looks for some takes a third of
    the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: the collections that look for what a test left need not go through them.

    With torch and 5,000 tests each such look takes half a second otherwise.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[failed] = item.stash.get(failed, False) or report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def first_loops() -> None:
    """What a process opens once with its first event loop (libuv: a pipe for signals) is no test's leak."""
    asyncio.new_event_loop().close()
    if os.name == "posix":
        import uvloop

        uvloop.new_event_loop().close()


def settled(left: Callable[[], list[T]]) -> list[T]:
    """What `left` returns once it is empty, or after GRACE_S."""
    found = left()
    if found:
        gc.collect()  # what only a cycle holds is Python's to close, and warns where it should not be
    deadline = time.monotonic() + GRACE_S
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found


def open_descriptors() -> set[tuple[str, str]]:
    """(number, target) of every open descriptor that neither pytest nor a library keeps by design."""
    found = set()
    for number in set(os.listdir(DESCRIPTORS)) - STANDARD_STREAMS:
        try:
            target = os.readlink(f"{DESCRIPTORS}/{number}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself, or one closed by another thread meanwhile
        if not target.startswith(KEPT_TARGETS):
            found.add((number, target))
    return found


def has_children() -> bool:
    """Whether this process has any. Linux tells at once; elsewhere all processes have to be looked through."""
    if not os.path.isdir(CHILDREN_OF_THREADS):
        return True
    for thread in os.listdir(CHILDREN_OF_THREADS):
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),  # that thread has ended
            open(f"{CHILDREN_OF_THREADS}/{thread}/children", "rb", buffering=0) as children,
        ):
            if children.read(1):
                return True
    return False


def child_processes() -> set[psutil.Process]:
    """All descendants, also those that have ended and were not waited for."""
    found: set[psutil.Process] = set()
    if not has_children():
        return found
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
        except psutil.ZombieProcess:
            command = ""
        except psutil.NoSuchProcess:
            continue
        if not any(kept in command for kept in KEPT_CHILDREN):
            found.add(child)
    return found


def describe(child: psutil.Process) -> str:
    try:
        return f"{child.pid} {child.status()}: {' '.join(child.cmdline()) or child.name()}"
    except psutil.Error:
        return f"{child.pid}: has ended and was not waited for"


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a descriptor or a process; kills the process, so that no other test meets it.

    A test that has failed already is not blamed for descriptors too: its traceback keeps alive what it opened.
    """
    descriptors_before = open_descriptors() if os.path.isdir(DESCRIPTORS) else None
    children_before = child_processes()
    yield
    assert descriptors_before is None or all(os.path.islink(f"{DESCRIPTORS}/{n}") for n in STANDARD_STREAMS), (
        "a standard stream was closed: what is opened next takes its number, and libuv aborts the process"
    )
    children = settled(lambda: list(child_processes() - children_before))
    blamed = [describe(child) for child in children]
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=GRACE_S)
    assert not blamed, f"processes left: {blamed}"
    if descriptors_before is not None and not request.node.stash.get(failed, False):
        left = settled(lambda: sorted(open_descriptors() - descriptors_before))
        assert not left, f"file descriptors left open: {left}"


@pytest_asyncio.fixture
async def tasks_awaited() -> AsyncIterator[None]:
    """Fails a test that leaves a task pending on its loop."""
    yield
    pending = asyncio.all_tasks() - {asyncio.current_task()}
    if pending:
        _, pending = await asyncio.wait(pending, timeout=GRACE_S)
    assert not pending, f"tasks left pending: {sorted(task.get_name() for task in pending)}"


@pytest.fixture(autouse=True)
def no_task_left(request: pytest.FixtureRequest) -> None:
    """Looks for tasks after the test's own fixtures have cleaned up, and before its loop is closed.

    That order follows from the order of setting up: `nothing_left`, the loop, this, then what the test asks for.
    """
    request.getfixturevalue("nothing_left")
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("tasks_awaited")
