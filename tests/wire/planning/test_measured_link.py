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
    """Alone 10 MB/s arrive, so each side carries 20; played, a byte takes as long as it was measured to."""
    network = measured_network([STATIONS])
    assert [each.air_bytes_s for each in network.links] == [20e6, 20e6]
    assert [(each.up_bytes_s, each.down_bytes_s) for each in network.links] == [(10e6, 9e6), (9e6, 10e6)]
    assert network.air_s(0, 1, 10e6) == pytest.approx(1.0)
    assert network.latency_s(0, 1) == pytest.approx(0.002)


@pytest.mark.parametrize(("wired", "first_wired"), [((True, False), True), ((False, True), False)])
def test_a_byte_to_a_cable_crosses_the_air_once(wired: tuple[bool, bool], first_wired: bool) -> None:
    network = measured_network([link(20e6, 20e6, (10e6, 10e6), wired)])
    assert [each.air_bytes_s for each in network.links] == ([None, 20e6] if first_wired else [20e6, None])
    assert network.air_s(0, 1, 20e6) == pytest.approx(1.0)


def test_two_ways_at_once_on_a_cable_are_what_counts_there() -> None:
    network = measured_network([CABLES])
    assert all(each.wired for each in network.links)
    assert [(each.up_bytes_s, each.down_bytes_s) for each in network.links] == [(80e6, 70e6), (70e6, 80e6)]


def test_cables_whose_ends_are_slow_share_no_air() -> None:
    both = (60e6, 50e6)
    assert link(100e6, 100e6, both).shared
    slow = link(100e6, 100e6, both, (True, True))
    assert not slow.shared
    assert all(each.wired for each in measured_network([slow]).links)


SLOW_STATION = link(2e6, 2e6, (1e6, 1e6), (False, False))


def test_a_slow_station_takes_the_air_for_its_own_bytes_alone() -> None:
    """To it a byte takes 0.5 us, to the other one 0.1, of which half is this side's: so between these two 0.5, too, and
    the other one's bytes take what they took without it."""
    network = measured_network([STATIONS, SLOW_STATION])
    assert [each.up_bytes_s for each in network.links] == [10e6, 9e6, 2e6]
    took_us = [network.air_s(*pair, 1e6) for pair in ((0, 1), (0, 2), (1, 2))]
    assert took_us == pytest.approx([0.1, 0.5, 0.5])


def test_two_slow_stations_take_twice_as_long_with_each_other() -> None:
    network = measured_network([STATIONS, SLOW_STATION, SLOW_STATION])
    assert network.air_s(2, 3, 1e6) == pytest.approx(0.9)


def test_what_this_side_takes_is_known_where_the_other_has_a_cable() -> None:
    """This device is the slow station: 5 MB/s to a cable; so the others are as near to the access point as can be."""
    network = measured_network([link(5e6, 5e6, (2.5e6, 2.5e6), (False, True)), link(4e6, 4e6, (2e6, 2e6))])
    assert [each.air_bytes_s for each in network.links] == [5e6, None, pytest.approx(20e6)]


def test_this_side_takes_no_more_than_nine_tenths_of_what_was_measured_to_a_station() -> None:
    """A slow processor on a cable is not this device's distance; and measurements scatter: to a station it was as fast
    as to a cable."""
    for to_cable in (2e6, 5e6):
        network = measured_network(
            [link(to_cable, to_cable, (to_cable / 2, to_cable / 2), (False, True)), link(5e6, 5e6, (2.5e6, 2.5e6))]
        )
        assert network.air_s(0, 2, 5e6) == pytest.approx(1.0), "as it was measured"
        assert network.links[2].air_bytes_s == pytest.approx(50e6)


def test_what_other_links_tell_of_this_side_counts_without_them() -> None:
    """Options are compared that have a hub, or a far laptop, and have not."""
    to_hub = link(8e6, 8e6, (4e6, 4e6), (False, True))
    pair = [link(2e6, 2e6, (1e6, 1e6))] * 2
    with_hub, without = measured_network([*pair, to_hub]), measured_network(pair, known=[to_hub])
    assert [each.air_bytes_s for each in with_hub.links[:3]] == [each.air_bytes_s for each in without.links]
    assert without.air_s(1, 2, 1e6) == pytest.approx(0.75)
    assert measured_network(pair).air_s(1, 2, 1e6) == pytest.approx(0.5)


def test_who_is_on_a_cable_crosses_no_air_on_that_side() -> None:
    """This device on the radio, one other too, a third on a cable that the access point is on."""
    network = measured_network([STATIONS, link(20e6, 20e6, (10e6, 10e6), (False, True))])
    assert [each.wired for each in network.links] == [False, False, True]
    assert network.air_s(0, 2, 20e6) == pytest.approx(1.0)
    assert network.air_s(0, 1, 10e6) == pytest.approx(1.0)
