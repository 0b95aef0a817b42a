"""Waiting for a condition, in tests: as short as it takes, and never for luck."""

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.002


async def until(condition: Callable[[], object], what: str = "it", deadline_s: float = 15.0) -> None:
    """Returns when the condition holds; fails after the deadline, with the name of what did not come."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {deadline_s:g} s for {what}"
        await asyncio.sleep(POLL_S)
