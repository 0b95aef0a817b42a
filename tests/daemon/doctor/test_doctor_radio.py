"""The radio's three faults, from what `iw` prints: here is no radio, and none is staged.

The texts have the form of iw 5.19's, as recorded on laptops and routers, with other names, addresses and numbers.
"""

import pytest

from meshtrain.doctor import radio
from meshtrain.doctor.facts import Radio
from meshtrain.doctor.radio import (
    air_counters,
    busy_share,
    look_at_radio,
    power_save,
    signal_and_frequency,
    wireless_interfaces,
)
from meshtrain.doctor.tools import Said

DEVICES = """phy#0
\tUnnamed/non-netdev interface
\t\twdev 0x2
\t\taddr 02:00:5e:10:00:01
\t\ttype P2P-device
\tInterface wlp2s0
\t\tifindex 3
\t\twdev 0x1
\t\taddr 02:00:5e:10:00:00
\t\tssid home
\t\ttype managed
\t\tchannel 36 (5180 MHz), width: 80 MHz, center1: 5210 MHz
\t\ttxpower 22.00 dBm
"""
GOOD_LINK = """Connected to 02:00:5e:20:00:00 (on wlp2s0)
\tSSID: home
\tfreq: 5180
\tRX: 48213045 bytes (52113 packets)
\tTX: 9120334 bytes (31004 packets)
\tsignal: -52 dBm
\trx bitrate: 780.0 MBit/s VHT-MCS 9 80MHz short GI VHT-NSS 2
\ttx bitrate: 650.0 MBit/s VHT-MCS 8 80MHz short GI VHT-NSS 2

\tbss flags:\tshort-slot-time
\tdtim period:\t3
\tbeacon int:\t100
"""
WEAK_LINK = """Connected to 02:00:5e:20:00:01 (on wlp2s0)
\tSSID: freq: 5180 signal: -1 dBm
\tfreq: 2437.0
\tRX: 2482130 bytes (8211 packets)
\tTX: 912033 bytes (3100 packets)
\tsignal: -79 dBm
\trx bitrate: 13.0 MBit/s MCS 1
\ttx bitrate: 6.5 MBit/s MCS 0
"""
SURVEY = """Survey data from wlp2s0
\tfrequency:\t\t\t2412 MHz
\tnoise:\t\t\t\t-92 dBm
\tchannel active time:\t\t59 ms
\tchannel busy time:\t\t58 ms
Survey data from wlp2s0
\tfrequency:\t\t\t5180 MHz [in use]
\tnoise:\t\t\t\t-95 dBm
\tchannel active time:\t\t{active} ms
\tchannel busy time:\t\t{busy} ms
\tchannel receive time:\t\t{receive} ms
\tchannel transmit time:\t\t{transmit} ms
Survey data from wlp2s0
\tfrequency:\t\t\t5200 MHz
"""


def survey(active: int, busy: int, transmit: int) -> str:
    return SURVEY.format(active=active, busy=busy, receive=busy - transmit, transmit=transmit)


class Tools:
    """`iw` as it was recorded; looks at the air say one after the other."""

    def __init__(self, link: str, saving: str, *surveys: str) -> None:
        self.said = {"link": link, "get power_save": saving}
        self.surveys = list(surveys)

    def __call__(self, *argv: str) -> Said:
        assert argv[:3] == ("iw", "dev", "wlp2s0")
        what = " ".join(argv[3:])
        if what == "survey dump":
            return Said(self.surveys.pop(0)) if self.surveys else Said(None, "iw failed: Operation not supported (-95)")
        return Said(self.said[what])


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radio, "LOOK_S", 0.0)


def test_radios_are_found_among_what_iw_lists() -> None:
    assert wireless_interfaces(DEVICES) == {"wlp2s0"}
    assert wireless_interfaces("") == set()


def test_a_healthy_radio_is_read() -> None:
    tools = Tools(GOOD_LINK, "Power save: off\n", survey(100_000, 20_000, 5_000), survey(101_000, 20_250, 5_100))
    assert look_at_radio(tools, "wlp2s0") == Radio("wlp2s0", False, -52.0, 5180.0, 0.15)


def test_a_radio_with_everything_wrong_is_read() -> None:
    """The name of a network, which anybody chooses, is not read as its signal."""
    tools = Tools(WEAK_LINK, "Power save: on\n", survey(100_000, 20_000, 5_000), survey(101_000, 20_800, 5_000))
    assert look_at_radio(tools, "wlp2s0") == Radio("wlp2s0", True, -79.0, 2437.0, 0.8)


def test_a_driver_that_says_nothing_leaves_gaps() -> None:
    assert look_at_radio(Tools("Not connected.\n", ""), "wlp2s0") == Radio("wlp2s0")
    assert signal_and_frequency("\tfreq: 5500.0\n\tsignal: 0 dBm\n") == (None, 5500.0), "0 is what drivers do not know"
    assert power_save("command failed: Operation not supported (-95)") is None


def test_own_sending_does_not_make_the_air_busy() -> None:
    assert air_counters(survey(1000, 900, 850)) == (1000, 50)


def test_counters_that_stand_still_or_begin_anew_say_what_they_hold() -> None:
    assert busy_share((1000, 100), (1000, 100)) == 0.1, "some count only while they scan"
    assert busy_share((5000, 4000), (300, 30)) == 0.1, "the radio was switched off meanwhile"
    assert busy_share((0, 0), (100, 90)) is None, "too short to say anything"
    assert busy_share(None, (1000, 100)) is None
    assert air_counters("Survey data from wlp2s0\n\tfrequency:\t2412 MHz\n\tchannel active time:\t5 ms\n") is None
