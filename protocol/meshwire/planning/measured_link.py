"""What was measured of the links that are there, and the network that follows from it.

The figures are a message, for a daemon keeps them and commands read them.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from pydantic import Field

from meshwire import limits
from meshwire.message_base import Seconds, Wire
from meshwire.planning.network import USUAL_WORK, DaemonWork, Network, PeerLink

SPEED_RATIO_MAX = 1000.0  # of two devices
SIDE_PART_MIN = 0.1  # of a byte's time in the air, on either side of the access point: measurements scatter
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
    def begins_on_cable(self) -> bool:
        """Whether this end alone has a cable, so that what goes over it crosses the air once, if it does at all."""
        return self.wired is True and self.peer_wired is not True

    @property
    def ends_on_cable(self) -> bool:
        """The same of the other end."""
        return self.peer_wired is True and self.wired is not True

    @property
    def rates_bytes_s(self) -> tuple[float, float]:
        """What it sends and receives while it does both, as far as no shared medium forbids that."""
        if self.shared:
            return self.send_bytes_s, self.receive_bytes_s
        return self.both_send_bytes_s, self.both_receive_bytes_s


def measured_network(
    links: Sequence[MeasuredLink], work: DaemonWork = USUAL_WORK, *, known: Sequence[MeasuredLink] = ()
) -> Network:
    """The network of a device, which comes first, and those that its links lead to.

    The first one is as fast as with the fastest of the others, and these are with each other as fast as with it. All
    whose two directions share a medium are taken to share one, the air of a cell, which each station's bytes take for
    as long as its own rate says.

    Args:
        known: its links to others that were measured, too: they tell how near it is to the access point.
    """
    shared = [link for link in links if link.shared]
    sends, receives = zip(*(link.rates_bytes_s for link in links), strict=True)
    own_s = _own_air_s([link for link in (*links, *known) if link.shared]) if shared else 0.0
    first = PeerLink(
        max(sends), max(receives), fmean(link.rtt_s for link in links), air_bytes_s=1.0 / own_s if own_s else None
    )
    others = (
        PeerLink(
            receive_bytes_s,
            send_bytes_s,
            link.rtt_s,
            air_bytes_s=None if not link.shared or link.ends_on_cable else _air_bytes_s(link, own_s),
            speed=link.peer_speed or 1.0,
        )
        for link, send_bytes_s, receive_bytes_s in zip(links, sends, receives, strict=True)
    )
    return Network((first, *others), work=work)


def _own_air_s(shared: Sequence[MeasuredLink]) -> float:
    """For how long a byte takes the air on this device's side; 0: it has a cable.

    To a device on a cable that is all that it takes, but for what its cable or processor is slower; of what it takes to
    another station something is left for that one's side. Where no device has a cable nothing tells whose side takes
    how much: this one is taken to be as near to the access point as the best of the others.
    """
    if any(link.begins_on_cable for link in shared):
        return 0.0
    to_cables = [1.0 / link.both_bytes_s for link in shared if link.ends_on_cable]
    to_stations = [1.0 / link.both_bytes_s for link in shared if not link.ends_on_cable]
    if not to_cables:
        return 0.5 * min(to_stations)
    return min(*to_cables, *((1 - SIDE_PART_MIN) * whole_s for whole_s in to_stations), math.inf)


def _air_bytes_s(link: MeasuredLink, own_s: float) -> float:
    """What passes between the other end of a link and the access point, if a byte takes so long on this side."""
    whole_s = 1.0 / link.both_bytes_s
    return 1.0 / max(whole_s - own_s, SIDE_PART_MIN * whole_s)
