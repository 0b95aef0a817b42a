"""WiFi, as `iw` tells of it (nl80211): asked, read, and what is wrong with it."""

import re
import time

from meshtrain.doctor.facts import Facts, Radio
from meshtrain.doctor.finding import Fault, Finding
from meshtrain.doctor.tools import AskTool

LOOK_S = 1.0  # between two looks at how busy the air is: the counters run since the radio was switched on
ACTIVE_MS_MIN = 200  # of listening, to say something
WEAK_DBM = -70.0  # below it the rate falls step by step, and frames are sent again
BAND_24_MHZ = (2400.0, 2500.0)
BUSY_SHARE = 0.5


def wireless_interfaces(text: str) -> frozenset[str]:
    """Of `iw dev`."""
    return frozenset(re.findall(r"^\s*Interface (\S+)$", text, re.MULTILINE))


def look_at_radio(ask: AskTool, interface: str) -> Radio:
    """Asks `iw`; takes LOOK_S."""
    before = air_counters(ask("iw", "dev", interface, "survey", "dump").text or "")
    time.sleep(LOOK_S if before is not None else 0)
    after = air_counters(ask("iw", "dev", interface, "survey", "dump").text or "") if before is not None else None
    link = ask("iw", "dev", interface, "link").text or ""
    saving = ask("iw", "dev", interface, "get", "power_save").text or ""
    return Radio(interface, power_save(saving), *signal_and_frequency(link), busy_share(before, after))


def power_save(text: str) -> bool | None:
    """Of `iw dev IF get power_save`."""
    found = re.search(r"Power save: (on|off)", text)
    return None if found is None else found[1] == "on"


def signal_and_frequency(text: str) -> tuple[float | None, float | None]:
    """Of `iw dev IF link`: dBm and MHz."""
    signal = re.search(r"^\s*signal: (-?[\d.]+) dBm", text, re.MULTILINE)
    frequency = re.search(r"^\s*freq: ([\d.]+)", text, re.MULTILINE)
    return (
        float(signal[1]) if signal and float(signal[1]) < 0 else None,  # some drivers say 0 where they do not know
        float(frequency[1]) if frequency else None,
    )


def air_counters(text: str) -> tuple[int, int] | None:
    """Of `iw dev IF survey dump`: for how many ms the channel in use was listened to, and was busy with what others
    sent."""
    for block in re.split(r"^Survey data from .*$", text, flags=re.MULTILINE):
        if "[in use]" not in block:
            continue
        counted = {what: int(ms) for what, ms in re.findall(r"channel (\w+) time:\s*(\d+) ms", block)}
        if "active" in counted and "busy" in counted:
            return counted["active"], max(0, counted["busy"] - counted.get("transmit", 0))
    return None


def busy_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """How busy the air was between two looks; where the counters stand still or begin anew, all that they know."""
    if before is None or after is None:
        return None
    active_ms, busy_ms = after[0] - before[0], after[1] - before[1]
    if active_ms < ACTIVE_MS_MIN or not 0 <= busy_ms <= active_ms:
        active_ms, busy_ms = after
    return busy_ms / active_ms if active_ms >= ACTIVE_MS_MIN and busy_ms <= active_ms else None


def sleeping_radio(facts: Facts) -> list[Finding]:
    """The radio sleeps between beacons."""
    return [
        Finding(
            Fault.SLEEPING_RADIO,
            f"The radio of {radio.interface} sleeps between beacons (power save is on).",
            "What others send waits for it, up to a third of a second each time, and each round of training waits for "
            "that.",
            f"sudo iw dev {radio.interface} set power_save off",
        )
        for radio in _in_use(facts)
        if radio.power_save
    ]


def weak_radio(facts: Facts) -> list[Finding]:
    """The signal is weak, or the band is the crowded one."""
    found = []
    for radio in _in_use(facts):
        weak = radio.signal_dbm is not None and radio.signal_dbm < WEAK_DBM
        crowded = radio.frequency_mhz is not None and BAND_24_MHZ[0] <= radio.frequency_mhz < BAND_24_MHZ[1]
        if not (weak or crowded):
            continue
        is_ = [f"on the 2.4 GHz band ({radio.frequency_mhz:.0f} MHz)"] if crowded else []
        is_ += [f"received at {radio.signal_dbm:.0f} dBm, which is weak"] if weak else []
        found.append(
            Finding(
                Fault.WEAK_RADIO,
                f"The WiFi of {radio.interface} is {' and '.join(is_)}.",
                "It carries a tenth of what 5 GHz carries in the same room, and gradients cross it twice."
                if crowded
                else "Frames are sent slowly and again and again, which takes the air from all laptops: move nearer to "
                "the access point, or take a cable.",
                f"nmcli --fields SSID,FREQ,SIGNAL device wifi list ifname {radio.interface}",
            )
        )
    return found


def busy_air(facts: Facts) -> list[Finding]:
    """A neighbour, or a hub beside, fills the channel."""
    return [
        Finding(
            Fault.BUSY_AIR,
            f"Others fill {radio.busy_share:.0%} of the air of {radio.interface} "
            f"({radio.frequency_mhz or 0:.0f} MHz), a neighbour or a hub on the same channel.",
            "Only what is left of the air is there for gradients: give the access point another channel, or the hub a "
            "cable.",
            f"sudo iw dev {radio.interface} scan | grep -E 'freq|signal|SSID'",
        )
        for radio in _in_use(facts)
        if radio.busy_share is not None and radio.busy_share > BUSY_SHARE
    ]


def _in_use(facts: Facts) -> list[Radio]:
    return [radio for radio in facts.radios if radio.interface in facts.in_use]
