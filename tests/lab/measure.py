"""`python -m tests.lab.measure`: the lab measures itself, and fails where a figure is off by more than stated.

Goodput is TCP's with cubic, by plain sockets; round trips and losses are those of small datagrams. "CPU busy" is how
busy all cores were during a situation, with everything else that ran: a lab on a busy machine measures the machine.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import psutil

from tests.lab.lab import ACCESS_POINT, Cell, Delay, Lab, LabError, RateSchedule, lab_unavailable
from tests.lab.links import FRAME_PER_GOODPUT, QUEUE_BYTES, WITH_ACKS
from tests.lab.probes import Flows, frames_passed, lost_percent, reachable, round_trips_ms
from tests.lab.videocall import Heard, VideoCall

WARM_UP_S = 0.7  # connections reach their rate, and what the bursts let through at first is over
RATE = 0.08  # of the expected goodput: 3 % is the buckets' own error, a single flow of cubic loses some more
QUIET_LOAD = 0.3  # runnable tasks, mean of a minute; above it the figures are to be taken again


@dataclass(frozen=True)
class Reading:
    """One figure. `expected` None: it is a fact of this machine, and nothing is wanted of it."""

    what: str
    measured: float
    unit: str
    expected: float | None = None
    allowed: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether it is what it should be."""
        return self.expected is None or abs(self.measured - self.expected) <= self.allowed

    def row(self) -> list[str]:
        """As cells of a table."""
        wanted = ["", ""] if self.expected is None else [f"{self.expected:.3g}", f"±{self.allowed:.2g}"]
        judged = "" if self.expected is None else "yes" if self.fits else "**NO**"
        return [self.what, *wanted, f"{self.measured:.3g}", self.unit, judged]


def goodput(what: str, expected_mbit: float, measured_mbit: float) -> Reading:
    """A reading of a rate, which may be off by RATE."""
    return Reading(what, measured_mbit, "Mbit/s", expected_mbit, RATE * expected_mbit)


def cables(seconds: float) -> list[Reading]:
    """Every station has its own rate, each way, at once."""
    readings = []
    for rate_mbit, count in ((50.0, 2), (100.0, 4), (300.0, 4)):
        with Lab(count, rate_mbit) as lab, Flows(lab, [(rank, (rank + 1) % count) for rank in range(count)]) as ring:
            time.sleep(WARM_UP_S)
            got = ring.goodput_mbit(seconds)
        readings.append(goodput(f"ring of {count} on cables of {rate_mbit:g}, a flow (mean)", rate_mbit, mean(got)))
    return readings


def air(seconds: float) -> list[Reading]:
    """One budget for all: a byte that crosses the air once pays once, from station to station twice."""
    ap = ACCESS_POINT
    wired = 3
    kinds: tuple[tuple[str, float, list[tuple[int, int]]], ...] = (
        ("cell of 100, station to access point", 100, [(0, ap)]),
        ("cell of 100, access point to station", 100, [(ap, 0)]),
        ("cell of 100, wired to wireless", 100, [(wired, 0)]),
        ("cell of 100, station to station (pays twice)", 100, [(0, 1)]),
        ("cell of 100, two stations to one wired", 100, [(0, wired), (1, wired)]),
        ("cell of 100, up and down at once", 100, [(0, wired), (ap, 1)]),
        ("cell of 200, ring of 3 wireless", 200, [(0, 1), (1, 2), (2, 0)]),
        ("cell of 200, ring of 3 wireless and 1 wired", 200, [(0, 1), (1, 2), (2, wired), (wired, 0)]),
        ("cell of 20, station to access point", 20, [(0, ap)]),
    )
    readings = []
    for what, rate_mbit, flows in kinds:
        cell = Cell(rate_mbit, frozenset({wired}))
        with Lab(4, cell=cell) as lab, Flows(lab, flows) as running:
            time.sleep(WARM_UP_S)
            got = running.goodput_mbit(seconds)
        several = ", a flow (mean)" if len(flows) > 1 else ""
        readings.append(goodput(what + several, cell.goodput_mbit(flows), mean(got)))
        if "two stations" in what:
            readings.append(Reading("... the smaller share of the two", min(got) / sum(got), "of all", 0.5, 0.1))
    return readings


