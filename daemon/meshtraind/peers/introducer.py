"""Introductions over the links: what this device says of others, and what it hears of them (K1 to K5)."""

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from meshtraind.peers.links import Link
from meshtraind.peers.node import Node
from meshtraind.runtime.log_limit import caused_by
from meshtraind.runtime.tasks import TaskSet
from meshtraind.trust.identity import CertificateError, check_certificate, device_id_of
from meshtraind.trust.newcomers import Newcomers, Verdict
from meshtraind.trust.pins import Pin, PinsError, PinTable
from meshwire import limits
from meshwire.addresses import Address
from meshwire.messages.link import Introduction, Introductions, KnownPeer
from meshwire.messages.local import IntroducedDevice
from meshwire.text import printable

log = logging.getLogger(__name__)

READ_INTERVAL_S = 1.0  # so often each device is listened to; of what it says meanwhile the last word counts


class Whereabouts(Protocol):
    """Knows where devices may be reached, and dials those that are trusted."""

    def gossip_for(self, device: str) -> tuple[KnownPeer, ...]:
        """What a linked device may be told of where others are."""

    def met_elsewhere(self, device: str, addresses: tuple[Address, ...]) -> None:
        """Somebody has reached a device at these addresses."""


class Introducer:
    """Introduces devices that a code was typed for here to the others, and takes in those that others introduce.

    Each device is listened to once in READ_INTERVAL_S: however much one says, one word of it lies here.
    """

    def __init__(self, node: Node, pins: PinTable, whereabouts: Whereabouts) -> None:
        self.newcomers = Newcomers(pins, node.device)
        self._node = node
        self._pins = pins
        self._whereabouts = whereabouts
        self._told: dict[str, object] = {}  # by device: what this one has said there last, but for addresses
        self._unread: dict[str, Introductions] = {}
        self._arrived = asyncio.Event()
        self._removed_at: dict[str, frozenset[str]] = {}  # by trusted device: whom a person has removed there
        self._joined: deque[IntroducedDevice] = deque(maxlen=limits.DEVICES_JOINED_TOLD_MAX)
        self.joined_count = 0
        self._tasks = TaskSet("introductions")

    def start(self) -> None:
        """Listens, and passes on what changes, until `close`."""
        self._pins.subscribe(self._say_to_all)
        self._tasks.spawn(self._read_all(), "introductions")

    async def close(self) -> None:
        await self._tasks.close()

    # What this device says

    def link_made(self, link: Link) -> None:
        """Says anew to who has just come all that there is to say."""
        self._told.pop(link.device, None)
        self._removed_at.pop(link.device, None)  # it says so again, if it is still so
        self._say(link)

    def _say_to_all(self) -> None:
        trusted = {pin.device_id for pin in self._pins.all()}
        self._removed_at = {device: gone for device, gone in self._removed_at.items() if device in trusted}
        self._told = {device: told for device, told in self._told.items() if device in self._node.links}
        for link in list(self._node.links.values()):
            if link.device in trusted:
                self._say(link)

    def _say(self, link: Link) -> None:
        known = {peer.device: peer.addresses for peer in self._whereabouts.gossip_for(link.device)}
        introduced = [pin for pin in self.newcomers.introduced_here() if pin.device_id != link.device]
        removed = tuple(one.device_id for one in self._pins.removed()[: limits.REMOVALS_TOLD_MAX])
        told = tuple((pin.device_id, pin.name) for pin in introduced), removed
        if self._told.get(link.device, ((), ())) == told:
            return
        self._told[link.device] = told
        words = tuple(_introduction(pin, known.get(pin.device_id, ())) for pin in introduced)
        link.connection.notify(Introductions(devices=words, removed=removed))

    # What it hears

    def heard(self, device: str, word: Introductions) -> None:
        """A linked device introduces others. What it has said before and was not read yet counts no more."""
        self._unread[device] = word
        self._arrived.set()

    async def _read_all(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            unread, self._unread = self._unread, {}
            for device, word in unread.items():
                await self.read(device, word)
            await asyncio.sleep(READ_INTERVAL_S)

    async def read(self, by: str, said: Introductions) -> None:
        """Does with a device's word what the rules say; ends at the first thing in it that is wrong or too much."""
        if by not in {pin.device_id for pin in self._pins.all()}:
            return
        self._removed_at[by] = frozenset(said.removed)
        for word in said.devices:
            await asyncio.sleep(0)
            try:
                goes_on = await self._read_one(by, word)
            except CertificateError as error:
                wrong = "%s introduces what is no device of meshtrain (%s): the rest of what it says is not read"
                log.warning(wrong, self._pins.name_of(by), printable(str(error)), extra=caused_by(by))
                return
            except (PinsError, ValueError) as error:
                log.error("what %s introduces: %s", self._pins.name_of(by), error, extra=caused_by(by))
                return
            if not goes_on:
                return

    async def _read_one(self, by: str, word: Introduction) -> bool:
        """Returns whether to read on."""
        device = device_id_of(word.certificate_der)
        verdict = self.newcomers.judge(by, word, doubted=self._is_doubted(device))
        if verdict in (Verdict.JOINS, Verdict.WAITS):
            pem = await asyncio.to_thread(check_certificate, word.certificate_der)  # its library takes a moment to load
            others = [pin.device_id for pin in self._pins.all() if pin.name == word.name and pin.device_id != device]
            verdict = self.newcomers.take(by, word, pem, doubted=self._is_doubted(device))
            if verdict is Verdict.JOINS:
                self._whereabouts.met_elsewhere(device, word.addresses)
            self._tell(verdict, by, Pin(device, word.name, pem, 0.0, by), others)
        elif verdict is Verdict.REMOVED:
            text = (
                "%s introduces %s (%s), which was removed here, or the list of those is full: only a code takes it in"
            )
            log.info(text, self._pins.name_of(by), printable(word.name), device[:8], extra=caused_by(by))
        if verdict is Verdict.FULL:
            text = "%s introduces more devices than are taken (%d of one, %d in all; of waiting ones %d): not taken"
            most = limits.INTRODUCTIONS_MAX, limits.INTRODUCED_MAX, limits.INTRODUCTIONS_MAX
            log.warning(text, self._pins.name_of(by), *most, extra=caused_by(by))
        return verdict not in (Verdict.FULL, Verdict.NEVER, Verdict.UNTRUSTED)

    def _tell(self, verdict: Verdict, by: str, pin: Pin, others: list[str]) -> None:
        name, says = printable(pin.name), self._pins.name_of(by)
        same = f"; another device is called so, too: {others[0][:8]}" if others else ""
        if verdict is Verdict.JOINS:
            log.info("%s (%s) joined, added by %s%s", name, pin.device_id[:8], says, same)
            self._note_joined(pin.device_id)
        elif verdict is Verdict.WAITS:
            text = (
                "%s introduces %s (%s)%s: it waits for your word: `meshtrain pair --accept %s`, or `meshtrain unpair`"
            )
            log.warning(text, says, name, pin.device_id[:8], same, pin.device_id[:8], extra=caused_by(by))

    def accept(self, text: str) -> Pin:
        """A person says yes to a device that waits. Raises PinsError."""
        pin = self.newcomers.accept(text)
        log.info(
            "%s (%s) joined, added by %s", printable(pin.name), pin.device_id[:8], self._pins.name_of(pin.added_by)
        )
        self._whereabouts.met_elsewhere(pin.device_id, pin.last_addresses)
        self._note_joined(pin.device_id)
        return pin

    def _is_doubted(self, device: str) -> bool:
        return any(device in removed for removed in self._removed_at.values())

    # What people see

    def _note_joined(self, device: str) -> None:
        self._joined.append(self.described(self._pins.get(device)))
        self.joined_count += 1

    def joined_since(self, count: int) -> tuple[IntroducedDevice, ...]:
        """The newest of those that joined since there were `count`, in order."""
        new = min(self.joined_count - count, len(self._joined))
        return tuple(self._joined)[len(self._joined) - new :]

    def described(self, pin: Pin) -> IntroducedDevice:
        """A device that came by another's word, for a screen."""
        names = printable(pin.name)[: limits.NAME_CHARS_MAX], self._pins.name_of(pin.added_by)[: limits.NAME_CHARS_MAX]
        return IntroducedDevice(device=pin.device_id, name=names[0], added_by=names[1], added_at_s=pin.added_at)

    @property
    def warnings(self) -> Iterator[str]:
        """Trusted devices that a person has removed at another one: it may have been lost."""
        for pin in self._pins.all():
            where = [self._pins.name_of(by) for by, removed in self._removed_at.items() if pin.device_id in removed]
            if where:
                name, one = printable(pin.name), len(where) == 1
                yield (
                    f"{' and '.join(where[:3])} {'has' if one else 'have'} removed {name} ({pin.device_id[:8]}): if it "
                    f"was lost or sold, remove it here as well: meshtrain unpair {pin.device_id[:8]}"
                )


def _introduction(pin: Pin, addresses: tuple[Address, ...]) -> Introduction:
    certificate = ssl.PEM_cert_to_DER_cert(pin.certificate_pem)
    return Introduction(certificate_der=certificate, name=pin.name, addresses=addresses)
