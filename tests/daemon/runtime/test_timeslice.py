"""Arithmetic in stretches: short, in order, and over when it is stopped."""

import asyncio

import pytest

from meshtraind.runtime import timeslice as slices
from meshtraind.runtime.timeslice import Slices


@pytest.mark.asyncio
async def test_the_loop_gets_a_turn_after_every_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of no length is one piece; what was scheduled in between comes first."""
    monkeypatch.setattr(slices, "SLICE_S", -1.0)
    seen: list[str] = []
    finished = asyncio.Event()

    def piece() -> bool:
        if len(seen) >= 5:
            finished.set()
            return False
        seen.append("piece")
        asyncio.get_running_loop().call_soon(seen.append, "other")
        return True

    work = Slices(piece)
    work.run()
    assert seen == ["piece"]
    await finished.wait()
    assert seen == ["piece", "other"] * 3


@pytest.mark.asyncio
async def test_a_piece_is_done_before_the_next_begins() -> None:
    """What a piece causes may ask for more work, whose turn comes after it."""
    seen: list[str] = []

    def piece() -> bool:
        if len(seen) == 4:
            return False
        seen.append("begin")
        work.run()
        seen.append("end")
        return True

    work = Slices(piece)
    work.run()
    assert seen == ["begin", "end", "begin", "end"]


@pytest.mark.asyncio
async def test_stopped_within_a_piece_it_does_no_other() -> None:
    """Whoever closes an executor may do so from one of its callbacks."""
    seen: list[str] = []

    def piece() -> bool:
        seen.append("piece")
        work.stop()
        work.run_later()
        return True

    work = Slices(piece)
    work.run()
    await asyncio.sleep(0)
    assert seen == ["piece"]