def losses(seconds: float) -> list[Reading]:
    """Each direction alone, and after the airtime was paid."""
    count = int(seconds * 1500)
    readings = []
    with Lab(2, cell=Cell(100)) as lab:
        for up, down in ((0.0, 0.0), (2.0, 0.0), (0.0, 5.0)):
            lab.lose(0, up_percent=up, down_percent=down)
            for way, flow, percent in (("up", (0, ACCESS_POINT), up), ("down", (ACCESS_POINT, 0), down)):
                allowed = 4 * (percent * (100 - percent) / count) ** 0.5  # four standard deviations
                got = lost_percent(lab, *flow, count)
                readings.append(Reading(f"lost {way} at {up:g} % up, {down:g} % down", got, "%", percent, allowed))
    return readings


def delays(seconds: float) -> list[Reading]:
    """Drawn evenly within the jitter; a rate beside it is still reached."""
    readings = []
    with Lab(2, cell=Cell(100), delays={0: Delay(4, 2), 1: Delay(10)}) as lab:
        trips_ms = round_trips_ms(lab, 0, ACCESS_POINT, int(seconds * 50))
        readings.append(Reading("round trip to the access point, 4±2 ms each way", mean(trips_ms), "ms", 8, 0.8))
        readings.append(Reading("... the shortest", min(trips_ms), "ms", 4.5, 0.6))
        readings.append(Reading("... the longest", max(trips_ms), "ms", 11.5, 1.5))
        trips_ms = round_trips_ms(lab, 0, 1, int(seconds * 25))
        readings.append(Reading("round trip to a station with 10 ms", mean(trips_ms), "ms", 28, 1.5))
        with Flows(lab, [(0, ACCESS_POINT)]) as flow:
            time.sleep(WARM_UP_S)
            (got,) = flow.goodput_mbit(seconds)
        readings.append(goodput("cell of 100, station with 4±2 ms to access point", 100 / WITH_ACKS, got))
    return readings


def forwarder(seconds: float) -> list[Reading]:
    """What the process in user space passes on at most; a delayed lab must stay below it."""
    readings = []
    for what, flows in (("station to access point", [(0, ACCESS_POINT)]), ("station to station", [(0, 1)])):
        with Lab(2, delays={0: Delay(1), 1: Delay(1)}) as lab, Flows(lab, flows) as running:
            time.sleep(WARM_UP_S)
            before, start_s = frames_passed(lab, 0) + frames_passed(lab, 1), time.monotonic()
            (got,) = running.goodput_mbit(seconds)
            frames = (frames_passed(lab, 0) + frames_passed(lab, 1) - before) / (time.monotonic() - start_s)
        readings.append(Reading(f"ceiling of delays, {what}", got, "Mbit/s"))
        readings.append(Reading("... frames that are held, answers too", frames / 1e3, "1000/s"))
    return readings


def varying(seconds: float) -> list[Reading]:
    """Measures one connection while the rate of its link changes twice."""
    stretch_s = seconds / 2
    schedule = RateSchedule(((stretch_s, 80.0), (stretch_s, 20.0), (stretch_s, 50.0)))
    readings = []
    for what, lab in (("cell", Lab(1, cell=Cell(80))), ("cable", Lab(1, 80))):
        with lab, Flows(lab, [(0, ACCESS_POINT)]) as flow, lab.varying(schedule):
            for _, rate_mbit in schedule.stretches:
                # The queue of a faster time is over by then: 256 kB take 0.1 s at 20 Mbit/s.
                time.sleep(stretch_s * 0.4)
                (got,) = flow.goodput_mbit(stretch_s * 0.5)
                time.sleep(stretch_s * 0.1)
                expected = rate_mbit / (WITH_ACKS if what == "cell" else 1)
                readings.append(goodput(f"{what} that varies, at {rate_mbit:g}", expected, got))
    return readings


