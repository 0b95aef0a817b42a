"""Shared memory between the daemon and one learner; nothing of it is left behind at kill -9 (M2)."""

import fcntl
import mmap
import os
import secrets
import sys

from meshwire.memory_layout.kept_state import kept_round
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.model.plan import VALUE_BYTES

SHARED_MEMORY_NAME = "meshtrain-learner"
KEPT_MEMORY_NAME = "meshtrain-base"


class SharedMemoryError(Exception):
    """The memory cannot be made or does not suit the model."""


class SharedMemory:
    """An anonymous file: made before the learner is spawned, sized by the first one, mapped by both.

    Attributes:
        kept: beside it, what learners keep for those after them.
    """

    def __init__(self) -> None:
        self.descriptor = _anonymous_file()
        self.kept = KeptMemory()
        self._map: mmap.mmap | None = None
        self._layout: MemoryLayout | None = None

    def make(self, layout: MemoryLayout) -> None:
        """Sizes and maps it before there is a learner. Raises SharedMemoryError."""
        try:
            os.ftruncate(self.descriptor, layout.total_bytes)
        except OSError as error:
            raise SharedMemoryError(f"no {layout.total_bytes} bytes of shared memory: {error}") from error
        self.map(layout)

    def map(self, layout: MemoryLayout) -> None:
        """Maps what the learner has sized. Raises SharedMemoryError when the size is another than the plan's."""
        if sys.platform == "linux":
            # A learner that shrank the file later would kill the daemon with SIGBUS.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        size_bytes = os.fstat(self.descriptor).st_size
        if size_bytes != layout.total_bytes:
            raise SharedMemoryError(
                f"the learner sized its shared memory to {size_bytes} bytes; its model needs {layout.total_bytes}"
            )
        self._map = mmap.mmap(self.descriptor, size_bytes)
        self._layout = layout

    def raw(self, step: int) -> memoryview:
        """The slot where step `step` of the learner puts w*g: `layout.values` of fp32, as bytes."""
        assert self._layout is not None
        return self._slot(self._layout.raw_offset(step))

    def result(self) -> memoryview:
        """The slot for the means: `layout.values` of fp32, as bytes."""
        assert self._layout is not None
        return self._slot(self._layout.result_offset)

    def _slot(self, offset: int) -> memoryview:
        assert self._map is not None
        assert self._layout is not None
        return memoryview(self._map)[offset : offset + self._layout.values * VALUE_BYTES]

    def close(self) -> None:
        """Gives the memory back once no view of it is left; without views, at once."""
        if self._map is not None:
            self._map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.kept.close()


class KeptMemory:
    """Memory where a learner keeps its base and its optimizer's state for the process after it (J3).

    An anonymous file that learners make as large as they need; here only its beginning is read, and only while no
    learner runs. Where such a file cannot grow (beyond Linux) there is none, and nothing is kept.

    Attributes:
        descriptor: None where nothing is kept.
        trusted: what it holds may be used, if it says so itself.
    """

    def __init__(self) -> None:
        self.trusted = True
        self.descriptor: int | None = None
        if sys.platform == "linux":
            self.descriptor = os.memfd_create(KEPT_MEMORY_NAME, os.MFD_CLOEXEC)

    def round(self) -> int | None:
        """The round after which the base is that lies there; None where none could be used. Blocks for some ms."""
        descriptor = self.descriptor
        if descriptor is None or not self.trusted:
            return None
        try:
            size_bytes = os.fstat(descriptor).st_size
            return kept_round(lambda size, offset: os.pread(descriptor, size, offset), size_bytes)
        except OSError:
            return None

    def clear(self) -> None:
        """What it holds is of no use: a learner that fills it again needs no more memory than that."""
        self.trusted = True
        if self.descriptor is not None:
            os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Gives the memory back when the last process that maps it has ended."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create(SHARED_MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if sys.platform == "darwin":
        import _posixshmem

        name = f"/mt-{secrets.token_hex(8)}"
        descriptor: int = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        _posixshmem.shm_unlink(name)
        return descriptor
    raise SharedMemoryError(f"learners are not supported on {sys.platform} yet; run this device as a hub")
