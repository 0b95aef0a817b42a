"""K1 to K5 between several devices, over links that are lists: who is told what, who joins where, what liars get."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.peers import introducer as introducer_module
from meshtraind.peers.introducer import Introducer
from meshtraind.trust import pins as pins_module
from meshtraind.trust.identity import Identity, load_or_create
from meshtraind.trust.pins import Pin, PinsError, PinTable
from meshwire import limits
from meshwire.addresses import Address
from meshwire.message_base import Wire
from meshwire.messages.link import Introduction, Introductions, KnownPeer
from meshwire.messages.local import IntroductionPolicy
from tests.daemon.waiting import until

NAMES = "anna", "bert", "carl", "dora", "emil"


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    return {name: load_or_create(tmp_path_factory.mktemp(name), name) for name in NAMES}


class Device:
    """A daemon's pins and introducer; its links put what is said into the mesh's list."""

    def __init__(self, mesh: "Devices", identity: Identity, folder: Path) -> None:
        self.mesh, self.identity, self.id, self.name = mesh, identity, identity.device_id, identity.name
        self.pins = PinTable(folder / f"{identity.name}.db")
        self.links: dict[str, Any] = {}
        self.met: list[str] = []
        node: Any = SimpleNamespace(device=self.id, links=self.links)
        self.introducer = Introducer(node, self.pins, self)
        self.pins.subscribe(self.introducer._pins_changed)

    def gossip_for(self, device: str) -> tuple[KnownPeer, ...]:
        pins = (pin.device_id for pin in self.pins.all() if pin.device_id != device)
        return tuple(KnownPeer(device=other, addresses=(Address(host="10.0.0.9", port=9),)) for other in pins)

    def met_elsewhere(self, device: str, addresses: tuple[Address, ...]) -> None:
        self.met.append(device)

    def link(self, other: "Device") -> Any:
        def notify(body: Wire) -> None:
            self.mesh.said.append((self, other, cast(Introductions, body)))

        hello, connection = SimpleNamespace(name=other.name), SimpleNamespace(name=other.name, notify=notify)
        return SimpleNamespace(device=other.id, hello=hello, connection=connection)

    @property
    def trusted(self) -> set[str]:
        return {pin.name for pin in self.pins.all()}

    def pin(self, other: "Device") -> None:
        name = other.identity.name
        self.pins.add(Pin(other.id, name, other.identity.certificate_pem, 1.0, self.id))


class Devices:
    """Devices in one loop. `settle` links those that trust each other, and lets all that is said be read."""

    def __init__(self, identities: dict[str, Identity], folder: Path) -> None:
        self.said: list[tuple[Device, Device, Introductions]] = []
        self.all = {name: Device(self, identity, folder) for name, identity in identities.items()}

    def __getitem__(self, name: str) -> Device:
        return self.all[name]

    def pair(self, one: str, other: str) -> None:
        self[one].pin(self[other])
        self[other].pin(self[one])

    def _link(self) -> None:
        for one in self.all.values():
            for other in self.all.values():
                both = other.identity.name in one.trusted and one.identity.name in other.trusted
                if both and other.id not in one.links:
                    one.links[other.id] = one.link(other)
                    one.introducer.link_made(one.links[other.id])
                elif not both:
                    one.links.pop(other.id, None)

    def unlink(self) -> None:
        for device in self.all.values():
            device.links.clear()

    async def settle(self) -> None:
        for _ in range(100):
            self._link()
            if not self.said:
                return
            said, self.said = self.said, []
            for by, to, body in said:
                await to.introducer.read(by.id, body)
        raise AssertionError("they never stop talking")


@pytest.fixture
def devices(identities: dict[str, Identity], tmp_path: Path) -> Iterator[Devices]:
    made = Devices(identities, tmp_path)
    yield made
    for device in made.all.values():
        device.pins.close()


def joined(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "joined" in record.getMessage()]


@pytest.mark.asyncio
async def test_one_code_each_joins_all(devices: Devices, caplog: pytest.LogCaptureFixture) -> None:
    """Each is paired once, with any of those that are there: with the first, the newest or one in between. Each of the
    others shows it once, with by whom."""
    caplog.set_level(logging.INFO)
    for one, other in (("anna", "bert"), ("bert", "carl"), ("carl", "dora"), ("anna", "emil")):
        devices.pair(one, other)
        await devices.settle()
    for name in NAMES:
        assert devices[name].trusted == set(NAMES) - {name}
    assert [one.name for one in devices["anna"].introducer.joined_since(0)] == ["carl", "dora"]
    assert [(one.name, one.added_by) for one in devices["emil"].introducer.joined_since(0)] == [("bert", "anna")] + [
        (name, by) for name, by in (("carl", "bert"), ("dora", "carl"))
    ]
    told = joined(caplog)
    devices.unlink()
    await devices.settle()
    assert joined(caplog) == told, "once, however often they link again"
    assert len(told) == 2 * (10 - 4), "of ten pairs four were made by codes"


@pytest.mark.asyncio
async def test_who_was_away_is_told_later_by_who_knows_first_hand(devices: Devices) -> None:
    devices.pair("anna", "bert")
    devices.pair("bert", "carl")
    bert = devices["bert"]
    away = bert.id, devices["anna"].id
    await devices.settle()
    assert "carl" in devices["anna"].trusted
    devices.pair("bert", "dora")
    devices.said.clear()  # the network lost it, and the links with it
    devices.unlink()
    assert away[0] not in devices["anna"].links
    await devices.settle()
    assert "dora" in devices["anna"].trusted


@pytest.mark.asyncio
async def test_a_removal_is_told_and_obeyed_by_nobody(devices: Devices) -> None:
    """K4, K5: anna removes carl. Bert goes on trusting him and introduces him again, in vain; both say why to people;
    dora, who has heard of it, asks first."""
    devices.pair("anna", "bert")
    devices.pair("bert", "carl")
    await devices.settle()
    anna, bert, carl, dora = (devices[name] for name in NAMES[:4])
    anna.pins.remove(carl.id)
    await devices.settle()
    assert bert.trusted == {"anna", "carl"}
    (warning,) = bert.introducer.warnings
    assert warning.startswith(f"anna has removed carl ({carl.id[:8]})")
    assert f"meshtrain unpair {carl.id[:8]}" in warning
    for _ in range(2):
        devices.unlink()
        await devices.settle()
        assert anna.trusted == {"bert"}
    devices.pair("anna", "dora")
    await devices.settle()
    assert "bert" in dora.trusted
    assert [(pin.name, pin.added_by) for pin in dora.pins.waiting()] == [("carl", bert.id)]
    bert.pins.remove(carl.id)
    await devices.settle()
    assert list(bert.introducer.warnings) == []


@pytest.mark.asyncio
async def test_never_keeps_trust_between_two(devices: Devices) -> None:
    """K3: it neither takes a word nor says one. Dora hears of bert from carl, who was paired with him; and trust on one
    side alone makes no link."""
    bert = devices["bert"]
    bert.pins.introductions = IntroductionPolicy.NEVER
    for one, other in (("anna", "bert"), ("bert", "carl"), ("carl", "dora")):
        devices.pair(one, other)
    await devices.settle()
    assert bert.trusted == {"anna", "carl"}
    assert devices["anna"].trusted == {"bert"}
    assert set(bert.links) == {devices["anna"].id, devices["carl"].id}
    assert set(devices["dora"].links) == {devices["carl"].id}


@pytest.mark.asyncio
async def test_the_word_of_a_device_that_was_unpaired_meanwhile_is_not_read(devices: Devices) -> None:
    """K2: it lay unread, or its certificate was being checked."""
    devices.pair("anna", "bert")
    devices.pair("bert", "carl")
    devices._link()
    (word,) = (body for by, to, body in devices.said if to is devices["anna"])
    anna, bert = devices["anna"], devices["bert"]
    reading = asyncio.get_running_loop().create_task(anna.introducer.read(bert.id, word))
    for _ in range(2):
        await asyncio.sleep(0)  # it is at the certificate now
    assert not reading.done()
    anna.pins.remove(bert.id)
    await reading
    await anna.introducer.read(bert.id, word)
    assert anna.trusted == set()
    assert anna.met == []


# --- a trusted device that lies ---


def word(identity: Identity, name: str) -> Introduction:
    return Introduction(certificate_der=identity.certificate_der, name=name, addresses=())


@pytest.mark.asyncio
async def test_a_name_draws_nothing_in_the_log(devices: Devices, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    devices["anna"].pin(devices["bert"])
    said = Introductions(devices=(word(devices["carl"].identity, "bert\x1b[2J\n"),))
    await devices["anna"].introducer.read(devices["bert"].id, said)
    (line,) = joined(caplog)
    assert line.isprintable()
    assert "bert\\x1b[2J\\n" in line
    assert devices["anna"].introducer.joined_since(0)[0].name.isprintable()


@pytest.mark.asyncio
async def test_a_second_device_of_a_name_is_told_apart(devices: Devices, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    devices["anna"].pin(devices["bert"])
    said = Introductions(devices=(word(devices["carl"].identity, "bert"),))
    await devices["anna"].introducer.read(devices["bert"].id, said)
    assert f"another device is called so, too: {devices['bert'].id[:8]}" in joined(caplog)[0]


@pytest.mark.asyncio
async def test_what_is_no_certificate_ends_the_reading_and_is_named(
    devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    devices["anna"].pin(devices["bert"])
    junk = Introduction(certificate_der=b"\x30\x03junk", name="x", addresses=())
    said = Introductions(devices=(junk, word(devices["carl"].identity, "carl")))
    await devices["anna"].introducer.read(devices["bert"].id, said)
    assert devices["anna"].trusted == {"bert"}
    (record,) = caplog.records
    assert record.getMessage().startswith("bert introduces what is no device of meshtrain (")


@pytest.mark.asyncio
async def test_however_much_a_device_says_one_word_of_it_lies_here(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K6: a million devices, in words of which each replaces the one before; read once in an interval."""
    monkeypatch.setattr(introducer_module, "READ_INTERVAL_S", 3600.0)
    anna, bert = devices["anna"], devices["bert"]
    anna.pin(bert)
    read: list[Introductions] = []

    async def noted(_by: str, said: Introductions) -> None:
        read.append(said)

    monkeypatch.setattr(anna.introducer, "read", noted)
    anna.introducer.start()
    try:
        for number in range(2000):
            anna.introducer.heard(bert.id, Introductions(devices=(), removed=(f"{number:064x}",)))
        await until(lambda: bool(read), "the first word that is read")
        for _ in range(2000):
            anna.introducer.heard(bert.id, Introductions(devices=()))
            await asyncio.sleep(0)
        assert [said.removed for said in read] == [(f"{1999:064x}",)]
        assert len(anna.introducer._unread) == 1
    finally:
        await anna.introducer.close()


