"""What keeps laptops from meeting on their network: rules from facts to findings, each a function of its own."""

import ipaddress

from meshtrain.doctor.facts import Block, Facts, Firewall, Hearing, OtherLaptop, Reach
from meshtrain.doctor.finding import Fault, Finding
from meshwire.addresses import DEFAULT_PORT

MDNS = "5353/udp"
ALONE = ("127.", "localhost", "::1")


def multicast_blocked(facts: Facts) -> list[Finding]:
    """Questions to all reach nobody: they are kept here, or by the network."""
    why = "Laptops that are not paired cannot find each other, and paired ones do not hear that one has moved."
    found = []
    for interface, hearing in facts.hearing.items():
        if hearing is Hearing.TAKEN:
            what = f"Another program of this laptop holds {MDNS} alone."
            found.append(
                Finding(Fault.MULTICAST, what, why, "sudo ss -ulpn sport = :5353    # names it, to be stopped")
            )
        elif hearing is not Hearing.WELL:
            block = next((one for one in facts.blocks if one.port == MDNS), None)
            by = f", {_by(block)}" if block is not None else ""
            what = f"This laptop's own multicast does not pass on {interface} ({MDNS}{by})."
            mend = _opening(block) if block is not None else _by_address(facts)
            found.append(Finding(Fault.MULTICAST, what, why, mend))
    deaf = [one for one in facts.laptops if facts.next_door(one) and one.answered and not one.heard]
    deaf = [one for one in deaf if facts.hearing.get(one.interface or "") is Hearing.WELL]
    if deaf:
        what = f"{_names(deaf)} answers when asked alone, but not when all are asked: the network drops multicast."
        found.append(Finding(Fault.MULTICAST, what, why, _by_address(facts, deaf[0])))
    return found


def _by_address(facts: Facts, laptop: OtherLaptop | None = None) -> str:
    """How two laptops meet without multicast."""
    laptop = laptop or next(facts.apart(), None)
    where = "HOST" if laptop is None or not laptop.address else _place(laptop)
    if laptop is not None and laptop.state in ("paired", "linked"):
        return f"meshtrain down && meshtrain up --peer {where}"
    return f"meshtrain pair CODE --at {where}"


def kept_apart(facts: Facts) -> list[Finding]:
    """A laptop is in the same network, and no frame reaches it, though frames reach the gateway."""
    gateway = facts.lan_way.gateway_answers if facts.lan_way is not None else None
    return [
        Finding(
            Fault.ISOLATION,
            f"Nothing that this laptop sends reaches {_named(one)}, which is in the same network"
            f"{'' if one.heard else ' (if it is on)'}, while the router answers.",
            "This WiFi keeps laptops apart (client isolation, a guest network): turn that off in the router, or let "
            "them meet on another network, say a hotspot of one of them.",
            "nmcli device wifi hotspot",
        )
        for one in facts.apart()
        if gateway and one.there and facts.next_door(one) and not facts.is_tunnel(one.interface)
        if one.reach in (Reach.SILENT, Reach.UNREACHABLE) and (one.hardware_known is False or one.heard)
        if not (one.answered or one.hardware_known)
    ]


def other_network(facts: Facts) -> list[Finding]:
    """The address that a person names is a private one, of a network in which this machine is not."""
    own = [network for one in facts.adapters if one.name in facts.in_use for network in one.networks]
    return [
        Finding(
            Fault.OTHER_NETWORK,
            f"{one.address} is in another network than this laptop ({' and '.join(own) or 'none'}): no answer.",
            "A guest network, or a second router, lets laptops meet only within it: bring both into the same one.",
            "nmcli device wifi connect NAME",
        )
        for one in facts.apart()
        if one.said_on and not facts.next_door(one) and not facts.is_tunnel(one.interface)
        if one.reach not in (Reach.OPEN, Reach.REFUSED) and ipaddress.ip_address(one.address).is_private
    ]


def firewall_here(facts: Facts) -> list[Finding]:
    """This machine's rules keep others out of the daemon's port, or it in."""
    found = []
    for block in facts.blocks:
        if block.port == MDNS:
            continue  # heard, and told by multicast_blocked, where it matters
        what, why = "lets nobody in on", "No other laptop can connect to this one, for links or for pairing."
        if block.outward:
            what, why = "lets nothing out to", "This laptop can connect to no other."
        found.append(
            Finding(
                Fault.FIREWALL, f"The firewall of this laptop {what} {block.port} ({_by(block)}).", why, _opening(block)
            )
        )
    if not found:
        found += [
            Finding(
                Fault.FIREWALL,
                f"A firewall of this laptop forbids it to connect to {one.name} ({_place(one)}).",
                "This laptop can connect to no other.",
                "sudo nft list ruleset    # names the rule",
            )
            for one in facts.apart()
            if one.reach is Reach.FORBIDDEN
        ][:1]
    return found


