"""W7: the network that follows from what links were measured to carry."""

import pytest

from meshwire.planning.measured_link import MeasuredLink, measured_network


def link(
    send: float, receive: float, both: tuple[float, float], wired: tuple[bool | None, bool | None] = (None, None)
) -> MeasuredLink:
    return MeasuredLink(
        send_bytes_s=send,
        receive_bytes_s=receive,
        both_send_bytes_s=both[0],
        both_receive_bytes_s=both[1],
        rtt_s=0.004,
        loaded_rtt_s=None,
        wired=wired[0],
        peer_wired=wired[1],
        at_s=0.0,
    )


STATIONS = link(10e6, 9e6, (5e6, 5e6), (False, False))
CABLES = link(100e6, 90e6, (80e6, 70e6))


def test_two_stations_share_the_air_that_a_byte_crosses_twice() -> None:
    """Alone 10 MB/s arrive, so the air carries 20; played, a byte takes as long as it was measured to."""
    network = measured_network([STATIONS])
    assert network.air_bytes_s == 20e6
    assert [(each.up_bytes_s, each.down_bytes_s) for each in network.links] == [(10e6, 9e6), (9e6, 10e6)]
    assert network.crossings(0, 1) == 2
    assert network.latency_s(0, 1) == pytest.approx(0.002)


@pytest.mark.parametrize(("wired", "first_wired"), [((True, False), True), ((False, True), False)])
def test_a_byte_to_a_cable_crosses_the_air_once(wired: tuple[bool, bool], first_wired: bool) -> None:
    network = measured_network([link(20e6, 20e6, (10e6, 10e6), wired)])
    assert network.air_bytes_s == 20e6
    assert network.links[0].wired is first_wired
    assert network.links[1].wired is not first_wired
    assert network.crossings(0, 1) == 1


def test_two_ways_at_once_on_a_cable_are_what_counts_there() -> None:
    network = measured_network([CABLES])
    assert network.air_bytes_s is None
    assert [(each.up_bytes_s, each.down_bytes_s) for each in network.links] == [(80e6, 70e6), (70e6, 80e6)]


def test_cables_whose_ends_are_slow_share_no_air() -> None:
    both = (60e6, 50e6)
    assert link(100e6, 100e6, both).shared
    slow = link(100e6, 100e6, both, (True, True))
    assert not slow.shared
    assert measured_network([slow]).air_bytes_s is None


def test_the_slowest_station_sets_what_the_air_carries() -> None:
    """A subset without it has more."""
    slow = link(2e6, 2e6, (1e6, 1e6), (False, False))
    network = measured_network([STATIONS, slow])
    assert network.air_bytes_s == 4e6
    assert [each.up_bytes_s for each in network.links] == [10e6, 9e6, 2e6]
    assert measured_network([STATIONS]).air_bytes_s == 20e6


def test_who_is_on_a_cable_crosses_no_air_on_that_side() -> None:
    """This device on the radio, one other too, a third on a cable that the access point is on."""
    network = measured_network([STATIONS, link(20e6, 20e6, (10e6, 10e6), (False, True))])
    assert [each.wired for each in network.links] == [False, False, True]
    assert network.crossings(1, 2) == network.crossings(0, 2) == 1
    assert network.crossings(0, 1) == 2