@pytest.mark.asyncio
async def test_inventions_take_a_bounded_place_and_say_so_once(
    devices: Devices, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bert introduces as many devices as fit into a message, again and again: his share is taken, the rest is not even
    looked at as far as its certificates."""
    share = 3
    monkeypatch.setattr(limits, "INTRODUCTIONS_MAX", share)
    checked = 0

    def check(der: bytes) -> str:
        nonlocal checked
        checked += 1
        return der.decode()

    monkeypatch.setattr(introducer_module, "check_certificate", check)
    monkeypatch.setattr(introducer_module, "device_id_of", lambda der: der.hex().zfill(64)[-64:])
    monkeypatch.setattr("meshtraind.trust.newcomers.device_id_of", lambda der: der.hex().zfill(64)[-64:])
    known = {devices["bert"].identity.certificate_pem: devices["bert"].id}
    id_of = pins_module._device_id
    monkeypatch.setattr(pins_module, "_device_id", lambda pem: known.get(pem) or pem.encode().hex().zfill(64)[-64:])
    assert id_of(devices["bert"].identity.certificate_pem) == devices["bert"].id
    anna, bert = devices["anna"], devices["bert"]
    anna.pin(bert)
    for wave in range(4):
        inventions = (
            Introduction(certificate_der=b"%d" % (100 * wave + number), name="x", addresses=()) for number in range(60)
        )
        await anna.introducer.read(bert.id, Introductions.model_construct(devices=tuple(inventions), removed=()))
    assert len(anna.pins.all()) == 1 + share
    assert checked == share
    full = [record for record in caplog.records if "more devices than are taken" in record.getMessage()]
    assert len(full) == 4, "once for each word; the log's limit holds for floods of them"
    assert {getattr(record, "caused_by", None) for record in full} == {bert.id}


@pytest.mark.asyncio
async def test_a_removal_is_held_against_a_device_while_who_has_said_it_links_again(devices: Devices) -> None:
    """K5: anna has removed carl, and her link to dora breaks. Bert says carl's name in the very moment in which she is
    back and has not said so again."""
    anna, bert, carl, dora = (devices[name] for name in NAMES[:4])
    anna.pin(carl)
    anna.pins.remove(carl.id)
    devices.pair("anna", "dora")
    devices.pair("bert", "dora")
    await devices.settle()
    devices.unlink()
    devices._link()
    await dora.introducer.read(bert.id, Introductions(devices=(word(carl.identity, "carl"),)))
    assert "carl" not in dora.trusted
    assert [pin.name for pin in dora.pins.waiting()] == ["carl"]
    assert [text for text in dora.introducer.warnings if text.startswith("anna has removed carl")], (
        "also while it waits"
    )
    devices.unlink()
    devices.said.clear()  # nobody hears that a code was typed for carl at anna's, before the next link
    anna.pin(carl)
    await devices.settle()
    assert list(dora.introducer.warnings) == [], "she holds it against carl no more"


@pytest.mark.asyncio
async def test_of_words_that_lie_together_the_removals_are_read_first(devices: Devices) -> None:
    """K5: bert's word about carl came before anna's that she has removed him; both are read in one go."""
    dora = devices["dora"]
    for name in ("anna", "bert"):
        dora.pin(devices[name])
    carl = devices["carl"]
    dora.introducer.heard(devices["bert"].id, Introductions(devices=(word(carl.identity, "carl"),)))
    dora.introducer.heard(devices["anna"].id, Introductions(devices=(), removed=(carl.id,)))
    dora.introducer.start()
    try:
        await until(lambda: dora.pins.waiting() or "carl" in dora.trusted, "bert's word to be read")
    finally:
        await dora.introducer.close()
    assert "carl" not in dora.trusted


@pytest.mark.asyncio
async def test_who_introduces_nobody_any_more_says_so_on_each_link(devices: Devices) -> None:
    """K3: anna asks; bert, who has introduced carl, was started anew with `never`, and nobody is asked about carl."""
    anna, bert = devices["anna"], devices["bert"]
    anna.pins.introductions = IntroductionPolicy.ASK
    devices.pair("anna", "bert")
    devices.pair("bert", "carl")
    await devices.settle()
    assert [pin.name for pin in anna.pins.waiting()] == ["carl"]
    devices.unlink()
    bert.pins.introductions = IntroductionPolicy.NEVER
    bert.introducer._told.clear()  # another process
    await devices.settle()
    assert anna.pins.waiting() == ()


@pytest.mark.asyncio
async def test_a_new_policy_counts_at_once_for_what_was_said_before(devices: Devices) -> None:
    """K3: whom bert has introduced while anna wanted nobody joins when she says `accept`; when bert says `never`, his
    words are taken back."""
    anna, bert = devices["anna"], devices["bert"]
    anna.pins.introductions = IntroductionPolicy.NEVER
    devices.pair("anna", "bert")
    devices.pair("bert", "carl")
    devices._link()
    said, devices.said = devices.said, []
    for by, to, body in said:
        to.introducer.heard(by.id, body)
    anna.introducer.start()
    try:
        await until(lambda: not anna.introducer._unread, "the words to be read")
        assert anna.trusted == {"bert"}
        anna.pins.introductions = IntroductionPolicy.ACCEPT
        await until(lambda: "carl" in anna.trusted, "carl")
    finally:
        await anna.introducer.close()
    devices.said.clear()
    bert.pins.introductions = IntroductionPolicy.NEVER
    assert {(to.name, body.devices) for by, to, body in devices.said if by is bert} == {("anna", ()), ("carl", ())}


@pytest.mark.asyncio
async def test_what_the_disk_refuses_is_read_again(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the table cannot even be read: introductions go on once it can."""
    monkeypatch.setattr(introducer_module, "RETRY_S", 0.01)
    monkeypatch.setattr(introducer_module, "READ_INTERVAL_S", 0.01)
    devices.pair("anna", "bert")
    devices._link()
    anna, bert = devices["anna"], devices["bert"]
    anna.introducer.start()
    all_pins, failed = anna.pins.all, 0

    def unreadable() -> tuple[Pin, ...]:
        nonlocal failed
        failed += 1
        raise PinsError("the table is locked")

    try:
        with monkeypatch.context() as broken:
            broken.setattr(anna.pins, "all", unreadable)
            anna.introducer.heard(bert.id, Introductions(devices=(word(devices["carl"].identity, "carl"),)))
            await until(lambda: failed >= 2, "a second try")
        await until(lambda: len(all_pins()) == 2, "carl")
    finally:
        await anna.introducer.close()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert told
    assert all("is read again in" in line and "the table is locked" in line for line in told)


@pytest.mark.asyncio
async def test_room_that_is_made_is_given_to_those_that_had_none(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """K6: the person removes one, and needs not restart anything for the next."""
    monkeypatch.setattr(limits, "INTRODUCED_MAX", 1)
    monkeypatch.setattr(introducer_module, "READ_INTERVAL_S", 0.01)
    devices.pair("anna", "bert")
    devices._link()
    anna = devices["anna"]
    anna.introducer.start()
    try:
        words = tuple(word(devices[name].identity, name) for name in ("carl", "dora"))
        anna.introducer.heard(devices["bert"].id, Introductions(devices=words))
        await until(lambda: "more devices than are taken" in caplog.text, "the word to be read")
        assert anna.trusted == {"bert", "carl"}
        anna.pins.remove(devices["carl"].id)
        await until(lambda: "dora" in anna.trusted, "dora")
    finally:
        await anna.introducer.close()
    assert anna.trusted == {"bert", "dora"}


@pytest.mark.asyncio
async def test_a_device_is_called_what_it_calls_itself_on_its_newest_link(devices: Devices) -> None:
    """`peers` shows that name, and commands and introductions take it."""
    devices.pair("anna", "bert")
    devices.pair("anna", "carl")
    await devices.settle()
    devices["bert"].name = "attic"
    devices.unlink()
    devices._link()
    assert devices["anna"].trusted == {"attic", "carl"}
    told = [
        [one.name for one in body.devices] for by, to, body in devices.said if (by.name, to.name) == ("anna", "carl")
    ]
    assert told[-1] == ["attic"]


@pytest.mark.asyncio
async def test_who_joins_costs_no_table_read_for_each_link(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 devices each of 62 joins would read the table, of 64 rows, 126 times."""
    anna = devices["anna"]
    anna.pin(devices["bert"])
    reads: list[int] = []
    for links in (1, 60):
        anna.links.clear()
        for number in range(links):
            anna.links[f"{number:064x}"] = SimpleNamespace(**vars(anna.link(devices["bert"])))
        count = 0
        select = anna.pins._select

        def counted(*arguments: str, select: Any = select) -> tuple[Pin, ...]:
            nonlocal count
            count += 1
            return cast(tuple[Pin, ...], select(*arguments))

        with monkeypatch.context() as counting:
            counting.setattr(anna.pins, "_select", counted)
            counting.setattr(anna, "gossip_for", lambda _device: ())
            anna.introducer._pins_changed()
        reads.append(count)
    assert reads[0] == reads[1]


def test_a_word_has_an_end() -> None:
    with pytest.raises(ValueError, match="at most 64 items"):
        Introductions.load({"devices": [{"certificate_der": b"x", "name": "x", "addresses": []}] * 65, "removed": []})
    longest = Introduction(
        certificate_der=b"x" * limits.CERTIFICATE_BYTES_MAX, name="\U0001f600" * limits.NAME_CHARS_MAX,
        addresses=(Address(host="x" * 60 + ".local", port=9),) * limits.ADDRESSES_GOSSIPED_PER_PEER_MAX,
    )  # fmt: skip
    fullest = Introductions(
        devices=(longest,) * limits.INTRODUCTIONS_MAX, removed=("0" * 64,) * limits.REMOVALS_TOLD_MAX
    )
    assert len(fullest.pack()) < limits.CONTROL_BYTES_MAX
