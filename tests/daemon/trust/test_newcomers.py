"""K1 to K4, K6: what becomes of a trusted device's word about another one, word by word, and what stays on the disk."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtraind.trust.identity import Identity, load_or_create
from meshtraind.trust.newcomers import Newcomers, Verdict
from meshtraind.trust.pins import AmbiguousPeerError, Pin, PinsError, PinTable, RemovedError, UnknownPeerError
from meshwire import limits
from meshwire.addresses import Address
from meshwire.messages.link import Introduction, Introductions
from meshwire.messages.local import IntroductionPolicy

NAMES = "anna", "bert", "carl", "dora", "emil", "fred"
AT = (Address(host="192.168.1.20", port=29610),)


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    return {name: load_or_create(tmp_path_factory.mktemp(name), name) for name in NAMES}


class Anna:
    """A device that is paired with bert by a code, and what it does with words."""

    def __init__(self, path: Path, devices: dict[str, Identity]) -> None:
        self.path, self.devices = path, devices
        self.open()
        self.pairs("bert")

    def open(self) -> None:
        self.pins = PinTable(self.path)
        self.newcomers = Newcomers(self.pins, self.devices["anna"].device_id)

    def restarts(self) -> None:
        self.pins.close()
        self.open()

    def id(self, name: str) -> str:
        return self.devices[name].device_id

    def pairs(self, name: str, added_at: float = 1.0) -> None:
        identity = self.devices[name]
        self.pins.add(Pin(identity.device_id, name, identity.certificate_pem, added_at, self.id("anna")))

    def hears(self, by: str, about: str, *, doubted: bool = False) -> Verdict:
        identity = self.devices[about]
        word = Introduction(certificate_der=identity.certificate_der, name=about, addresses=AT)
        return self.newcomers.take(self.id(by), word, identity.certificate_pem, doubted=doubted)

    def removes(self, *names: str) -> None:
        self.pins.remove(*map(self.id, names))

    @property
    def trusted(self) -> dict[str, str]:
        """Names of the trusted devices, and by whom they were added."""
        names = {identity.device_id: name for name, identity in self.devices.items()}
        return {pin.name: names[pin.added_by] for pin in self.pins.all()}

    @property
    def waiting(self) -> list[tuple[str, str]]:
        names = {identity.device_id: name for name, identity in self.devices.items()}
        return [(pin.name, names[pin.added_by]) for pin in self.pins.waiting()]


@pytest.fixture
def anna(tmp_path: Path, devices: dict[str, Identity]) -> Iterator[Anna]:
    anna = Anna(tmp_path / "pins.db", devices)
    yield anna
    anna.pins.close()


def test_a_trusted_devices_word_counts_and_says_whose_it_was(anna: Anna) -> None:
    """K2. It survives a restart, with where the device was met."""
    assert anna.hears("bert", "carl") is Verdict.JOINS
    anna.restarts()
    assert anna.trusted == {"bert": "anna", "carl": "bert"}
    assert anna.pins.get(anna.id("carl")).last_addresses == AT


def test_a_word_counts_once_whoever_says_it_again(anna: Anna) -> None:
    """Who was first stays noted; a code that is typed here overrides it."""
    anna.pairs("dora")
    assert [anna.hears("bert", "carl"), anna.hears("bert", "carl"), anna.hears("dora", "carl")] == [
        Verdict.JOINS,
        Verdict.KNOWN,
        Verdict.KNOWN,
    ]
    assert anna.trusted["carl"] == "bert"
    anna.pairs("carl")
    assert anna.trusted["carl"] == "anna"


def test_nobodys_word_counts_who_is_not_trusted_now(anna: Anna) -> None:
    """K2: also not that of a device which was unpaired between its word and the reading of it."""
    assert anna.hears("dora", "carl") is Verdict.UNTRUSTED
    anna.removes("bert")
    assert anna.hears("bert", "carl") is Verdict.UNTRUSTED
    assert anna.trusted == {}


def test_only_those_that_a_code_was_typed_for_here_are_introduced(anna: Anna) -> None:
    """K1: no word is passed on. The newest first."""
    anna.pairs("dora", added_at=5.0)
    anna.hears("bert", "carl")
    assert [pin.name for pin in anna.newcomers.introduced_here()] == ["dora", "bert"]


def test_an_introduced_device_may_introduce_whom_it_was_paired_with(anna: Anna) -> None:
    """K2: a chain of words, each of which rests on a code; and who came by whom is known along it."""
    for by, about in (("bert", "carl"), ("carl", "dora"), ("dora", "emil")):
        assert anna.hears(by, about) is Verdict.JOINS
    assert [pin.name for pin in anna.newcomers.came_by(anna.id("carl"))] == ["dora", "emil"]
    assert [pin.name for pin in anna.newcomers.came_by(anna.id("emil"))] == []


def test_a_device_is_introduced_to_itself_in_vain(anna: Anna) -> None:
    assert anna.hears("bert", "anna") is Verdict.KNOWN
    assert anna.hears("bert", "bert") is Verdict.KNOWN
    assert anna.trusted == {"bert": "anna"}


@pytest.mark.parametrize("policy", list(IntroductionPolicy))
def test_a_removal_holds_until_a_code_is_typed_here(anna: Anna, policy: IntroductionPolicy) -> None:
    """K4: whoever introduces it, whatever the policy, after a restart, and again."""
    anna.hears("bert", "carl")
    anna.removes("carl")
    anna.pins.introductions = policy
    anna.pairs("dora")
    for _ in range(2):
        held = {Verdict.NEVER if policy is IntroductionPolicy.NEVER else Verdict.REMOVED}
        assert {anna.hears(by, "carl", doubted=doubted) for by in ("bert", "dora") for doubted in (False, True)} == held
        assert "carl" not in anna.trusted
        assert not anna.waiting
        anna.restarts()
    anna.pairs("carl")
    assert anna.trusted["carl"] == "anna"
    anna.removes("carl")
    anna.pins.introductions = IntroductionPolicy.ACCEPT
    assert anna.hears("bert", "carl") is Verdict.REMOVED, "the second removal holds as the first did"


def test_the_table_itself_takes_nobody_in_again(anna: Anna) -> None:
    """K4, whoever asks it to: the rule does not rest on one caller."""
    carl = anna.devices["carl"]
    pin = Pin(carl.device_id, "carl", carl.certificate_pem, 1.0, anna.id("bert"))
    anna.pins.introduce(pin)
    anna.removes("carl")
    with pytest.raises(RemovedError, match="only a code"):
        anna.pins.introduce(pin)
    assert anna.trusted == {"bert": "anna"}


def test_of_an_introducer_that_is_removed_its_devices_are_known_and_go_with_it_if_wished(anna: Anna) -> None:
    for about in ("carl", "dora"):
        anna.hears("bert", about)
    anna.hears("carl", "emil")
    came = anna.newcomers.came_by(anna.id("bert"))
    assert {pin.name for pin in came} == {"carl", "dora", "emil"}
    anna.removes("bert", *(pin.name for pin in came))
    assert anna.trusted == {}
    anna.pairs("fred")
    assert {anna.hears("fred", name) for name in ("bert", "carl", "dora", "emil")} == {Verdict.REMOVED}


def test_never_means_never(anna: Anna) -> None:
    """K3: nothing is taken, kept or asked about, and nobody is introduced; also after a restart."""
    anna.pins.introductions = IntroductionPolicy.NEVER
    for doubted in (False, True):
        assert anna.hears("bert", "carl", doubted=doubted) is Verdict.NEVER
    anna.restarts()
    assert anna.hears("bert", "carl") is Verdict.NEVER
    assert anna.trusted == {"bert": "anna"}
    assert not anna.waiting
    assert anna.newcomers.introduced_here() == ()


def test_who_waits_is_taken_by_a_persons_word_alone(anna: Anna) -> None:
    """K3: `ask`."""
    anna.pins.introductions = IntroductionPolicy.ASK
    assert [anna.hears("bert", "carl") for _ in range(2)] == [Verdict.WAITS, Verdict.KNOWN]
    anna.restarts()
    assert anna.trusted == {"bert": "anna"}
    assert anna.waiting == [("carl", "bert")]
    assert anna.newcomers.accept("carl").device_id == anna.id("carl")
    assert anna.trusted == {"bert": "anna", "carl": "bert"}
    assert not anna.waiting


def test_who_is_refused_asks_no_more(anna: Anna) -> None:
    """K4: a refusal is a removal."""
    anna.pins.introductions = IntroductionPolicy.ASK
    anna.hears("bert", "carl")
    assert anna.pins.find("carl").device_id == anna.id("carl")
    anna.removes("carl")
    assert not anna.waiting
    assert anna.hears("bert", "carl") is Verdict.REMOVED
    with pytest.raises(UnknownPeerError, match="no device that waits is called 'carl'"):
        anna.newcomers.accept("carl")


def test_nobody_waits_at_the_word_of_a_removed_device(anna: Anna) -> None:
    """Of two that introduce the same one, the other's word stays."""
    anna.pairs("dora")
    anna.pins.introductions = IntroductionPolicy.ASK
    anna.hears("bert", "carl")
    anna.hears("dora", "carl")
    anna.hears("bert", "emil")
    anna.removes("bert")
    assert anna.waiting == [("carl", "dora")]
    anna.newcomers.accept(anna.id("carl")[:12])
    assert anna.trusted["carl"] == "dora"


