"""The delay of a lab's links: a process that holds every frame of some stations for a while, then passes it on.

Each such station's interface and its port at the access point are TAP devices of this process. `python -m
tests.lab.forwarder JSON` makes them, says "ready", and ends when its standard input does: with it go the devices, so
nothing outlives a run that was killed. What it can pass on a second `python -m tests.lab.measure` says.
"""

import contextlib
import errno
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass

from tests.lab.namespaces import entered

FRAME_BYTES_MAX = 65536
FRAMES_AT_ONCE = 64  # from one device, then the others have their turn
FRAMES_MAX = 4096  # under way in one direction: 100 ms of 490 Mbit/s; what comes beyond is lost, as in a full queue
PRIORITY = -10  # the air does not wait until a learner has computed
_TUNSETIFF = 0x400454CA
_TAP_PLAIN = 0x0002 | 0x1000  # IFF_TAP, IFF_NO_PI: whole frames, which the kernel has cut to size and summed up


@dataclass(frozen=True)
class DelayedLink:
    """One station whose frames are held, both ways.

    Attributes:
        namespace: the station's, where its "eth0" is made.
        switch: the access point's, where `port` is made.
    """

    namespace: str
    switch: str
    port: str
    delay_s: float
    jitter_s: float


class DelayLine:
    """One direction of a link: frames in the order in which they came, each with the time when it goes on."""

    def __init__(self, delay_s: float, jitter_s: float, seed: str) -> None:
        self._least_s = delay_s - jitter_s
        self._spread_s = 2 * jitter_s
        self._random = random.Random(seed)
        self._frames: deque[tuple[float, bytes]] = deque()
        self._last_s = 0.0

    def put(self, frame: bytes, now_s: float) -> None:
        """Takes a frame; loses it when FRAMES_MAX are under way."""
        if len(self._frames) < FRAMES_MAX:
            self._last_s = max(self._last_s, now_s + self._least_s + self._spread_s * self._random.random())
            self._frames.append((self._last_s, frame))

    def due(self, now_s: float) -> bytes | None:
        """The next frame whose time has come."""
        return self._frames.popleft()[1] if self._frames and self._frames[0][0] <= now_s else None

    def next_s(self) -> float | None:
        """When the next frame goes on."""
        return self._frames[0][0] if self._frames else None


def arguments(links: list[DelayedLink]) -> list[str]:
    """Of the command that holds the frames of these links."""
    return ["-m", "tests.lab.forwarder", json.dumps([asdict(link) for link in links])]


def main(text: str) -> None:
    """Runs until the standard input ends."""
    lines: dict[int, tuple[int, DelayLine]] = {}  # where frames come from: where they go
    for link in (DelayedLink(**fields) for fields in json.loads(text)):
        station, port = _tap(link.namespace, "eth0"), _tap(link.switch, link.port)
        lines[station] = port, DelayLine(link.delay_s, link.jitter_s, f"{link.port} up")
        lines[port] = station, DelayLine(link.delay_s, link.jitter_s, f"{link.port} down")
    os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sources = [*lines, sys.stdin.fileno()]
    while True:
        next_s = min((at for _, line in lines.values() if (at := line.next_s()) is not None), default=None)
        wait_s = None if next_s is None else max(0.0, next_s - time.monotonic())
        ready, _, _ = select.select(sources, (), (), wait_s)  # epoll waits in whole milliseconds
        for source in ready:
            if source == sys.stdin.fileno():
                return
            _take(source, lines[source][1])
        now_s = time.monotonic()
        for target, line in lines.values():
            while (frame := line.due(now_s)) is not None:
                _pass_on(target, frame)


def _take(source: int, line: DelayLine) -> None:
    now_s = time.monotonic()
    with contextlib.suppress(BlockingIOError):  # no more has come
        for _ in range(FRAMES_AT_ONCE):
            line.put(os.read(source, FRAME_BYTES_MAX), now_s)


def _pass_on(target: int, frame: bytes) -> None:
    try:
        os.write(target, frame)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EAGAIN):  # a link that is down, a queue that is full: it is lost
            raise


def _tap(namespace: str, name: str) -> int:
    with entered(namespace):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_PLAIN))
    return device


if __name__ == "__main__":
    main(sys.argv[1])
