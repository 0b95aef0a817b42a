"""Memory shared with a learner: nothing of it has a name that could outlive its processes, and nobody shrinks it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtraind.learner.shared_memory import SharedMemory, SharedMemoryError
from meshwire.memory_layout.kept_state import DIRTY_OFFSET, HEADER_BYTES, KeptHeader, sample_digest
from meshwire.memory_layout.shared_slots import PAGE_BYTES, MemoryLayout

LAYOUT = MemoryLayout.for_bound(values=1024, staleness=0)
NAMED = Path("/dev/shm")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous files are looked at as Linux shows them")


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory()
    made.make(LAYOUT)
    yield made
    made.close()


def test_it_has_no_name_that_a_killed_process_could_leave(memory: SharedMemory) -> None:
    """M2: without a link in any file system the kernel frees it with the last process that has it, kill -9 or not."""
    assert os.fstat(memory.descriptor).st_nlink == 0
    assert not [path.name for path in NAMED.glob("*") if path.stat().st_ino == os.fstat(memory.descriptor).st_ino]


def test_only_who_is_given_it_has_it(memory: SharedMemory) -> None:
    """M2: passed by descriptor. What the daemon starts otherwise must not keep it alive."""
    code = f"import os; os.fstat({memory.descriptor})"
    others = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, check=False)
    assert b"Bad file descriptor" in others.stderr
    given = subprocess.run([sys.executable, "-c", code], pass_fds=[memory.descriptor], check=False)
    assert given.returncode == 0


def test_nobody_shrinks_it_under_the_daemon(memory: SharedMemory) -> None:
    """A learner that did would kill the daemon with SIGBUS."""
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 0)
    memory.raw(1)[:] = bytes(LAYOUT.values * 4)


def test_what_is_kept_is_used_only_as_it_was_left(memory: SharedMemory) -> None:
    """J3: a base that a round changes, that is not trusted, or of which a word is another, is none."""
    kept = memory.kept
    assert kept.descriptor is not None
    assert kept.round() is None, "nobody has filled it"
    words = os.urandom(PAGE_BYTES)
    spans = (HEADER_BYTES, PAGE_BYTES), (HEADER_BYTES, 8), (HEADER_BYTES, 8)
    header = KeptHeader(False, 7, *spans, HEADER_BYTES + PAGE_BYTES, sample_digest(words))
    os.pwrite(kept.descriptor, header.pack().ljust(HEADER_BYTES, b"\0") + words, 0)
    assert kept.round() == 7
    os.pwrite(kept.descriptor, b"\1", DIRTY_OFFSET)
    assert kept.round() is None
    os.pwrite(kept.descriptor, b"\0", DIRTY_OFFSET)
    os.pwrite(kept.descriptor, b"changed!", HEADER_BYTES + 1024)
    assert kept.round() is None
    os.pwrite(kept.descriptor, words, HEADER_BYTES)
    assert kept.round() == 7
    os.ftruncate(kept.descriptor, HEADER_BYTES)
    assert kept.round() is None, "a part of it is gone"
    os.pwrite(kept.descriptor, words, HEADER_BYTES)
    kept.trusted = False
    assert kept.round() is None
    kept.clear()
    assert (kept.round(), os.fstat(kept.descriptor).st_size) == (None, 0)


def test_what_is_kept_goes_with_the_rest() -> None:
    """M2: with the job."""
    memory = SharedMemory()
    descriptor = memory.kept.descriptor
    memory.close()
    assert descriptor is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert memory.kept.round() is None


def test_a_size_that_is_not_the_models_is_refused() -> None:
    memory = SharedMemory()
    try:
        os.ftruncate(memory.descriptor, LAYOUT.total_bytes - 1)
        with pytest.raises(SharedMemoryError, match=f"needs {LAYOUT.total_bytes}"):
            memory.map(LAYOUT)
    finally:
        memory.close()