def test_a_code_for_one_that_waits_ends_the_waiting(anna: Anna) -> None:
    anna.pins.introductions = IntroductionPolicy.ASK
    anna.hears("bert", "carl")
    anna.pairs("carl")
    assert anna.trusted["carl"] == "anna"
    assert not anna.waiting


def test_whom_another_one_has_removed_waits(anna: Anna) -> None:
    """K5: a lost laptop is not taken in at once by those that have heard of its removal."""
    assert anna.hears("bert", "carl", doubted=True) is Verdict.WAITS
    assert anna.trusted == {"bert": "anna"}


def test_one_device_fills_no_more_than_its_share(anna: Anna, monkeypatch: pytest.MonkeyPatch) -> None:
    """K6. What has joined by its word and what waits at it count together."""
    monkeypatch.setattr(limits, "INTRODUCTIONS_MAX", 2)
    anna.pairs("dora")
    verdicts = [anna.hears("bert", "carl"), anna.hears("bert", "emil", doubted=True)]
    assert verdicts == [Verdict.JOINS, Verdict.WAITS]
    assert anna.hears("bert", "fred") is Verdict.FULL
    assert anna.hears("dora", "fred") is Verdict.JOINS


def test_introductions_leave_room_for_codes(anna: Anna, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INTRODUCED_MAX", 1)
    monkeypatch.setattr(limits, "PEERS_MAX", 3)
    anna.hears("bert", "carl")
    assert anna.hears("bert", "dora") is Verdict.FULL
    assert anna.hears("carl", "dora") is Verdict.FULL
    anna.pairs("emil")
    assert set(anna.trusted) == {"bert", "carl", "emil"}


def test_the_list_of_those_that_wait_has_an_end(anna: Anna, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INTRODUCTIONS_MAX", 1)
    anna.pairs("dora")
    anna.pins.introductions = IntroductionPolicy.ASK
    assert [anna.hears("bert", "carl"), anna.hears("dora", "emil")] == [Verdict.WAITS, Verdict.FULL]


def test_a_full_list_of_removals_lets_nobody_in(anna: Anna, monkeypatch: pytest.MonkeyPatch) -> None:
    """K4: nothing that a person has removed falls out of it, and what has no place in it stays out as well."""
    monkeypatch.setattr(limits, "REMOVED_MAX", 1)
    for name in ("carl", "dora"):
        anna.pairs(name)
    anna.removes("carl")
    anna.removes("dora")
    assert len(anna.pins.removed()) == 1
    assert {anna.hears("bert", name) for name in ("carl", "dora", "emil")} == {Verdict.REMOVED}
    anna.pairs("carl")
    assert anna.trusted["carl"] == "anna"


def test_a_name_that_two_devices_have_is_nobodys(anna: Anna) -> None:
    """A liar that calls its device by another's name gets neither its trust nor its removal."""
    carl = anna.devices["carl"]
    word = Introduction(certificate_der=carl.certificate_der, name="bert", addresses=())
    assert anna.newcomers.take(anna.id("bert"), word, carl.certificate_pem, doubted=False) is Verdict.JOINS
    with pytest.raises(AmbiguousPeerError, match=carl.device_id[:12]):
        anna.pins.find("bert")


def test_an_introduction_names_no_id_but_the_certificates(anna: Anna) -> None:
    """K2: whoever introduces carl's certificate as dora's gets carl, who alone can use it."""
    pem = anna.devices["dora"].certificate_pem
    word = Introduction(
        certificate_der=ssl.PEM_cert_to_DER_cert(anna.devices["carl"].certificate_pem), name="dora", addresses=()
    )
    with pytest.raises(ValueError, match="another device's"):
        anna.newcomers.take(anna.id("bert"), word, pem, doubted=False)
    assert anna.trusted == {"bert": "anna"}


def test_a_name_that_a_trusted_and_a_waiting_one_have_is_nobodys(anna: Anna) -> None:
    """`unpair bert` removes neither: the trusted one was perhaps not meant."""
    anna.pins.introductions = IntroductionPolicy.ASK
    carl = anna.devices["carl"]
    word = Introduction(certificate_der=carl.certificate_der, name="bert", addresses=())
    assert anna.newcomers.take(anna.id("bert"), word, carl.certificate_pem, doubted=False) is Verdict.WAITS
    with pytest.raises(AmbiguousPeerError, match=carl.device_id[:12]):
        anna.pins.find("bert")
    assert anna.pins.find_waiting("bert").device_id == carl.device_id, "`pair --accept` is about that one alone"


@pytest.mark.parametrize("by", ["bert", "dora"])
def test_who_waits_does_so_until_a_person_decides(anna: Anna, by: str) -> None:
    """K2, K3: whatever else changes meanwhile: who doubted it is away since a restart, or words are taken again."""
    anna.pairs("dora")
    assert anna.hears("bert", "carl", doubted=True) is Verdict.WAITS
    anna.restarts()
    for policy in (IntroductionPolicy.ACCEPT, IntroductionPolicy.ASK):
        anna.pins.introductions = policy
        assert anna.hears(by, "carl") is not Verdict.JOINS
    assert "carl" not in anna.trusted
    anna.newcomers.accept("carl")
    assert anna.trusted["carl"] == "bert"


def said(anna: Anna, *names: str) -> Introductions:
    words = (Introduction(certificate_der=anna.devices[n].certificate_der, name=n, addresses=AT) for n in names)
    return Introductions(devices=tuple(words))


def test_a_word_that_is_taken_back_ends_the_waiting(anna: Anna) -> None:
    """Bert has removed carl meanwhile: nobody is asked about carl for ever. Dora's word stays, and who was taken in."""
    anna.hears("bert", "emil")
    anna.pairs("dora")
    anna.pins.introductions = IntroductionPolicy.ASK
    for by, about in (("bert", "carl"), ("dora", "carl"), ("bert", "fred")):
        assert anna.hears(by, about) is Verdict.WAITS
    anna.newcomers.withdraw(anna.id("bert"), said(anna, "fred"))
    assert anna.waiting == [("carl", "dora"), ("fred", "bert")]
    anna.newcomers.withdraw(anna.id("bert"), said(anna))
    assert anna.waiting == [("carl", "dora")]
    assert anna.trusted == {"bert": "anna", "dora": "anna", "emil": "bert"}


def test_a_persons_yes_leaves_room_for_codes_as_well(anna: Anna, monkeypatch: pytest.MonkeyPatch) -> None:
    """K6: 128 in all, those included that waited."""
    assert anna.hears("bert", "carl", doubted=True) is Verdict.WAITS
    monkeypatch.setattr(limits, "INTRODUCED_MAX", 1)
    anna.hears("bert", "dora")
    with pytest.raises(PinsError, match="unpair"):
        anna.newcomers.accept("carl")
    assert anna.trusted == {"bert": "anna", "dora": "bert"}
    anna.removes("dora")
    anna.newcomers.accept("carl")
    assert "carl" in anna.trusted


def test_of_two_words_about_one_that_waits_the_first_names_it(anna: Anna, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that a screen shows is the one by which it is taken."""
    anna.pairs("dora")
    anna.pins.introductions = IntroductionPolicy.ASK
    carl = anna.devices["carl"]
    for by, name, now_s in (("bert", "zeta", 1.0), ("dora", "alpha", 2.0)):
        monkeypatch.setattr("meshtraind.trust.newcomers.time.time", lambda now_s=now_s: now_s)
        word = Introduction(certificate_der=carl.certificate_der, name=name, addresses=())
        assert anna.newcomers.take(anna.id(by), word, carl.certificate_pem, doubted=False) is Verdict.WAITS
    assert [pin.name for pin in anna.pins.waiting_once()] == ["zeta"]
    assert anna.newcomers.accept("zeta").added_by == anna.id("bert")
