"""Where devices may be reached, and what to dial next.

An address is only a candidate. Who answers there is decided by the pinned key in the handshake, never by the
book (DESIGN section 10): a wrong or hostile entry costs one failed dial.
"""

import math
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
# Happy eyeballs (RFC 8305, section 8): the next candidate is dialled while earlier ones go on, so that silent addresses
# cost this much each and not a time-out; after one that failed a little sooner.
ATTEMPT_DELAY_S = 0.25
ATTEMPT_DELAY_MIN_S = 0.1


class Source(StrEnum):
    """How an address became known, in the order in which they are believed; see `_Device.in_order`."""

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

    def back_off(self, now_s: float, delay_max_s: float = BACKOFF_MAX_S) -> None:
        # The exponent is capped because a device may be away for months.
        delay_s = min(BACKOFF_MIN_S * 2.0 ** min(self.failures, 16), delay_max_s)
        self.failures += 1
        self.not_before_s = now_s + delay_s

    def start_over(self, now_s: float) -> None:
        """Fresh evidence. The spacing stays, so that a flood of it cannot become a flood of dials."""
        self.failures = 0
        self.not_before_s = min(self.not_before_s, max(now_s, self.last_dial_s + BACKOFF_MIN_S))


@dataclass(slots=True)
class _Candidate:
    """One address of a device. Each has its own back-off: how silent ones do does not delay the others."""

    schedule: _Schedule
    sources: dict[Source, float] = field(default_factory=dict)  # learned at

    @property
    def worked_s(self) -> float:
        """When a handshake there showed the device's key last."""
        return self.sources.get(Source.REMEMBERED, -math.inf)


@dataclass(slots=True)
class _Device:
    """`schedule`: of its links, which back off when they break young; `attempt_at_s`: the earliest next dial."""

    schedule: _Schedule
    attempt_at_s: float = -math.inf
    candidates: dict[Address, _Candidate] = field(default_factory=dict)
    linked_since_s: float | None = None
    delay_max_s: float = BACKOFF_MAX_S

    def in_order(self) -> list[Address]:
        """What worked before and is seen on this network now; where it worked last; what else is seen now; the rest.

        Anybody may announce false addresses: they come after the one that worked last, and no more than that one
        comes before what is announced in a new network.
        """
        last_s = max((candidate.worked_s for candidate in self.candidates.values()), default=-math.inf)
        last = next((a for a, candidate in self.candidates.items() if -math.inf < candidate.worked_s == last_s), None)

        def key(address: Address) -> tuple[bool, bool, bool, bool, int, float]:
            sources = self.candidates[address].sources
            fresh, worked = not _FRESH.isdisjoint(sources), Source.REMEMBERED in sources
            return (
                not (fresh and worked),
                address != last,
                not fresh,
                not worked,
                min(_RANK[source] for source in sources),
                -max(sources.values()),
            )

        return sorted(self.candidates, key=key)

    def next_address(self, busy: Collection[Address]) -> tuple[float, Address] | None:
        """The candidate that is due first, the best of those that are due together. None: all are being dialled."""
        due = [
            (self.candidates[address].schedule.not_before_s, place, address)
            for place, address in enumerate(self.in_order())
            if address not in busy
        ]
        if not due:
            return None
        at_s, _, address = min(due, key=lambda one: one[:2])
        return max(at_s, self.schedule.not_before_s, self.attempt_at_s), address

    def start_over(self, now_s: float) -> None:
        self.schedule.start_over(now_s)
        for candidate in self.candidates.values():
            candidate.schedule.start_over(now_s)


@dataclass(slots=True)
class _Configured:
    schedule: _Schedule
    device: str | None = None  # who answered there last


