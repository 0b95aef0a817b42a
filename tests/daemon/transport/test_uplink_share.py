"""Even shares of a way up: found, followed, and left alone where nothing can be told; on links that are played."""

from typing import Any, cast

import pytest

from meshtraind.transport.connection import Connection
from meshtraind.transport.low_extra_delay import PACE_BYTES_S_MIN, PathSample
from meshtraind.transport.round_link import RoundLink
from meshtraind.transport.uplink_share import FORGET_S, HEADROOM, LOOK_INTERVAL_S, UplinkShare
from tests.daemon.transport.test_low_extra_delay import Path, Silent, Wire
from tests.sim.clusternetwork import Clock, Node
from tests.sim.virtualloop import virtual_loop

RTT_S = 0.001


class Uplink:
    """What some links share, evenly among those that have something to send."""

    def __init__(self, links: int, bytes_s: float) -> None:
        self.clock = Clock()
        self.bytes_s = bytes_s
        self.lost = 0.03  # of the packets
        self.links = [SharedLink(self) for _ in range(links)]
        self.loop = virtual_loop(self.clock, Node(0))
        self.share = UplinkShare([cast(RoundLink, link) for link in self.links])
        self._carried_s = 0.0

    def carry(self) -> None:
        """What has left until now."""
        took_s, self._carried_s = self.clock.now_s - self._carried_s, self.clock.now_s
        busy = [link for link in self.links if link.waiting_bytes > 0]
        for link in busy:
            rate = min(self.bytes_s / len(busy), link.share_bytes_s or self.bytes_s)
            left = min(link.waiting_bytes, rate * took_s)
            link.busy_s += left / rate
            link.waiting_bytes -= left
            link.arrived_bytes += left

    def send(self, each_bytes: float, links: int | None = None, *, chunks: bool = True) -> None:
        """Some bytes on each of so many links, until they have arrived, and a pause."""
        for link in self.links[:links]:
            link.waiting_bytes = each_bytes
        if chunks:
            self.loop.run(self.share.sends)
        while any(link.waiting_bytes > 1 for link in self.links):
            self.clock.run_until(self.clock.now_s + LOOK_INTERVAL_S / 10, 10**7)
            self.carry()
        self.clock.run_until(self.clock.now_s + 1.0, 10**7)
        self.carry()


class SharedLink:
    def __init__(self, uplink: Uplink) -> None:
        self.uplink = uplink
        self.waiting_bytes = self.arrived_bytes = self.busy_s = 0.0
        self.share_bytes_s: float | None = None
        self.told: list[float | None] = []
        self.tells = True
        self.asked = 0

    @property
    def newest(self) -> float:
        return [share for share in self.told if share is not None][-1]

    def path(self) -> PathSample | None:
        self.asked += 1
        self.uplink.carry()
        if not self.tells:
            return None
        packets = int(self.arrived_bytes / 1448)
        again = int(self.uplink.lost * packets)
        return PathSample(RTT_S, RTT_S, int(self.arrived_bytes), self.waiting_bytes > 1, self.busy_s, packets, again)

    def share(self, owner: object, bytes_s: float | None) -> None:
        assert owner is self.uplink.share
        self.uplink.carry()
        self.share_bytes_s = bytes_s
        self.told.append(bytes_s)


@pytest.mark.parametrize("links", [2, 7])
def test_links_that_send_at_once_have_even_shares_and_use_all_there_is(links: int) -> None:
    uplink = Uplink(links, 12.5e6)
    for _ in range(5):
        uplink.send(1.25e6)
    even = pytest.approx(HEADROOM * 12.5e6 / links, rel=0.01)
    assert [link.newest for link in uplink.links] == [even] * links


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_another_rate_is_followed(factor: float) -> None:
    """A slower one at once; a faster one by what there is left beside each share."""
    uplink = Uplink(4, 10e6)
    for _ in range(5):
        uplink.send(2.5e6)
    uplink.bytes_s *= factor
    for _ in range(60):
        uplink.send(2.5e6)
    assert uplink.links[0].newest == pytest.approx(HEADROOM * uplink.bytes_s / 4, rel=0.05)


def test_what_is_sent_in_a_moment_tells_nothing_and_is_not_held_up() -> None:
    uplink = Uplink(4, 10e6)
    for _ in range(20):
        uplink.send(2.5e6 * 1.5 * LOOK_INTERVAL_S)
    assert not any(link.told for link in uplink.links)


