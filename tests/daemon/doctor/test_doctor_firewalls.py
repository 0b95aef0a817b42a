"""What firewalls do with other laptops' first packets, from what ufw, firewalld and nftables print.

The texts of ufw 0.36 and nft 1.0.6 were recorded; firewalld's has the form that its manual shows.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from meshtrain.doctor.facts import Adapter, AdapterKind, Block, Firewall
from meshtrain.doctor.firewalls import firewall_blocks, firewalld_closes, ufw_lets_in
from meshtrain.doctor.ruleset import FirstPacket, dropped_by
from meshtrain.doctor.tools import Said, ask_tool

ETH0 = Adapter("eth0", AdapterKind.CABLE, ("192.168.1.5/24",))
OTHER = "192.168.1.20"
MISSING = Said(None, "not installed")
ROOT_ONLY = Said(None, "only root may see it", needs_root=True)
UFW = """Status: active
Logging: on (low)
Default: {default} (incoming), allow (outgoing), disabled (routed)
New profiles: skip

To                         Action      From
--                         ------      ----
22/tcp                     ALLOW IN    Anywhere
{rows}
8000:8100/tcp on wlan0     ALLOW IN    Anywhere
29611                      DENY IN     Anywhere
22/tcp (v6)                ALLOW IN    Anywhere (v6)
29610/tcp (v6)             ALLOW IN    Anywhere (v6)
"""
FIREWALLD = """public (active)
  target: {target}
  icmp-block-inversion: no
  interfaces: eth0
  sources:
  services: dhcpv6-client {services}
  ports: {ports}
  protocols:
  forward: yes
  masquerade: no
  rich rules:
