"""Finding other daemons on the local network by multicast DNS (RFC 6762, RFC 6763).

What comes from here is a candidate address and a name for display, from anybody on the network: identity is the
pinned key of the handshake (DESIGN section 10).
"""

import asyncio
import ipaddress
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from meshtraind.peers.interfaces import Interface, InterfaceError, reachable_addresses, usable_interfaces
from meshtraind.runtime.tasks import TaskSet
from meshwire import limits

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

log = logging.getLogger(__name__)

SERVICE_TYPE = "_meshtrain._tcp.local."
INSTANCE_CHARS = 16  # of the device id: 64 bits, so a clash is a copied data folder or somebody who pretends
MDNS_PORT = 5353
INTERFACE_POLL_S = 10.0
RESOLVE_TIMEOUT_S = 3.0
# Whatever TTL an announcement comes with, up to 136 years: after this the device is asked itself, and forgotten when it
# does not answer. Host records ask for 120 s (RFC 6762, section 10); more keeps the radio quiet.
SIGHTING_LIFETIME_S = 300.0
ASKED_TIMES = 3  # multicast is lost easily on WiFi
REGISTER_TIMEOUT_S = 15.0  # probing takes about a second; the rest is for a starved machine
NAME_BYTES_MAX = 200  # one TXT string holds 255 bytes, key included

_INSTANCE = re.compile(rf"([0-9a-f]{{{INSTANCE_CHARS}}})\.{re.escape(SERVICE_TYPE)}", re.IGNORECASE)
_DEVICE_ID = re.compile(r"[0-9a-f]{64}")
_USE_PEER = "connect devices with `--peer HOST[:PORT]` instead"


@dataclass(slots=True)
class _Confirmed:
    """When a sighting was last confirmed, and how often it was asked for since."""

    at_s: float
    asked: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a device announces. Unauthenticated; `name` holds printable characters only."""

    device_id: str
    addresses: tuple[str, ...]  # IP addresses, IPv4 first
    port: int
    name: str
    wire_version: int
    pairing: bool  # it shows a code


class SightingListener(Protocol):
    """Whoever wants to know which devices are to be seen on the network."""

    def sighted(self, sighting: Sighting) -> None:
        """A device was seen for the first time, or announces something else than before."""

    def out_of_sight(self, device: str) -> None:
        """A device is to be seen no more: it said goodbye, its announcement expired, it is silent when it is asked
        again, this machine's network has changed, or more than DEVICES_SEEN_MAX were seen since."""

    def is_paired(self, device: str) -> bool:
        """Whether a device is one of this person's own; those are not forgotten for the sake of others."""


