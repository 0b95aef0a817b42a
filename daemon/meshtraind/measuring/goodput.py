"""A rate from counted bytes, and how many bytes may be under way while it is being found out."""

from collections import deque

from meshwire import limits

SETTLES_PART = 0.5  # of the time, at the beginning: TCP finds its speed then
WINDOW_BYTES_MIN = 16 * limits.KIB  # at 0.1 Mbit/s they take 1.3 s
WINDOW_BYTES_MAX = 8 * limits.MIB
WINDOW_S = 0.05  # beside a round trip: about when what is under way at the end of a leg has come
GROWTH = 2  # for each byte that has come in time: quicker than TCP's own window at its start
CHUNK_BYTES_MIN = 4 * limits.KIB
CHUNKS_A_WINDOW = 4


class Goodput:
    """How fast bytes come, once the beginning is left out.

    Args:
        began_s: when none had come.
    """

    def __init__(self, began_s: float) -> None:
        self.total_bytes = 0
        self._seen = [(began_s, 0)]  # at most one for each CHUNK_BYTES_MIN of a leg

    def came(self, total_bytes: int, now_s: float) -> None:
        """Notes how many have come by now, in all."""
        self.total_bytes = total_bytes
        self._seen.append((now_s, total_bytes))

    @property
    def bytes_s(self) -> float | None:
        """The rate; None where there is too little to tell."""
        (began_s, _), (ended_s, total_bytes) = self._seen[0], self._seen[-1]
        settled_s = began_s + SETTLES_PART * (ended_s - began_s)
        from_s, before_bytes = max(seen for seen in self._seen if seen[0] <= settled_s)
        passed_s, bytes_ = ended_s - from_s, total_bytes - before_bytes
        return bytes_ / passed_s if passed_s > 0 and bytes_ > 0 else None


class ProbeWindow:
    """How much of a leg may be sent now: a window beyond what has come.

    It grows as long as that comes soon; where a leg one way is known, it is what that fills, and stays so: words on
    what has come are late themselves, behind chunks that go their way.

    Args:
        rtt_s: of the link, without load.
        before: the window of a leg in which this end alone has sent.

    Attributes:
        sent_bytes: so far.
        goodput: of what the other end has taken.
    """

    def __init__(self, began_s: float, rtt_s: float, before: "ProbeWindow | None" = None) -> None:
        self.sent_bytes = 0
        self.goodput = Goodput(began_s)
        self._window_bytes = WINDOW_BYTES_MIN
        self._soon_s = rtt_s + WINDOW_S
        self._grows = before is None
        if before is not None and (rate := before.goodput.bytes_s) is not None:
            self._window_bytes = _within_limits(int(rate * (rtt_s + 2 * WINDOW_S)))
        self._under_way: deque[tuple[int, float]] = deque()  # what had been sent in all, and when

    @property
    def all_taken(self) -> bool:
        """Whether all that was sent has come."""
        return self.goodput.total_bytes == self.sent_bytes

    def next_bytes(self) -> int:
        """How large a chunk to send now; 0: none, before more has come."""
        size = min(limits.CHUNK_BYTES, max(CHUNK_BYTES_MIN, self._window_bytes // CHUNKS_A_WINDOW))
        size = min(size, limits.MEASURE_LEG_BYTES_MAX - self.sent_bytes)
        return size if self.sent_bytes - self.goodput.total_bytes + size <= self._window_bytes else 0

    def sent(self, size: int, now_s: float) -> None:
        """Notes that a chunk has left."""
        self.sent_bytes += size
        self._under_way.append((self.sent_bytes, now_s))

    def taken(self, total_bytes: int, now_s: float) -> str | None:
        """The other end says how much has come, in all. Returns what is wrong with that."""
        newly_bytes = total_bytes - self.goodput.total_bytes
        if newly_bytes <= 0 or total_bytes > self.sent_bytes:
            return f"it has taken {total_bytes} bytes of a measurement, of {self.sent_bytes} that were sent"
        self.goodput.came(total_bytes, now_s)
        sent_s = now_s
        while self._under_way and self._under_way[0][0] <= total_bytes:
            sent_s = self._under_way.popleft()[1]
        if self._grows:
            change = GROWTH * newly_bytes if now_s - sent_s <= self._soon_s else -newly_bytes
            self._window_bytes = _within_limits(self._window_bytes + change)
        return None


def _within_limits(window_bytes: int) -> int:
    return min(max(window_bytes, WINDOW_BYTES_MIN), WINDOW_BYTES_MAX)
