"""Arithmetic on the event loop, in stretches so short that reads and messages are not held up."""

import asyncio
import time
from collections.abc import Callable

SLICE_S = 0.001  # longest stretch before the loop gets a turn; longer only by the piece it ends with


class Slices:
    """Calls `piece` until it has nothing left to do, giving the loop a turn after every SLICE_S.

    Args:
        piece: does a little, well under a millisecond; returns False if there was nothing to do.
    """

    def __init__(self, piece: Callable[[], bool]) -> None:
        self._piece = piece
        self._scheduled = False
        self._running = False
        self._stopped = False

    def run(self) -> None:
        """Works now, and goes on later if that takes longer than a slice.

        A piece may cause a call of this again. It does nothing, so one piece is done before the next one begins.
        """
        if self._running:
            return
        self._running = True
        try:
            end_s = time.monotonic() + SLICE_S
            while not self._stopped and self._piece():
                if time.monotonic() > end_s:
                    self.run_later()
                    return
        finally:
            self._running = False

    def run_later(self) -> None:
        """Begins at the event loop's next turn."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_again)

    def stop(self) -> None:
        """Stops for good: `piece` is called no more."""
        self._stopped = True

    def _run_again(self) -> None:
        self._scheduled = False
        self.run()
