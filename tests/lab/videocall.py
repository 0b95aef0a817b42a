"""A neighbour's video call: a station and the access point send each other small datagrams at a steady pace.

It takes its share of the airtime whatever else goes on, and measures what becomes of it: whoever trains beside it is a
good guest as long as the call stays what it was. One process holds both ends, so one clock times them; the kernel says
when a datagram came, so that a machine that is busy does not look like a busy channel.
"""

import errno
import json
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from tests.lab.lab import ACCESS_POINT, ROOT, Lab, LabError
from tests.lab.namespaces import entered

PACKET_BYTES = 1200  # what WebRTC sends of a picture
DRAIN_S = 0.5
START_S = 0.3  # first the two learn each other's address
PRIORITY = -10  # the neighbour's machine is not this one
STOP_TIMEOUT_S = 10.0
# What a full queue and a link that is down answer: the packet is sent and lost.
LOST = (errno.EAGAIN, errno.ENOBUFS, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED)
_TIMESTAMPS = 35  # SO_TIMESTAMPNS, which the socket module does not name


@dataclass(frozen=True)
class Heard:
    """One direction of a call: what was sent, lost, and how long the rest was on its way."""

    sent: int
    lost_percent: float
    median_ms: float
    p95_ms: float
    worst_ms: float

    @classmethod
    def of(cls, sent: int, latencies_ms: Sequence[float]) -> "Heard":
        """From what was received of so many."""
        if not sent or len(latencies_ms) < 2:
            return cls(sent, 100.0, float("inf"), float("inf"), float("inf"))
        p95_ms = statistics.quantiles(latencies_ms, n=20)[-1]
        lost_percent = 100 * (1 - len(latencies_ms) / sent)
        return cls(sent, lost_percent, statistics.median(latencies_ms), p95_ms, max(latencies_ms))


class VideoCall:
    """A context manager: the call goes on while it holds, and says afterwards what it heard.

    Args:
        station: whose call it is; the other end is the access point, as if the call came from outside.
        rate_mbit: of each direction, with headers of IP and UDP.

    Attributes:
        up, down: after its end, what the access point heard, and what the station heard.
    """

    def __init__(self, lab: Lab, station: int, rate_mbit: float) -> None:
        self._lab = lab
        self._station = station
        self._rate_mbit = rate_mbit
        self._process: subprocess.Popen[bytes] | None = None
        self.up: Heard | None = None
        self.down: Heard | None = None

    def __enter__(self) -> "VideoCall":
        ends = [[self._lab.namespace(station), self._lab.host(station)] for station in (self._station, ACCESS_POINT)]
        command = ["python", "-m", "tests.lab.videocall", json.dumps({"ends": ends, "rate_mbit": self._rate_mbit})]
        pipe = subprocess.PIPE
        self._process = self._lab.run(self._station, command, stdin=pipe, stdout=pipe, cwd=ROOT)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"calling\n":
            self._process.communicate(timeout=STOP_TIMEOUT_S)
            raise LabError(f"station {self._station} could not start its call: see above")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        report, _ = self._process.communicate(timeout=STOP_TIMEOUT_S)  # the end of its input is the end of the call
        if kind is None:
            self.up, self.down = (Heard(**fields) for fields in json.loads(report))


class _End:
    """One of the two: a socket, how many packets it sent, and how long those that it received took."""

    def __init__(self, namespace: str, host: str) -> None:
        with entered(namespace):
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((host, 0))
        self.socket.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
        self.socket.setblocking(False)
        self.sent = 0
        self.latencies_ms: list[float] = []

    def send(self, start_s: float) -> None:
        """One packet, which says when it was sent; not counted in the first START_S."""
        now_s = time.time()
        counted = now_s - start_s >= START_S
        self.sent += counted
        try:
            self.socket.send(struct.pack("!?d", counted, now_s).ljust(PACKET_BYTES))
        except OSError as error:
            if error.errno not in LOST:
                raise

    def receive(self) -> None:
        """All that has come."""
        while True:
            try:
                packet, extra, _, _ = self.socket.recvmsg(PACKET_BYTES, 64)
            except BlockingIOError:
                return
            counted, sent_s = struct.unpack_from("!?d", packet)
            seconds, nanoseconds = struct.unpack("qq", extra[0][2])
            if counted:
                self.latencies_ms.append((seconds - sent_s) * 1e3 + nanoseconds * 1e-6)


def main(text: str) -> None:
    """Calls until the standard input ends, then prints what both ends heard: what went up, what went down."""
    given = json.loads(text)
    os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    station, outside = (_End(namespace, host) for namespace, host in given["ends"])
    station.socket.connect(outside.socket.getsockname())
    outside.socket.connect(station.socket.getsockname())
    spacing_s = (PACKET_BYTES + 28) * 8e-6 / given["rate_mbit"]
    sys.stdout.write("calling\n")
    sys.stdout.flush()
    ends = {station.socket.fileno(): station, outside.socket.fileno(): outside}
    start_s = due_s = time.time()
    hung_up = False
    while not hung_up or time.time() < due_s:
        if not hung_up and time.time() >= due_s:
            station.send(start_s)
            outside.send(start_s)
            due_s += spacing_s
        sources = [*ends, *([] if hung_up else [sys.stdin.fileno()])]
        for ready in select.select(sources, (), (), max(0.0, due_s - time.time()))[0]:
            if ready in ends:
                ends[ready].receive()
            else:
                hung_up, due_s = True, time.time() + DRAIN_S
    heard = [Heard.of(station.sent, outside.latencies_ms), Heard.of(outside.sent, station.latencies_ms)]
    sys.stdout.write(json.dumps([vars(one) for one in heard]))


if __name__ == "__main__":
    main(sys.argv[1])
