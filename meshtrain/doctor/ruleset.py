"""What nftables would do with a packet, read from `nft -j list ruleset` and not tried.

Statements that are not understood (iptables' extensions, limits, routing lookups) match nothing, and make what follows
from the policy unsure.
"""

import ipaddress
import json
from dataclasses import dataclass
from typing import Any

HOOKS_IN, HOOKS_OUT = ("prerouting", "input"), ("output", "postrouting")
FAMILIES = ("inet", "ip")
QUIET = {"counter", "log", "comment", "notrack", "mangle"}  # statements that decide nothing
DEPTH_MAX = 16  # of jumps, as in the kernel


@dataclass(frozen=True, slots=True)
class FirstPacket:
    """A packet that begins something: IPv4, of no known connection. It comes in by an interface, or goes out by it."""

    interface: str
    source: str
    destination: str
    protocol: str  # "tcp" or "udp"
    port: int
    multicast: bool = False
    outward: bool = False


@dataclass(frozen=True, slots=True)
class Dropped:
    """A chain that keeps a packet out, as `nft` takes it: family, table, name."""

    place: str
    table: str  # family and name


class _Unsure(Exception):
    """What decides is not understood."""


def dropped_by(text: str, packet: FirstPacket, skipped: frozenset[str] = frozenset()) -> tuple[Dropped, ...]:
    """The base chains that surely keep a packet out; those of the tables in `skipped` ("ip filter") are left out."""
    try:
        listed = [one for one in json.loads(text)["nftables"] if isinstance(one, dict)]
    except (ValueError, KeyError, TypeError):  # another nft than any we know: nothing is sure
        return ()
    rules = _PacketRules(listed, packet)
    found = []
    for chain in rules.base_chains():
        table = f"{chain['family']} {chain['table']}"
        if table in skipped:
            continue
        try:
            out = rules.drops(chain)
        except _Unsure:
            continue
        if out:
            found.append(Dropped(f"{table} {chain['name']}", table))
    return tuple(found)


