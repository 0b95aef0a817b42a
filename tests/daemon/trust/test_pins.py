"""The table of pinned devices: what it holds survives restarts, and what is damaged is never half used."""

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtraind.runtime.data_folder import FORMAT
from meshtraind.trust.identity import load_or_create
from meshtraind.trust.pins import AmbiguousPeerError, Pin, PinsError, PinTable, UnknownPeerError
from meshwire import limits
from meshwire.addresses import Address
from meshwire.text import printable

ME = "ab" * 32


@pytest.fixture(scope="module")
def pins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pin, ...]:
    """Devices whose ids begin differently, so that prefixes tell them apart."""
    made: dict[str, Pin] = {}
    while len(made) < 3:
        identity = load_or_create(tmp_path_factory.mktemp("device"), "laptop")
        pin = Pin(identity.device_id, f"laptop-{len(made)}", identity.certificate_pem, 1.5, ME)
        made.setdefault(identity.device_id[0], pin)
    return tuple(made.values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pins.db"


@pytest.fixture
def table(path: Path) -> Iterator[PinTable]:
    table = PinTable(path)
    yield table
    table.close()


def test_pins_survive_a_restart_and_are_the_owner_s_only(path: Path, pins: tuple[Pin, ...]) -> None:
    before = os.umask(0)
    try:
        table = PinTable(path)
    finally:
        os.umask(before)
    addresses = (Address(host="192.168.1.20", port=29610), Address(host="fd00::2", port=1))
    for pin in pins:
        table.add(pin)
    table.set_addresses(pins[0].device_id, addresses)
    table.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    table = PinTable(path)
    first = Pin(pins[0].device_id, pins[0].name, pins[0].certificate_pem, 1.5, ME, addresses)
    assert table.all() == (first, *pins[1:])
    assert table.get(pins[1].device_id) == pins[1]
    table.close()


def test_adding_and_removing_is_told_to_those_who_build_on_it(table: PinTable, pins: tuple[Pin, ...]) -> None:
    seen: list[int] = []
    table.subscribe(lambda: seen.append(len(table.all())))
    table.add(pins[0])
    table.add(pins[1])
    assert table.remove(pins[0].device_id) == (pins[0],)
    assert seen == [1, 2, 1]
    with pytest.raises(UnknownPeerError, match="not paired"):
        table.remove(pins[0].device_id)
    assert seen == [1, 2, 1]


def test_pairing_again_replaces_the_name(table: PinTable, pins: tuple[Pin, ...]) -> None:
    table.add(pins[0])
    renamed = Pin(pins[0].device_id, "renamed", pins[0].certificate_pem, 2.0, ME)
    table.add(renamed)
    assert table.all() == (renamed,)


def test_devices_are_found_by_name_or_id_prefix_and_never_guessed(table: PinTable, pins: tuple[Pin, ...]) -> None:
    for pin in pins:
        table.add(pin)
    for pin in pins:
        for text in (pin.name, pin.device_id, pin.device_id[:8], pin.device_id[:8].upper()):
            assert table.find(text) == pin
    for text in ("", "nobody", "laptop", "%", "_"):
        with pytest.raises(UnknownPeerError, match="meshtrain peers"):
            table.find(text)


def test_two_devices_of_one_name_are_ambiguous(table: PinTable, pins: tuple[Pin, ...]) -> None:
    for pin in pins[:2]:
        table.add(Pin(pin.device_id, "twin", pin.certificate_pem, 1.0, ME))
    with pytest.raises(AmbiguousPeerError) as caught:
        table.find("twin")
    assert all(pin.device_id[:12] in str(caught.value) for pin in pins[:2])


def test_a_device_cannot_take_the_id_of_another_by_naming_itself_so(table: PinTable, pins: tuple[Pin, ...]) -> None:
    table.add(pins[0])
    table.add(Pin(pins[1].device_id, pins[0].device_id, pins[1].certificate_pem, 1.0, ME))
    assert table.find(pins[0].device_id) == pins[0]


@pytest.mark.parametrize("chars", [1, 8, 12, 63])
def test_a_device_named_as_anothers_id_begins_is_not_taken_for_it(
    table: PinTable, pins: tuple[Pin, ...], chars: int
) -> None:
    """A screen says `meshtrain unpair 1a2b3c4d` of a stolen laptop, and that laptop has introduced one called so."""
    meant, decoy = pins[0], Pin(pins[1].device_id, pins[0].device_id[:chars], pins[1].certificate_pem, 1.0, ME)
    table.add(meant)
    table.add(decoy)
    with pytest.raises(AmbiguousPeerError, match="write more of the id") as caught:
        table.find(decoy.name)
    assert all(pin.device_id[:12] in str(caught.value) for pin in (meant, decoy))
    assert table.find(meant.device_id[: chars + 1]) == meant
    assert table.find(decoy.device_id) == decoy


def test_a_device_is_found_by_its_name_as_a_screen_shows_it(table: PinTable, pins: tuple[Pin, ...]) -> None:
    table.add(Pin(pins[0].device_id, "bert\x1b[2J", pins[0].certificate_pem, 1.0, ME))
    assert table.find("bert\\x1b[2J").device_id == pins[0].device_id


def test_whoever_is_said_to_have_said_something_is_told_apart(table: PinTable, pins: tuple[Pin, ...]) -> None:
    """ "added by twin" names one of two, also where the name is as long as it may be."""
    table.add(pins[2])
    for pin in pins[:2]:
        table.add(Pin(pin.device_id, "twin", pin.certificate_pem, 1.0, ME))
    assert [table.name_of(pin.device_id) for pin in pins[:2]] == [f"twin ({pin.device_id[:8]})" for pin in pins[:2]]
    assert table.name_of(pins[2].device_id) == "laptop-2"
    for pin in pins[:2]:
        table.add(Pin(pin.device_id, "\n" * limits.NAME_CHARS_MAX, pin.certificate_pem, 1.0, ME))
        assert len(table.name_of(pin.device_id)) == limits.NAME_CHARS_MAX
    assert table.name_of(pins[0].device_id).endswith(f" ({pins[0].device_id[:8]})")


def test_a_new_name_is_kept_and_told_and_the_same_one_is_not_written(path: Path, pins: tuple[Pin, ...]) -> None:
    table = PinTable(path)
    table.add(pins[0])
    seen: list[str] = []
    table.subscribe(lambda: seen.append(table.all()[0].name))
    for name in ("attic", "attic"):
        table.rename(pins[0].device_id, name)
    with pytest.raises(ValueError, match="1 to 64 characters"):
        table.rename(pins[0].device_id, "")
    table.close()
    table = PinTable(path)
    assert seen == [table.all()[0].name] == ["attic"]
    table.close()


def test_a_full_disk_is_told_as_one_and_leaves_the_table_as_it_was(table: PinTable, pins: tuple[Pin, ...]) -> None:
    """SQLite ends a transaction by itself where the disk is full."""
    table.add(pins[0])
    (pages,) = table._db.execute("PRAGMA page_count").fetchone()
    table._db.execute(f"PRAGMA max_page_count = {pages}")
    long = Pin(pins[1].device_id, "long", pins[1].certificate_pem + "\n" * 20_000, 1.0, ME)
    for refused in (table.add, table.wait):
        with pytest.raises(PinsError, match="full") as caught:
            refused(long)
        assert "rollback" not in str(caught.value)
    assert (table.all(), table.waiting(), table.removed()) == ((pins[0],), (), ())
    table._db.execute("PRAGMA max_page_count = 1000")
    table.add(long)
    assert len(table.all()) == 2


def test_what_breaks_a_limit_is_refused(table: PinTable, pins: tuple[Pin, ...]) -> None:
    one, other = pins[:2]
    many = tuple(Address(host="host", port=port) for port in range(1, limits.ADDRESSES_PER_PEER_MAX + 2))
    for bad in (
        Pin(one.device_id, "", one.certificate_pem, 1.0, ME),
        Pin(one.device_id, "x" * (limits.NAME_CHARS_MAX + 1), one.certificate_pem, 1.0, ME),
        Pin(one.device_id, "mixed", other.certificate_pem, 1.0, ME),
        Pin(one.device_id, "no certificate", "x", 1.0, ME),
        Pin(one.device_id, "everywhere", one.certificate_pem, 1.0, ME, many),
    ):
        with pytest.raises(ValueError, match=r".+"):
            table.add(bad)
    assert table.all() == ()


def test_the_table_has_an_end(table: PinTable, pins: tuple[Pin, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PEERS_MAX", 2)
    table.add(pins[0])
    table.add(pins[1])
    table.add(pins[1])
    with pytest.raises(PinsError, match="unpair"):
        table.add(pins[2])


@pytest.mark.parametrize("content", [b"not a database " * 100, b"SQLite format 3\0" + b"\xff" * 4000])
def test_a_damaged_file_is_a_clear_error(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(PinsError, match="move it away and pair the devices again"):
        PinTable(path)


@pytest.mark.parametrize(
    "change", ["certificate_pem = 'x'", "last_addresses = '[1]'", "last_addresses = '{'", "device_id = 'cd'"]
)
def test_a_damaged_entry_is_a_clear_error(path: Path, pins: tuple[Pin, ...], change: str) -> None:
    table = PinTable(path)
    table.add(pins[0])
    table.set_addresses(pins[0].device_id, (Address(host="host", port=1),))
    table.close()
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE pins SET {change}")
    db.close()
    with pytest.raises(PinsError, match="is damaged"):
        PinTable(path)


def test_a_newer_schema_is_not_touched(path: Path) -> None:
    PinTable(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {FORMAT + 1}")
    db.close()
    with pytest.raises(PinsError, match="newer meshtraind"):
        PinTable(path)


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_a_file_that_others_may_write_is_refused(path: Path) -> None:
    PinTable(path).close()
    path.chmod(0o660)
    with pytest.raises(PinsError, match="chmod 600"):
        PinTable(path)


def test_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PinsError, match=r"pins\.db"):
        PinTable(tmp_path / "missing" / "pins.db")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Ada's laptop ü 日本", "Ada's laptop ü 日本"),
        ("a\x1b[2Jb\n", "a\\x1b[2Jb\\n"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
    ],
)
def test_names_cannot_write_on_the_terminal_what_they_like(name: str, shown: str) -> None:
    assert printable(name) == shown