def test_a_bad_moment_is_over_soon() -> None:
    """A network that was down to a 25th for some seconds: two more, and not half a minute."""
    uplink = Uplink(3, 12.5e6)
    for _ in range(5):
        uplink.send(4e6)
    uplink.bytes_s /= 25
    uplink.send(0.4e6)
    uplink.bytes_s *= 25
    began_s = uplink.clock.now_s
    for _ in range(3):
        uplink.send(4e6)
    assert uplink.clock.now_s - began_s < 3 * (0.96 + 1.0) + 3.0
    assert uplink.links[0].newest * 3 > 12.5e6


def test_where_nothing_is_lost_nothing_is_shared_out() -> None:
    """Long ways: what links carry is less than they could, and no queue is full."""
    uplink = Uplink(4, 10e6)
    uplink.lost = 0.0
    for _ in range(5):
        uplink.send(10e6)
    assert not any(link.told for link in uplink.links)


def test_what_some_links_carry_alone_is_not_what_all_can() -> None:
    """The others wait for something: a share of that would hold them up later."""
    uplink = Uplink(4, 10e6)
    uplink.send(2.5e6)
    share = uplink.links[0].newest
    for _ in range(30):
        uplink.send(1e6, links=2)
    uplink.send(2.5e6)
    assert uplink.links[0].newest == pytest.approx(share, rel=0.02)


def test_a_link_that_sends_alone_has_all_there_is() -> None:
    """J1: the state for who comes in, between two rounds."""
    uplink = Uplink(4, 10e6)
    uplink.send(2.5e6)
    assert uplink.links[0].told
    began_s = uplink.clock.now_s
    uplink.send(10e6, links=1, chunks=False)
    assert uplink.clock.now_s - began_s == pytest.approx(1.0 + 1.0, abs=0.01)
    assert uplink.links[0].share_bytes_s is None


@pytest.mark.parametrize("pause_s", [FORGET_S / 2, FORGET_S])
def test_what_was_found_long_ago_is_forgotten(pause_s: float) -> None:
    """Rounds that are too short to tell anything would be held up by it for good."""
    uplink = Uplink(4, 10e6)
    uplink.send(2.5e6)
    uplink.clock.run_until(uplink.clock.now_s + pause_s, 10**7)
    told = len(uplink.links[0].told)
    uplink.send(2.5e6 * 1.5 * LOOK_INTERVAL_S)
    assert (len(uplink.links[0].told) > told) == (pause_s < FORGET_S)


def test_no_share_is_below_what_others_take_for_a_stall() -> None:
    uplink = Uplink(4, 1e5)
    uplink.send(1e5)
    assert uplink.links[0].newest == PACE_BYTES_S_MIN


@pytest.mark.parametrize("silent", [0, 1])
def test_nothing_is_looked_at_where_the_system_does_not_tell_or_nothing_is_under_way(silent: int) -> None:
    uplink = Uplink(3, 10e6)
    uplink.links[0].tells = not silent
    uplink.send(1e6)
    asked = uplink.links[0].asked
    assert (asked == 1) == bool(silent)
    uplink.clock.run_until(uplink.clock.now_s + 10, 10**7)
    assert uplink.links[0].asked == asked


def test_links_are_as_fast_as_they_like_after_it() -> None:
    uplink = Uplink(3, 10e6)
    for link in uplink.links:
        link.waiting_bytes = 50e6
    uplink.loop.run(uplink.share.sends)
    uplink.clock.run_until(uplink.clock.now_s + 1.0, 10**7)
    assert uplink.links[0].share_bytes_s is not None
    uplink.share.close()
    assert [link.share_bytes_s for link in uplink.links] == [None] * 3
    told = len(uplink.links[0].told)
    uplink.clock.run_until(uplink.clock.now_s + 1.0, 10**7)
    assert len(uplink.links[0].told) == told


def test_a_share_and_a_call_that_is_yielded_to_go_together() -> None:
    """The kernel keeps the lower of both paces, and hears only of another one."""
    wire, loop = Wire(Path(1e6)), virtual_loop(Clock(), Node(0))
    conn = Connection(cast(Any, Silent()), name="bert")
    one, other = object(), object()
    conn.share(one, 1e6)  # without a transport
    loop.run(lambda: conn.connection_made(cast(Any, wire)))
    conn.share(one, 3e6)
    conn.share(one, 3e6)
    conn.pacer.delay.pace_bytes_s = 2e6
    conn.share(one, 4e6)
    conn.share(other, 1e6)
    conn.share(one, None)
    conn.share(other, None)
    conn.pacer.delay.pace_bytes_s = None
    conn.share(one, None)
    assert wire.paces == [3_000_000, 2_000_000, 1_000_000, 2_000_000, 0xFFFFFFFF]
