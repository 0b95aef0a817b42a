"""Finds the facts out: all probes side by side, each with a deadline of its own."""

import ipaddress
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from meshtrain.doctor.facts import (
    Adapter,
    AdapterKind,
    Block,
    Facts,
    Hearing,
    OtherLaptop,
    Reach,
    Unknown,
    WayOut,
)
from meshtrain.doctor.firewalls import firewall_blocks
from meshtrain.doctor.local_daemon import AskedDaemon, ask_daemon
from meshtrain.doctor.multicast import Answer, Heard, ask_all, ask_alone
from meshtrain.doctor.radio import look_at_radio, wireless_interfaces
from meshtrain.doctor.reach import card_answers, echoes, is_there, port_holder, reach
from meshtrain.doctor.routes import adapters, way, way_without_tunnels
from meshtrain.doctor.tools import AskTool, ask_tool
from meshwire.addresses import DEFAULT_PORT, Address

WORKERS = 16
ANYWHERE = "203.0.113.1"  # reserved for documentation (RFC 5737): only the route there is asked for
ADAPTERS_MAX = 6
CARD_TIMEOUT_S = 8.0  # five until the system asks again, three times a second
CARD_POLL_S = 0.25
SHOWN_MAX = 24  # laptops that the doctor itself has heard

# The best of a laptop's addresses counts: most laptops have some that lead nowhere from here.
_RANK = {Reach.OPEN: 0, Reach.REFUSED: 1, Reach.FORBIDDEN: 2, Reach.UNREACHABLE: 3, Reach.SILENT: 3, Reach.NO_ROUTE: 4}


@dataclass(frozen=True, slots=True)
class _Machine:
    """What this machine says of itself, before anybody else is asked."""

    adapters: tuple[Adapter, ...]
    way_out: WayOut | None
    lan_way: WayOut | None
    wireless: frozenset[str]
    unknown: tuple[Unknown, ...] = ()

    def is_tunnel(self, name: str) -> bool:
        return any(one.name == name and one.kind is AdapterKind.TUNNEL for one in self.adapters)

    def worth_asking(self, daemon: AskedDaemon) -> list[Adapter]:
        """The interfaces on which other laptops may be."""
        named = set(daemon.daemon.interfaces or ())
        if self.lan_way is not None:
            named.add(self.lan_way.interface)
        kinds = (AdapterKind.WIFI, AdapterKind.CABLE)
        return [one for one in self.adapters if one.kind in kinds or one.name in named][:ADAPTERS_MAX]


