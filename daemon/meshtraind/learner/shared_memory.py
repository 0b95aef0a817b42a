"""Shared memory between the daemon and one learner; nothing of it is left behind at kill -9 (M2).

Where files without a name cannot be inherited (`machine/memory_file.py`), the next daemon removes what was left.
"""

import mmap
import os

from meshtraind.machine.memory_file import MemoryFile
from meshwire.memory_layout.kept_state import kept_round
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.model.plan import VALUE_BYTES

SHARED_MEMORY_NAME = "meshtrain-learner"
KEPT_MEMORY_NAME = "meshtrain-base"


class SharedMemoryError(Exception):
    """The memory cannot be made or does not suit the model."""


class SharedMemory:
    """A file that is made before the learner is spawned, sized by the first one, mapped by both.

    Attributes:
        file: for whoever starts the learner.
        kept: beside it, what learners keep for those after them.
    """

    def __init__(self) -> None:
        try:
            self.file = MemoryFile(SHARED_MEMORY_NAME)
        except OSError as error:
            raise SharedMemoryError(f"no memory can be shared with a learner: {error}") from error
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
        self.file.seal()
        size_bytes = self.file.size_bytes()
        if size_bytes != layout.total_bytes:
            raise SharedMemoryError(
                f"the learner sized its shared memory to {size_bytes} bytes; its model needs {layout.total_bytes}"
            )
        self._map = mmap.mmap(self.descriptor, size_bytes)
        self._layout = layout

    @property
    def descriptor(self) -> int:
        """The file, open in this process."""
        return self.file.descriptor

    def raw(self, step: int) -> memoryview:
        """The slot where step `step` of the learner puts w*g: `layout.values` of fp32, as bytes."""
        assert self._layout is not None
        return self._slot(self._layout.raw_offset(step))

    def result(self) -> memoryview:
        """The slot for the means: `layout.values` of fp32, as bytes."""
        assert self._layout is not None
        return self._slot(self._layout.result_offset)

    def mixed(self, slot: int) -> memoryview:
        """A slot of weights that are mixed (R9): `layout.values` of `layout.mixed_bytes` each."""
        assert self._layout is not None
        return self._slot(self._layout.mixed_offset(slot), self._layout.mixed_bytes)

    def _slot(self, offset: int, value_bytes: int = VALUE_BYTES) -> memoryview:
        assert self._map is not None
        assert self._layout is not None
        return memoryview(self._map)[offset : offset + self._layout.values * value_bytes]

    def close(self) -> None:
        """Gives the memory back once no view of it is left; without views, at once."""
        if self._map is not None:
            self._map = None
        self.file.close()
        self.kept.close()


class KeptMemory:
    """Memory where a learner keeps its base and its optimizer's state for the process after it (J3).

    A file that learners make as large as they need; here only its beginning is read, and only while no learner runs.
    Where such a file cannot grow (macOS) there is none, and nothing is kept.

    Attributes:
        file: None where nothing is kept.
        trusted: what it holds may be used, if it says so itself.
    """

    def __init__(self) -> None:
        self.trusted = True
        self.file: MemoryFile | None = MemoryFile(KEPT_MEMORY_NAME)
        if not self.file.grows:
            self.file.close()
            self.file = None

    @property
    def descriptor(self) -> int | None:
        """The file, open in this process; None where nothing is kept."""
        return None if self.file is None else self.file.descriptor

    def round(self) -> int | None:
        """The round after which the base is that lies there; None where none could be used. Blocks for some ms."""
        if self.file is None or not self.trusted:
            return None
        try:
            return kept_round(self.file.read, self.file.size_bytes())
        except OSError:
            return None

    def clear(self) -> None:
        """What it holds is of no use: a learner that fills it again needs no more memory than that."""
        self.trusted = True
        if self.file is not None:
            os.ftruncate(self.file.descriptor, 0)

    def close(self) -> None:
        """Gives the memory back when the last process that maps it has ended."""
        if self.file is not None:
            self.file.close()
            self.file = None
