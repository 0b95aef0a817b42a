"""The report for strangers: what is planted anywhere in the facts is not in it, and what helps is."""

import json
import stat
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from meshtrain.doctor.bundle import network_class, report, write_bundle
from meshtrain.doctor.diagnosis import diagnose
from meshtrain.doctor.facts import (
    Adapter,
    AdapterKind,
    Block,
    Daemon,
    Facts,
    Firewall,
    Hearing,
    OtherLaptop,
    PortHolder,
    Radio,
    Reach,
    Unknown,
    WayOut,
)
from meshtrain.doctor.finding import Fault

SECRET = "Xq7secretZ"
PLANTED = Facts(
    system=SECRET,
    now_s=1_800_000_123.25,
    adapters=(
        Adapter(f"wl{SECRET}", AdapterKind.WIFI, ("192.168.41.42/24", "203.0.113.77/32")),
        Adapter(f"tun{SECRET}", AdapterKind.TUNNEL, ("10.45.46.47/8",)),
    ),
    way_out=WayOut(f"tun{SECRET}", "10.45.46.1", None),
    lan_way=WayOut(f"wl{SECRET}", "192.168.41.1", True),
    blocks=(Block(Firewall.NFTABLES, "29610/tcp", zone=SECRET, place=f"inet {SECRET} input"),),
    hearing={f"wl{SECRET}": Hearing.DEAF, SECRET: Hearing.WELL},
    radios=(Radio(f"wl{SECRET}", True, -80.0, 2437.0, 0.9), Radio(SECRET)),
    daemon=Daemon(running=True, host="192.168.41.42", port=29610, interfaces=(SECRET, f"wl{SECRET}"), ahead_s=3600.0),
    laptops=(
        OtherLaptop(
            name=f"{SECRET}'s laptop",
            address="192.168.41.43",
            reach=Reach.SILENT,
            interface=f"wl{SECRET}",
            hardware_known=True,
            answered=True,
            refused=f"token {SECRET} /home/{SECRET}",
            dial_failed=f"certificate has expired {SECRET}",
            wire_version=7,
        ),
        OtherLaptop(name=SECRET, address=f"{SECRET}.local", state="named", reach=Reach.REFUSED),
    ),
    port_taken=PortHolder(29610, f"{SECRET} (pid 4711)", 29611),
    looked_at=(SECRET,),
    unknown=(Unknown(SECRET, f"/home/{SECRET}/.ssh/id", f"sudo {SECRET}"),),
)


def all_texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in all_texts(one)]
    if isinstance(value, list):
        return [text for one in value for text in all_texts(one)]
    return [value] if isinstance(value, str) else []


def test_nothing_that_was_planted_is_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_bundle(path, PLANTED, diagnose(PLANTED))
    text = path.read_text("utf-8")
    assert SECRET not in text
    assert "4711" not in text
    assert not [
        part for part in ("41.42", "41.43", "203.0", "45.46", "41.1", "/home", ".local", ".ssh") if part in text
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    known = json.loads(text)
    assert Fault.FIREWALL.value in known["faults"]
    assert [one["network"] for one in known["laptops"]] == ["192.168.0.0/16", "a host name"]
    assert known["laptops"][0] == {
        "laptop": "laptop 1",
        "state": "paired",
        "network": "192.168.0.0/16",
        "interface": "interface 1",
        "reach": "silent",
        "card_answers": True,
        "said_on": False,
        "heard": False,
        "answered_alone": True,
        "wire_version": 7,
        "refused": True,
        "dial_failed": True,
    }
    assert known["daemon"]["interfaces"] == ["another interface", "interface 1"]


def test_the_report_holds_words_of_its_own_alone() -> None:
    """Whatever text stands in a fact: each is replaced, one by one, and the report stays as it was."""
    before = report(PLANTED, diagnose(PLANTED))
    for changed in changes(PLANTED):
        after = report(changed, diagnose(PLANTED))
        new = set(all_texts(after)) - set(all_texts(before))
        assert not {text for text in new if "planted" in text}


def changes(facts: Facts) -> list[Facts]:
    """The facts with each text replaced, but for those that are chosen from a few."""
    made: list[Facts] = []
    for field in fields(facts):
        value = getattr(facts, field.name)
        single = is_dataclass(value) and not isinstance(value, type)
        if not single and not (isinstance(value, tuple) and is_dataclass(value[0])):
            continue
        for one in _changed(value if single else value[0]):
            changed: Any = {field.name: one if single else (one, *value[1:])}
            made.append(replace(facts, **changed))
    assert len(made) > 15
    return made


def _changed(one: Any) -> list[Any]:
    free = [field.name for field in fields(one) if type(getattr(one, field.name)) is str]
    free = [name for name in free if name not in ("port", "state")]  # ours
    return [replace(one, **{name: f"planted {name}"}) for name in free]


def test_a_report_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        write_bundle(path, PLANTED, ())
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("192.168.41.42/24", "192.168.0.0/16"),
        ("172.20.1.2", "172.16.0.0/12"),
        ("100.101.102.103", "100.64.0.0/10"),
        ("8.8.4.4", "public"),
        ("fe80::1", "IPv6"),
        ("attic.local", "a host name"),
        ("", "unknown"),
    ],
)
def test_an_address_is_named_by_its_kind_of_network(address: str, said: str) -> None:
    assert network_class(address) == said