class Discovery:
    """Announces this daemon and reports others, on interfaces that may change while it runs.

    Never raises for the network's sake: while mDNS is impossible `warning` says why and what to do, and it is
    tried again every INTERFACE_POLL_S.

    Args:
        device_id: 64 hex digits, announced.
        name: shown to people.
        wire_version: announced, so that a person sees why a link is refused.
        listen_host: IP address that the daemon's listener is bound to.
        listen_port: its actual port.
        interfaces: names from `--interface`; empty means all usable ones.
        listener: is told what is seen.
    """

    def __init__(
        self,
        *,
        device_id: str,
        name: str,
        wire_version: int,
        listen_host: str,
        listen_port: int,
        interfaces: Sequence[str] = (),
        listener: SightingListener,
    ) -> None:
        self._device_id = device_id
        self._name = name
        self._wire_version = wire_version
        self._listen_host = listen_host
        self._listen_port = listen_port
        self._interface_names = tuple(interfaces)
        self._listener = listener
        self._pairing = False
        self._announced_pairing = False
        self._announced = False
        self._announcements = 0
        self._bound: tuple[Interface, ...] = ()
        self._mdns: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._sightings: dict[str, Sighting] = {}  # by instance name, oldest first
        self._confirmed: dict[str, _Confirmed] = {}  # of the same
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._tasks = TaskSet("discovery")
        self.warning: str | None = None

    @property
    def interfaces(self) -> tuple[str, ...]:
        """The names of those that this daemon is announced on now; none while mDNS is impossible."""
        return tuple(interface.name for interface in self._bound)

    async def start(self) -> None:
        """Opens the sockets, or sets `warning`. Announcing goes on in a task."""
        await self._follow_interfaces()
        self._tasks.spawn(self._run(), "announce")

    async def stop(self) -> None:
        """Says goodbye to the network. Leaves no task and no socket behind."""
        await self._tasks.close()
        await self._close()

    def announce_pairing(self, pairing: bool) -> None:
        """Announces whether this device shows a code. Returns at once."""
        self._pairing = pairing
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._announce()
            try:
                async with asyncio.timeout(INTERFACE_POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                await self._follow_interfaces()
                self._ask_again(time.monotonic())
            self._wake.clear()

    # Announcing

    async def _follow_interfaces(self) -> None:
        """Makes the sockets match the interfaces that there are now."""
        try:
            interfaces = usable_interfaces(self._interface_names)
            if not reachable_addresses(interfaces, self._listen_host):
                raise InterfaceError(f"no usable network interface for a daemon listening on {self._listen_host}")
        except InterfaceError as error:
            await self._reset()
            self._warn(f"mDNS is off: {error}; name one with `--interface`, or {_USE_PEER}")
            return
        if self._mdns is not None and interfaces == self._bound:
            return
        await self._reset()
        try:
            self._open(interfaces)
        except OSError as error:
            self._warn(
                f"mDNS is off: UDP port {MDNS_PORT} cannot be shared ({error}); stop the program that holds it "
                f"alone (avahi: `disallow-other-stacks=no`), or {_USE_PEER}"
            )

    def _open(self, interfaces: tuple[Interface, ...]) -> None:
        from zeroconf import IPVersion
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        _check_port_shared()
        # One address an interface is enough to send from, and IPv4 multicast is what home networks carry;
        # IPv6 addresses are announced over it all the same.
        first = [interface.addresses[0] for interface in interfaces]
        ipv4 = [address for address in first if ipaddress.ip_address(address).version == 4]
        version = IPVersion.V4Only if ipv4 else IPVersion.V6Only
        self._mdns = AsyncZeroconf(interfaces=ipv4 or first, ip_version=version)
        self._browser = AsyncServiceBrowser(self._mdns.zeroconf, SERVICE_TYPE, handlers=[self._changed])
        self._bound = interfaces
        self.warning = None

    async def _announce(self) -> None:
        """Registers this daemon, or what changed since."""
        if self._mdns is None or (self._announced and self._announced_pairing == self._pairing):
            return
        from zeroconf import Error, NonUniqueNameException

        pairing = self._pairing
        info = self._service_info(pairing)
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                if self._announced:
                    sent = await self._mdns.async_update_service(info)
                else:
                    sent = await self._mdns.async_register_service(info)
                await sent
        except NonUniqueNameException:
            self._warn(
                f"mDNS: another machine announces the id {self._device_id[:8]} of this device, so this one cannot be "
                f"announced. Keep this device's identity: links check its key, which no announcement has; {_USE_PEER}. "
                "Only if you copied this data folder to the other machine: remove the folder `identity` of the copy, "
                "there, and pair that machine as a device of its own. If not, somebody on this network pretends to be "
                "this device, and gains nothing but this warning"
            )
            # The next try asks the network, and not what somebody has once said with a TTL of years.
            _forget(self._mdns.zeroconf, info.name)
            _forget_pointer(self._mdns.zeroconf, info.name)
        except (Error, OSError, TimeoutError) as error:
            self._warn(f"mDNS: this device could not be announced ({error!r}); {_USE_PEER}")
        else:
            self._announced = True
            self._announced_pairing = pairing
            self.warning = None

    def _service_info(self, pairing: bool) -> "AsyncServiceInfo":
        from zeroconf.asyncio import AsyncServiceInfo

        name = self._name.encode()[:NAME_BYTES_MAX].decode(errors="ignore")
        # Caches keep a replaced record for seconds and take its return for no news: no two texts may be equal.
        self._announcements += 1
        text = {
            "id": self._device_id,
            "v": str(self._wire_version),
            "name": name,
            "seq": str(self._announcements),
        }
        if pairing:
            text["pair"] = "1"
        instance = self._device_id[:INSTANCE_CHARS]
        return AsyncServiceInfo(
            SERVICE_TYPE,
            f"{instance}.{SERVICE_TYPE}",
            parsed_addresses=list(reachable_addresses(self._bound, self._listen_host)),
            port=self._listen_port,
            properties=text,
            server=f"meshtrain-{instance}.local.",
        )

    def _warn(self, text: str) -> None:
        if text != self.warning:
            log.warning("%s", text)
        self.warning = text

    # Closing

    async def _reset(self) -> None:
        """Forgets this network, and what was seen on it."""
        if self._mdns is None:
            return
        await self._close()
        for sighting in self._sightings.values():
            self._listener.out_of_sight(sighting.device_id)
        self._sightings.clear()
        self._confirmed.clear()

    async def _close(self) -> None:
        for task in self._resolving.values():
            task.cancel()
        self._resolving.clear()
        if self._browser is not None:
            await self._browser.async_cancel()
            self._browser = None
        if self._mdns is not None:
            await self._mdns.async_close()  # with the goodbye
            self._mdns = None
        self._announced = False
        self._bound = ()

    # Listening

    def _changed(self, zeroconf: "Zeroconf", service_type: str, name: str, state_change: "ServiceStateChange") -> None:
        from zeroconf import ServiceStateChange
        from zeroconf.asyncio import AsyncServiceInfo

        match = _INSTANCE.fullmatch(name)
        if match is None or match[1].lower() == self._device_id[:INSTANCE_CHARS]:
            return
        instance = match[1].lower()
        resolving = self._resolving.pop(instance, None)
        if resolving is not None:
            resolving.cancel()
        if state_change is ServiceStateChange.Removed:
            self._gone(instance)
            return
        info = AsyncServiceInfo(service_type, name)
        if info.load_from_cache(zeroconf):
            self._resolved(instance, info)
            return
        if len(self._resolving) >= limits.MDNS_RESOLVES_MAX:
            # The oldest gives way: it is the least likely to be answered.
            self._resolving.pop(next(iter(self._resolving))).cancel()
        work = self._resolve(zeroconf, instance, info)
        self._resolving[instance] = self._tasks.spawn(work, f"resolve {instance}")

    async def _resolve(self, zeroconf: "Zeroconf", instance: str, info: "AsyncServiceInfo") -> None:
        answered = await info.async_request(zeroconf, RESOLVE_TIMEOUT_S * 1000)
        if self._resolving.get(instance) is asyncio.current_task():
            del self._resolving[instance]
        if answered:
            self._resolved(instance, info)

    def _resolved(self, instance: str, info: "AsyncServiceInfo") -> None:
        sighting = parse_sighting(instance, info)
        known = self._sightings.get(instance)
        if sighting is None:
            return
        self._confirmed[instance] = _Confirmed(time.monotonic())
        if sighting == known:
            return
        if known is not None and known.device_id != sighting.device_id:
            self._gone(instance)
        if instance not in self._sightings and len(self._sightings) >= limits.DEVICES_SEEN_MAX:
            crowded = self._most_crowded()
            self._gone(crowded)
            if self._mdns is not None:  # its cache has room for so many records, and throws away true ones for them
                _forget(self._mdns.zeroconf, f"{crowded}.{SERVICE_TYPE}")
                _forget_pointer(self._mdns.zeroconf, f"{crowded}.{SERVICE_TYPE}")
        self._sightings[instance] = sighting
        self._listener.sighted(sighting)

    def _most_crowded(self) -> str:
        """The oldest sighting at the address that has the most, so that one machine's inventions crowd out its own;
        a paired device's only where there is no other."""
        strangers = {
            name: seen for name, seen in self._sightings.items() if not self._listener.is_paired(seen.device_id)
        }
        among = strangers or self._sightings
        ((crowded, _),) = Counter(sighting.addresses[0] for sighting in among.values()).most_common(1)
        return next(name for name, sighting in among.items() if sighting.addresses[0] == crowded)

    def _gone(self, instance: str) -> None:
        self._confirmed.pop(instance, None)
        sighting = self._sightings.pop(instance, None)
        if sighting is not None:
            self._listener.out_of_sight(sighting.device_id)

    def _ask_again(self, now_s: float) -> None:
        """Asks the network, and not its cache, for what was not confirmed for SIGHTING_LIFETIME_S."""
        from zeroconf.asyncio import AsyncServiceInfo

        if self._mdns is None:
            return
        zeroconf = self._mdns.zeroconf
        self._forget_old(zeroconf)
        for instance, confirmed in list(self._confirmed.items()):
            if now_s - confirmed.at_s < SIGHTING_LIFETIME_S or instance in self._resolving:
                continue
            name = f"{instance}.{SERVICE_TYPE}"
            if confirmed.asked >= ASKED_TIMES:
                _forget(zeroconf, name)
                _forget_pointer(zeroconf, name)  # kept until now: without it a goodbye would go unheard
                self._gone(instance)
            elif len(self._resolving) < limits.MDNS_RESOLVES_MAX:
                confirmed.asked += 1
                _forget(zeroconf, name)
                work = self._resolve(zeroconf, instance, AsyncServiceInfo(SERVICE_TYPE, name))
                self._resolving[instance] = self._tasks.spawn(work, f"resolve {instance}")

    def _forget_old(self, zeroconf: "Zeroconf") -> None:
        """Removes what the cache was told long ago, whatever the TTL: without an end it would fill up for good, with
        what is not ours, too. The pointers to devices that are known stay: without them a goodbye would go unheard."""
        from zeroconf import current_time_millis

        oldest_ms = current_time_millis() - SIGHTING_LIFETIME_S * 1000
        known = {f"{instance}.{SERVICE_TYPE}" for instance in self._confirmed}
        cache = zeroconf.cache
        for name in cache.names():
            records = cache.entries_with_name(name)
            old = [r for r in records if r.created < oldest_ms and getattr(r, "alias", "").lower() not in known]
            if old:
                cache.async_remove_records(old)


def _forget(zeroconf: "Zeroconf", name: str) -> None:
    """Removes what the cache knows of a device, so that it is asked for, and the answer is news."""
    cache = zeroconf.cache
    records = cache.entries_with_name(name)
    hosts = {host for record in records if (host := getattr(record, "server_key", None)) is not None}
    cache.async_remove_records([*records, *(record for host in hosts for record in cache.entries_with_name(host))])


def _forget_pointer(zeroconf: "Zeroconf", name: str) -> None:
    """Removes from the cache that there is a device of this name."""
    cache = zeroconf.cache
    pointers = [r for r in cache.entries_with_name(SERVICE_TYPE) if getattr(r, "alias", "").lower() == name]
    cache.async_remove_records(pointers)


def parse_sighting(instance: str, info: "AsyncServiceInfo") -> Sighting | None:
    """What a resolved announcement says, or None when it is not one of ours in every respect."""
    if len(info.text) > limits.MDNS_TXT_BYTES_MAX or not info.port:
        return None
    text = {
        key.decode(errors="replace"): (value or b"").decode(errors="replace") for key, value in info.properties.items()
    }
    device_id = text.get("id", "")
    wire_version = _number(text.get("v", ""))
    addresses = tuple(address for address in info.parsed_addresses() if _is_unicast(address))
    if not _DEVICE_ID.fullmatch(device_id) or device_id[:INSTANCE_CHARS] != instance:
        return None
    if wire_version is None or not addresses:
        return None
    return Sighting(
        device_id=device_id,
        addresses=addresses[: limits.ADDRESSES_PER_SIGHTING_MAX],
        port=info.port,
        name="".join(c for c in text.get("name", "") if c.isprintable())[: limits.NAME_CHARS_MAX],
        wire_version=wire_version,
        pairing=text.get("pair") == "1",
    )


def _number(text: str) -> int | None:
    """A u16 in decimal, or None."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        return None
    number = int(text)
    return number if number <= 65535 else None


def _is_unicast(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return not (address.is_unspecified or address.is_multicast or (address.version == 6 and address.is_link_local))


def _check_port_shared() -> None:
    """Raises OSError when another program holds the mDNS port alone (zeroconf would leak a socket over it)."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind(("", MDNS_PORT))
