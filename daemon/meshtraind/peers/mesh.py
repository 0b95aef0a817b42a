"""This daemon among its peers: identity, trust, addresses, discovery, links, pairing."""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Literal

from meshtraind.peers.interfaces import InterfaceError, likely_addresses, reachable_addresses, usable_interfaces
from meshtraind.peers.introducer import Introducer
from meshtraind.peers.links import Link, Links
from meshtraind.peers.mdns import Discovery, Sighting
from meshtraind.peers.node import Node
from meshtraind.peers.pairing_search import PairingSearch
from meshtraind.transport.connection import Emit, RequestFailed
from meshtraind.trust.identity import Identity
from meshtraind.trust.pairing_guest import Guest, Target, pair_at
from meshtraind.trust.pairing_host import PairedDevice, PairingError, PairingHost
from meshtraind.trust.pairing_proof import CodeError, normalised_code
from meshtraind.trust.pins import Pin, PinsError, PinTable
from meshwire import limits
from meshwire.addresses import Address
from meshwire.discovery.addressbook import AddressBook, Source
from meshwire.frames.header import WIRE_VERSION
from meshwire.messages.local import (
    IntroducedDevice,
    IntroductionPolicy,
    PairAccept,
    PairCode,
    Paired,
    PairJoin,
    PairProgress,
    PeerSummary,
    SetIntroductions,
    Unpair,
    Unpaired,
)
from meshwire.messages.network import DeviceSeen, NetworkView
from meshwire.text import printable

log = logging.getLogger(__name__)

JOINED_TOLD_S = 86_400.0  # for so long `status` names who joined
LINK_AFTER_PAIRING_S = 5.0  # how long a person waits to see the new peer linked


@dataclass(frozen=True)
class MeshSettings:
    """Where this daemon listens, and how it looks for others."""

    listen_host: str
    interfaces: tuple[str, ...]
    peers: tuple[Address, ...]
    mdns: bool