class _PacketRules:
    """A ruleset, asked about one packet."""

    def __init__(self, listed: list[dict[str, Any]], packet: FirstPacket) -> None:
        self._packet = packet
        self._chains = [one["chain"] for one in listed if "chain" in one]
        self._rules = [one["rule"] for one in listed if "rule" in one]
        self._sets = {_key(one["set"]): one["set"].get("elem", []) for one in listed if "set" in one}

    def base_chains(self) -> list[dict[str, Any]]:
        """Those that the packet passes, in this order."""
        hooks = HOOKS_OUT if self._packet.outward else HOOKS_IN
        chains = [one for one in self._chains if one.get("hook") in hooks and one.get("family") in FAMILIES]
        return sorted(chains, key=lambda one: (hooks.index(one["hook"]), one.get("prio", 0)))

    def drops(self, chain: dict[str, Any]) -> bool:
        """Whether this base chain drops the packet. Raises _Unsure."""
        verdict, unsure = self._walk(chain, 0)
        if verdict is None and chain.get("policy") == "drop":
            verdict = "drop"
        if unsure and verdict == "drop":
            raise _Unsure
        return verdict == "drop"

    def _walk(self, chain: dict[str, Any], depth: int) -> tuple[str | None, bool]:
        """(what is decided, None: nothing; whether a rule before it was not understood)."""
        unsure = False
        for rule in self._rules:
            if _place(rule, "chain") != _place(chain, "name"):
                continue
            matches, verdict = self._read(rule.get("expr", []))
            if matches is False or verdict is None:
                continue
            if matches is None:
                unsure = True
                continue
            kind, target = verdict
            if kind in ("accept", "drop"):
                return kind, unsure
            if kind == "return":
                return None, unsure
            place = (*_place(chain, "name")[:2], target)
            called = next((one for one in self._chains if _place(one, "name") == place), None)
            if called is None or depth >= DEPTH_MAX:
                unsure = True
                continue
            decided, inner = self._walk(called, depth + 1)
            unsure = unsure or inner
            if decided is not None or kind == "goto":
                return decided, unsure
        return None, unsure

    def _read(self, expressions: list[Any]) -> tuple[bool | None, tuple[str, str] | None]:
        """(whether a rule matches, None: not understood; its verdict, a jump's with its target)."""
        matches: bool | None = True
        verdict = None
        for expression in expressions:
            if not isinstance(expression, dict):
                continue
            (name, body), *_ = expression.items()
            if name == "match":
                one = self._matches(body)
                if one is False:
                    return False, None
                matches = None if one is None else matches
            elif name == "vmap":
                known, verdict = self._mapped(body)
                matches = matches if known else None
                verdict = verdict if known else ("drop", "")
            elif name in ("accept", "return", "drop"):
                verdict = (name, "")
            elif name == "reject":
                verdict = ("drop", "")
            elif name in ("jump", "goto"):
                verdict = (name, body["target"])
            elif name not in QUIET:
                matches = None
        return matches, verdict

    def _mapped(self, body: dict[str, Any]) -> tuple[bool, tuple[str, str] | None]:
        data = body.get("data")
        value = self._value(body.get("key", {}))
        if value is None or not isinstance(data, dict):
            return False, None
        for key, verdict in data.get("set", []):
            same = self._equal(value, key)
            if same is None:
                return False, None
            if same:
                return True, self._read([verdict])[1]
        return True, None

    def _matches(self, body: dict[str, Any]) -> bool | None:
        left, right, operator = body.get("left", {}), body.get("right"), body.get("op")
        other = left.get("payload", {}).get("protocol") if isinstance(left, dict) else None
        if other in ("tcp", "udp") and other != self._packet.protocol:
            return False  # nft asks for the protocol first
        value = self._value(left)
        if value is None or operator not in ("==", "!=", "in"):
            return None
        same = self._equal(value, right)
        return None if same is None else same != (operator == "!=")

    def _value(self, left: Any) -> str | int | None:
        """What the packet has there; None: that is not known."""
        packet = self._packet
        match left:
            case {"payload": {"protocol": ("tcp" | "udp" | "th"), "field": "dport"}}:
                return packet.port
            case {"payload": {"protocol": "ip", "field": "saddr"}}:
                return packet.source
            case {"payload": {"protocol": "ip", "field": "daddr"}}:
                return packet.destination
            case {"payload": {"protocol": "ip", "field": "protocol"}} | {"meta": {"key": "l4proto"}}:
                return packet.protocol
            case {"meta": {"key": ("iif" | "iifname")}} if not packet.outward:
                return packet.interface
            case {"meta": {"key": ("oif" | "oifname")}} if packet.outward:
                return packet.interface
            case {"meta": {"key": "pkttype"}}:
                return "multicast" if packet.multicast else "host"
            case {"meta": {"key": "nfproto"}}:
                return "ipv4"
            case {"meta": {"key": "protocol"}}:
                return "ip"
            case {"ct": {"key": "state"}}:
                return "new"
        return None

    def _equal(self, value: str | int, right: Any) -> bool | None:
        """Whether the packet's value is that, or among those; None: that is not understood."""
        match right:
            case {"set": members} | list(members):
                return self._among(value, members)
            case {"range": [first, last]}:
                return first <= value <= last if isinstance(value, int) and isinstance(first, int) else None
            case {"prefix": {"addr": address, "len": length}}:
                return _within(value, f"{address}/{length}")
            case {"elem": {"val": inner}}:
                return self._equal(value, inner)
            case str(name) if name.startswith("@"):
                return self._among_set(value, name[1:])
            case str(text) if text.endswith("*") and isinstance(value, str):
                return value.startswith(text[:-1])
            case bool():
                return None
            case int() | str():
                return _same(value, right)
        return None

    def _among(self, value: str | int, members: Any) -> bool | None:
        answers = [self._equal(value, one) for one in (members if isinstance(members, list) else [members])]
        return True if True in answers else None if None in answers else False

    def _among_set(self, value: str | int, name: str) -> bool | None:
        found = [elements for (_, _, other), elements in self._sets.items() if other == name]
        return self._among(value, found[0]) if len(found) == 1 else None  # of several tables: whose is not asked


def _same(value: str | int, right: str | int) -> bool:
    """Protocols may stand there by number."""
    numbers = {"tcp": 6, "udp": 17}
    return right in (value, numbers.get(value) if isinstance(value, str) else None)


def _within(value: str | int, network: str) -> bool | None:
    try:
        return ipaddress.ip_address(value) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return None


def _key(made: dict[str, Any]) -> tuple[str, str, str]:
    return made["family"], made["table"], made["name"]


def _place(one: dict[str, Any], name: str) -> tuple[str, str, str]:
    return one["family"], one["table"], one[name]