class AddressBook:
    """Candidate addresses of devices, and which of them to dial next. Only pinned devices are dialled.

    Candidates of one device are dialled side by side, each begun a little after the one before; the first that makes
    a link wins, and whoever dials gives up the others.

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
        self._under_way: set[tuple[str | None, Address]] = set()  # dials, also to addresses withdrawn meanwhile

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
        return tuple(a for a in entry.in_order() if Source.REMEMBERED in entry.candidates[a].sources)

    def unpinned(self) -> tuple[str, ...]:
        """Devices that were seen but are not paired, most recently learned last."""
        return tuple(device for device in self._devices if device not in self._pinned)

    def is_pinned(self, device: str) -> bool:
        """Whether the device is paired."""
        return device in self._pinned

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
                if entry.candidates[address].sources.keys() != {Source.GOSSIP}
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
        for device in [d for d in self.unpinned() if not self._devices[d].candidates]:
            del self._devices[device]
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

        A sighting (mdns, observed) and any new address are due at once. Own, unspecified, multicast and IPv6
        link-local addresses (useless without this machine's zone) are ignored.
        """
        return self._is_candidate(device, address) and self._note(device, address, source, now_s)

    def sighted(self, device: str, addresses: Iterable[Address], now_s: float) -> None:
        """The device announces these addresses now (mDNS): they replace those of its earlier announcement.

        What worked, or was learned otherwise, stays: anybody on the network can announce in a device's name.
        """
        announced = [address for address in addresses if self._is_candidate(device, address)]
        entry = self._devices.get(device)
        if entry is not None:
            self._withdraw(entry, Source.MDNS, kept=announced)
        for address in announced:
            self._note(device, address, Source.MDNS, now_s)
        self._drop_if_unknown(device)

    def withdraw(self, device: str, source: Source) -> None:
        """A source no longer vouches for its addresses (an mDNS goodbye). What worked before is kept."""
        entry = self._devices.get(device)
        if entry is not None:
            self._withdraw(entry, source)
            self._drop_if_unknown(device)

    # Dialling

    def next_dial(self, now_s: float) -> Dial | None:
        """The dial that is due first, or None when there is none, or DIALS_MAX are under way. Changes nothing.

        Of those that are due, the one to the device with the fewest dials under way: many candidates of some do not
        keep others waiting.
        """
        if len(self._under_way) >= limits.DIALS_MAX:
            return None
        busy: dict[str | None, set[Address]] = {}
        for device, address in self._under_way:
            busy.setdefault(device, set()).add(address)
        dials = []
        for device, entry in self._devices.items():
            here = busy.get(device, set())
            if device not in self._pinned or entry.linked_since_s is not None:
                continue
            if len(here) < limits.DIALS_PER_DEVICE_MAX and (due := entry.next_address(here)) is not None:
                dials.append((len(here), Dial(device, due[1], due[0])))
        for address, configured in self._configured.items():
            # Once somebody answered there it is one of that device's candidates.
            if configured.device is None and address not in busy.get(None, ()) and not self._is_own(address):
                dials.append((0, Dial(None, address, configured.schedule.not_before_s)))

        def key(of: tuple[int, Dial]) -> tuple[float, int, float, str, str]:
            others, dial = of
            return (max(dial.at_s, now_s), others, dial.at_s, dial.device or "", str(dial.address))

        return min(dials, key=key, default=(0, None))[1]

    def dialling(self, dial: Dial, now_s: float) -> None:
        """The dial has begun; `ended` ends it."""
        self._under_way.add((dial.device, dial.address))
        if dial.device is None:
            configured = self._configured.get(dial.address)
            if configured is not None:
                configured.schedule.last_dial_s = now_s
            return
        entry = self._devices.get(dial.device)
        if entry is not None:
            entry.schedule.last_dial_s = now_s
            entry.attempt_at_s = now_s + ATTEMPT_DELAY_S
            if dial.address in entry.candidates:
                entry.candidates[dial.address].schedule.last_dial_s = now_s

    def ended(self, dial: Dial, now_s: float) -> None:
        """The dial is over. Unless its device is linked now, the address backs off and the next one may be dialled."""
        self._under_way.discard((dial.device, dial.address))
        if dial.device is None:
            configured = self._configured.get(dial.address)
            if configured is not None and configured.device is None:
                configured.schedule.back_off(now_s)
            return
        entry = self._devices.get(dial.device)
        if entry is None or entry.linked_since_s is not None:
            return
        entry.attempt_at_s = min(entry.attempt_at_s, entry.schedule.last_dial_s + ATTEMPT_DELAY_MIN_S)
        if dial.address in entry.candidates:
            entry.candidates[dial.address].schedule.back_off(now_s, entry.delay_max_s)

    def awaits(self, devices: Collection[str], now_s: float) -> None:
        """From now on these devices, and no others, are dialled every AWAITED_BACKOFF_MAX_S at least."""
        for device, entry in self._devices.items():
            entry.delay_max_s = AWAITED_BACKOFF_MAX_S if device in devices else BACKOFF_MAX_S
            for schedule in (entry.schedule, *(candidate.schedule for candidate in entry.candidates.values())):
                schedule.not_before_s = min(schedule.not_before_s, now_s + entry.delay_max_s)

    def connected(self, device: str, now_s: float, dialled: Address | None = None) -> None:
        """A pinned handshake succeeded; `dialled` is where, when this side dialled.

        A dialled address is remembered for this device and no longer believed to be another's. When it is this
        daemon itself that answered, the address is never dialled again on this network.
        """
        if dialled is not None:
            configured = self._configured.get(dialled)
            if configured is not None:
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
        entry.linked_since_s = now_s

    def disconnected(self, device: str, now_s: float) -> None:
        """The link ended. Its device is dialled after BACKOFF_MIN_S, later when links keep breaking young."""
        entry = self._devices.get(device)
        if entry is None or entry.linked_since_s is None:
            return
        if now_s - entry.linked_since_s >= STABLE_LINK_S:
            entry.schedule.failures = 0
        entry.linked_since_s = None
        for candidate in entry.candidates.values():
            candidate.schedule = _Schedule(now_s)
        entry.schedule.back_off(now_s, entry.delay_max_s)

    # Inside

    def _is_own(self, address: Address) -> bool:
        return address in self._own or address in self._found_self

    def _is_candidate(self, device: str, address: Address) -> bool:
        if device == self._own_device or self._is_own(address):
            return False
        ip = address.ip
        return ip is None or not (ip.is_unspecified or ip.is_multicast or (ip.version == 6 and ip.is_link_local))

    def _note(self, device: str, address: Address, source: Source, now_s: float) -> bool:
        entry = self._devices.pop(device, None) or _Device(_Schedule(now_s))
        self._devices[device] = entry  # at the end: the most recently learned
        new = address not in entry.candidates
        candidate = entry.candidates.setdefault(address, _Candidate(_Schedule(now_s)))
        candidate.sources[source] = now_s
        if len(entry.candidates) > limits.ADDRESSES_PER_PEER_MAX:
            least = entry.in_order()[-1]
            del entry.candidates[least]
            new = new and least != address
        if new or source in _FRESH:
            entry.schedule.start_over(now_s)
            candidate.schedule.start_over(now_s)
        self._drop_surplus_unpinned()
        return new

    def _withdraw(self, entry: _Device, source: Source, kept: Collection[Address] = ()) -> None:
        for address, candidate in list(entry.candidates.items()):
            if address not in kept:
                candidate.sources.pop(source, None)
                if not candidate.sources:
                    del entry.candidates[address]

    def _drop_if_unknown(self, device: str) -> None:
        """Nothing is left of a stranger's entry. A paired device's stays, with the spacing of its dials."""
        entry = self._devices.get(device)
        if entry is not None and not entry.candidates and device not in self._pinned:
            del self._devices[device]

    def _drop_surplus_unpinned(self) -> None:
        surplus = len(strangers := self.unpinned()) - limits.DEVICES_SEEN_MAX
        for device in strangers[: max(surplus, 0)]:
            del self._devices[device]
