"""What was measured of the links that are there, and the network that follows from it.

The figures are a message, for a daemon keeps them and commands read them.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from pydantic import Field

from meshwire import limits
from meshwire.message_base import Seconds, Wire
from meshwire.planning.network import USUAL_WORK, DaemonWork, Network, PeerLink

SPEED_RATIO_MAX = 1000.0  # of two devices
SHARED_PART = 1.4  # both directions at once carry less than this of the better one alone: they share a medium

Goodput = Annotated[float, Field(gt=0, le=limits.GOODPUT_BYTES_S_MAX)]


class MeasuredLink(Wire):
    """What the link to one peer was measured to carry (W7), in payload bytes a second, TLS and headers taken off.

    Attributes:
        send_bytes_s, receive_bytes_s: one way at a time.
        both_send_bytes_s, both_receive_bytes_s: both ways at once.
        rtt_s: while nothing else was sent.
        loaded_rtt_s: of a message beside chunks one way; None: none came back in time.
        wired, peer_wired: whether this end, and the other one, has a cable; None: unknown.
        at_s: when, in Unix time.
        peer_speed: how fast the other device computes, in this one's speed, by a calculation that is the same on both;
            None: unknown.
    """

    send_bytes_s: Goodput
    receive_bytes_s: Goodput
    both_send_bytes_s: Goodput
    both_receive_bytes_s: Goodput
    rtt_s: Seconds
    loaded_rtt_s: Seconds | None
    wired: bool | None
    peer_wired: bool | None
    at_s: Seconds
    peer_speed: Annotated[float, Field(gt=0, le=SPEED_RATIO_MAX)] | None = None

    @property
    def both_bytes_s(self) -> float:
        """What it carries both ways together."""
        return self.both_send_bytes_s + self.both_receive_bytes_s

    @property
    def shared(self) -> bool:
        """Whether both directions share a medium, as the air: together they carry hardly more than one alone."""
        cables = self.wired is True and self.peer_wired is True  # then it is a processor that they share
        return not cables and self.both_bytes_s < SHARED_PART * max(self.send_bytes_s, self.receive_bytes_s)

    @property
    def crossings(self) -> int:
        """How often what goes over it crosses the air, if it does at all: once where one end has a cable."""
        return 1 if (self.wired is True) != (self.peer_wired is True) else 2

    @property
    def rates_bytes_s(self) -> tuple[float, float]:
        """What it sends and receives while it does both, as far as no shared medium forbids that."""
        if self.shared:
            return self.send_bytes_s, self.receive_bytes_s
        return self.both_send_bytes_s, self.both_receive_bytes_s


def measured_network(links: Sequence[MeasuredLink], work: DaemonWork = USUAL_WORK) -> Network:
    """The network of a device, which comes first, and those that its links lead to.

    The first one is as fast as with the fastest of the others, and these are with each other as fast as with it. All
    whose two directions share a medium are taken to share one, and the slowest of them sets what that carries: a slow
    station takes the air from all.
    """
    shared = [link for link in links if link.shared]
    sends, receives = zip(*(link.rates_bytes_s for link in links), strict=True)
    on_cable = not shared or any(link.wired is True and link.crossings == 1 for link in shared)
    first = PeerLink(max(sends), max(receives), fmean(link.rtt_s for link in links), wired=on_cable)
    others = (
        PeerLink(
            receive_bytes_s,
            send_bytes_s,
            link.rtt_s,
            wired=not link.shared or (link.peer_wired is True and link.crossings == 1),
            speed=link.peer_speed or 1.0,
        )
        for link, send_bytes_s, receive_bytes_s in zip(links, sends, receives, strict=True)
    )
    air = min((link.crossings * link.both_bytes_s for link in shared), default=None)
    return Network((first, *others), air_bytes_s=air, work=work)
