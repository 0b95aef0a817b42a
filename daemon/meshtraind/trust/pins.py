"""Which devices this one trusts: DATA/pins.db. A pinned device may run code here; nothing else says so.

Beside them lie those that a person has removed, which no introduction takes in again (K4), those that wait for a
person's word, and what the person has said about introductions and about this device's own name.

Calls block for less than a millisecond, or for one disk flush; they belong to the thread that opened the table.
"""

import os
import sqlite3
import ssl
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from meshtraind.machine.facts import has_modes
from meshtraind.runtime.data_folder import FORMAT
from meshtraind.trust.identity import device_id_of
from meshwire import limits
from meshwire.addresses import Address
from meshwire.messages.local import IntroductionPolicy
from meshwire.text import printable

_CREATE = """
CREATE TABLE IF NOT EXISTS pins (
    device_id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    certificate_pem TEXT NOT NULL,
    added_at REAL NOT NULL,
    added_by TEXT NOT NULL,
    last_addresses TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS waiting (
    device_id TEXT NOT NULL,
    name TEXT NOT NULL,
    certificate_pem TEXT NOT NULL,
    added_at REAL NOT NULL,
    added_by TEXT NOT NULL,
    last_addresses TEXT NOT NULL,
    PRIMARY KEY (device_id, added_by)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS removed (device_id TEXT NOT NULL UNIQUE, name TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
"""
_COLUMNS = "device_id, name, certificate_pem, added_at, added_by, last_addresses"
_ADDRESSES = TypeAdapter(tuple[Address, ...])  # the last column, as JSON
ID_CHARS = 8  # of an id that people see
_BUSY_TIMEOUT_S = 5.0  # somebody looks into the file with the sqlite3 tool


class PinsError(Exception):
    """The pin table cannot be read or written; the message names the file and what to do."""


class UnknownPeerError(PinsError):
    """No pinned device is called so."""


class AmbiguousPeerError(PinsError):
    """Several pinned devices are called so; the message lists them."""


class RemovedError(PinsError):
    """A person has removed the device: an introduction does not take it in again."""


@dataclass(frozen=True)
class Pin:
    """A trusted device.

    Attributes:
        name: what the device called itself when it was linked last, or pinned; show it through `printable`.
        added_at: Unix time.
        added_by: id of the device that introduced it: this one, for a device paired here by code (K1).
        last_addresses: where it was last reached, best first; before that, where its introducer says that it is.
    """

    device_id: str
    name: str
    certificate_pem: str
    added_at: float
    added_by: str
    last_addresses: tuple[Address, ...] = ()


@dataclass(frozen=True)
class RemovedDevice:
    """A device that a person has removed, or refused."""

    device_id: str
    name: str


