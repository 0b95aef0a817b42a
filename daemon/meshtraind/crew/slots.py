"""The memory of a device's learners, in which what they have for a round is added up (R6).

The first one's is that which the device shares with its daemon: the others' values are added to it in place, and what
the daemon puts there is copied to the others.
"""

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from meshtraind.learner.shared_memory import SharedMemoryError
from meshtraind.machine.memory_file import MemoryFile, memory_found
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.model.plan import Plan

MEMORY_NAME = "meshtrain-learner"

Values = NDArray[np.float32]


class CrewMemory:
    """Of all learners of one device. A file for each but the first is made here.

    Args:
        told: by the daemon, of the first one's.

    Raises:
        OSError: the system refuses more.
    """

    def __init__(self, learners: int, told: str) -> None:
        self._first = memory_found(told)
        self._told = told
        self._others = [MemoryFile(MEMORY_NAME) for _ in range(learners - 1)]
        self._raw: list[Values] = []
        self._results: list[Values] = []
        self._buckets: tuple[slice, ...] = ()

    def told(self, learner: int) -> str:
        """By what the learner finds its memory."""
        return self._others[learner - 1].told if learner else self._told

    def inherited(self, learner: int) -> tuple[int, ...]:
        """Descriptors that it must inherit for that."""
        if learner:
            return self._others[learner - 1].inherited
        return (self._first,) if self._told.isdecimal() else ()

    def map(self, plan: Plan) -> None:
        """Maps what the learners have sized. Raises SharedMemoryError when a size is another than the plan's."""
        layout = MemoryLayout.for_bound(plan.total_values, 0)
        self._buckets = tuple(slice(each.start, each.start + each.count) for each in plan.buckets)
        for file in self._others:
            file.seal()
            if file.size_bytes() != layout.total_bytes:
                raise SharedMemoryError(
                    f"a learner sized its shared memory to {file.size_bytes()} bytes; its model needs "
                    f"{layout.total_bytes}"
                )
        for descriptor in (self._first, *(file.descriptor for file in self._others)):
            mapped = mmap.mmap(descriptor, layout.total_bytes)
            self._raw.append(_values(mapped, layout, layout.raw_offset(0)))
            self._results.append(_values(mapped, layout, layout.result_offset))

    def add_up(self, bucket: int) -> None:
        """What all learners have for a bucket, in the first one's place."""
        first, *others = (raw[self._buckets[bucket]] for raw in self._raw)
        for values in others:
            np.add(first, values, out=first)

    def hand_out(self) -> None:
        """The means that the daemon has put into the first one's result slot are in the others' as well."""
        first, *others = self._results
        for values in others:
            np.copyto(values, first)

    def close(self) -> None:
        """Gives the memory back when the learners have ended."""
        self._raw.clear()
        self._results.clear()
        for file in self._others:
            file.close()
        if not self._told.isdecimal():  # else it was inherited, as all is that this process was given
            os.close(self._first)


def _values(mapped: mmap.mmap, layout: MemoryLayout, offset_bytes: int) -> Values:
    return np.frombuffer(mapped, np.float32, layout.values, offset_bytes)
