"""Interfaces, routes and neighbours, as `ip -j` (iproute2) prints them."""

import json
import re
from typing import Any

from meshtrain.doctor.facts import Adapter, AdapterKind, WayOut

TUNNEL_KINDS = {"tun", "wireguard", "ipip", "gre", "sit", "xfrm", "vti", "ppp"}
VIRTUAL_KINDS = {"bridge", "dummy", "vxlan"}
TUNNELS = re.compile(r"tun|tap|utun|ipsec|wg|wireguard|tailscale|ppp|zt|nordlynx|proton|mullvad", re.IGNORECASE)
VIRTUAL = re.compile(r"docker|br-|veth|virbr|vmnet|vboxnet|lxcbr|lxdbr|podman|cni|flannel|cali", re.IGNORECASE)
UNKNOWN_STATES = {"FAILED", "INCOMPLETE"}  # no card has answered
FRESH_S = 4  # an answer that is older than a dial may be of a laptop that was closed since


def adapters(text: str, wireless: frozenset[str]) -> tuple[Adapter, ...]:
    """Of `ip -j -d addr show up`, those that have an IPv4 address."""
    found = []
    for link in _objects(text):
        networks = tuple(
            f"{one['local']}/{one['prefixlen']}"
            for one in link.get("addr_info", ())
            if one.get("family") == "inet" and "local" in one
        )
        if networks and "ifname" in link:
            found.append(Adapter(link["ifname"], _kind(link, wireless), networks))
    return tuple(found)


def _kind(link: dict[str, Any], wireless: frozenset[str]) -> AdapterKind:
    name, info = link["ifname"], link.get("linkinfo", {}).get("info_kind", "")
    if "LOOPBACK" in link.get("flags", ()):
        return AdapterKind.LOOPBACK
    if name in wireless:
        return AdapterKind.WIFI
    if info in TUNNEL_KINDS or TUNNELS.match(name):
        return AdapterKind.TUNNEL
    if info in VIRTUAL_KINDS or VIRTUAL.match(name):
        return AdapterKind.VIRTUAL
    return AdapterKind.CABLE


def way(text: str) -> WayOut | None:
    """Of `ip -j route get ADDRESS`: how this machine would send there."""
    route = next(iter(_objects(text)), None)
    return None if route is None or "dev" not in route else WayOut(route["dev"], route.get("gateway"))


def way_without_tunnels(text: str, tunnels: frozenset[str]) -> WayOut | None:
    """Of `ip -j route show default`: the best that is no VPN's."""
    routes = [one for one in _objects(text) if one.get("dev") not in tunnels and "dev" in one]
    best = min(routes, key=lambda one: one.get("metric", 0), default=None)
    return None if best is None else WayOut(best["dev"], best.get("gateway"))


def hardware_known(text: str, address: str) -> bool | None:
    """Of `ip -j -s neigh show ADDRESS`: whether the card of this address has just answered; None: that may be old."""
    known = [one for one in _objects(text) if one.get("dst") == address]
    if any("REACHABLE" in one.get("state", ()) and one.get("confirmed", FRESH_S + 1) <= FRESH_S for one in known):
        return True
    return False if any(UNKNOWN_STATES.intersection(one.get("state", ())) for one in known) else None


def _objects(text: str) -> list[dict[str, Any]]:
    try:
        read = json.loads(text or "[]")
    except ValueError:  # an ip without JSON (busybox) prints text: nothing is known
        return []
    return [one for one in read if isinstance(one, dict)] if isinstance(read, list) else []