class PinTable:
    """The pinned devices in one sqlite file, made if missing, for its owner only.

    Args:
        path: DATA/pins.db.

    Raises:
        PinsError: the file is damaged, of a newer version, open to others, or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._observers: list[Callable[[], None]] = []
        with self._explained():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))
            mode = stat.S_IMODE(path.stat().st_mode)
        if has_modes() and mode & 0o077:
            raise PinsError(
                f"others than its owner may use {path} (mode {mode:03o}), and who is in it may run code here: "
                f"run `chmod 600 {path}`, then look through `meshtrain peers`"
            )
        with self._explained():
            self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        try:
            with self._explained():
                self._open_schema()
            self.all()
        except BaseException:
            self._db.close()
            raise

    def _open_schema(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > FORMAT:
            raise PinsError(
                f"{self.path} was written by a newer meshtraind (format {version}, this one knows "
                f"{FORMAT}): update meshtraind, or use another --data-dir"
            )
        if version == 0:
            self._db.executescript(f"BEGIN IMMEDIATE; {_CREATE} PRAGMA user_version = {FORMAT}; COMMIT")
        (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)

    def subscribe(self, changed: Callable[[], None]) -> None:
        """Calls `changed` after every device that is added, removed or renamed, and after a new policy."""
        self._observers.append(changed)

    def add(self, pin: Pin) -> None:
        """Pins a device for which a person has typed a code, or replaces what is known of it. If it was removed before,
        it is no more.

        Raises:
            ValueError: the certificate is not the device's, or the name or the addresses break a limit.
            PinsError: the table is full, or the disk refuses.
        """
        self._check(pin)
        with self._changing() as change:
            change("DELETE FROM removed WHERE device_id = ?", pin.device_id)
            self._put(change, pin)
        self._tell()

    def introduce(self, pin: Pin) -> None:
        """Pins a device at another's word, `pin.added_by`'s. Raises as `add` does, and RemovedError."""
        self._check(pin)
        if self.is_removed(pin.device_id):
            raise RemovedError(f"device {pin.device_id[:8]} was removed here: only a code takes it in again")
        with self._changing() as change:
            self._put(change, pin)
        self._tell()

    def _put(self, change: "_Change", pin: Pin) -> None:
        row = (pin.device_id, pin.name, pin.certificate_pem, pin.added_at, pin.added_by)
        change("DELETE FROM waiting WHERE device_id = ?", pin.device_id)
        change(
            f"INSERT OR REPLACE INTO pins ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
            *row,
            _addresses_json(pin.last_addresses),
        )

    def _check(self, pin: Pin) -> None:
        if _device_id(pin.certificate_pem) != pin.device_id:
            raise ValueError(f"the certificate given for device {pin.device_id[:8]} is another device's")
        _check_name(pin.name)
        known = {other.device_id for other in self.all()} | {pin.device_id}
        if len(known) > limits.PEERS_MAX:
            raise PinsError(f"{limits.PEERS_MAX} devices are paired already: `meshtrain unpair` one first")

    def remove(self, *devices: str) -> tuple[Pin, ...]:
        """Stops trusting these devices, and forgets who waits at their word. No introduction takes one of them in
        again, also where it only waited (K4). Returns what was known of them. Raises UnknownPeerError."""
        known = {pin.device_id: pin for pin in (*self.waiting(), *self.all())}
        removed = tuple(known[device] if device in known else self.get(device) for device in devices)
        with self._changing() as change:
            for pin in removed:
                change("DELETE FROM pins WHERE device_id = ?", pin.device_id)
                change("DELETE FROM waiting WHERE device_id = ? OR added_by = ?", pin.device_id, pin.device_id)
                if len(self.removed()) < limits.REMOVED_MAX:  # a full list takes in nobody any more
                    change("INSERT OR REPLACE INTO removed VALUES (?, ?)", pin.device_id, pin.name)
        self._tell()
        return removed

    def is_removed(self, device_id: str) -> bool:
        """Whether a person has removed this device, as far as that can be told: a full list may lack it."""
        removed = self.removed()
        return len(removed) >= limits.REMOVED_MAX or any(one.device_id == device_id for one in removed)

    def removed(self) -> tuple[RemovedDevice, ...]:
        """Those that a person has removed, newest first."""
        with self._explained():
            rows = self._db.execute("SELECT device_id, name FROM removed ORDER BY rowid DESC").fetchall()
        return tuple(RemovedDevice(*row) for row in rows)

    def wait(self, pin: Pin) -> None:
        """Keeps a device that `pin.added_by` has introduced until a person takes or refuses it. Raises as `add`."""
        self._check(pin)
        row = (pin.device_id, pin.name, pin.certificate_pem, pin.added_at, pin.added_by)
        with self._changing() as change:
            change(
                f"INSERT OR IGNORE INTO waiting ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
                *row,
                _addresses_json(pin.last_addresses),
            )

    def withdraw(self, by: str, kept: Collection[str]) -> None:
        """Forgets who waits at this device's word, but for those that it still introduces."""
        gone = [pin.device_id for pin in self.waiting() if pin.added_by == by and pin.device_id not in kept]
        if not gone:
            return
        with self._changing() as change:
            for device in gone:
                change("DELETE FROM waiting WHERE device_id = ? AND added_by = ?", device, by)

    def waiting(self) -> tuple[Pin, ...]:
        """Devices that wait for a person's word: one entry for each that has introduced it, by name and time."""
        return self._select("waiting", "ORDER BY name, device_id, added_at, added_by")

    @property
    def introductions(self) -> IntroductionPolicy:
        """What the person wants of introductions. Raises PinsError for what no version has written."""
        with self._explained():
            row = self._db.execute("SELECT value FROM settings WHERE name = 'introductions'").fetchone()
            if row is not None and row[0] not in list(IntroductionPolicy):
                raise _DamagedRowError(f"no policy of introductions is called {printable(str(row[0]))[:20]!r}")
        return IntroductionPolicy.ACCEPT if row is None else IntroductionPolicy(row[0])

    @introductions.setter
    def introductions(self, policy: IntroductionPolicy) -> None:
        with self._changing() as change:
            change("INSERT OR REPLACE INTO settings VALUES ('introductions', ?)", policy.value)
        self._tell()

    @property
    def own_name(self) -> str | None:
        """What the person calls this device; None: nothing. Raises PinsError for what no version has written."""
        with self._explained():
            row = self._db.execute("SELECT value FROM settings WHERE name = 'own_name'").fetchone()
            if row is not None and not 0 < len(row[0]) <= limits.NAME_CHARS_MAX:
                raise _DamagedRowError(f"a name of this device has {len(row[0])} characters")
        return None if row is None else str(row[0])

    @own_name.setter
    def own_name(self, name: str) -> None:
        _check_name(name)
        with self._changing() as change:
            change("INSERT OR REPLACE INTO settings VALUES ('own_name', ?)", name)

    def rename(self, device_id: str, name: str) -> None:
        """A pinned device calls itself so now. Raises UnknownPeerError, ValueError."""
        if self.get(device_id).name == name:
            return
        _check_name(name)
        with self._explained():
            self._db.execute("UPDATE pins SET name = ? WHERE device_id = ?", (name, device_id))
        self._tell()

    def set_addresses(self, device_id: str, addresses: Sequence[Address]) -> None:
        """Remembers where a pinned device was reached, best first. Raises UnknownPeerError, ValueError."""
        self.get(device_id)
        with self._explained():
            self._db.execute(
                "UPDATE pins SET last_addresses = ? WHERE device_id = ?", (_addresses_json(addresses), device_id)
            )

    def get(self, device_id: str) -> Pin:
        """The pinned device with exactly this id. Raises UnknownPeerError."""
        for pin in self._select("pins", "WHERE device_id = ?", device_id):
            return pin
        raise UnknownPeerError(f"device {printable(device_id)[:8]} is not paired with this one")

    def all(self) -> tuple[Pin, ...]:
        """Every pinned device, in the order of names."""
        return self._select("pins", "ORDER BY name, device_id")

    def name_of(self, device_id: str) -> str:
        """What a device was called, also one that was removed, in at most NAME_CHARS_MAX characters; the beginning of
        its id where nobody knows, and beside a name that several have."""
        known = {one.device_id: one.name for one in self.removed()} | {pin.device_id: pin.name for pin in self.all()}
        shown = {device: printable(name) for device, name in known.items()}
        name, id_ = shown.get(device_id), device_id[:ID_CHARS]
        if name is None:
            return id_
        if list(shown.values()).count(name) > 1:
            return f"{name[: limits.NAME_CHARS_MAX - ID_CHARS - 3]} ({id_})"
        return name[: limits.NAME_CHARS_MAX]

    def waiting_once(self) -> tuple[Pin, ...]:
        """The devices that wait, each as the first to introduce it has said, in the order of names."""
        first: dict[str, Pin] = {}
        for pin in sorted(self.waiting(), key=lambda pin: pin.added_at):
            first.setdefault(pin.device_id, pin)
        return tuple(sorted(first.values(), key=lambda pin: (pin.name, pin.device_id)))

    def find(self, text: str) -> Pin:
        """The one device, pinned or waiting, that a person means: with this id, or with this name as it is shown, or
        whose id begins so.

        Whoever calls its device as another's id begins gets nobody in its place: both are named, and more of the id is
        asked for.

        Raises:
            UnknownPeerError, AmbiguousPeerError: none is, or several are.
        """
        return _find((*self.all(), *self.waiting_once()), text, "device, paired or waiting, is", "devices are")

    def find_waiting(self, text: str) -> Pin:
        """As `find`, of those that wait."""
        return _find(self.waiting_once(), text, "device that waits is", "devices that wait are")

    def close(self) -> None:
        with self._explained():
            self._db.close()

    def _select(self, table: str, clause: str, *arguments: str) -> tuple[Pin, ...]:
        with self._explained():
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM {table} {clause}", arguments).fetchall()
            return tuple(map(_pin, rows))

    def _tell(self) -> None:
        for changed in self._observers:
            changed()

    @contextmanager
    def _changing(self) -> Iterator["_Change"]:
        """A change that is on the disk whole, or not at all."""
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield lambda statement, *values: self._db.execute(statement, values)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk has ended it already, and is what is to be told
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, _DamagedRowError) as error:
            raise PinsError(
                f"the table of paired devices {self.path}: {error}; make it readable and writable to the daemon's "
                "user, or move it away and pair the devices again"
            ) from error


