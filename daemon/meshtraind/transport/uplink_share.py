"""Splits what this device sends evenly among the links on which it sends at once, so that receivers' queues stay short.

In a sharded exchange everybody sends to everybody. A connection takes for its own rate what it had when the others were
done, the cable's; when all send at that rate again the queue in front of each receiver overflows, and whoever loses the
last packets waits for a timeout of 200 ms: eight laptops on 100 Mbit/s took twice as long as the cables need
(`topologies.md`). With even shares each receiver is sent what its cable takes, where cables are alike. Elsewhere TCP
finds less by itself: a share is no more than an upper limit, and there is none while one link sends something alone, as
the state for who comes in.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from statistics import median

from meshtraind.transport.low_extra_delay import PACE_BYTES_S_MIN, PathSample
from meshtraind.transport.round_link import RoundLink

LOOK_INTERVAL_S = 0.05
LOOKS = 20  # of which the middle one counts: acknowledgements come in bursts
BUSY_MIN = 0.8  # of a look, on each link that is in use at once: else they carried less than they could
QUIET_LOOKS = 4  # without a chunk, and without all links sending: the last of a round still goes at its share
HEADROOM = 1.05  # of what all links carried together: a faster way up is found so, step by step


class UplinkShare:
    """Paces links, of which rounds use all at once, while chunks leave on them.

    Args:
        links: to all that this member sends to.
        at_once: on how many of them it sends at once, whenever it sends.
    """

    def __init__(self, links: Sequence[RoundLink], at_once: int) -> None:
        self._links = links
        self._at_once = at_once
        self._rates_bytes_s: deque[float] = deque(maxlen=LOOKS)
        self._share_bytes_s: float | None = None  # that links have been told
        self._quiet = 0  # looks
        self._seen: list[PathSample | None] = []
        self._seen_s = 0.0
        self._begins = False  # what has not come to the ends of all links yet is no rate
        self._timer: asyncio.TimerHandle | None = None

    def sends(self) -> None:
        """Hears that a chunk was given to a link: it looks until all have arrived."""
        self._quiet = 0
        self._share_out()
        if self._timer is None:
            self._seen = [link.path() for link in self._links]
            self._seen_s, self._begins = asyncio.get_running_loop().time(), True
            if sum(path is not None for path in self._seen) >= self._at_once:
                self._look_later()

    def close(self) -> None:
        """Links send as fast as TCP likes again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._quiet = QUIET_LOOKS
        self._share_out()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look)

    def _look(self) -> None:
        self._timer = None
        before, self._seen = self._seen, [link.path() for link in self._links]
        before_s, self._seen_s = self._seen_s, asyncio.get_running_loop().time()
        both = [(then, now) for then, now in zip(before, self._seen, strict=True) if then is not None is not now]
        begins, self._begins = self._begins, False
        long_s = BUSY_MIN * (self._seen_s - before_s)
        if not begins and sum(now.busy_s - then.busy_s >= long_s for then, now in both) >= self._at_once:
            arrived_bytes = sum(now.arrived_bytes - then.arrived_bytes for then, now in both)
            self._rates_bytes_s.append(arrived_bytes / (self._seen_s - before_s))
        sending = sum(now.sending for _, now in both)
        self._quiet = 0 if sending >= self._at_once else self._quiet + 1
        self._share_out()
        if sending:
            self._look_later()

    def _share_out(self) -> None:
        """What each link may take, where it is known what all carry together."""
        share = None
        if self._quiet < QUIET_LOOKS and self._rates_bytes_s:
            share = max(HEADROOM * median(self._rates_bytes_s) / self._at_once, PACE_BYTES_S_MIN)
        if share != self._share_bytes_s:
            self._share_bytes_s = share
            for link in self._links:
                link.share(share)
