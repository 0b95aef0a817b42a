"""What all tests of executors have in common: a seed alone decides in which order things happen."""

from itertools import count
from types import SimpleNamespace

import pytest

from meshtraind.runtime import timeslice

TICK_S = timeslice.SLICE_S / 3


@pytest.fixture(autouse=True)
def slices_end_by_a_clock_that_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice is some pieces long, and not as many as this machine happens to manage."""
    ticks = count()
    monkeypatch.setattr(timeslice, "time", SimpleNamespace(monotonic=lambda: next(ticks) * TICK_S))
