"""A report that may be sent to strangers: made of kinds, numbers and yes or no alone.

Nothing that a person, another device or a tool has written goes into it, so nothing has to be found and crossed out:
devices and interfaces are numbered, an address is named by its kind of network.
"""

import ipaddress
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtrain.doctor.facts import Facts, OtherLaptop
from meshtrain.doctor.finding import Finding

PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8")
FORMAT = 1


def write_bundle(path: Path, facts: Facts, findings: Sequence[Finding]) -> None:
    """Writes the report for this user's eyes; what is there already stays. Raises OSError."""
    text = json.dumps(report(facts, findings), indent=2, allow_nan=False) + "\n"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def report(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """The report as JSON values."""
    interfaces = {one.name: f"interface {number}" for number, one in enumerate(facts.adapters, 1)}

    def interface(name: str | None) -> str | None:
        return None if name is None else interfaces.get(name, "another interface")

    return {
        "format": FORMAT,
        "python": platform.python_version(),
        "system": platform.system(),
        "wire_version": facts.own_version,
        "faults": [finding.fault.value for finding in findings],
        "interfaces": [
            {
                "interface": interfaces[one.name],
                "kind": one.kind.value,
                "networks": [network_class(network) for network in one.networks],
                "multicast": facts.hearing[one.name].value if one.name in facts.hearing else None,
            }
            for one in facts.adapters
        ],
        "way_out": interface(facts.way_out.interface) if facts.way_out is not None else None,
        "way_without_vpn": interface(facts.lan_way.interface) if facts.lan_way is not None else None,
        "router_answers": facts.lan_way.gateway_answers if facts.lan_way is not None else None,
        "firewall": [
            {"firewall": one.firewall.value, "port": one.port, "outward": one.outward} for one in facts.blocks
        ],
        "radios": [
            {
                "interface": interface(one.interface),
                "power_save": one.power_save,
                "signal_dbm": one.signal_dbm,
                "frequency_mhz": one.frequency_mhz,
                "busy_share": one.busy_share,
            }
            for one in facts.radios
        ],
        "daemon": {
            "running": facts.daemon.running,
            "other_version": facts.daemon.other_version,
            "listens_everywhere": facts.daemon.host in ("0.0.0.0", "::"),
            "port": facts.daemon.port,
            "mdns": facts.daemon.mdns,
            "interfaces": [interface(name) for name in facts.daemon.interfaces or ()],
            "clock_ahead_s": facts.daemon.ahead_s,
        },
        "port_taken": facts.port_taken is not None,
        "laptops": [_laptop(number, one, interface(one.interface)) for number, one in enumerate(facts.laptops, 1)],
        "not_looked_at": len(facts.unknown),
    }


def _laptop(number: int, laptop: OtherLaptop, interface: str | None) -> dict[str, Any]:
    return {
        "laptop": f"laptop {number}",
        "state": laptop.state,
        "network": network_class(laptop.address),
        "interface": interface,
        "reach": None if laptop.reach is None else laptop.reach.value,
        "card_answers": laptop.hardware_known,
        "said_on": laptop.said_on,
        "heard": laptop.heard,
        "answered_alone": laptop.answered,
        "wire_version": laptop.wire_version,
        "refused": laptop.refused is not None,
        "dial_failed": laptop.dial_failed is not None,
    }


def network_class(address: str) -> str:
    """What an address says to strangers: its private network of RFC 1918 and the like, else that it is public."""
    try:
        ip = ipaddress.ip_interface(address).ip
    except ValueError:
        return "a host name" if address else "unknown"
    if ip.version == 6:
        return "IPv6"
    return next((network for network in PRIVATE if ip in ipaddress.ip_network(network)), "public")