def upgrade(path: Path) -> None:
    """Gives a table of before there were introductions what they need. Whoever was paired then was paired with one
    device alone, and is asked before others are added. Raises sqlite3.Error."""
    if not path.exists():
        return
    with closing(sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)) as database:
        database.executescript(f"BEGIN IMMEDIATE; {_CREATE} COMMIT")
        if database.execute("SELECT 1 FROM pins LIMIT 1").fetchone() is not None:
            database.execute(
                "INSERT OR IGNORE INTO settings VALUES ('introductions', ?)", (IntroductionPolicy.ASK.value,)
            )


_Change = Callable[..., object]  # executes a statement with these values, within one transaction


class _DamagedRowError(Exception):
    pass


def _check_name(name: str) -> None:
    if not 0 < len(name) <= limits.NAME_CHARS_MAX:
        raise ValueError(f"a device name has 1 to {limits.NAME_CHARS_MAX} characters, not {len(name)}")


def _find(pins: Sequence[Pin], text: str, one: str, several: str) -> Pin:
    found = [pin for pin in pins if pin.device_id == text.lower()]
    found = found or [pin for pin in pins if text and _is_meant(pin, text)]
    if not found:
        raise UnknownPeerError(f"no {one} called {printable(text)!r}: see `meshtrain peers`")
    if len(found) > 1:
        shown = ", ".join(f"{pin.device_id[:12]} ({printable(pin.name)})" for pin in found)
        raise AmbiguousPeerError(f"several {several} called {printable(text)!r}: {shown}; write more of the id")
    return found[0]


def _is_meant(pin: Pin, text: str) -> bool:
    return text in (pin.name, printable(pin.name)) or pin.device_id.startswith(text.lower())


def _pin(row: tuple[str, str, str, float, str, str]) -> Pin:
    device_id, name, certificate_pem, added_at, added_by, addresses = row
    try:
        if _device_id(certificate_pem) != device_id:
            raise ValueError("the certificate is another device's")
        last_addresses = _ADDRESSES.validate_json(addresses)
    except ValueError as error:
        raise _DamagedRowError(f"the entry of device {printable(device_id)[:8]} is damaged: {error}") from error
    return Pin(device_id, name, certificate_pem, added_at, added_by, last_addresses)


def _device_id(certificate_pem: str) -> str:
    """The id of a pinned certificate. Raises ValueError."""
    return device_id_of(ssl.PEM_cert_to_DER_cert(certificate_pem))


def _addresses_json(addresses: Sequence[Address]) -> str:
    if len(addresses) > limits.ADDRESSES_PER_PEER_MAX:
        raise ValueError(f"{len(addresses)} addresses of one device, at most {limits.ADDRESSES_PER_PEER_MAX} are kept")
    return _ADDRESSES.dump_json(tuple(addresses)).decode()
