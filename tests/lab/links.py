"""A lab's links, as data and as the lines that make them: cables, a WiFi cell, delays, losses, a rate that varies.

Nothing here touches the machine. Rates are TCP goodput: the token buckets run at R * 1514/1448, so headers are not
taken out of it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

ACCESS_POINT = -1  # in place of a station's number: the switch as a host of its own, on no cable and in no cell's air
FRAME_PER_GOODPUT = 1514 / 1448  # Ethernet, IPv4 and TCP with timestamps around 1448 bytes
WITH_ACKS = 1 + 66 / 2 / 1514  # airtime of a full frame and of half an answer: a receiver answers every second one
QUEUE_BYTES = 256_000  # before each bucket, each way: what home routers have, about 20 ms at 100 Mbit/s
TURN_BYTES = 3028  # two full frames, then it is another's turn
BURST_BYTES_MIN = 3100  # two frames: less than one would never be sent
CABLE_BURST_S = 0.001
AIR_BURST_S = 0.002
AIR = "air"  # the device through which everything passes that takes airtime
LEAF_RATE = "8kbit"  # nobody in a cell is promised anything, and HTB wants a number
LEAF_CEIL = "10gbit"

UP, DOWN, OTHER = 0x100, 0x200, 0x300  # HTB's classes: up from station N is UP + N


@dataclass(frozen=True)
class Delay:
    """How long every frame to a station, and every frame from it, is on its way; drawn evenly, and none overtakes.

    A round trip to the access point takes twice `ms`, one to another such station four times.
    """

    ms: float
    jitter_ms: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter_ms <= self.ms:
            raise ValueError(f"a delay of {self.ms:g} ms cannot vary by {self.jitter_ms:g} ms")


@dataclass(frozen=True)
class RateSchedule:
    """A rate that varies: each of its stretches in turn, then from the start again.

    Attributes:
        stretches: (seconds, Mbit/s).
    """

    stretches: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.stretches or any(seconds <= 0 or rate_mbit <= 0 for seconds, rate_mbit in self.stretches):
            raise ValueError(f"a rate that varies is made of stretches with a length and a rate: {self.stretches}")

    @classmethod
    def parse(cls, text: str) -> "RateSchedule":
        """From "5:100,0.5:20": 5 s of 100 Mbit/s, then half a second of 20. Raises ValueError."""
        parts = text.split(",")
        if not all(re.fullmatch(r"\d+(\.\d+)?:\d+(\.\d+)?", part) for part in parts):
            raise ValueError(f"{text!r} is not SECONDS:MBIT,SECONDS:MBIT,...")
        return cls(tuple((float(seconds), float(rate)) for seconds, rate in (part.split(":") for part in parts)))

    @property
    def mean_mbit(self) -> float:
        """Over one turn."""
        length_s = sum(seconds for seconds, _ in self.stretches)
        return sum(seconds * rate_mbit for seconds, rate_mbit in self.stretches) / length_s

    def at(self, elapsed_s: float) -> tuple[float, float]:
        """(Mbit/s now, seconds until it changes)."""
        left_s = elapsed_s % sum(seconds for seconds, _ in self.stretches)
        for seconds, rate_mbit in self.stretches:
            if left_s < seconds:
                return rate_mbit, seconds - left_s
            left_s -= seconds
        return self.at(0.0)  # rounding took it beyond the end


@dataclass(frozen=True)
class Cell:
    """A WiFi cell: the wireless stations and the access point take turns on one channel, up and down alike.

    Whoever has something to send gets an equal share of the bytes. A byte from station to station goes through the
    access point, and is paid twice.

    Attributes:
        rate_mbit: what one flow between a station and the access point gets when it is alone, but for its answers.
        wired: stations on a cable to the access point; their own side of a flow takes no airtime.
        one_queue: what goes down waits in one queue at the access point, whoever it is for, as in plain routers; else
            every station has its own there, and they take turns.
    """

    rate_mbit: float
    wired: frozenset[int] = frozenset()
    one_queue: bool = False

    def __post_init__(self) -> None:
        if self.rate_mbit <= 0:
            raise ValueError(f"a cell of {self.rate_mbit:g} Mbit/s lets nothing through")

    def wireless(self, station: int) -> bool:
        """Whether what this station sends and receives takes airtime."""
        return station != ACCESS_POINT and station not in self.wired

    def crossings(self, sender: int, receiver: int) -> int:
        """How often a byte of this flow crosses the air: 0, 1 or 2."""
        return self.wireless(sender) + self.wireless(receiver)

    def goodput_mbit(self, flows: Sequence[tuple[int, int]]) -> float:
        """What each of these TCP flows gets when all send at once: (sender, receiver), no sender twice.

        Raises ValueError where the air is not what limits them.
        """
        crossings = [self.crossings(*flow) for flow in flows]
        if len({sender for sender, _ in flows}) < len(flows) or not all(crossings):
            raise ValueError(f"the air alone does not say what each of {list(flows)} gets")
        return self.rate_mbit / WITH_ACKS / sum(crossings)

    def setup(self, stations: int) -> list[str]:
        """Lines for `tc -batch`: the air's bucket, and one class for each that waits for a turn.

        Up from a station is known by its address (its last two bytes are its number + 1); what goes down has been given
        its class as priority by then, which comes before these filters.
        """
        wireless = [station for station in range(stations) if self.wireless(station)]
        downs = [DOWN] if self.one_queue else [DOWN + station for station in wireless]
        lines = [f"qdisc add dev {AIR} root handle 1: htb default {OTHER:x}", self.rate_change("add", self.rate_mbit)]
        for leaf in (*(UP + station for station in wireless), *downs, OTHER):
            lines += [
                f"class add dev {AIR} parent 1:1 classid 1:{leaf:x} htb rate {LEAF_RATE} ceil {LEAF_CEIL}"
                f" burst {BURST_BYTES_MIN} quantum {TURN_BYTES}",
                f"qdisc add dev {AIR} parent 1:{leaf:x} bfifo limit {QUEUE_BYTES}",
            ]
        for station in wireless:
            lines.append(
                f"filter add dev {AIR} parent 1: protocol all prio 5"
                f" u32 match u16 0x{station + 1:04x} 0xffff at -4 flowid 1:{UP + station:x}"
            )
        return lines

    def admission(self, station: int, port: str) -> list[str]:
        """Lines for `tc -batch`: what comes and goes at this station's port passes the air first."""
        if not self.wireless(station):
            return []
        through = f"protocol all u32 match u32 0 0 action mirred egress redirect dev {AIR}"
        return [
            f"qdisc add dev {port} clsact",
            f"filter add dev {port} ingress {through}",
            f"filter add dev {port} egress {through}",
        ]

    def classes_down(self, stations: int) -> str:
        """For `nft -f`: what goes down to a station gets its class as priority."""
        rules = [
            f'oifname "{port_name(station)}" meta priority set 1:{DOWN + (0 if self.one_queue else station):x}'
            for station in range(stations)
            if self.wireless(station)
        ]
        return _table("bridge", "classes", ["type filter hook postrouting priority 0; policy accept;", *rules])

    def rate_change(self, verb: str, rate_mbit: float) -> str:
        """A line for `tc -batch`: the whole cell has this rate ("add" or "change")."""
        return f"class {verb} dev {AIR} parent 1: classid 1:1 {_bucket(rate_mbit, AIR_BURST_S)}"