"""


def ufw(*rows: str, default: str = "deny") -> str:
    return UFW.format(default=default, rows="\n".join(rows))


@pytest.mark.parametrize(
    ("rows", "let_in"),
    [
        ([], False),
        (["29610/tcp                  ALLOW IN    192.168.0.0/16            "], True),
        (["29610                      ALLOW IN    Anywhere                  "], True),
        (["29600:29620/tcp            ALLOW IN    Anywhere                  # for training"], True),
        (["22,29610/tcp               LIMIT IN    Anywhere                  "], True),
        (["Anywhere                   ALLOW IN    192.168.1.0/24            "], True),
        (["192.168.1.5 29610/tcp      ALLOW IN    Anywhere                  "], True),
        (["29610/tcp on eth0          ALLOW IN    Anywhere                  "], True),
        (["29610/tcp on wlan0         ALLOW IN    Anywhere                  "], False),
        (["29610/udp                  ALLOW IN    Anywhere                  "], False),
        (["29610/tcp                  ALLOW IN    10.0.0.0/8                "], False),
        (["29610/tcp                  ALLOW OUT   Anywhere                  "], False),
        (
            [
                "29610/tcp                  DENY IN     Anywhere                  ",
                "29610/tcp                  ALLOW IN    Anywhere   ",
            ],
            False,
        ),
    ],
)
def test_ufws_first_rule_that_fits_decides(rows: list[str], let_in: bool) -> None:
    assert ufw_lets_in(ufw(*rows), 29610, "eth0", OTHER) is let_in


def test_ufws_default_decides_where_no_rule_fits() -> None:
    assert ufw_lets_in(ufw(default="allow"), 29610, "eth0", OTHER)
    assert not ufw_lets_in(ufw(default="allow"), 29611, "eth0", OTHER)
    assert not ufw_lets_in(ufw(default="reject"), 29610, "eth0", OTHER)


@pytest.mark.parametrize(
    ("target", "services", "ports", "closed"),
    [
        ("default", "ssh", "", ("29610/tcp", "5353/udp")),
        ("default", "mdns ssh", "29610/tcp", ()),
        ("%%REJECT%%", "mdns", "29600-29620/tcp 5353/udp", ()),
        ("default", "mdns", "29610/udp", ("29610/tcp",)),
        ("ACCEPT", "", "", ()),
    ],
)
def test_firewalld_closes_what_its_zone_does_not_name(
    target: str, services: str, ports: str, closed: tuple[str, ...]
) -> None:
    assert firewalld_closes(FIREWALLD.format(target=target, services=services, ports=ports), 29610) == closed


# --- nftables ---


def rule(chain: str, *expressions: dict[str, Any]) -> dict[str, Any]:
    return {"rule": {"family": "inet", "table": "t", "chain": chain, "expr": list(expressions)}}


def base(
    policy: str = "accept", name: str = "input", hook: str = "input", prio: int = 0, **more: object
) -> dict[str, Any]:
    made = {
        "family": "inet",
        "table": "t",
        "name": name,
        "type": "filter",
        "hook": hook,
        "prio": prio,
        "policy": policy,
    }
    return {"chain": made | more}


def match(left: dict[str, Any], right: Any, op: str = "==") -> dict[str, Any]:
    return {"match": {"op": op, "left": left, "right": right}}


def payload(protocol: str, field: str) -> dict[str, Any]:
    return {"payload": {"protocol": protocol, "field": field}}


def network(address: str, length: int) -> dict[str, Any]:
    return {"prefix": {"addr": address, "len": length}}


STATE = {"ct": {"key": "state"}}
ACCEPT, DROP, REJECT = {"accept": None}, {"drop": None}, {"reject": {"type": "icmpx", "expr": "port-unreachable"}}
OURS = match(payload("tcp", "dport"), 29610)
PACKET = FirstPacket("eth0", OTHER, "192.168.1.5", "tcp", 29610)


def dropped(*listed: dict[str, Any], packet: FirstPacket = PACKET) -> list[str]:
    return [one.place for one in dropped_by(json.dumps({"nftables": [{"metainfo": {}}, *listed]}), packet)]


HERE = ["inet t input"]


@pytest.mark.parametrize(
    ("listed", "places"),
    [
        ([], []),
        ([base()], []),
        ([base("drop")], HERE),
        ([base("drop"), rule("input", OURS, ACCEPT)], []),
        ([base(), rule("input", OURS, DROP)], HERE),
        ([base(), rule("input", OURS, {"counter": {}}, REJECT)], HERE),
        ([base(), rule("input", match(payload("tcp", "dport"), 22, "!="), DROP)], HERE),
        ([base(), rule("input", match(payload("udp", "dport"), 29610), DROP)], []),
        ([base(), rule("input", match(payload("tcp", "dport"), {"set": [22, {"range": [29600, 29700]}]}), DROP)], HERE),
        ([base("drop"), rule("input", match(payload("tcp", "dport"), {"set": [22, 80]}), ACCEPT)], HERE),
        ([base("drop"), rule("input", match({"meta": {"key": "iif"}}, "lo"), ACCEPT)], HERE),
        ([base(), rule("input", match({"meta": {"key": "iifname"}}, "eth*"), DROP)], HERE),
        ([base("drop"), rule("input", match(STATE, ["established", "related"], "in"), ACCEPT)], HERE),
        ([base("drop"), rule("input", match(STATE, "new", "in"), ACCEPT)], []),
        ([base("drop"), rule("input", match(payload("ip", "saddr"), network("192.168.1.0", 24)), ACCEPT)], []),
        ([base("drop"), rule("input", match(payload("ip", "saddr"), network("10.0.0.0", 8)), ACCEPT)], HERE),
        ([base("drop"), rule("input", match({"meta": {"key": "l4proto"}}, "tcp"), ACCEPT)], []),
        ([base("drop"), rule("input", match({"meta": {"key": "l4proto"}}, 6), ACCEPT)], []),
        ([base("drop", hook="forward")], []),
        ([base("drop", hook="output")], []),
        ([base("drop", family="ip6")], []),
        ([base("drop", name="raw", hook="prerouting", prio=-300), base()], ["inet t raw"]),
        ([base(), base(name="later", prio=5, policy="drop"), rule("input", OURS, ACCEPT)], ["inet t later"]),
    ],
)  # fmt: skip
def test_what_nftables_does_with_a_first_packet(listed: list[dict[str, Any]], places: list[str]) -> None:
    """An `accept` ends its chain alone: chains of a later priority still decide."""
    assert dropped(*listed) == places


def test_jumps_return_and_gotos_do_not() -> None:
    inner = {"chain": {"family": "inet", "table": "t", "name": "x"}}
    returning = [inner, rule("x", {"return": None}), rule("x", DROP)]
    assert dropped(base(), *returning, rule("input", {"jump": {"target": "x"}}), rule("input", OURS, DROP)) == HERE
    assert dropped(base(), *returning, rule("input", {"goto": {"target": "x"}}), rule("input", OURS, DROP)) == []
    assert dropped(base("drop"), inner, rule("x", OURS, ACCEPT), rule("input", {"jump": {"target": "x"}})) == []
    circle = [inner, rule("x", {"jump": {"target": "x"}})]
    assert dropped(base("drop"), *circle, rule("input", {"jump": {"target": "x"}})) == [], "not understood"


def test_sets_and_verdict_maps_are_looked_up() -> None:
    named = {"set": {"family": "inet", "table": "t", "name": "open", "type": "inet_service", "elem": [22, 29610]}}
    assert dropped(base("drop"), named, rule("input", match(payload("tcp", "dport"), "@open"), ACCEPT)) == []
    states = {"vmap": {"key": {"ct": {"key": "state"}}, "data": {"set": [["invalid", DROP], ["established", ACCEPT]]}}}
    assert dropped(base("drop"), rule("input", states)) == HERE, "a new connection is neither"
    ports = {"vmap": {"key": payload("tcp", "dport"), "data": {"set": [[29610, DROP]]}}}
    assert dropped(base(), rule("input", ports)) == HERE


def test_what_is_not_understood_makes_no_finding() -> None:
    """Extensions of iptables, limits and routing lookups may let a packet in that the policy would not."""
    for odd in ({"xt": {"type": "match", "name": "conntrack"}}, {"limit": {"rate": 5, "per": "second"}}):
        assert dropped(base("drop"), rule("input", odd, ACCEPT)) == []
        assert dropped(base(), rule("input", odd, DROP)) == []
        assert dropped(base(), rule("input", odd, {"counter": {}}), rule("input", OURS, DROP)) == HERE, "no verdict"
    fib = match({"fib": {"result": "type", "flags": ["daddr"]}}, "broadcast")
    assert dropped(base("drop"), rule("input", fib, ACCEPT)) == []
    assert dropped(base("drop"), rule("input", match(payload("tcp", "dport"), "@of-another-table"), ACCEPT)) == []
    for text in ("", "[]", "{}", '{"nftables": 7}'):
        assert dropped_by(text, PACKET) == ()


def test_what_leaves_passes_other_chains() -> None:
    out = FirstPacket("eth0", "192.168.1.5", OTHER, "tcp", 29610, outward=True)
    assert dropped(base("drop"), packet=out) == []
    closed = base("drop", name="out", hook="output")
    assert dropped(closed, packet=out) == ["inet t out"]
    assert dropped(closed, rule("out", match({"meta": {"key": "oifname"}}, "eth0"), ACCEPT), packet=out) == []


# --- all of them ---


class Tools:
    """Tools that say what was recorded."""

    def __init__(self, **said: Said) -> None:
        self.said = said

    def __call__(self, *argv: str) -> Said:
        return self.said.get(argv[0].replace("-", "_"), MISSING)


def nft(*listed: dict[str, Any]) -> Said:
    return Said(json.dumps({"nftables": list(listed)}))


def test_a_block_is_told_once_and_by_who_made_it() -> None:
    """ufw's rules are nftables' too, in tables of which ufw is asked."""
    table = {"family": "ip", "table": "filter", "name": "INPUT", "hook": "input", "prio": 0, "policy": "drop"}
    tools = Tools(ufw=Said(ufw()), nft=nft({"chain": table}))
    assert firewall_blocks(tools, ETH0, 29610, OTHER) == ((Block(Firewall.UFW, "29610/tcp"),), ())
    open_ = Tools(ufw=Said(ufw("29610/tcp                  ALLOW IN    Anywhere  ")), nft=nft({"chain": table}))
    assert firewall_blocks(open_, ETH0, 29610, OTHER) == ((), ())
    off = Tools(ufw=Said("Status: inactive\n"), nft=nft({"chain": table}))
    blocks, _ = firewall_blocks(off, ETH0, 29610, OTHER)
    assert {(one.port, one.place) for one in blocks} == {
        ("29610/tcp", "ip filter INPUT"),
        ("5353/udp", "ip filter INPUT"),
    }


def test_what_only_root_may_read_is_said(tmp_path: Path) -> None:
    """With the command that shows it; ufw's only where ufw is on."""
    config = tmp_path / "ufw.conf"
    tools = Tools(ufw=ROOT_ONLY, nft=ROOT_ONLY)
    _, unknown = firewall_blocks(tools, ETH0, 29610, OTHER, config)
    assert [one.command for one in unknown] == ["sudo nft list ruleset"]
    config.write_text("# /etc/ufw/ufw.conf\nENABLED=yes\nLOGLEVEL=low\n")
    _, unknown = firewall_blocks(tools, ETH0, 29610, OTHER, config)
    assert [one.command for one in unknown] == ["sudo ufw status verbose", "sudo nft list ruleset"]


def test_tools_that_are_missing_fail_or_hang_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("meshtrain.doctor.tools.TOOL_TIMEOUT_S", 0.3)
    for name, script in (
        ("hangs", "exec sleep 60"),
        ("fails", "echo wrong words; echo 'no such thing' >&2; exit 3"),
        ("refuses", "echo 'Operation not permitted (you must be root)' >&2; exit 1"),
        ("works", "echo fine"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    assert ask_tool("nobody-has-this") == Said(None, "nobody-has-this is not installed")
    assert ask_tool("hangs") == Said(None, "hangs has not answered within 0.3 s")
    assert ask_tool("fails") == Said(None, "fails failed: no such thing")
    assert ask_tool("refuses").needs_root
    assert ask_tool("works") == Said("fine\n")
