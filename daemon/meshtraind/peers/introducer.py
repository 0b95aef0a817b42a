"""Introductions over the links: what this device says of others, and what it hears of them (K1 to K5)."""

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
RETRY_S = 60.0  # what the disk refused is read again after so long


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
        self._heard: dict[str, Introductions] = {}  # by linked device: its newest word, also once it was read
        self._unread: dict[str, Introductions] = {}
        self._arrived = asyncio.Event()
        self._removed_at: dict[str, frozenset[str]] = {}  # by trusted device: whom a person has removed there
        self._policy = pins.introductions
        self._trusted: frozenset[str] = frozenset()
        self._joined: deque[IntroducedDevice] = deque(maxlen=limits.DEVICES_JOINED_TOLD_MAX)
        self.joined_count = 0
        self._tasks = TaskSet("introductions")

    def start(self) -> None:
        """Listens, and passes on what changes, until `close`."""
        self._pins_changed()
        self._pins.subscribe(self._pins_changed)
        self._tasks.spawn(self._read_all(), "introductions")

    async def close(self) -> None:
        await self._tasks.close()

    # What this device says

    def link_made(self, link: Link) -> None:
        """Notes what who has just come is called now, and says to it all that there is to say. It says so, too, and
        until then counts what it has said before."""
        self._told.pop(link.device, None)
        try:
            self._pins.rename(link.device, link.hello.name)
            self._say(link, self._to_say())
        except (PinsError, ValueError) as error:
            log.error("%s is told of nobody: %s", link.connection.name, error)

    def _pins_changed(self) -> None:
        trusted = frozenset(pin.device_id for pin in self._pins.all())
        for by_device in (self._removed_at, self._heard, self._unread):
            for device in by_device.keys() - trusted:
                del by_device[device]
        for device in self._told.keys() - self._node.links.keys():
            del self._told[device]
        policy, gone = self._pins.introductions, self._trusted - trusted
        if policy is not self._policy or gone:  # what was not taken may be now
            self._read_again(self._heard)
        self._policy, self._trusted = policy, trusted
        to_say = self._to_say()
        for link in list(self._node.links.values()):
            if link.device in trusted:
                self._say(link, to_say)

    def _to_say(self) -> "_ToSay":
        removed = tuple(one.device_id for one in self._pins.removed()[: limits.REMOVALS_TOLD_MAX])
        return _ToSay(self.newcomers.introduced_here(), removed)

    def _say(self, link: Link, to_say: "_ToSay") -> None:
        introduced = [pin for pin in to_say.introduced if pin.device_id != link.device]
        told = tuple((pin.device_id, pin.name) for pin in introduced), to_say.removed
        if self._told.get(link.device) == told:
            return
        self._told[link.device] = told
        known = {peer.device: peer.addresses for peer in self._whereabouts.gossip_for(link.device)}
        words = tuple(_introduction(pin, known.get(pin.device_id, ())) for pin in introduced)
        link.connection.notify(Introductions(devices=words, removed=to_say.removed))

    # What it hears

    def heard(self, device: str, word: Introductions) -> None:
        """A linked device introduces others. What it has said before counts no more."""
        self._heard[device] = self._unread[device] = word
        self._arrived.set()

    def _read_again(self, devices: Iterable[str]) -> None:
        """What devices that are not linked have said is let be: they say it anew with their next link."""
        heard = {device: self._heard[device] for device in devices if device in self._node.links}
        self._unread = heard | self._unread
        self._arrived.set()

    async def _read_all(self) -> None:
        refused: set[str] = set()  # by the disk, for the moment
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if refused else None):
                    await self._arrived.wait()
            self._read_again(refused & self._heard.keys())
            self._arrived.clear()
            unread, self._unread = self._unread, {}
            for device, word in unread.items():  # all first: what one introduces another may have removed
                self._removed_at[device] = frozenset(word.removed)
            refused = {device for device, word in unread.items() if await self.read(device, word)}
            await asyncio.sleep(READ_INTERVAL_S)

    async def read(self, by: str, said: Introductions) -> bool:
        """Does with a device's word what the rules say; ends at the first thing in it that is wrong or too much.
        Returns whether the disk has refused something, and it is to be read again."""
        try:
            return await self._read(by, said)
        except PinsError as error:
            log.error("what %s introduces is read again in %g s: %s", by[:8], RETRY_S, error, extra=caused_by(by))
            return True

    async def _read(self, by: str, said: Introductions) -> bool:
        if by not in {pin.device_id for pin in self._pins.all()}:
            self._removed_at.pop(by, None)
            return False
        self._removed_at[by] = frozenset(said.removed)
        self.newcomers.withdraw(by, said)
        for word in said.devices:
            await asyncio.sleep(0)
            try:
                goes_on = await self._read_one(by, word)
            except CertificateError as error:
                wrong = "%s introduces what is no device of meshtrain (%s): the rest of what it says is not read"
                log.warning(wrong, self._pins.name_of(by), printable(str(error)), extra=caused_by(by))
                return False
            except ValueError as error:
                log.error("what %s introduces: %s", self._pins.name_of(by), error, extra=caused_by(by))
                return False
            if not goes_on:
                return False
        return False

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
        """Devices, trusted here or waiting, that a person has removed at another one: it may have been lost."""
        for pin in (*self._pins.all(), *self._pins.waiting_once()):
            where = [self._pins.name_of(by) for by, removed in self._removed_at.items() if pin.device_id in removed]
            if where:
                name, one = printable(pin.name), len(where) == 1
                yield (
                    f"{' and '.join(where[:3])} {'has' if one else 'have'} removed {name} ({pin.device_id[:8]}): if it "
                    f"was lost or sold, remove it here as well: meshtrain unpair {pin.device_id[:8]}"
                )


@dataclass(frozen=True)
class _ToSay:
    """What this device says to all others, but for the one that each of them is."""

    introduced: tuple[Pin, ...]
    removed: tuple[str, ...]


def _introduction(pin: Pin, addresses: tuple[Address, ...]) -> Introduction:
    certificate = ssl.PEM_cert_to_DER_cert(pin.certificate_pem)
    return Introduction(certificate_der=certificate, name=pin.name, addresses=addresses)