def port_name(station: int) -> str:
    """The access point's end of a station's link."""
    return f"port{station}"


def cable_setup(device: str, rate_mbit: float) -> list[str]:
    """Lines for `tc -batch`: what leaves by this end of a cable has a rate."""
    return [
        f"qdisc add dev {device} root handle 1: htb default 1",
        cable_rate_change(device, "add", rate_mbit),
        f"qdisc add dev {device} parent 1:1 bfifo limit {QUEUE_BYTES}",
    ]


def cable_rate_change(device: str, verb: str, rate_mbit: float) -> str:
    """A line for `tc -batch`: this end of a cable has this rate ("add" or "change")."""
    return f"class {verb} dev {device} parent 1: classid 1:1 {_bucket(rate_mbit, CABLE_BURST_S)}"


def losses_up(station: int, percent: float) -> str:
    """For `nft -f` at the access point: so many frames of this station are lost after they took their airtime."""
    rule = f'iifname "{port_name(station)}" {_dice(percent)} drop'
    lines = ["type filter hook prerouting priority 0; policy accept;", *([rule] if percent else [])]
    return _table("bridge", f"loss{station}", lines)


def losses_down(percent: float) -> str:
    """For `nft -f` at a station: so many frames to it are lost after they took their airtime."""
    rules = [f"{_dice(percent)} drop"] if percent else []
    lines = ['type filter hook ingress device "eth0" priority 0; policy accept;', *rules]
    return _table("netdev", "loss", lines)


def _dice(percent: float) -> str:
    if not 0 <= percent <= 100:
        raise ValueError(f"{percent:g} is no percentage")
    return f"numgen random mod 100000 < {round(percent * 1000)}"


def _table(family: str, name: str, lines: Sequence[str]) -> str:
    """One chain, in place of what this table held before."""
    body = "\n".join(f"  {line}" for line in lines)
    named = f"table {family} {name}"
    return f"{named}\ndelete {named}\n{named} {{\n chain frames {{\n{body}\n }}\n}}\n"


def _bucket(rate_mbit: float, burst_s: float) -> str:
    frame_mbit = rate_mbit * FRAME_PER_GOODPUT
    burst = max(BURST_BYTES_MIN, int(frame_mbit * 1e6 / 8 * burst_s))
    rate = f"{frame_mbit:.3f}mbit"
    return f"htb rate {rate} ceil {rate} burst {burst} cburst {burst} quantum {TURN_BYTES}"
