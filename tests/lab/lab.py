"""Stations and an access point, made of network namespaces: on rate-limited cables, in a WiFi cell, or both.

Nothing here is netem: token buckets (HTB) before byte queues, a bridge in a namespace of its own, frames dropped by
nftables, and a process that holds frames for a while. The README has the physics.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.lab.forwarder import DelayedLink, arguments
from tests.lab.links import (
    ACCESS_POINT,
    AIR,
    Cell,
    Delay,
    RateSchedule,
    cable_rate_change,
    cable_setup,
    losses_down,
    losses_up,
    port_name,
)
from tests.lab.namespaces import (
    PREFIX,
    STOP_TIMEOUT_S,
    LabError,
    do,
    entered,
    lab_unavailable,
    remove_namespaces,
    remove_stale,
)

__all__ = ["ACCESS_POINT", "Cell", "Delay", "Lab", "LabError", "RateSchedule", "lab_unavailable"]

SINGLE_FRAMES_UP_TO_MBIT = 400  # in the whole lab; above it one packet a frame takes more CPU than there is
STATIONS_MAX = 200
ROOT = Path(__file__).parents[2]

_numbers = itertools.count()


class Lab:
    """A context manager: the stations exist inside it, and nothing of them afterwards.

    Args:
        stations: how many, at most STATIONS_MAX.
        rate_mbit: goodput of every station's own link, each way, in Mbit/s; None: no limit.
        cell: the air that the wireless stations share; None: there is none, all are on cables.
        delays: of the links of some stations. These pass a process in user space, whose ceiling the README states.

    The access point is a host as well: ACCESS_POINT in place of a station's number, on no cable and in no air.

    Names hold this process's id and a number, so that labs of several test runs do not meet; what a killed run left
    behind is removed when the next lab is made.
    """

    def __init__(
        self,
        stations: int,
        rate_mbit: float | None = None,
        *,
        cell: Cell | None = None,
        delays: Mapping[int, Delay] | None = None,
    ) -> None:
        assert 1 <= stations <= STATIONS_MAX
        assert rate_mbit is None or rate_mbit > 0
        self.stations = stations
        self.rate_mbit = rate_mbit
        self.cell = cell
        self.delays = dict(delays or {})
        most_mbit = min(
            stations * rate_mbit if rate_mbit is not None else float("inf"),
            cell.rate_mbit if cell is not None else float("inf"),
        )
        self.single_frames = (
            most_mbit <= SINGLE_FRAMES_UP_TO_MBIT
        )  # else bursts of 64 KiB meet a queue of four times that
        self._name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._name}-switch"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._forwarder: subprocess.Popen[bytes] | None = None

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
        held = self._forwarder is None or self._forwarder.poll() is None
        self._remove()
        if not held and error is None:
            raise LabError("the process that holds delayed frames ended before the lab did: see above")

    def host(self, station: int) -> str:
        """The IPv4 address of a station."""
        return "10.77.0.254" if station == ACCESS_POINT else f"10.77.0.{station + 1}"

    def namespace(self, station: int) -> str:
        """The name of a station's namespace."""
        if station == ACCESS_POINT:
            return self._switch
        assert 0 <= station < self.stations
        return f"{self._name}-{station}"

    def command(self, station: int, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that runs in a station's namespace."""
        return ["ip", "netns", "exec", self.namespace(station), *argv]

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

    @contextlib.contextmanager
    def inside(self, station: int) -> Iterator[None]:
        """While this holds, what this thread makes is a station's: sockets, processes, threads."""
        with entered(self.namespace(station)):
            yield

    def plug(self, station: int, *, into: bool) -> None:
        """Lets a station's link lead into the switch, or nowhere: what it sends is lost, its interface stays up."""
        attached = ("master", "br0") if into else ("nomaster",)
        do("ip", "-n", self._switch, "link", "set", port_name(station), *attached)

    def flap(self, station: int, down_s: float) -> None:
        """Takes a station's link down and, after this time, up again; returns then.

        Its interface has no carrier meanwhile, unless the link is a delayed one: then nothing comes through.
        """
        port = port_name(station)
        do("ip", "-n", self._switch, "link", "set", port, "down")
        time.sleep(down_s)
        do("ip", "-n", self._switch, "link", "set", port, "up")

    def lose(self, station: int, *, up_percent: float = 0.0, down_percent: float = 0.0) -> None:
        """From now on so many of a station's frames are lost, at random, in each direction; 0 ends it.

        Raises LabError in a lab that passes bursts of frames as one: a single loss would be up to 64 KiB.
        """
        if not self.single_frames and station not in self.delays:
            raise LabError(f"losses take single frames, which are passed at up to {SINGLE_FRAMES_UP_TO_MBIT} Mbit/s")
        self._nft(ACCESS_POINT, losses_up(station, up_percent))
        self._nft(station, losses_down(down_percent))

    def isolate(self, isolated: bool = True) -> None:
        """Lets wireless stations reach only the access point and what is on its cables, as many guest networks do."""
        assert self.cell is not None
        for station in range(self.stations):
            if self.cell.wireless(station):
                flag = ("isolated", "on" if isolated else "off")
                do("ip", "-n", self._switch, "link", "set", port_name(station), "type", "bridge_slave", *flag)

    def set_rate(self, rate_mbit: float) -> None:
        """Gives another rate to the cell if there is one, else to all cables; connections do not notice but for that.

        Whether single frames are passed was decided by the first rate.
        """
        if self.cell is not None:
            self._tc(ACCESS_POINT, [self.cell.rate_change("change", rate_mbit)])
            return
        assert self.rate_mbit is not None, "a lab without any limit has no rate to change"
        stations = range(self.stations)
        self._tc(ACCESS_POINT, [cable_rate_change(port_name(station), "change", rate_mbit) for station in stations])
        for station in stations:
            self._tc(station, [cable_rate_change("eth0", "change", rate_mbit)])

    @contextlib.contextmanager
    def varying(self, schedule: RateSchedule) -> Iterator[None]:
        """While this holds, the rate follows a schedule, again and again; afterwards it is what it was at last."""
        ended = threading.Event()
        errors: list[Exception] = []

        def follow() -> None:
            start_s = change_s = time.monotonic()
            try:
                while not ended.wait(max(0.0, change_s - time.monotonic())):
                    now_s = time.monotonic()
                    rate_mbit, left_s = schedule.at(now_s - start_s)
                    change_s = now_s + left_s  # from before: a stretch that begins while this one's rate is set counts
                    self.set_rate(rate_mbit)
            except Exception as error:  # belongs to who asked for this
                errors.append(error)

        follower = threading.Thread(target=follow, name="rate schedule of a lab")
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()
        if errors:
            raise errors[0]

    def _make(self) -> None:
        switch = ("ip", "-n", self._switch)
        do("ip", "netns", "add", self._switch)
        do(*switch, "link", "add", "br0", "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
        do(*switch, "link", "set", "br0", "up", *self._single_frames())
        do(*switch, "addr", "add", f"{self.host(ACCESS_POINT)}/24", "brd", "+", "dev", "br0")
        if self.cell is not None:
            do(*switch, "link", "add", AIR, "type", "ifb")
            do(*switch, "link", "set", AIR, "up")
            self._tc(ACCESS_POINT, self.cell.setup(self.stations))
            self._nft(ACCESS_POINT, self.cell.classes_down(self.stations))
        for station in range(self.stations):
            do("ip", "netns", "add", self.namespace(station))
        if self.delays:
            self._start_forwarder()
        for station in range(self.stations):
            self._plug_in(station)

    def _plug_in(self, station: int) -> None:
        name, port = self.namespace(station), port_name(station)
        if station not in self.delays:
            do("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
        do("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up", *self._single_frames())
        do("ip", "-n", name, "link", "set", "lo", "up")
        address = f"02:00:00:00:{(station + 1) >> 8:02x}:{(station + 1) & 0xFF:02x}"
        do("ip", "-n", name, "link", "set", "eth0", "address", address, "up", *self._single_frames())
        do("ip", "-n", name, "addr", "add", f"{self.host(station)}/24", "brd", "+", "dev", "eth0")
        do("ip", "-n", name, "route", "add", "224.0.0.0/4", "dev", "eth0")
        # A connection must not begin with what an earlier one learned.
        do("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_no_metrics_save=1")
        if self.rate_mbit is not None:
            self._tc(station, cable_setup("eth0", self.rate_mbit))
            self._tc(ACCESS_POINT, cable_setup(port, self.rate_mbit))
        if self.cell is not None:
            self._tc(ACCESS_POINT, self.cell.admission(station, port))

    def _start_forwarder(self) -> None:
        links = [
            DelayedLink(
                self.namespace(station), self._switch, port_name(station), delay.ms / 1e3, delay.jitter_ms / 1e3
            )
            for station, delay in sorted(self.delays.items())
        ]
        command = ["python", *arguments(links)]
        self._forwarder = self.run(ACCESS_POINT, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._forwarder.stdout is not None
        if self._forwarder.stdout.readline() != b"ready\n":
            raise LabError(f"{' '.join(command[:3])} could not make its devices: see above")

    def _single_frames(self) -> tuple[str, ...]:
        return ("gso_max_segs", "1") if self.single_frames else ()

    def _tc(self, station: int, lines: Sequence[str]) -> None:
        if lines:
            do("tc", "-n", self.namespace(station), "-batch", "-", text="\n".join(lines) + "\n")

    def _nft(self, station: int, rules: str) -> None:
        do(*self.command(station, ["nft", "-f", "-"]), text=rules)

    def _remove(self) -> None:
        if self._forwarder is not None:
            self._forwarder.communicate(timeout=STOP_TIMEOUT_S)  # the end of its input is its end
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait(STOP_TIMEOUT_S)
        remove_namespaces(f"{self._name}-")