class Examination:
    """Looks at this machine, its network and the other laptops.

    Args:
        at: addresses that a person names, where another laptop is.
        ask: the system's tools.
    """

    def __init__(self, data_dir: Path, at: Sequence[Address] = (), ask: AskTool = ask_tool) -> None:
        self._data_dir = data_dir
        self._at = at
        self._ask = ask
        self._now_s = time.time()

    def run(self) -> Facts:
        """Takes some seconds: what is silent is waited for. Changes nothing."""
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="doctor") as pool:
            asked = pool.submit(ask_daemon, self._data_dir, self._now_s)
            machine, daemon = self._machine(pool), asked.result()
            return self._around(pool, machine, daemon)

    def _machine(self, pool: ThreadPoolExecutor) -> _Machine:
        ask = self._ask
        if sys.platform != "linux":
            what = "routes, firewall and radio"
            return _Machine(_portable_adapters(), None, None, frozenset(), (Unknown(what, "read on Linux only"),))
        words = (
            ("ip", "-j", "-d", "addr", "show", "up"),
            ("ip", "-j", "route", "get", ANYWHERE),
            ("ip", "-j", "route", "show", "default"),
            ("iw", "dev"),
        )
        addresses, anywhere, defaults, radios = pool.map(lambda argv: ask(*argv), words)
        wireless = wireless_interfaces(radios.text or "")
        found = adapters(addresses.text or "", wireless)
        unknown = []
        if addresses.text is None:
            why = addresses.problem or "unknown"
            unknown.append(Unknown("interfaces and routes", why, "sudo apt install iproute2"))
        if radios.text is None and any(one.name.startswith("wl") for one in found):
            unknown.append(Unknown("the radio", radios.problem or "unknown", "sudo apt install iw"))
        tunnels = frozenset(one.name for one in found if one.kind is AdapterKind.TUNNEL)
        lan = way_without_tunnels(defaults.text or "", tunnels)
        if lan is None:  # a network without a way to anywhere: two laptops on a cable
            physical = [one.name for one in found if one.kind in (AdapterKind.WIFI, AdapterKind.CABLE)]
            lan = WayOut(physical[0]) if len(physical) == 1 else None
        return _Machine(found, way(anywhere.text or ""), lan, wireless, tuple(unknown))

    def _around(self, pool: ThreadPoolExecutor, machine: _Machine, asked: AskedDaemon) -> Facts:
        own = {str(ipaddress.ip_interface(one).ip) for adapter in machine.adapters for one in adapter.networks}
        places = self._with_named(asked.places)
        worth = machine.worth_asking(asked)
        port = asked.daemon.port or DEFAULT_PORT
        gateway = machine.lan_way.gateway if machine.lan_way is not None else None

        hearing = {
            one.name: pool.submit(ask_all, one.name, address, _awaited(one, places))
            for one in worth
            if (address := str(ipaddress.ip_interface(one.networks[0]).ip))
        }
        firewalls = [pool.submit(self._firewall, one, port, places) for one in worth]
        radios = [pool.submit(look_at_radio, self._ask, name) for name in sorted(machine.wireless)]
        router = pool.submit(is_there, self._ask, gateway) if gateway is not None else None
        holder = pool.submit(port_holder, self._ask, port) if not asked.daemon.running else None
        looks = [(device, pool.submit(self._look, place, machine)) for device, place in places]

        heard = {name: future.result() for name, future in hearing.items()}
        answers = [answer for one in heard.values() for answer in one.answers if answer.address not in own]
        if asked.own_device is not None:
            answers = [one for one in answers if one.device != asked.own_device]
        known = _with_answers([(device, future.result()) for device, future in looks], answers)
        strangers = [self._stranger(answer) for answer in _unknown_answers(answers, known)]
        looked = pool.map(lambda one: self._look(one, machine), strangers[:SHOWN_MAX])
        laptops = (*_best_places(known), *looked)
        blocks, unknown = _both(firewalls)
        lan = machine.lan_way
        return Facts(
            system=sys.platform,
            now_s=self._now_s,
            adapters=machine.adapters,
            way_out=machine.way_out,
            lan_way=lan if lan is None or router is None else replace(lan, gateway_answers=router.result()),
            blocks=blocks,
            hearing={name: one.hearing for name, one in heard.items()},
            radios=tuple(future.result() for future in radios),
            daemon=asked.daemon,
            laptops=laptops,
            port_taken=holder.result() if holder is not None else None,
            looked_at=_looked_at(machine, asked, port, heard, laptops),
            unknown=(*asked.unknown, *machine.unknown, *unknown),
        )

    def _with_named(self, known: Iterable[tuple[str, OtherLaptop]]) -> list[tuple[str, OtherLaptop]]:
        """Those that the daemon knows, and those that a person names; some of the former are among the latter."""
        named = {one.host: one for one in self._at}
        places = [(device, replace(one, said_on=one.address in named)) for device, one in known]
        for host in named.keys() - {one.address for _, one in places}:
            port = named[host].port
            places.append(("", OtherLaptop(name=host, address=host, port=port, state="named", said_on=True)))
        return places

    def _stranger(self, answer: Answer) -> OtherLaptop:
        return OtherLaptop(
            name=answer.name or answer.address,
            address=answer.address,
            port=answer.port or DEFAULT_PORT,
            state="heard",
            heard=True,
            wire_version=answer.wire_version,
        )

    def _look(self, laptop: OtherLaptop, machine: _Machine) -> OtherLaptop:
        """Whether a laptop can be reached where it may be; a linked one is."""
        if not laptop.address:
            return laptop
        route = way(self._ask("ip", "-j", "route", "get", laptop.address).text or "")
        next_door = any(
            one.holds(laptop.address) for one in machine.adapters if one.kind is not AdapterKind.TUNNEL
        ) and not (route is not None and machine.is_tunnel(route.interface))
        came = Reach.OPEN if laptop.state == "linked" else reach(laptop.address, laptop.port)
        card = self._card(laptop, came) if next_door else None
        return replace(
            laptop,
            interface=None if route is None else route.interface,
            reach=came,
            hardware_known=card,
            answered=card is not False and ask_alone(laptop.address) if next_door else None,
        )

    def _card(self, laptop: OtherLaptop, came: Reach) -> bool | None:
        """Whether its network card answers now. What the system knows may be minutes old: then it asks again itself,
        which takes seconds and is awaited only where a person says that the laptop is on."""
        if came in (Reach.OPEN, Reach.REFUSED):
            return True
        if echoes(self._ask, laptop.address):
            return True
        deadline_s = time.monotonic() + (CARD_TIMEOUT_S if laptop.said_on else 0)
        while (known := card_answers(self._ask, laptop.address)) is None and time.monotonic() < deadline_s:
            time.sleep(CARD_POLL_S)
        return known

    def _firewall(
        self, adapter: Adapter, port: int, places: Iterable[tuple[str, OtherLaptop]]
    ) -> tuple[tuple[Block, ...], tuple[Unknown, ...]]:
        network = ipaddress.ip_interface(adapter.networks[0]).network
        near = (place.address for _, place in places if adapter.holds(place.address))
        other = next(near, str(network.network_address + 1))  # anybody there
        return firewall_blocks(self._ask, adapter, port, other)


