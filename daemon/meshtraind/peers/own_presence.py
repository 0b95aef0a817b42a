"""Whether this machine itself was there: awake, with a daemon that ran, in the network where it was.

A laptop that wakes up in another place finds nobody where its peers were. That says nothing about them.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from meshtraind.peers.interfaces import own_addresses

ASLEEP_S_MIN = 0.1  # between two clocks that are read one after the other; a sleep takes longer
LATE_LOOKS = 2  # a look that comes so many intervals after the one before: the daemon stood still
AWAY_LOOKS = 4  # of them missed, asleep or not: others have given it up, or soon will (an interval is patience / 4)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one look at this machine's clocks and addresses has found.

    Attributes:
        now_s: of the clock that may stop while the machine sleeps.
        asleep_s: how long it has slept since it was started, as far as its clocks tell.
        addresses: of its interfaces that are up.
    """

    now_s: float
    asleep_s: float
    addresses: frozenset[str]


def read() -> Reading:
    """Looks at this machine's clocks and addresses as they are now."""
    now_s = time.monotonic()
    return Reading(now_s, _with_sleep_s(now_s) - now_s, own_addresses())


def _with_sleep_s(now_s: float) -> float:
    """The clock that goes on while the machine sleeps; `now_s` where there is none."""
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC)  # Python's own is another one there, which stops
    if sys.platform != "win32" and hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return now_s  # then a sleep shows as a look that comes late


class Presence:
    """Knows whether this machine was awake, running and in its network all the time.

    `look` is to be called every `interval_s`.

    """

    def __init__(self, interval_s: float, take: Callable[[], Reading] = read) -> None:
        self.interval_s = interval_s
        self._take = take
        self._last = take()
        self._broken_s = float("-inf")

    def look(self) -> bool:
        """Compares with what was found last. Returns whether this machine was not there for so long that others may
        have gone on without it."""
        before, now = self._last, self._take()
        self._last = now
        late = now.now_s - before.now_s > LATE_LOOKS * self.interval_s
        slept = now.asleep_s - before.asleep_s > ASLEEP_S_MIN
        moved = now.addresses != before.addresses
        if not (late or slept or moved):
            return False
        self._broken_s = now.now_s
        missed_s = now.now_s - before.now_s + now.asleep_s - before.asleep_s
        return moved or missed_s > AWAY_LOOKS * self.interval_s

    def unbroken_since(self, since_s: float) -> bool:
        """Whether it was there all the time since `since_s`, of `time.monotonic`, until the last look."""
        return self._broken_s < since_s
