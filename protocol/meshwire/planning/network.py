"""What is known of a network between peers, as far as it decides how long an exchange takes.

Rates are goodput: what arrives of payloads, in bytes a second, with the headers of TCP and TLS taken off.
"""

import math
from dataclasses import dataclass, replace

# What a daemon's processor needs at each end, with TLS, beside the codec. 1.8 s for 10^9 bytes sent and received with
# two peers, sums of fp32 included (tests/bench/results/allreduce.md); of them 40 us for each frame.
BYTE_S = 0.9e-9
MESSAGE_S = 40e-6
# Of each round, whatever is in it: messages of learner and daemon, binds, seals, timers. A tiny model makes 229 rounds
# a second with two peers on loopback, and 470 with DDP.
ROUND_S = 2.5e-3


@dataclass(frozen=True, slots=True)
class DaemonWork:
    """What a daemon's processor does for a round beside the codec.

    Attributes:
        byte_s, message_s: at each end, for a byte and for a frame, with TLS.
        round_s: of each round, whatever is in it.
    """

    byte_s: float = BYTE_S
    message_s: float = MESSAGE_S
    round_s: float = ROUND_S


NO_WORK = DaemonWork(0.0, 0.0, 0.0)
USUAL_WORK = DaemonWork()


@dataclass(frozen=True, slots=True)
class PeerLink:
    """How a peer is linked to all others: its rates, its latency, and by cable or through the air.

    Attributes:
        up_bytes_s, down_bytes_s: what it sends, and what it receives, both at once.
        rtt_s: round trip to a peer like itself; between two that differ it is the mean of both.
        air_bytes_s: what passes between it and the access point while the air is its alone, up and down together: a
            slow or far station's bytes take the air for longer. None: it has a cable.
        speed: how fast its processor is, in the speed of the one that the work of daemons and codecs was measured on.
    """

    up_bytes_s: float
    down_bytes_s: float
    rtt_s: float
    air_bytes_s: float | None = None
    speed: float = 1.0

    @property
    def wired(self) -> bool:
        """Whether what it sends and receives crosses no air on its side."""
        return self.air_bytes_s is None


@dataclass(frozen=True, slots=True)
class Network:
    """All peers' links. Those without a cable share the air of one WiFi cell, and take turns in it: what goes from
    station to station takes it twice, on either side of the access point.

    Attributes:
        links: by position in the ring.
        work: of a daemon's processor.
    """

    links: tuple[PeerLink, ...]
    work: DaemonWork = USUAL_WORK

    @property
    def round_s(self) -> float:
        """What the slowest daemon takes for each round, whatever is in it."""
        return self.work.round_s / min(link.speed for link in self.links)

    def without_rates(self) -> "Network":
        """The same with links that take any number of bytes at once; the air stays as it is."""
        links = tuple(replace(link, up_bytes_s=math.inf, down_bytes_s=math.inf) for link in self.links)
        return replace(self, links=links)

    def without_air(self) -> "Network":
        """The same with a cable for each, as fast as its link is."""
        return replace(self, links=tuple(replace(link, air_bytes_s=None) for link in self.links))

    def at_rate(self, part: float) -> "Network":
        """The same where links and air carry so many times as much."""
        links = tuple(
            replace(
                link,
                up_bytes_s=part * link.up_bytes_s,
                down_bytes_s=part * link.down_bytes_s,
                air_bytes_s=None if link.air_bytes_s is None else part * link.air_bytes_s,
            )
            for link in self.links
        )
        return replace(self, links=links)

    def without_latency(self) -> "Network":
        """The same where nothing is on its way."""
        return replace(self, links=tuple(replace(link, rtt_s=0.0) for link in self.links))

    def air_s(self, sender: int, receiver: int, size_bytes: float) -> float:
        """How long what goes from one to the other takes the air."""
        sides = (self.links[sender].air_bytes_s, self.links[receiver].air_bytes_s)
        return sum(size_bytes / air_bytes_s for air_bytes_s in sides if air_bytes_s is not None)

    def latency_s(self, sender: int, receiver: int) -> float:
        """How long a byte is on its way from one to the other, beside what its rate takes."""
        return (self.links[sender].rtt_s + self.links[receiver].rtt_s) / 4


def cables(peers: int, bytes_s: float, rtt_s: float) -> Network:
    """Equal peers on a switch: each sends and receives `bytes_s` at once, and nobody is in another's way."""
    return Network((PeerLink(bytes_s, bytes_s, rtt_s),) * peers)


def cell(peers: int, bytes_s: float, rtt_s: float, wired: int = 0) -> Network:
    """Equal stations in one WiFi cell, in which `bytes_s` cross the air: what one alone gets to the access point.

    Args:
        wired: so many of them, the first ones, are on a cable to the access point, which is as fast.
    """
    air = [None if at < wired else bytes_s for at in range(peers)]
    return Network(tuple(PeerLink(bytes_s, bytes_s, rtt_s, air_bytes_s) for air_bytes_s in air))