class Mesh:
    """Which devices are there, paired or not, and how new ones are paired.

    Owns discovery; `Links` is started and stopped by the app.

    Attributes:
        node: what the rest of the daemon shares.
        introducer: what devices say of each other.
    """

    def __init__(
        self,
        node: Node,
        identity: Identity,
        pins: PinTable,
        book: AddressBook,
        links: Links,
        introducer: Introducer,
        settings: MeshSettings,
    ) -> None:
        self.node = node
        self.introducer = introducer
        self._identity = identity
        self._pins = pins
        self._book = book
        self._links = links
        self._settings = settings
        self._started_s = time.monotonic()
        self._sightings: dict[str, Sighting] = {}
        self._shown: PairingHost | None = None
        self._discovery: Discovery | None = None

    async def start(self) -> None:
        """Remembers, dials and announces. Links listen already."""
        now_s = time.monotonic()
        for pin in self._pins.all():
            # Where an introduced device was ever reached is not written down: until then its place is hearsay.
            source = Source.REMEMBERED if pin.added_by == self.node.device else Source.GOSSIP
            for address in pin.last_addresses:
                self._book.learn(pin.device_id, address, source, now_s)
        self._follow_pins()
        self._pins.subscribe(self._follow_pins)
        with contextlib.suppress(InterfaceError):  # discovery says so, as a warning
            own = reachable_addresses(usable_interfaces(self._settings.interfaces), self._settings.listen_host)
            self._book.set_own_addresses(Address(host=str(host), port=self._links.port) for host in own)
        for address in self._settings.peers:
            self._book.configure(address, now_s)
        if self._settings.mdns:
            self._discovery = Discovery(
                device_id=self.node.device,
                name=self.node.name,
                wire_version=WIRE_VERSION,
                listen_host=self._settings.listen_host,
                listen_port=self._links.port,
                interfaces=self._settings.interfaces,
                listener=self,
            )
            await self._discovery.start()

    async def stop(self) -> None:
        """Says goodbye and remembers where the peers were."""
        if self._discovery is not None:
            await self._discovery.stop()
        try:
            for pin in self._pins.all():
                addresses = self._book.remembered(pin.device_id)
                if addresses:
                    self._pins.set_addresses(pin.device_id, addresses)
        except PinsError as error:  # the daemon ends in order all the same: a service would start it again
            log.warning("where the other devices are is not remembered: %s", error)

    # What people see

    @property
    def listen(self) -> str:
        """The address where peers connect."""
        return f"{self._settings.listen_host}:{self._links.port}"

    @property
    def up_s(self) -> float:
        """Seconds since the daemon was started."""
        return time.monotonic() - self._started_s

    @property
    def paired(self) -> int:
        """How many devices are pinned."""
        return len(self._pins.all())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know."""
        found = self._discovery.warning if self._discovery is not None else None
        own = (found,) if found is not None else ()
        return (*own, *self._links.unlinkable.values(), *self.introducer.warnings)

    @property
    def introductions(self) -> IntroductionPolicy:
        """What is done with the words of others about devices."""
        return self._pins.introductions

    def set_introductions(self, body: SetIntroductions) -> None:
        """A person says what is to be done with them from now on. Raises RequestFailed."""
        try:
            self._pins.introductions = body.policy
        except PinsError as error:
            raise RequestFailed(str(error)) from error
        log.info("introductions from now on: %s", body.policy)

    @property
    def joined(self) -> tuple[IntroducedDevice, ...]:
        """Who came by another's word within a day, the newest last."""
        now_s = time.time()
        pins = (
            pin
            for pin in self._pins.all()
            # Also of a time to come: this machine's clock was wrong then, or is now.
            if pin.added_by != self.node.device and abs(now_s - pin.added_at) <= JOINED_TOLD_S
        )
        return tuple(self.introducer.described(pin) for pin in sorted(pins, key=lambda pin: pin.added_at))

    @property
    def waiting(self) -> tuple[IntroducedDevice, ...]:
        """Who waits for a person's word."""
        return tuple(map(self.introducer.described, self._pins.waiting()))

    def peers(self) -> tuple[PeerSummary, ...]:
        """Linked first, then paired, then those that wait, then those that were only seen."""
        rows = []
        pins = {pin.device_id: pin for pin in self._pins.all()}
        for device, pin in pins.items():
            link = self.node.links.get(device)
            row = self._unlinked(device, printable(pin.name), "paired") if link is None else _linked(link)
            rows.append(row.model_copy(update={"added_by": self._added_by(pin)}))
        waiting = {pin.device_id: pin for pin in self._pins.waiting_once()}
        rows += [
            self._unlinked(device, printable(pin.name), "waiting").model_copy(update={"added_by": self._added_by(pin)})
            for device, pin in waiting.items()
        ]
        rows += [
            self._unlinked(device, sighting.name, "seen")
            for device, sighting in self._sightings.items()
            if device not in pins and device not in waiting
        ]
        order = {"linked": 0, "paired": 1, "waiting": 2, "seen": 3}
        return tuple(sorted(rows, key=lambda row: (order[row.state], row.name, row.device)))

    def network(self) -> NetworkView:
        """What this daemon sees of the network, and why it is not linked with whom."""
        return NetworkView(
            host=self._settings.listen_host,
            port=self._links.port,
            mdns=self._discovery is not None,
            interfaces=self._interfaces(),
            devices=tuple(map(self._seen, self.peers())),
        )

    def _interfaces(self) -> tuple[str, ...]:
        if self._discovery is not None:
            return self._discovery.interfaces
        try:
            usable = usable_interfaces(self._settings.interfaces)
        except InterfaceError:  # what was named is not up now: there is none
            return ()
        return tuple(one.name for one in usable if reachable_addresses((one,), self._settings.listen_host))

    def _seen(self, peer: PeerSummary) -> DeviceSeen:
        sighting, link = self._sightings.get(peer.device), self.node.links.get(peer.device)
        failed = self._links.dial_failures.get(peer.device)
        return DeviceSeen(
            device=peer.device,
            name=peer.name,
            state=peer.state,
            addresses=self._book.addresses_of(peer.device) if link is None else (link.listens_at,),
            announced_version=None if sighting is None else sighting.wire_version,
            refused=peer.refused,
            dial_failed=None if failed is None else printable(failed)[: limits.REFUSAL_CHARS_MAX],
        )

    def _added_by(self, pin: Pin) -> str | None:
        return None if pin.added_by == self.node.device else self.introducer.described(pin).added_by

    def _unlinked(self, device: str, name: str, state: Literal["paired", "waiting", "seen"]) -> PeerSummary:
        known = self._book.addresses_of(device)
        return PeerSummary(
            device=device,
            name=name[: limits.NAME_CHARS_MAX] or device[:8],
            state=state,
            address=str(known[0]) if known else None,
            rtt_s=None,
            software=None,
            cores=None,
            memory_bytes=None,
            refused=self._links.unlinkable.get(device),
        )

    # Pairing

    async def host_pairing(self, emit: Emit) -> Paired:
        """Shows a code until a guest has typed it. Raises RequestFailed."""
        if self._shown is not None:
            raise RequestFailed(
                "this device shows a pairing code already: use that one, or end the other `meshtrain pair`"
            )
        self._shown = PairingHost(self._identity, self._links)
        try:
            async with self._shown as host:
                if self._discovery is not None:
                    self._discovery.announce_pairing(True)
                addresses = likely_addresses(self._settings.interfaces, self._settings.listen_host)
                shown = PairCode(
                    code=host.code,
                    port=self._links.port,
                    expires_s=limits.PAIRING_LIFETIME_S,
                    addresses=addresses[: limits.ADDRESSES_PER_PEER_MAX],
                )
                emit(shown)
                device = await host.wait()
        except PairingError as error:
            raise RequestFailed(str(error)) from error
        finally:
            self._shown = None
            if self._discovery is not None:
                self._discovery.announce_pairing(False)
        return await self._pin(device)

    async def join_pairing(self, body: PairJoin, emit: Emit) -> Paired:
        """Types a code that another device shows. Raises RequestFailed."""

        def say(text: str) -> None:
            emit(PairProgress(text=text))

        try:
            code = normalised_code(body.code)
            if self._shown is not None and normalised_code(self._shown.code) == code:
                raise RequestFailed("this device itself shows that code: type it on the other one")
            guest = Guest(self._identity, code, self._links.port)
            if body.at is None:
                return await self._pin(await PairingSearch(guest, self._sightings, say).run())
            at = Address.parse(body.at)
            return await self._pin(await pair_at(guest, Target(at.host, at.port), say))
        except (PairingError, CodeError, ValueError) as error:
            raise RequestFailed(str(error)) from error

    async def _pin(self, device: PairedDevice) -> Paired:
        pin = Pin(
            device_id=device.device_id,
            name=device.name,
            certificate_pem=device.certificate_pem,
            added_at=time.time(),
            added_by=self.node.device,
            last_addresses=(device.address,),
        )
        try:
            self._pins.add(pin)
        except PinsError as error:
            raise RequestFailed(str(error)) from error
        self._book.learn(device.device_id, device.address, Source.REMEMBERED, time.monotonic())
        self._links.dial_now()
        with contextlib.suppress(TimeoutError):  # paired all the same; `meshtrain peers` shows when it is linked
            async with asyncio.timeout(LINK_AFTER_PAIRING_S):
                while device.device_id not in self.node.links and device.device_id not in self._links.unlinkable:
                    await asyncio.sleep(0.02)
        return _paired(pin)

    def accept(self, body: PairAccept) -> Paired:
        """A person says yes to a device that waits. Raises RequestFailed."""
        try:
            return _paired(self.introducer.accept(body.peer))
        except PinsError as error:
            raise RequestFailed(str(error)) from error

    def unpair(self, body: Unpair) -> Unpaired:
        """Removes a device, and perhaps those that it has introduced, and drops their links. Raises RequestFailed."""
        try:
            pin = self._pins.find(body.peer)
            came = self.introducer.newcomers.came_by(pin.device_id)
            removed = (pin, *came) if body.introduced else (pin,)
            self._pins.remove(*(one.device_id for one in removed))
        except PinsError as error:
            raise RequestFailed(str(error)) from error
        for one in removed:
            log.info("%s (%s) was removed here", printable(one.name), one.device_id[:8])
            self._links.drop(one.device_id, "this device was unpaired")
        return Unpaired(
            removed=tuple(map(_paired, removed)),
            stay=() if body.introduced else tuple(map(_paired, came)),
            others=tuple(_paired(one).name for one in self._pins.all()),
        )

    # News

    def _follow_pins(self) -> None:
        self._book.set_pinned([pin.device_id for pin in self._pins.all()], time.monotonic())
        self._links.dial_now()

    def sighted(self, sighting: Sighting) -> None:
        """mDNS shows a device, or something new of it."""
        self._sightings[sighting.device_id] = sighting
        now_s = time.monotonic()
        addresses = [Address(host=host, port=sighting.port) for host in sighting.addresses]
        self._book.sighted(sighting.device_id, addresses, now_s)
        self._links.dial_now()

    def is_paired(self, device: str) -> bool:
        """Whether a device is one of this person's own."""
        return self._book.is_pinned(device)

    def out_of_sight(self, device: str) -> None:
        """mDNS shows a device no more."""
        self._sightings.pop(device, None)
        self._book.withdraw(device, Source.MDNS)


def _paired(pin: Pin) -> Paired:
    return Paired(device=pin.device_id, name=printable(pin.name)[: limits.NAME_CHARS_MAX])


def _linked(link: Link) -> PeerSummary:
    return PeerSummary(
        device=link.device,
        name=link.hello.name,
        state="linked",
        address=str(link.address),
        rtt_s=link.rtt_s,
        software=link.hello.software,
        cores=link.hello.cores,
        memory_bytes=link.hello.memory_bytes,
        hub=link.hello.hub,
        same_machine=link.same_machine,
    )
