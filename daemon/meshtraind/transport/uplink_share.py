"""Splits what this device sends evenly among the links on which it sends at once, so that receivers' queues stay short.

In a sharded exchange everybody sends to everybody. A connection takes for its own rate what it had when the others were
done, the cable's; when all send at that rate again the queue in front of each receiver overflows, and whoever loses the
last packets waits for a timeout of 200 ms: eight laptops on 100 Mbit/s took twice as long as the cables need
(`topologies.md`). With even shares each receiver is sent what its cable takes, where cables are alike. Elsewhere TCP
finds less by itself: a share is no more than an upper limit. Where no packets are lost there is none, nor while one
link sends something alone, as the state for who comes in.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from meshtraind.transport.low_extra_delay import PACE_BYTES_S_MIN, PathSample
from meshtraind.transport.round_link import RoundLink

LOOK_INTERVAL_S = 0.02  # at least
LOOK_RTTS = 2  # at least: what is acknowledged in less is chance
LOOKS = 6  # whose mean counts: acknowledgements come in bursts
MEANS = 10  # of which the middle one counts, since links last carried all that they might
BUSY_MIN = 0.8  # of a look, on each link that is in use at once: else they carried less than they could
LOST_MIN = 0.005  # of the packets: with less no queue overflows, and nothing is to be shared out
HEADROOM = 1.05  # of what all links carried together, where that was less than their shares
FULL = 0.98  # of their shares: if links carry so much, there may be more
RISES = (1.05, 1.1, 1.2, 1.4)  # of the shares then, each time in a row
QUIET_LOOKS = 10  # without a chunk, and without all links sending: the last of a round still goes at its share
FORGET_S = 10.0  # rounds that are over within two looks tell nothing, and are not held up for long by what was


class UplinkRate:
    """Decides how fast links send together, from what they are seen to carry when all of them send.

    Attributes:
        bytes_s: of all of them, at most; None: as fast as TCP likes.
    """

    def __init__(self) -> None:
        self.bytes_s: float | None = None
        self._rates_bytes_s: list[float] = []  # of the last looks
        self._means_bytes_s: deque[float] = deque(maxlen=MEANS)
        self._risen = 0  # times in a row
        self._packets = self._again = 0  # since the last mean

    def look(self, packets: int, again: int, rate_bytes_s: float | None) -> None:
        """Changes the rate where that is due.

        Args:
            packets, again: that were sent since the last look, and how many of them were sent before.
            rate_bytes_s: of all links together since then; None: they carried less than they could.
        """
        self._packets += packets
        self._again += again
        if rate_bytes_s is not None:
            self._rates_bytes_s.append(rate_bytes_s)
        if len(self._rates_bytes_s) < LOOKS:
            return
        mean_bytes_s, overflows = fmean(self._rates_bytes_s), self._again >= LOST_MIN * self._packets
        self._rates_bytes_s.clear()
        self._packets = self._again = 0
        if self.bytes_s is None and not overflows:
            return
        if self.bytes_s is not None and mean_bytes_s >= FULL * self.bytes_s:
            self.bytes_s *= RISES[min(self._risen, len(RISES) - 1)]
            self._risen += 1
            self._means_bytes_s.clear()
        else:
            self._risen = 0
            self._means_bytes_s.append(mean_bytes_s)
            self.bytes_s = HEADROOM * median(self._means_bytes_s)


class UplinkShare:
    """Paces links, of which rounds use all at once, while chunks leave on them. `links`: these."""

    def __init__(self, links: Sequence[RoundLink]) -> None:
        self._links = links
        self._rate = UplinkRate()
        self._told: float | None = None
        self._seen: list[PathSample | None] = []
        self._seen_s = self._counted_s = 0.0
        self._begins = False  # what has not come to the ends of all links yet is no rate
        self._quiet = 0  # looks
        self._timer: asyncio.TimerHandle | None = None

    def sends(self) -> None:
        """Hears that a chunk was given to a link: it looks until all have arrived."""
        self._quiet = 0
        if self._timer is not None:
            self._share_out()
            return
        self._seen, self._seen_s = [link.path() for link in self._links], asyncio.get_running_loop().time()
        if self._seen_s - self._counted_s > FORGET_S:
            self._rate = UplinkRate()
        self._begins = True
        if all(path is not None for path in self._seen):
            self._share_out()
            self._look_later()

    def close(self) -> None:
        """Links send as fast as TCP likes again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._quiet = QUIET_LOOKS
        self._share_out()

    def _look_later(self) -> None:
        rtt_s = max((path.rtt_s for path in self._seen if path is not None), default=0.0)
        self._timer = asyncio.get_running_loop().call_later(max(LOOK_INTERVAL_S, LOOK_RTTS * rtt_s), self._look)

    def _look(self) -> None:
        self._timer = None
        before, self._seen = self._seen, [link.path() for link in self._links]
        before_s, self._seen_s = self._seen_s, asyncio.get_running_loop().time()
        both = [(then, now) for then, now in zip(before, self._seen, strict=True) if then is not None is not now]
        begins, self._begins = self._begins, False
        all_tell, busy_s = len(both) == len(self._links), [now.busy_s - then.busy_s for then, now in both]
        rate_bytes_s = None
        if all_tell and not begins and min(busy_s) >= BUSY_MIN * (self._seen_s - before_s):
            self._counted_s = self._seen_s
            rate_bytes_s = sum(now.arrived_bytes - then.arrived_bytes for then, now in both) / max(busy_s)
        packets = sum(now.packets - then.packets for then, now in both)
        self._rate.look(packets, sum(now.again - then.again for then, now in both), rate_bytes_s)
        sending = [now.sending for _, now in both]
        self._quiet = 0 if all_tell and all(sending) else self._quiet + 1
        self._share_out()
        if any(sending) or self._quiet < QUIET_LOOKS:
            self._look_later()

    def _share_out(self) -> None:
        share = None
        if self._quiet < QUIET_LOOKS and self._rate.bytes_s is not None:
            share = max(self._rate.bytes_s / len(self._links), PACE_BYTES_S_MIN)
        if share != self._told:
            self._told = share
            for link in self._links:
                link.share(self, share)
