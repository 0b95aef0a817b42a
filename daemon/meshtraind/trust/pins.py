"""Which devices this one trusts: DATA/pins.db. A pinned device may run code here; nothing else says so.

Calls block for less than a millisecond, or for one disk flush; they belong to the thread that opened the table.
"""

import os
import sqlite3
import ssl
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from meshtraind.runtime.data_folder import FORMAT
from meshtraind.trust.identity import device_id_of
from meshwire import limits
from meshwire.addresses import Address
from meshwire.text import printable

_CREATE = """
CREATE TABLE pins (
    device_id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    certificate_pem TEXT NOT NULL,
    added_at REAL NOT NULL,
    added_by TEXT NOT NULL,
    last_addresses TEXT NOT NULL
) STRICT, WITHOUT ROWID
"""
_COLUMNS = "device_id, name, certificate_pem, added_at, added_by, last_addresses"
_ADDRESSES = TypeAdapter(tuple[Address, ...])  # the last column, as JSON
_BUSY_TIMEOUT_S = 5.0  # somebody looks into the file with the sqlite3 tool


class PinsError(Exception):
    """The pin table cannot be read or written; the message names the file and what to do."""


class UnknownPeerError(PinsError):
    """No pinned device is called so."""


class AmbiguousPeerError(PinsError):
    """Several pinned devices are called so; the message lists them."""


@dataclass(frozen=True)
class Pin:
    """A trusted device.

    Attributes:
        name: what the device called itself when it was pinned; show it through `printable`.
        added_at: Unix time.
        added_by: id of the device that introduced it: this one, for a device paired here by code.
        last_addresses: where it was last reached, best first.
    """

    device_id: str
    name: str
    certificate_pem: str
    added_at: float
    added_by: str
    last_addresses: tuple[Address, ...] = ()


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
        if os.name == "posix" and mode & 0o077:
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
            self._db.executescript(f"BEGIN IMMEDIATE; {_CREATE}; PRAGMA user_version = {FORMAT}; COMMIT")
        (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)

    def subscribe(self, changed: Callable[[], None]) -> None:
        """Calls `changed` after every device that is added or removed."""
        self._observers.append(changed)

    def add(self, pin: Pin) -> None:
        """Pins a device, or replaces what is known of it.

        Raises:
            ValueError: the certificate is not the device's, or the name or the addresses break a limit.
            PinsError: the table is full, or the disk refuses.
        """
        if _device_id(pin.certificate_pem) != pin.device_id:
            raise ValueError(f"the certificate given for device {pin.device_id[:8]} is another device's")
        if not 0 < len(pin.name) <= limits.NAME_CHARS_MAX:
            raise ValueError(f"a device name has 1 to {limits.NAME_CHARS_MAX} characters, not {len(pin.name)}")
        known = {other.device_id for other in self.all()} | {pin.device_id}
        if len(known) > limits.PEERS_MAX:
            raise PinsError(f"{limits.PEERS_MAX} devices are paired already: `meshtrain unpair` one first")
        row = (pin.device_id, pin.name, pin.certificate_pem, pin.added_at, pin.added_by)
        with self._explained():
            self._db.execute(
                f"INSERT OR REPLACE INTO pins ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
                (*row, _addresses_json(pin.last_addresses)),
            )
        self._tell()

    def remove(self, device_id: str) -> Pin:
        """Stops trusting a device; returns what was known of it. Raises UnknownPeerError."""
        pin = self.get(device_id)
        with self._explained():
            self._db.execute("DELETE FROM pins WHERE device_id = ?", (device_id,))
        self._tell()
        return pin

    def set_addresses(self, device_id: str, addresses: Sequence[Address]) -> None:
        """Remembers where a pinned device was reached, best first. Raises UnknownPeerError, ValueError."""
        self.get(device_id)
        with self._explained():
            self._db.execute(
                "UPDATE pins SET last_addresses = ? WHERE device_id = ?", (_addresses_json(addresses), device_id)
            )

    def get(self, device_id: str) -> Pin:
        """The pinned device with exactly this id. Raises UnknownPeerError."""
        for pin in self._select("WHERE device_id = ?", device_id):
            return pin
        raise UnknownPeerError(f"device {printable(device_id)[:8]} is not paired with this one")

    def all(self) -> tuple[Pin, ...]:
        """Every pinned device, in the order of names."""
        return self._select("ORDER BY name, device_id")

    def find(self, text: str) -> Pin:
        """The one pinned device with this name, or whose id begins so; an exact name or id goes first.

        Raises:
            UnknownPeerError, AmbiguousPeerError: none is, or several are.
        """
        pins = self.all()
        found = [pin for pin in pins if text in (pin.name, pin.device_id)]
        found = found or [pin for pin in pins if text and pin.device_id.startswith(text.lower())]
        if not found:
            raise UnknownPeerError(f"no paired device is called {printable(text)!r}: see `meshtrain peers`")
        if len(found) > 1:
            shown = ", ".join(f"{pin.device_id[:12]} ({printable(pin.name)})" for pin in found)
            raise AmbiguousPeerError(
                f"several paired devices are called {printable(text)!r}: {shown}; write more of the id"
            )
        return found[0]

    def close(self) -> None:
        with self._explained():
            self._db.close()

    def _select(self, clause: str, *arguments: str) -> tuple[Pin, ...]:
        with self._explained():
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM pins {clause}", arguments).fetchall()
            return tuple(map(_pin, rows))

    def _tell(self) -> None:
        for changed in self._observers:
            changed()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, _DamagedRowError) as error:
            raise PinsError(
                f"the table of paired devices {self.path}: {error}; make it readable and writable to the daemon's "
                "user, or move it away and pair the devices again"
            ) from error


class _DamagedRowError(Exception):
    pass


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