def flaps(seconds: float) -> list[Reading]:
    """A link that is away for a second; the connection lives, and goes on when its sender tries again."""
    readings = []
    for what, delays_by_station in (("a plain link", {}), ("a delayed link", {0: Delay(1)})):
        with Lab(1, cell=Cell(50), delays=delays_by_station) as lab, Flows(lab, [(0, ACCESS_POINT)]) as flow:
            time.sleep(WARM_UP_S)
            lab.flap(0, 1.0)
            time.sleep(1.0)
            (got,) = flow.goodput_mbit(seconds / 2)
        readings.append(Reading(f"longest silence, {what} down for 1 s", flow.longest_gap_s[0], "s", 1.4, 0.45))
        readings.append(goodput("... goodput afterwards", 50 / WITH_ACKS, got))
    return readings


def isolation(_seconds: float) -> list[Reading]:
    """Stations reach the access point and who is wired, not each other."""
    readings = []
    with Lab(3, cell=Cell(50, frozenset({2}))) as lab:
        lab.isolate()
        for what, pair, expected in (
            ("station to station", (0, 1), 0),
            ("station to wired", (0, 2), 1),
            ("wired to station", (2, 1), 1),
            ("station to access point", (0, ACCESS_POINT), 1),
        ):
            readings.append(
                Reading(f"isolated, {what} (1: reachable)", reachable(lab, *pair, timeout_s=0.5), "", expected)
            )
    return readings


def neighbour(seconds: float) -> list[Reading]:
    """A video call of 2.5 Mbit/s each way, alone and beside a download: a queue for each station, and one for all."""
    readings = []
    call_mbit = 2.5
    for beside, one_queue in ((False, False), (True, False), (True, True)):
        with Lab(2, cell=Cell(50, one_queue=one_queue)) as lab, VideoCall(lab, 1, call_mbit) as call:
            if not beside:
                time.sleep(seconds)
                got = 0.0
            else:
                with Flows(lab, [(ACCESS_POINT, 0)]) as flow:
                    time.sleep(WARM_UP_S)
                    (got,) = flow.goodput_mbit(seconds)
        name = "alone" if not beside else "beside a download, one queue" if one_queue else "beside a download"
        readings += _of_call(name, call, one_queue and beside)
        if beside:
            frames = call_mbit * (1200 + 42) / (1200 + 28)
            rest_mbit = (50 * FRAME_PER_GOODPUT - 2 * frames) / FRAME_PER_GOODPUT / WITH_ACKS
            readings.append(goodput("... the download", rest_mbit, got))
    return readings


def _of_call(name: str, call: VideoCall, queued: bool) -> list[Reading]:
    readings = []
    for way, heard in (("up", call.up), ("down", call.down)):
        assert isinstance(heard, Heard)
        if queued and way == "down":
            full_ms = QUEUE_BYTES * 8e3 / (50e6 * FRAME_PER_GOODPUT)
            readings.append(Reading(f"call {name}, {way}: worst", heard.worst_ms, "ms", full_ms * 0.95, full_ms * 0.25))
            readings.append(Reading("... lost", heard.lost_percent, "%"))
        else:
            readings.append(Reading(f"call {name}, {way}: 95 % within", heard.p95_ms, "ms", 1.5, 1.5))
            readings.append(Reading("... lost", heard.lost_percent, "%", 0, 0.5))
    return readings


Situation = Callable[[float], list[Reading]]
SITUATIONS: tuple[Situation, ...] = (cables, air, losses, delays, forwarder, varying, flaps, isolation, neighbour)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.measure", description=__doc__)
    names = [situation.__name__ for situation in SITUATIONS]
    parser.add_argument("--only", choices=names, nargs="+", default=names)
    parser.add_argument("--seconds", type=float, default=3.0, help="of every measurement")
    options = parser.parse_args()
    if (reason := lab_unavailable("nft", "/dev/net/tun")) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores; load of the minute before: {load:.2f}")
    if load > QUIET_LOAD:
        print("Other work ran on this machine: to be taken again when it is quiet.")
    print("\n| situation | expected | allowed | measured | unit | fits | CPU busy |\n|---|---|---|---|---|---|---|")
    off = 0
    try:
        for situation in SITUATIONS:
            if situation.__name__ not in options.only:
                continue
            psutil.cpu_percent()
            readings = situation(options.seconds)
            busy = f"{psutil.cpu_percent():.0f} %"
            for reading in readings:
                print(f"| {' | '.join([*reading.row(), busy])} |", flush=True)
                off += not reading.fits
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{off} of what was measured is off by more than stated." if off else "\nAll as expected.")
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