def _awaited(adapter: Adapter, places: Iterable[tuple[str, OtherLaptop]]) -> list[str]:
    return [place.address for _, place in places if adapter.holds(place.address)]


def _with_answers(known: Iterable[tuple[str, OtherLaptop]], answers: Sequence[Answer]) -> list[tuple[str, OtherLaptop]]:
    """The known laptops, with what the doctor has heard of them: by their id or, where an answer has none, their
    address."""
    found = []
    for device, laptop in known:
        by_id = [one for one in answers if device and one.device == device]
        own = by_id or [one for one in answers if not (device and one.device) and one.address == laptop.address]
        version = next((one.wire_version for one in own if one.wire_version is not None), laptop.wire_version)
        found.append((device, replace(laptop, heard=bool(own), wire_version=version)))
    return found


def _unknown_answers(answers: Iterable[Answer], known: Sequence[tuple[str, OtherLaptop]]) -> list[Answer]:
    devices = {device for device, _ in known}
    addresses = {laptop.address for _, laptop in known}
    return [one for one in answers if one.device not in devices and one.address not in addresses]


def _best_places(known: Iterable[tuple[str, OtherLaptop]]) -> list[OtherLaptop]:
    """Each laptop at the one of its addresses that says most of it."""
    best: dict[str, OtherLaptop] = {}
    for device, laptop in known:
        key = device or f"at {laptop.address}"
        if key not in best or _rank(laptop) < _rank(best[key]):
            best[key] = laptop
    return list(best.values())


def _rank(laptop: OtherLaptop) -> tuple[int, int]:
    near = 0 if laptop.said_on or laptop.answered is not None else 1
    return (_RANK[laptop.reach] if laptop.reach is not None else 9, near)


def _both(
    firewalls: Iterable["Future[tuple[tuple[Block, ...], tuple[Unknown, ...]]]"],
) -> tuple[tuple[Block, ...], tuple[Unknown, ...]]:
    """Of all interfaces, each block and each gap once."""
    blocks: dict[Block, None] = {}
    unknown: dict[Unknown, None] = {}
    for future in firewalls:
        found, gaps = future.result()
        blocks.update(dict.fromkeys(found))
        unknown.update(dict.fromkeys(gaps))
    return tuple(blocks), tuple(unknown)


def _looked_at(
    machine: _Machine, asked: AskedDaemon, port: int, heard: dict[str, Heard], laptops: Sequence[OtherLaptop]
) -> tuple[str, ...]:
    """For people: what was looked at, in the order of the rules."""
    looked = [f"port {port}/tcp"]
    looked += ["the daemon"] if asked.daemon.running else []
    looked += [f"interface {one.name}" for one in machine.adapters if one.kind is not AdapterKind.LOOPBACK]
    if machine.way_out is not None or machine.lan_way is not None:
        looked += ["the way out", "VPNs", "the firewall"]
    looked += [f"multicast on {name}" for name, one in heard.items() if one.hearing is not Hearing.TAKEN]
    looked += [f"the radio of {name}" for name in sorted(machine.wireless)]
    looked += [one.name for one in laptops]
    return (*dict.fromkeys(looked), "the clock", "versions")


def _portable_adapters() -> tuple[Adapter, ...]:
    import psutil

    found = []
    states = psutil.net_if_stats()
    for name, entries in sorted(psutil.net_if_addrs().items()):
        networks = []
        for entry in entries:
            if entry.family.name == "AF_INET" and entry.netmask and name in states and states[name].isup:
                networks.append(str(ipaddress.ip_interface(f"{entry.address}/{entry.netmask}")))
        if networks:
            kind = AdapterKind.LOOPBACK if networks[0].startswith("127.") else AdapterKind.CABLE
            found.append(Adapter(name, kind, tuple(networks)))
    return tuple(found)
