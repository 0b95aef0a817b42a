"""This machine's firewall: what its rules do with other laptops' first packets. Read, never changed."""

import ipaddress
import re
from pathlib import Path

from meshtrain.doctor.facts import Adapter, Block, Firewall, Unknown
from meshtrain.doctor.ruleset import FirstPacket, dropped_by
from meshtrain.doctor.tools import AskTool

MDNS_GROUP, MDNS_PORT = "224.0.0.251", 5353
UFW_CONFIG = Path("/etc/ufw/ufw.conf")  # everybody may read it
UFW_TABLES = frozenset({"ip filter", "ip6 filter"})
FIREWALLD_TABLES = frozenset({"inet firewalld", "ip firewalld", "ip6 firewalld"})


def firewall_blocks(
    ask: AskTool, adapter: Adapter, port: int, other: str, ufw_config: Path = UFW_CONFIG
) -> tuple[tuple[Block, ...], tuple[Unknown, ...]]:
    """What keeps others out, and what could not be read.

    Args:
        adapter: the interface by which others come.
        port: where the daemon listens.
        other: the address of another laptop there, or one that it might have.
    """
    blocks: list[Block] = []
    unknown: list[Unknown] = []
    skipped: frozenset[str] = frozenset()
    own = str(ipaddress.ip_interface(adapter.networks[0]).ip)
    said = ask("ufw", "status", "verbose")
    if said.needs_root and _enabled(ufw_config):
        unknown.append(Unknown("ufw's rules", "only root may see them", "sudo ufw status verbose"))
    if said.text is not None and ufw_is_active(said.text):
        skipped |= UFW_TABLES
        if not ufw_lets_in(said.text, port, adapter.name, other):
            blocks.append(Block(Firewall.UFW, f"{port}/tcp"))
    if (ask("firewall-cmd", "--state").text or "").strip() == "running":
        skipped |= FIREWALLD_TABLES
        zone = (ask("firewall-cmd", f"--get-zone-of-interface={adapter.name}").text or "").strip()
        zone = zone or (ask("firewall-cmd", "--get-default-zone").text or "").strip()
        listed = ask("firewall-cmd", f"--zone={zone}", "--list-all")
        if listed.text is None:
            command = f"sudo firewall-cmd --zone={zone} --list-all"
            unknown.append(Unknown("firewalld's rules", listed.problem or "unknown", command))
        else:
            closed = firewalld_closes(listed.text, port)
            blocks += [Block(Firewall.FIREWALLD, one, zone=zone) for one in closed]
    said = ask("nft", "-j", "list", "ruleset")
    if said.needs_root:
        unknown.append(Unknown("nftables' rules", "only root may see them", "sudo nft list ruleset"))
    if said.text is not None:
        for first in (
            FirstPacket(adapter.name, other, own, "tcp", port),
            FirstPacket(adapter.name, own, other, "tcp", port, outward=True),
            FirstPacket(adapter.name, other, MDNS_GROUP, "udp", MDNS_PORT, multicast=True),
            FirstPacket(adapter.name, own, MDNS_GROUP, "udp", MDNS_PORT, multicast=True, outward=True),
        ):
            name = f"{first.port}/{first.protocol}"
            blocks += [
                Block(Firewall.NFTABLES, name, place=one.place, outward=first.outward)
                for one in dropped_by(said.text, first, skipped)
            ]
    return tuple(blocks), tuple(unknown)


def ufw_is_active(text: str) -> bool:
    """Of `ufw status verbose`."""
    return re.search(r"^Status: active$", text, re.MULTILINE) is not None


def ufw_lets_in(text: str, port: int, interface: str, other: str) -> bool:
    """Of `ufw status verbose`: whether a connection from `other` is let in. The first rule that fits decides."""
    for line in text.splitlines():
        rule = re.fullmatch(r"(\S.*?)\s{2,}(ALLOW|LIMIT|DENY|REJECT)(?: IN)?\s{2,}(\S.*?)\s*(?:#.*)?", line)
        if rule is None:
            continue
        to, action, source = rule.groups()
        if _ufw_to_fits(to, port, interface) and _ufw_source_fits(source, other):
            return action in ("ALLOW", "LIMIT")
    default = re.search(r"^Default: (\w+) \(incoming\)", text, re.MULTILINE)
    return default is None or default[1] == "allow"


def _ufw_to_fits(to: str, port: int, interface: str) -> bool:
    where, _, on = to.partition(" on ")
    if on and on.strip() != interface:
        return False
    words = where.split()
    ports = words[-1] if words else ""
    if ports == "Anywhere" or (re.fullmatch(r"[\d.]+(/\d+)?", ports) and "." in ports):
        return True  # any port of this machine
    numbers, _, protocol = ports.partition("/")
    if protocol not in ("", "tcp"):
        return False
    return any(_in_range(one, port, ":") for one in numbers.split(","))


def _ufw_source_fits(source: str, other: str) -> bool:
    if source.startswith("Anywhere"):
        return True
    try:
        return ipaddress.ip_address(other) in ipaddress.ip_network(source.split()[0], strict=False)
    except ValueError:
        return False


def firewalld_closes(text: str, port: int) -> tuple[str, ...]:
    """Of `firewall-cmd --zone=Z --list-all`: which of the two ports are closed."""
    if _of(text, "target") == "ACCEPT":
        return ()
    services, ports = _of(text, "services").split(), _of(text, "ports").split()

    def opened(number: int, protocol: str) -> bool:
        pairs = (one.partition("/") for one in ports)
        return any(kind == protocol and _in_range(numbers, number, "-") for numbers, _, kind in pairs)

    closed = [] if opened(port, "tcp") or "meshtrain" in services else [f"{port}/tcp"]
    if not (opened(MDNS_PORT, "udp") or "mdns" in services):
        closed.append(f"{MDNS_PORT}/udp")
    return tuple(closed)


def _of(text: str, key: str) -> str:
    found = re.search(rf"^\s*{key}:[ \t]*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _in_range(text: str, port: int, dash: str) -> bool:
    first, _, last = text.partition(dash)
    return first.isdigit() and (last or first).isdigit() and int(first) <= port <= int(last or first)


def _enabled(config: Path) -> bool:
    try:
        return re.search(r"^ENABLED=yes", config.read_text("utf-8"), re.MULTILINE) is not None
    except OSError:  # there is no ufw
        return False
