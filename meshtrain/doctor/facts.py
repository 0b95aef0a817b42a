"""What was found out about this machine, its network and the other laptops: data, of which rules make findings.

None stands for what could not be found out; `Facts.unknown` says why.
"""

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from meshwire.addresses import DEFAULT_PORT
from meshwire.frames.header import WIRE_VERSION

LaptopState = Literal["linked", "paired", "waiting", "seen", "heard", "named"]


class AdapterKind(StrEnum):
    """What a network interface is."""

    WIFI = "WiFi"
    CABLE = "cable"
    TUNNEL = "VPN"
    VIRTUAL = "virtual"  # to containers and virtual machines
    LOOPBACK = "loopback"


class Firewall(StrEnum):
    """Who makes this machine's rules."""

    UFW = "ufw"
    FIREWALLD = "firewalld"
    NFTABLES = "nftables"


class Reach(StrEnum):
    """What came of a TCP connection."""

    OPEN = "open"
    REFUSED = "refused"  # the machine is there, and nobody listens
    SILENT = "silent"  # no answer in time
    UNREACHABLE = "unreachable"  # nobody has that address here, or a firewall says no
    NO_ROUTE = "no route"
    FORBIDDEN = "forbidden"  # by this machine's own firewall


class Hearing(StrEnum):
    """What came of a question to 224.0.0.251, this machine's own included."""

    WELL = "well"  # this machine heard itself
    DEAF = "deaf"  # it was sent, and not heard
    FORBIDDEN = "forbidden"  # it could not be sent: a firewall
    TAKEN = "taken"  # another program holds 5353/udp alone


@dataclass(frozen=True, slots=True)
class Adapter:
    """A network interface that is up, with its IPv4 addresses as ADDRESS/LENGTH."""

    name: str
    kind: AdapterKind
    networks: tuple[str, ...] = ()

    def holds(self, address: str) -> bool:
        """Whether an address is in a network of this interface."""
        ip = _ip(address)
        return ip is not None and any(ip in ipaddress.ip_interface(network).network for network in self.networks)


@dataclass(frozen=True, slots=True)
class WayOut:
    """Where packets to anywhere leave this machine."""

    interface: str
    gateway: str | None = None
    gateway_answers: bool | None = None  # on its own network, by ARP


@dataclass(frozen=True, slots=True)
class Block:
    """A rule of this machine that keeps other laptops out.

    Attributes:
        port: the one that is closed.
        zone: of firewalld.
        place: the chain of nftables that drops it, as `nft` takes it: family, table and name.
        outward: it keeps this machine from reaching that port elsewhere.
    """

    firewall: Firewall
    port: str  # "29610/tcp" or "5353/udp"
    zone: str | None = None
    place: str | None = None
    outward: bool = False


@dataclass(frozen=True, slots=True)
class Radio:
    """A WiFi interface and its air; shares are of the time that was looked at."""

    interface: str
    power_save: bool | None = None
    signal_dbm: float | None = None
    frequency_mhz: float | None = None
    busy_share: float | None = None  # with what others send, this laptop's own sending left out


@dataclass(frozen=True, slots=True)
class OtherLaptop:
    """Another laptop, at one of its addresses.

    Attributes:
        name: as people call it; its address where nobody knows better.
        state: of the daemon's peers; "named": only by whoever asks, with --at; "heard": only by the doctor itself.
        said_on: whoever asks says that it is on.
        interface: by which this machine would send to the address.
        hardware_known: its network card has answered (ARP).
        heard: it answered a question to all (multicast DNS).
        answered: it answered the same question, put to it alone.
    """

    name: str
    address: str
    port: int = DEFAULT_PORT
    state: LaptopState = "paired"
    reach: Reach | None = None
    said_on: bool = False
    interface: str | None = None
    hardware_known: bool | None = None
    heard: bool = False
    answered: bool | None = None
    wire_version: int | None = None
    refused: str | None = None
    dial_failed: str | None = None

    @property
    def there(self) -> bool:
        """It is on and in this network now: it has said so, or whoever asks says it."""
        return self.heard or self.answered is True or self.said_on

    @property
    def met(self) -> bool:
        """It and this laptop reach each other."""
        return self.state == "linked" or self.reach is Reach.OPEN or self.heard


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon on this machine, as far as it answers."""

    running: bool = False
    other_version: int | None = None
    host: str | None = None  # that it listens on
    port: int | None = None
    mdns: bool = True
    interfaces: tuple[str, ...] | None = None
    ahead_s: float | None = None  # of this clock: that of another laptop, by the times of jobs


@dataclass(frozen=True, slots=True)
class PortHolder:
    """Who has the port that the daemon would listen on. `program`: None where only root may know."""

    port: int
    program: str | None = None
    free: int | None = None  # the next port that nobody has


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something that could not be looked at: why, and the command that does."""

    what: str
    why: str
    command: str | None = None


@dataclass(frozen=True)
class Facts:
    """All of it."""

    system: str = "Linux"
    now_s: float = 0.0  # Unix time, as this machine believes
    own_version: int = WIRE_VERSION
    adapters: tuple[Adapter, ...] = ()
    way_out: WayOut | None = None  # that packets take
    lan_way: WayOut | None = None  # that they would take without any VPN
    blocks: tuple[Block, ...] = ()
    hearing: dict[str, Hearing] = field(default_factory=dict)  # by interface
    radios: tuple[Radio, ...] = ()
    daemon: Daemon = Daemon()
    laptops: tuple[OtherLaptop, ...] = ()
    port_taken: PortHolder | None = None
    looked_at: tuple[str, ...] = ()
    unknown: tuple[Unknown, ...] = ()

    def adapter(self, name: str | None) -> Adapter | None:
        """The interface of this name that is up."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

    def is_tunnel(self, name: str | None) -> bool:
        """Whether the interface of this name is a VPN's."""
        adapter = self.adapter(name)
        return adapter is not None and adapter.kind is AdapterKind.TUNNEL

    def next_door(self, laptop: OtherLaptop) -> bool:
        """Whether a laptop's address is in a network that this machine is in, a VPN's left out."""
        return any(one.holds(laptop.address) for one in self.adapters if one.kind is not AdapterKind.TUNNEL)

    @property
    def in_use(self) -> frozenset[str]:
        """The interfaces by which other laptops would be reached."""
        names = {one.interface for one in self.laptops if one.interface is not None}
        if self.lan_way is not None:
            names.add(self.lan_way.interface)
        return frozenset(name for name in names if not self.is_tunnel(name))

    def apart(self) -> Iterator[OtherLaptop]:
        """The laptops that are not linked."""
        return (one for one in self.laptops if one.state != "linked")


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None