def _by(block: Block) -> str:
    if block.firewall is Firewall.FIREWALLD:
        return f"firewalld, zone {block.zone}"
    return f"nftables, chain {block.place}" if block.place is not None else str(block.firewall)


def _opening(block: Block) -> str:
    """The command that lets others in."""
    number, _, protocol = block.port.partition("/")
    if block.firewall is Firewall.UFW:
        return f"sudo ufw allow {block.port}"
    if block.firewall is Firewall.FIREWALLD:
        what = "--add-service=mdns" if block.port == MDNS else f"--add-port={block.port}"
        return f"sudo firewall-cmd --zone={block.zone} {what} && sudo firewall-cmd --runtime-to-permanent"
    keep = "    # in /etc/nftables.conf, too, to keep it"
    return f"sudo nft insert rule {block.place} {protocol} dport {number} accept{keep}"


def firewall_there(facts: Facts) -> list[Finding]:
    """A laptop is there and lets nobody in."""
    return [
        Finding(
            Fault.FIREWALL_THERE,
            f"{one.name} is there, and lets nobody in on {one.port}/tcp.",
            "This laptop cannot connect to it: most likely its own firewall drops that.",
            "meshtrain doctor    # there, it names the rule",
            where=one.name,
        )
        for one in facts.apart()
        if one.reach in (Reach.SILENT, Reach.UNREACHABLE) and (one.hardware_known or one.answered)
        if not facts.is_tunnel(one.interface)
    ]


def nobody_there(facts: Facts) -> list[Finding]:
    """A machine answers at the address that was named, and no daemon."""
    return [
        Finding(
            Fault.NOBODY_THERE,
            f"At {_place(one)} a machine answers, and no daemon listens (or its firewall says so).",
            "Without a daemon it can neither pair nor train.",
            "meshtrain up",
            where=one.name,
        )
        for one in facts.apart()
        if one.there and one.reach is Reach.REFUSED
    ]


def wrong_interface(facts: Facts) -> list[Finding]:
    """The daemon is to be found on other interfaces than the one that leads to the others."""
    daemon, lan = facts.daemon, facts.lan_way
    if not daemon.running or daemon.interfaces is None or any(one.state == "linked" for one in facts.laptops):
        return []
    why = "Laptops on the other network neither see it nor reach it."
    if daemon.host is not None and daemon.host.startswith(ALONE):
        return [
            Finding(
                Fault.INTERFACE,
                f"The daemon listens on {daemon.host} alone, where only this laptop reaches it.",
                "No other laptop can connect to this one, for links or for pairing.",
                f"meshtrain down && meshtrain up --listen 0.0.0.0:{daemon.port or DEFAULT_PORT}",
            )
        ]
    if lan is None or lan.interface in daemon.interfaces or facts.adapter(lan.interface) is None:
        return []
    if facts.hearing.get(lan.interface) is Hearing.TAKEN:
        return []  # it announces nothing anywhere, and that is told
    on = " and ".join(daemon.interfaces) or "no interface"
    return [
        Finding(
            Fault.INTERFACE,
            f"The daemon is announced on {on}, while this laptop's network is on {lan.interface}.",
            why,
            f"meshtrain down && meshtrain up --interface {lan.interface}",
        )
    ]


def vpn_in_the_way(facts: Facts) -> list[Finding]:
    """A VPN takes what is meant for other laptops, or all that leaves while no other laptop is met. Beside one that
    leaves the local network alone laptops meet, and nothing is said."""
    tunnels: dict[str, str] = {}
    for one in facts.apart():
        taken = one.interface is not None and facts.is_tunnel(one.interface) and one.reach is not Reach.OPEN
        if taken and one.interface is not None and (one.there or facts.next_door(one)):
            tunnels.setdefault(one.interface, f"what is sent to {_named(one)}")
    way = facts.way_out
    if way is not None and facts.is_tunnel(way.interface) and not any(one.met for one in facts.laptops):
        tunnels.setdefault(way.interface, "all that leaves this laptop")
    return [
        Finding(
            Fault.VPN,
            f"The VPN on {interface} takes {what}.",
            "Other laptops at home are not behind it, and many VPNs forbid everything else: end it while laptops meet, "
            "or let it leave the local network alone.",
            _ending(interface),
        )
        for interface, what in tunnels.items()
    ]


def _ending(interface: str) -> str:
    if interface.startswith("tailscale"):
        return "sudo tailscale down"
    if interface.startswith("wg"):
        return f"sudo wg-quick down {interface}"
    return f"sudo ip link set {interface} down"


def _place(laptop: OtherLaptop) -> str:
    return laptop.address if laptop.port == DEFAULT_PORT else f"{laptop.address}:{laptop.port}"


def _named(laptop: OtherLaptop) -> str:
    return laptop.address if laptop.name == laptop.address else f"{laptop.name} ({laptop.address})"


def _names(laptops: list[OtherLaptop]) -> str:
    return " and ".join(dict.fromkeys(one.name for one in laptops))
