"""Stations on rate-limited cables to one switch, made of network namespaces: every station sends and receives at R.

Rates are TCP goodput: the token buckets run at R * 1514/1448, so headers are not taken out of it. Nothing here is
netem: HTB and a byte FIFO at both ends of every cable, a bridge in a namespace of its own.
"""

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

PREFIX = "meshlab"
FRAME_PER_GOODPUT = 1514 / 1448  # Ethernet, IPv4 and TCP with timestamps around 1448 bytes
QUEUE_BYTES = 256_000  # of a cable, each way: what home routers have, about 20 ms at 100 Mbit/s
BURST_S = 0.001
BURST_BYTES_MIN = 3100  # two frames: less than one would never be sent
SINGLE_FRAMES_UP_TO_MBIT = 400  # all stations together; above it one packet a frame takes more CPU than there is
COMMAND_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0

_CAPABILITIES = {12: "CAP_NET_ADMIN", 21: "CAP_SYS_ADMIN"}
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


class LabError(Exception):
    """A command of the lab failed; the text has the command and what it said."""


def lab_unavailable() -> str | None:
    """Why no lab can be made here, None when it can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    effective = int(re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.M)[1], 16)  # type: ignore[index]
    lacking = [name for bit, name in _CAPABILITIES.items() if not effective >> bit & 1]
    if lacking:
        return f"making network namespaces takes {' and '.join(lacking)}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    return None


class Lab:
    """A context manager: the stations exist inside it, and nothing of them afterwards.

    Args:
        stations: how many, at most 200.
        rate_mbit: goodput of every station, each way, in Mbit/s.

    Names hold this process's id and a number, so that labs of several test runs do not meet; what a killed run left
    behind is removed when the next lab is made.
    """

    def __init__(self, stations: int, rate_mbit: float) -> None:
        assert 1 <= stations <= 200
        assert rate_mbit > 0
        self.stations = stations
        self.rate_mbit = rate_mbit
        self._name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._name}-switch"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Lab":
        remove_stale()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def host(self, station: int) -> str:
        """The IPv4 address of a station."""
        return f"10.77.0.{station + 1}"

    def command(self, station: int, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that runs in a station's namespace."""
        return ["ip", "netns", "exec", self._station(station), *argv]

    def run(
        self,
        station: int,
        argv: Sequence[str],
        *,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Starts a command in a station; "python" is this interpreter. It is killed when the lab ends."""
        argv = [sys.executable, *argv[1:]] if argv[0] == "python" else list(argv)
        process = subprocess.Popen(
            self.command(station, argv), stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd
        )
        self._processes.append(process)
        return process

    def plug(self, station: int, *, into: bool) -> None:
        """Lets a station's cable lead into the switch, or nowhere: what it sends is lost, its interface stays up."""
        attached = ("master", "br0") if into else ("nomaster",)
        _do("ip", "-n", self._switch, "link", "set", f"port{station}", *attached)

    @contextlib.contextmanager
    def inside(self, station: int) -> Iterator[None]:
        """While this holds, what this thread makes is a station's: sockets, processes, threads."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as outside, open(f"/run/netns/{self._station(station)}") as namespace:
            _enter(libc, namespace)
            try:
                yield
            finally:
                _enter(libc, outside)

    def _station(self, station: int) -> str:
        assert 0 <= station < self.stations
        return f"{self._name}-{station}"

    def _make(self) -> None:
        _do("ip", "netns", "add", self._switch)
        _do("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
        _do("ip", "-n", self._switch, "link", "set", "br0", "up")
        single_frames = self.stations * self.rate_mbit <= SINGLE_FRAMES_UP_TO_MBIT
        for station in range(self.stations):
            self._plug_in(station, single_frames)

    def _plug_in(self, station: int, single_frames: bool) -> None:
        name, port = self._station(station), f"port{station}"
        _do("ip", "netns", "add", name)
        _do("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
        _do("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
        _do("ip", "-n", name, "link", "set", "lo", "up")
        _do("ip", "-n", name, "link", "set", "eth0", "address", f"02:00:00:00:00:{station + 1:02x}", "up")
        _do("ip", "-n", name, "addr", "add", f"{self.host(station)}/24", "brd", "+", "dev", "eth0")
        _do("ip", "-n", name, "route", "add", "224.0.0.0/4", "dev", "eth0")
        # A connection must not begin with what an earlier one learned.
        _do("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_no_metrics_save=1")
        for namespace, device in ((name, "eth0"), (self._switch, port)):
            if single_frames:  # else bursts of 64 KiB meet a queue of four times that
                _do("ip", "-n", namespace, "link", "set", device, "gso_max_segs", "1")
            self._limit(namespace, device)

    def _limit(self, namespace: str, device: str) -> None:
        frame_mbit = self.rate_mbit * FRAME_PER_GOODPUT
        burst = str(max(BURST_BYTES_MIN, int(frame_mbit * 1e6 / 8 * BURST_S)))
        rate = f"{frame_mbit:.3f}mbit"
        tc = ("tc", "-n", namespace)
        _do(*tc, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1")
        _do(
            *(*tc, "class", "add", "dev", device, "parent", "1:", "classid", "1:1", "htb"),
            *("rate", rate, "ceil", rate, "burst", burst, "cburst", burst, "quantum", "3028"),
        )
        _do(*tc, "qdisc", "add", "dev", device, "parent", "1:1", "bfifo", "limit", str(QUEUE_BYTES))

    def _remove(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait(STOP_TIMEOUT_S)
        _remove_namespaces(f"{self._name}-")


def _enter(libc: ctypes.CDLL, namespace: IO[str]) -> None:
    if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
        raise LabError(f"cannot enter {namespace.name}: {os.strerror(ctypes.get_errno())}")


def remove_stale() -> None:
    """Removes the namespaces, and what runs in them, of labs whose process is gone."""
    for name in _namespaces():
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-\d+-\w+", name)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            _remove_namespaces(name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _do("ip", "netns", "list").splitlines() if line.strip()]


def _remove_namespaces(prefix: str) -> None:
    for name in _namespaces():
        if not name.startswith(prefix):
            continue
        _kill(name)
        _do("ip", "netns", "del", name)


def _kill(namespace: str) -> None:
    """Ends what runs in a namespace: a process would keep it, and its cables, beyond its name."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while pids := _do("ip", "netns", "pids", namespace).split():
        if time.monotonic() > deadline:
            raise LabError(f"processes {', '.join(pids)} in {namespace} survive SIGKILL")
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def _do(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
