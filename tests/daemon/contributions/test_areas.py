"""What rounds lie in is used again, and goes back to the system when many were kept and are not any more (J1)."""

import subprocess
import sys

import pytest

from meshtraind.contributions.segments import MAPPED_BYTES_MIN, Areas, new_area

PROGRAM = """
import numpy as np
import psutil
from meshtraind.contributions.segments import Areas
from meshwire.limits import MIB

np.ones(8 * MIB, np.uint8)  # once that has been freed, glibc takes smaller blocks from its heap
process = psutil.Process()
before_bytes = process.memory_info().rss
areas = Areas(MIB)
kept, small = [], []
for _ in range(100):
    area = areas.take()
    area[:] = b"\\1" * MIB
    kept.append(area)
    small.append(bytes(60_000))  # large enough for no hole that is there already
print((process.memory_info().rss - before_bytes) // MIB)
del area
while kept:
    areas.give(kept.pop(0))
print((process.memory_info().rss - before_bytes) // MIB)
"""


def test_an_area_that_was_given_back_is_taken_again() -> None:
    areas = Areas(64)
    first = areas.take()
    areas.give(first)
    assert areas.take() is first


def test_one_that_was_retired_is_never_taken_again() -> None:
    areas = Areas(64)
    first = areas.take()
    areas.retire()
    areas.give(first)
    assert areas.take() is not first


@pytest.mark.parametrize("size_bytes", [64, MAPPED_BYTES_MIN])
def test_a_fresh_area_is_zero_and_can_be_written(size_bytes: int) -> None:
    area = new_area(size_bytes)
    assert len(area) == size_bytes
    assert not any(area)
    area[-1] = 1


def test_of_what_was_kept_for_a_while_no_more_waits_than_is_in_use_and_one() -> None:
    areas = Areas(64)
    kept = [areas.take() for _ in range(100)]
    _in_use = areas.take()
    for area in kept:
        area[0] = 1
    while kept:
        areas.give(kept.pop(0))
    assert sum(areas.take()[0] for _ in range(100)) == 2, "used ones; fresh ones are zero"


def test_rounds_that_take_turns_cost_no_fresh_area() -> None:
    areas = Areas(64)
    lent = [areas.take() for _ in range(3)]
    known = {id(area) for area in lent}
    for _ in range(50):
        areas.give(lent.pop(0))
        lent.append(areas.take())
        assert id(lent[-1]) in known


@pytest.mark.skipif(sys.platform != "linux", reason="resident bytes are asked of Linux")
def test_many_areas_go_back_to_the_system_with_small_things_that_live_on_between_them() -> None:
    """In a process of its own, for what an allocator does follows from all that it did before."""
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    taken_mib, kept_mib = map(int, said.split())
    assert taken_mib > 90
    assert kept_mib < 20
