"""Keeps what a link sends from making everybody else's packets wait: a call in the same WiFi stays what it was.

TCP that knows losses alone fills the queue in front of the slowest hop, and a neighbour's packet waits behind all of
it. LEDBAT (RFC 6817) watches how much longer packets take than they did on an empty path, and sends slower where that
is more than a target. Here it sets the pace at which the kernel lets a connection's packets go; how many may be under
way stays TCP's own matter. Only Linux tells the round trips of a connection's packets, and takes a pace from anybody.
"""

import asyncio
import socket
import struct
from collections import deque
from dataclasses import dataclass

from meshtraind.transport.send_cap import SendCap
from meshtraind.transport.tcp_socket import tcp_info

TARGET_S = 0.05  # longer than on an empty path, there and back; RFC 6817 allows twice that
LOOK_INTERVAL_S = 0.1
# The shortest of so many counts: a WiFi that gathers frames, or lets the radio sleep, holds single ones up for as long.
WAITS = 3
RATE_LOOKS = 10  # over which a rate is counted: in less, a burst looks like one
RISE = 0.05  # of the pace, each time, on a path without any queue
FALL = 0.5  # of the pace, at most, where packets wait twice the target
# Whoever else sends has the same queue, and waits less the more this link yields. So much of what it was seen to carry
# is kept: a download of somebody else costs a job speed, and not its life.
KEPT = 0.25
FORGET = 0.998  # of what it was seen to carry, each time: the half of it in half a minute
PACE_BYTES_S_MIN = 125_000  # below 1 Mbit/s a chunk takes seconds, and others take this device for one that has stalled
SHORT = 0.8  # of the pace: if less arrives the path itself is slower now, and what it carried before says nothing
AHEAD = 1.1  # of what it was seen to carry: no pace is more, or a queue would be full before that is noticed

_SO_MAX_PACING_RATE = 47  # which the socket module does not name
_PACE = struct.Struct("I")
_NO_PACE = 0xFFFFFFFF
# Places in Linux's struct tcp_info (since 4.10): packets not acknowledged yet, smoothed round trip, packets sent again,
# bytes acknowledged, shortest round trip, packets sent, time with something under way.
_TCP_INFO = struct.Struct("=24xI40xI28xI16xQ20xI4xI8xQ")


@dataclass(frozen=True, slots=True)
class PathSample:
    """What the kernel says of a connection's path.

    Attributes:
        rtt_s: how long its packets take now, there and back.
        shortest_s: how long they took at best in the last minutes.
        arrived_bytes: of all that was sent.
        sending: something has not arrived yet.
        busy_s: for how long something had not, since the connection began.
        packets, again: that were sent since then, and how many of them were sent before.
    """

    rtt_s: float
    shortest_s: float
    arrived_bytes: int
    sending: bool
    busy_s: float = 0.0
    packets: int = 0
    again: int = 0


