"""What is wrong, in one sentence each: what is, why it matters, and the one command that mends it."""

from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """All that the doctor can name."""

    MULTICAST = "multicast blocked"
    ISOLATION = "laptops kept apart"
    FIREWALL = "firewall"
    FIREWALL_THERE = "firewall on the other laptop"
    OTHER_NETWORK = "another network"
    INTERFACE = "wrong interface"
    VPN = "VPN in the way"
    CLOCK = "clock"
    VERSION = "other version"
    PORT = "port taken"
    NOBODY_THERE = "no daemon there"
    SLEEPING_RADIO = "sleeping radio"
    WEAK_RADIO = "weak radio"
    BUSY_AIR = "busy air"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    Attributes:
        what: what is, one sentence.
        why: why it matters, one sentence.
        mend: the command that mends it.
        where: the name of the laptop on which to type that; None: this one.
    """

    fault: Fault
    what: str
    why: str
    mend: str
    where: str | None = None
