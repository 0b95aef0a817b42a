"""Where devices may be reached, and what to dial next.

An address is only a candidate. Who answers there is decided by the pinned key in the handshake, never by the
book (DESIGN section 10): a wrong or hostile entry costs one failed dial.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from meshwire import limits
from meshwire.addresses import Address
from meshwire.messages.link import KnownPeer

BACKOFF_MIN_S = 0.25
BACKOFF_MAX_S = 30.0
AWAITED_BACKOFF_MAX_S = 2.0  # of a job's members: each has something to do as soon as it is back
# A link that broke sooner than this counts as a failed dial: otherwise a peer that accepts and then refuses
# (another wire version, say) would be dialled four times a second for ever.
STABLE_LINK_S = 5.0


class Source(StrEnum):
    """How an address became known, in the order in which they are believed."""

    MDNS = "mdns"  # being announced on this network now
    OBSERVED = "observed"  # an open link came from there
    REMEMBERED = "remembered"  # a handshake there once showed this device's key
    CONFIGURED = "configured"  # a person typed it (--peer)
    GOSSIP = "gossip"  # a linked peer says so


_RANK = {source: rank for rank, source in enumerate(Source)}
_FRESH = frozenset({Source.MDNS, Source.OBSERVED})


@dataclass(frozen=True, slots=True)
class Dial:
    """Dial `address` at `at_s` (a past time means now). `device` None: the handshake says who it is."""

    device: str | None
    address: Address
    at_s: float


@dataclass(slots=True)
class _Schedule:
    """When to try next: at once, then after BACKOFF_MIN_S * 2**n, at most `delay_max_s`."""

    not_before_s: float
    failures: int = 0
    last_dial_s: float = -BACKOFF_MAX_S
    dialling: bool = False
    delay_max_s: float = BACKOFF_MAX_S

    def back_off(self, now_s: float) -> None:
        # The exponent is capped because a device may be away for months.
        delay_s = min(BACKOFF_MIN_S * 2.0 ** min(self.failures, 16), self.delay_max_s)
        self.failures += 1
        self.not_before_s = now_s + delay_s

    def start_over(self, now_s: float) -> None:
        """Fresh evidence. The spacing stays, so that a flood of it cannot become a flood of dials."""
        self.failures = 0
        self.not_before_s = min(self.not_before_s, max(now_s, self.last_dial_s + BACKOFF_MIN_S))


@dataclass(slots=True)
class _Device:
    schedule: _Schedule
    candidates: dict[Address, dict[Source, float]] = field(default_factory=dict)  # learned at, by source
    tried: set[Address] = field(default_factory=set)  # in this pass over the candidates
    linked_since_s: float | None = None

    def in_order(self) -> list[Address]:
        """Addresses seen on this network now come first, among them those that worked before."""

        def key(address: Address) -> tuple[bool, bool, int, float, str]:
            sources = self.candidates[address]
            return (
                _FRESH.isdisjoint(sources),
                Source.REMEMBERED not in sources,
                min(_RANK[source] for source in sources),
                -max(sources.values()),
                str(address),
            )

        return sorted(self.candidates, key=key)

    def start_over(self, now_s: float) -> None:
        self.tried.clear()
        self.schedule.start_over(now_s)


@dataclass(slots=True)
class _Configured:
    schedule: _Schedule
    device: str | None = None  # who answered there last


class AddressBook:
    """Candidate addresses of devices, and which of them to dial next. Only pinned devices are dialled.

    Args:
        own_device: this device's id; neither it nor an address where it answered is ever dialled.
    """

    def __init__(self, own_device: str) -> None:
        self._own_device = own_device
        self._own: frozenset[Address] = frozenset()
        self._found_self: set[Address] = set()
        self._pinned: frozenset[str] = frozenset()
        self._devices: dict[str, _Device] = {}  # unpinned ones: least recently learned first
        self._configured: dict[Address, _Configured] = {}

    # What is known

    def addresses_of(self, device: str) -> tuple[Address, ...]:
        """Candidates in the order in which they are dialled."""
        entry = self._devices.get(device)
        return () if entry is None else tuple(entry.in_order())

    def remembered(self, device: str) -> tuple[Address, ...]:
        """Addresses worth keeping on disk: a handshake there showed this device's key."""
        entry = self._devices.get(device)
        if entry is None:
            return ()
        return tuple(a for a in entry.in_order() if Source.REMEMBERED in entry.candidates[a])

    def unpinned(self) -> tuple[str, ...]:
        """Devices that were seen but are not paired, most recently learned last."""
        return tuple(device for device in self._devices if device not in self._pinned)

    def gossip_for(self, device: str) -> tuple[KnownPeer, ...]:
        """What to tell a linked peer: first-hand addresses of paired devices other than itself.

        Hearsay is not passed on, or dead addresses would circulate for ever. Loopback addresses are meant only
        for peers on this machine; link-local ones only for the link they came from.
        """
        receiver = self._devices.get(device)
        same_machine = receiver is not None and any(a.is_loopback for a in receiver.candidates)
        entries = []
        for other in sorted(self._pinned - {device, self._own_device}):
            entry = self._devices.get(other)
            if entry is None:
                continue
            addresses = [
                address
                for address in entry.in_order()
                if entry.candidates[address].keys() != {Source.GOSSIP}
                and not address.is_link_local
                and (same_machine or not address.is_loopback)
            ]
            if addresses:
                kept = tuple(addresses[: limits.ADDRESSES_GOSSIPED_PER_PEER_MAX])
                entries.append(KnownPeer(device=other, addresses=kept))
        return tuple(entries)

    # What changes it

    def set_pinned(self, devices: Iterable[str], now_s: float) -> None:
        """Replaces the set of paired devices. A newly paired one is due at once."""
        pinned = frozenset(devices)
        for device in pinned - self._pinned:
            if device in self._devices:
                self._devices[device].start_over(now_s)
        for configured in self._configured.values():
            if configured.device in self._pinned - pinned:
                configured.device = None
        self._pinned = pinned
        self._drop_surplus_unpinned()

    def set_own_addresses(self, addresses: Iterable[Address]) -> None:
        """This daemon's own listening addresses, anew after each change of network."""
        self._own = frozenset(addresses)
        self._found_self.clear()
        for entry in self._devices.values():
            for address in self._own & entry.candidates.keys():
                del entry.candidates[address]

    def configure(self, address: Address, now_s: float) -> None:
        """A person named an address: dialled without knowing whose it is. Raises ValueError when full."""
        if address in self._configured:
            return
        if len(self._configured) >= limits.PEERS_MAX:
            raise ValueError(f"{address}: at most {limits.PEERS_MAX} addresses can be configured; remove some")
        self._configured[address] = _Configured(_Schedule(now_s))

    def learn(self, device: str, address: Address, source: Source, now_s: float) -> bool:
        """Notes a candidate. Returns whether the set of addresses changed.

        A sighting (mdns, observed) and any new address make the device due at once. Own, unspecified, multicast
        and IPv6 link-local addresses (useless without this machine's zone) are ignored.
        """
        if device == self._own_device or self._is_own(address):
            return False
        ip = address.ip
        if ip is not None and (ip.is_unspecified or ip.is_multicast or (ip.version == 6 and ip.is_link_local)):
            return False
        return self._note(device, address, source, now_s)

    def withdraw(self, device: str, source: Source) -> None:
        """A source no longer vouches for its addresses (an mDNS goodbye). What worked before is kept."""
        entry = self._devices.get(device)
        if entry is None:
            return
        for address, sources in list(entry.candidates.items()):
            sources.pop(source, None)
            if not sources:
                del entry.candidates[address]
        if not entry.candidates and entry.linked_since_s is None and not entry.schedule.dialling:
            del self._devices[device]

    # Dialling

    def next_dial(self) -> Dial | None:
        """The dial that is due first, or None when there is nothing to dial. Changes nothing."""
        dials = []
        for device, entry in self._devices.items():
            if device not in self._pinned or entry.linked_since_s is not None or entry.schedule.dialling:
                continue
            order = entry.in_order()
            address = next((a for a in order if a not in entry.tried), None) or next(iter(order), None)
            if address is not None:
                dials.append(Dial(device, address, entry.schedule.not_before_s))
        for address, configured in self._configured.items():
            # Once somebody answered there it is one of that device's candidates.
            if configured.device is None and not configured.schedule.dialling and not self._is_own(address):
                dials.append(Dial(None, address, configured.schedule.not_before_s))
        return min(dials, key=lambda dial: (dial.at_s, dial.device or "", str(dial.address)), default=None)

    def dialling(self, dial: Dial, now_s: float) -> None:
        """The dial has begun; `failed` or `connected` ends it."""
        schedule = self._schedule_of(dial)
        if schedule is not None:
            schedule.dialling = True
            schedule.last_dial_s = now_s

    def failed(self, dial: Dial, now_s: float) -> None:
        """The dial reached nobody, or somebody else. Back-off grows with each pass over all candidates."""
        schedule = self._schedule_of(dial)
        if schedule is None:
            return
        schedule.dialling = False
        if dial.device is None:
            schedule.back_off(now_s)
            return
        entry = self._devices[dial.device]
        entry.tried.add(dial.address)
        if entry.tried.issuperset(entry.candidates):
            entry.tried.clear()
            schedule.back_off(now_s)

    def awaits(self, devices: Collection[str], now_s: float) -> None:
        """From now on these devices, and no others, are dialled every AWAITED_BACKOFF_MAX_S at least."""
        for device, entry in self._devices.items():
            schedule = entry.schedule
            schedule.delay_max_s = AWAITED_BACKOFF_MAX_S if device in devices else BACKOFF_MAX_S
            schedule.not_before_s = min(schedule.not_before_s, now_s + schedule.delay_max_s)

    def connected(self, device: str, now_s: float, dialled: Address | None = None) -> None:
        """A pinned handshake succeeded; `dialled` is where, when this side dialled.

        A dialled address is remembered for this device and no longer believed to be another's. When it is this
        daemon itself that answered, the address is never dialled again on this network.
        """
        if dialled is not None:
            configured = self._configured.get(dialled)
            if configured is not None:
                configured.schedule.dialling = False
                configured.device = device
            for other, entry in self._devices.items():
                if other != device:
                    entry.candidates.pop(dialled, None)
        if device == self._own_device:
            if dialled is not None:
                self._found_self.add(dialled)
            return
        if dialled is not None:
            self._note(device, dialled, Source.REMEMBERED, now_s)
            if dialled in self._configured:
                self._note(device, dialled, Source.CONFIGURED, now_s)
        entry = self._devices.setdefault(device, _Device(_Schedule(now_s)))
        entry.tried.clear()
        entry.schedule.dialling = False
        entry.linked_since_s = now_s

    def disconnected(self, device: str, now_s: float) -> None:
        """The link ended. It is dialled again after BACKOFF_MIN_S, later when links keep breaking young."""
        entry = self._devices.get(device)
        if entry is None or entry.linked_since_s is None:
            return
        if now_s - entry.linked_since_s >= STABLE_LINK_S:
            entry.schedule.failures = 0
        entry.linked_since_s = None
        entry.schedule.back_off(now_s)

    # Inside

    def _is_own(self, address: Address) -> bool:
        return address in self._own or address in self._found_self

    def _schedule_of(self, dial: Dial) -> _Schedule | None:
        """None when the entry was withdrawn or forgotten while the dial was under way."""
        if dial.device is not None:
            entry = self._devices.get(dial.device)
            return None if entry is None else entry.schedule
        configured = self._configured.get(dial.address)
        return None if configured is None else configured.schedule

    def _note(self, device: str, address: Address, source: Source, now_s: float) -> bool:
        entry = self._devices.pop(device, None) or _Device(_Schedule(now_s))
        self._devices[device] = entry  # at the end: the most recently learned
        new = address not in entry.candidates
        entry.candidates.setdefault(address, {})[source] = now_s
        if len(entry.candidates) > limits.ADDRESSES_PER_PEER_MAX:
            least = entry.in_order()[-1]
            del entry.candidates[least]
            new = new and least != address
        if new or source in _FRESH:
            entry.start_over(now_s)
        self._drop_surplus_unpinned()
        return new

    def _drop_surplus_unpinned(self) -> None:
        surplus = len(strangers := self.unpinned()) - limits.DEVICES_SEEN_MAX
        for device in strangers[: max(surplus, 0)]:
            del self._devices[device]
