"""All rules, in the order in which a person should read what they find: what keeps laptops apart, then what is slow."""

from meshtrain.doctor.facts import Facts
from meshtrain.doctor.finding import Finding
from meshtrain.doctor.machine_rules import other_version, port_taken, wrong_clock
from meshtrain.doctor.network_rules import (
    firewall_here,
    firewall_there,
    kept_apart,
    multicast_blocked,
    nobody_there,
    other_network,
    vpn_in_the_way,
    wrong_interface,
)
from meshtrain.doctor.radio import busy_air, sleeping_radio, weak_radio

RULES = (
    port_taken,
    other_version,
    firewall_here,
    wrong_interface,
    vpn_in_the_way,
    multicast_blocked,
    kept_apart,
    other_network,
    firewall_there,
    nobody_there,
    wrong_clock,
    sleeping_radio,
    weak_radio,
    busy_air,
)


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """What is wrong. Empty where nothing is."""
    return tuple(finding for rule in RULES for finding in rule(facts))
