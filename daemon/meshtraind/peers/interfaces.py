"""Which network interfaces a daemon announces itself on."""

import ipaddress
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM_INTERFACES = Path("/sys/class/net")

# Bridges and virtual switches lead to containers, tunnels to other networks: peers cannot be reached at the
# addresses that this machine has there. Whoever wants one names it.
_SKIPPED = re.compile(
    r"docker|br-|veth|virbr|vmnet|vboxnet|vethernet|lxcbr|lxdbr|podman|cni|flannel|cali"  # containers, machines
    r"|tun|tap|utun|ipsec|wg|wireguard|tailscale|ppp|zt",  # VPNs
    re.IGNORECASE,
)


class InterfaceError(ValueError):
    """A named interface does not exist or cannot be used; says which ones can."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface and its usable addresses, IPv4 first. IPv6 link-local ones are left out: they mean nothing
    to a peer without the zone, which differs between machines."""

    name: str
    addresses: tuple[str, ...]


def usable_interfaces(named: Sequence[str] = ()) -> tuple[Interface, ...]:
    """The interfaces in `named`, or every one that is up, apart from loopback, container bridges and VPNs.

    Raises InterfaceError when a named one is unknown, down or without an address. May be empty without names.
    """
    present = _interfaces_up()
    if not named:
        return tuple(i for i in present.values() if not _SKIPPED.match(i.name) and not _is_loopback(i))
    for name in named:
        if name not in present:
            available = ", ".join(f"{i.name} ({i.addresses[0]})" for i in present.values()) or "none"
            raise InterfaceError(f"no interface {name!r} that is up and has an address; available: {available}")
    return tuple(present[name] for name in dict.fromkeys(named))


def reachable_addresses(interfaces: Iterable[Interface], listen_host: str) -> tuple[str, ...]:
    """Addresses at which a listener bound to `listen_host` (an IP address; 0.0.0.0 and :: mean any) is reached."""
    bound = ipaddress.ip_address(listen_host)
    addresses = [address for interface in interfaces for address in interface.addresses]
    if not bound.is_unspecified:
        return tuple(address for address in addresses if ipaddress.ip_address(address) == bound)
    if bound.version == 4:
        return tuple(address for address in addresses if ipaddress.ip_address(address).version == 4)
    return tuple(addresses)


def likely_addresses(named: Sequence[str], listen_host: str) -> tuple[str, ...]:
    """The addresses where another device would reach this one, the likeliest first, for a person to type there.

    That on the default route comes first. Container bridges, VPNs and loopback only where there is nothing better; IPv6
    only without IPv4.

    Args:
        named: as of `usable_interfaces`; a name that is not up now counts as none.
        listen_host: as of `reachable_addresses`.
    """
    present = _interfaces_up()
    chosen = [present[name] for name in named if name in present] or [
        interface
        for interface in present.values()
        if not _SKIPPED.match(interface.name) and not _is_loopback(interface)
    ]
    others = [interface for interface in present.values() if not _is_loopback(interface)]
    for interfaces in (chosen, others, present.values()):
        found = reachable_addresses(interfaces, listen_host)
        if found:
            on_route = _address_on_default_route()
            ipv4 = [address for address in found if ipaddress.ip_address(address).version == 4]
            return tuple(sorted(dict.fromkeys(ipv4 or found), key=lambda address: address != on_route))
    return (listen_host,)


def is_wired(address: str | None) -> bool | None:
    """Whether the interface with this address of this machine has a cable; None where the system does not say: it is
    no Linux, or the interface is no device, as loopback and tunnels are none."""
    if address is None or sys.platform != "linux":
        return None
    name = interface_of(address)
    if name is None or not (SYSTEM_INTERFACES / name / "device").exists():
        return None
    return not ((SYSTEM_INTERFACES / name / "wireless").exists() or (SYSTEM_INTERFACES / name / "phy80211").exists())


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address of this machine now; None: none has."""
    return next((name for name, interface in _interfaces_up().items() if address in interface.addresses), None)


def own_addresses() -> frozenset[str]:
    """All addresses that this machine has now, whatever for: they change where it comes into another network."""
    return frozenset(address for interface in _interfaces_up().values() for address in interface.addresses)


def _address_on_default_route() -> str | None:
    """This machine's address on the way to anywhere; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737): only the route is asked for
        except OSError:  # there is none, which is an answer
            return None
        return str(probe.getsockname()[0])


def _interfaces_up() -> dict[str, Interface]:
    # Imported here: most commands need no interfaces.
    import psutil

    states = psutil.net_if_stats()
    found = {}
    for name, entries in sorted(psutil.net_if_addrs().items()):
        if name not in states or not states[name].isup:
            continue
        usable = {address for entry in entries if (address := _usable_address(entry.address)) is not None}
        if usable:
            found[name] = Interface(name, tuple(map(str, sorted(usable, key=lambda a: (a.version, int(a))))))
    return found


def _usable_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, or None if it is of no use to a peer; psutil lists hardware addresses among the others."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if address.is_unspecified or address.is_multicast or (address.version == 6 and address.is_link_local):
        return None
    return address


def _is_loopback(interface: Interface) -> bool:
    return any(ipaddress.ip_address(address).is_loopback for address in interface.addresses)
