"""So many bytes a second and not more: what is not urgent leaves the link to what is."""

import asyncio


class Throttle:
    """A bucket of tokens that holds none in store: after a pause there is no burst.

    Args:
        bytes_per_s: the pace; None: as fast as it goes.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"{bytes_per_s} bytes/s: nothing would ever come")
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # the loop's time at which the next bytes may go

    async def take(self, size_bytes: int) -> None:
        """Returns when these bytes may go, in the order of the calls."""
        if self._bytes_per_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        starts_s = max(now_s, self._free_s)
        self._free_s = starts_s + size_bytes / self._bytes_per_s
        if starts_s > now_s:
            await asyncio.sleep(starts_s - now_s)