class LowExtraDelay:
    """Decides one connection's pace from what is seen of its path while it sends.

    Attributes:
        pace_bytes_s: None: as fast as TCP likes.
    """

    def __init__(self) -> None:
        self.pace_bytes_s: float | None = None
        self._waits_s: deque[float] = deque(maxlen=WAITS)
        self._sent_for: deque[tuple[float, int]] = deque(maxlen=RATE_LOOKS)  # seconds of sending, bytes that arrived
        self._seen: tuple[float, int] | None = None  # at the last look: when, bytes that had arrived
        self._carried_bytes_s = 0.0  # the most lately
        self._settled_s = 0.0

    def look(self, now_s: float, path: PathSample, *, begins: bool = False) -> None:
        """Changes the pace where that is due. Called every LOOK_INTERVAL_S while it sends.

        Args:
            begins: it has sent nothing for a while, and sends again.
        """
        if self._seen is not None and not begins:
            then_s, then_bytes = self._seen
            self._sent_for.append((now_s - then_s, path.arrived_bytes - then_bytes))
        self._seen = now_s, path.arrived_bytes
        if len(self._sent_for) < WAITS or begins:
            return
        rate_bytes_s = sum(count for _, count in self._sent_for) / sum(seconds for seconds, _ in self._sent_for)
        self._carried_bytes_s = max(rate_bytes_s, self._carried_bytes_s * FORGET)
        if now_s < self._settled_s:
            return
        self._waits_s.append(path.rtt_s - path.shortest_s)
        if len(self._waits_s) < WAITS:
            return
        fill, pace = min(self._waits_s) / TARGET_S, self.pace_bytes_s
        if fill > 1:
            if pace is not None and rate_bytes_s < SHORT * pace:
                self._carried_bytes_s = rate_bytes_s
            slower = rate_bytes_s * (1 - FALL * min(1.0, fill - 1))
            self.pace_bytes_s = max(slower, KEPT * self._carried_bytes_s, PACE_BYTES_S_MIN)
            self._settled_s = now_s + 2 * path.rtt_s  # what waits has to leave first, and the news of it to come
            self._waits_s.clear()
        elif pace is not None:
            self.pace_bytes_s = max(pace, min(pace * (1 + RISE * (1 - fill)), AHEAD * self._carried_bytes_s))


class LinkPacer:
    """Looks at one connection's path while chunks leave, and not otherwise, for the kernel's figures are of then; and
    has the kernel keep the pace.

    Attributes:
        delay: what decides, beside its share.
    """

    def __init__(self) -> None:
        self.delay = LowExtraDelay()
        self._shares_bytes_s: dict[object, float] = {}  # by who has said so
        self._kept_bytes_s: float | None = None  # by the kernel
        self._timer: asyncio.TimerHandle | None = None

    def sends(self, transport: asyncio.Transport, cap: SendCap) -> None:
        """Hears that a chunk was given to the transport: it looks until all has arrived."""
        if self._timer is None and (cap.low_delay or self.delay.pace_bytes_s is not None):
            self._look(transport, cap, begins=True)

    def share(self, sock: socket.socket | None, owner: object, bytes_s: float | None) -> None:
        """At most so fast from now on, for other links of this device send too; None: this owner sets no limit more."""
        if bytes_s is None:
            self._shares_bytes_s.pop(owner, None)
        else:
            self._shares_bytes_s[owner] = bytes_s
        self._keep(sock)

    def close(self) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self, transport: asyncio.Transport, cap: SendCap) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look, transport, cap)

    def _look(self, transport: asyncio.Transport, cap: SendCap, begins: bool = False) -> None:
        self._timer = None
        sock = transport.get_extra_info("socket")
        path = path_of(sock)
        if not cap.low_delay:
            self.delay = LowExtraDelay()
        elif path is not None:
            self.delay.look(asyncio.get_running_loop().time(), path, begins=begins)
        self._keep(sock)
        if path is not None and (begins or path.sending) and cap.low_delay:
            self._look_later(transport, cap)

    def _keep(self, sock: socket.socket | None) -> None:
        paces = [*self._shares_bytes_s.values(), *filter(None, [self.delay.pace_bytes_s])]
        pace = min(paces, default=None)
        if pace != self._kept_bytes_s and sock is not None:
            self._kept_bytes_s = pace
            set_pace(sock, pace)


def path_of(sock: socket.socket | None) -> PathSample | None:
    """What the kernel says of a connection; None where it does not, or the socket is gone."""
    told = tcp_info(sock, _TCP_INFO)
    if told is None:
        return None
    under_way, rtt_us, again, arrived_bytes, shortest_us, packets, busy_us = told
    return PathSample(rtt_us * 1e-6, shortest_us * 1e-6, arrived_bytes, under_way > 0, busy_us * 1e-6, packets, again)


def set_pace(sock: socket.socket, bytes_s: float | None) -> None:
    """Has the kernel let packets of this connection go at this pace; None: at none. A socket that is gone has none."""
    pace = _NO_PACE if bytes_s is None else min(int(bytes_s), _NO_PACE - 1)
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _PACE.pack(pace))
    except OSError:
        return
