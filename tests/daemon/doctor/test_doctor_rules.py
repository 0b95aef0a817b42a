"""Each rule of the doctor, from facts: what it names, with which command, and when it says nothing."""

from dataclasses import replace

import pytest

from meshtrain.doctor.diagnosis import RULES, diagnose
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
    WayOut,
)
from meshtrain.doctor.finding import Fault, Finding
from meshtrain.doctor.machine_rules import EARLIEST_S
from meshwire.frames.header import WIRE_VERSION

WIFI = Adapter("wlan0", AdapterKind.WIFI, ("192.168.1.5/24",))
TUNNEL = Adapter("tun0", AdapterKind.TUNNEL, ("10.8.0.2/24",))
ROUTER = WayOut("wlan0", "192.168.1.1", True)
BERT = OtherLaptop("bert", "192.168.1.20", interface="wlan0", reach=Reach.OPEN, hardware_known=True, state="linked")
# Of a laptop that has nothing wrong: it is awake, on 5 GHz, linked, and beside a VPN that is not in the way.
HEALTHY = Facts(
    now_s=EARLIEST_S + 86_400,
    adapters=(Adapter("lo", AdapterKind.LOOPBACK, ("127.0.0.1/8",)), WIFI, TUNNEL),
    way_out=ROUTER,
    lan_way=ROUTER,
    hearing={"wlan0": Hearing.WELL},
    radios=(Radio("wlan0", False, -48.0, 5180.0, 0.1),),
    daemon=Daemon(running=True, host="0.0.0.0", port=29610, interfaces=("wlan0",), ahead_s=0.4),
    laptops=(replace(BERT, heard=True, answered=True, wire_version=WIRE_VERSION),),
)
ALONE = replace(HEALTHY, daemon=Daemon(), laptops=())


def with_bert(**changes: object) -> Facts:
    """Bert is not linked, and this is known of it."""
    return replace(HEALTHY, laptops=(replace(BERT, **({"state": "paired"} | changes)),))  # type: ignore[arg-type]


def only(facts: Facts) -> Finding:
    (found,) = diagnose(facts)
    return found


STAGED: dict[Fault, tuple[Facts, str, str]] = {
    Fault.MULTICAST: (
        with_bert(answered=True),
        "bert answers when asked alone, but not when all are asked",
        "meshtrain down && meshtrain up --peer 192.168.1.20",
    ),
    Fault.ISOLATION: (
        with_bert(reach=Reach.SILENT, hardware_known=False, heard=True),
        "Nothing that this laptop sends reaches bert (192.168.1.20)",
        "nmcli device wifi hotspot",
    ),
    Fault.FIREWALL: (
        replace(HEALTHY, blocks=(Block(Firewall.UFW, "29610/tcp"),)),
        "lets nobody in on 29610/tcp (ufw)",
        "sudo ufw allow 29610/tcp",
    ),
    Fault.FIREWALL_THERE: (
        with_bert(reach=Reach.SILENT, hardware_known=True),
        "bert is there, and lets nobody in on 29610/tcp",
        "meshtrain doctor ",
    ),
    Fault.INTERFACE: (
        replace(HEALTHY, laptops=(), daemon=replace(HEALTHY.daemon, interfaces=("eth1",))),
        "announced on eth1, while this laptop's network is on wlan0",
        "meshtrain down && meshtrain up --interface wlan0",
    ),
    Fault.VPN: (
        replace(with_bert(reach=Reach.SILENT, hardware_known=None), way_out=WayOut("tun0")),
        "The VPN on tun0 takes all that leaves this laptop",
        "sudo ip link set tun0 down",
    ),
    Fault.CLOCK: (
        replace(HEALTHY, daemon=replace(HEALTHY.daemon, ahead_s=7200.0)),
        "at least 2 hours behind that of another one",
        "sudo timedatectl set-ntp true",
    ),
    Fault.VERSION: (
        with_bert(wire_version=WIRE_VERSION - 1),
        f"bert speaks wire version {WIRE_VERSION - 1}, this laptop {WIRE_VERSION}",
        "git pull && pip install '.[torch]' && meshtrain down && meshtrain up",
    ),
    Fault.PORT: (
        replace(ALONE, port_taken=PortHolder(29610, "python3 (pid 7)", 29611)),
        "Port 29610/tcp of this laptop is taken by python3 (pid 7)",
        "meshtrain up --listen 0.0.0.0:29611",
    ),
    Fault.SLEEPING_RADIO: (
        replace(HEALTHY, radios=(Radio("wlan0", True, -48.0, 5180.0, 0.1),)),
        "The radio of wlan0 sleeps between beacons",
        "sudo iw dev wlan0 set power_save off",
    ),
    Fault.WEAK_RADIO: (
        replace(HEALTHY, radios=(Radio("wlan0", False, -78.0, 2437.0, 0.1),)),
        "on the 2.4 GHz band (2437 MHz) and received at -78 dBm",
        "nmcli ",
    ),
    Fault.BUSY_AIR: (
        replace(HEALTHY, radios=(Radio("wlan0", False, -48.0, 5180.0, 0.72),)),
        "Others fill 72% of the air of wlan0",
        "sudo iw dev wlan0 scan",
    ),
    Fault.NOBODY_THERE: (
        with_bert(reach=Reach.REFUSED, state="named", said_on=True),
        "At 192.168.1.20 a machine answers, and no daemon listens",
        "meshtrain up",
    ),
    Fault.OTHER_NETWORK: (
        with_bert(address="192.168.7.20", reach=Reach.SILENT, hardware_known=None, state="named", said_on=True),
        "192.168.7.20 is in another network than this laptop (192.168.1.5/24)",
        "nmcli device wifi connect",
    ),
}


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_is_named_with_what_mends_it(fault: Fault) -> None:
    """And no other is: one cause makes one sentence."""
    facts, what, mend = STAGED[fault]
    found = only(facts)
    assert found.fault is fault
    assert what in found.what
    assert found.mend.startswith(mend)
    assert found.what.endswith(".")
    assert found.why.endswith(".")


def test_nothing_is_named_where_nothing_is_wrong() -> None:
    """With a linked laptop, without a daemon, and with one that is not paired yet; by any rule."""
    stranger = replace(BERT, state="heard", heard=True, answered=True)
    for facts in (HEALTHY, ALONE, replace(ALONE, laptops=(stranger,)), Facts(now_s=HEALTHY.now_s)):
        assert not [finding for rule in RULES for finding in rule(facts)]


@pytest.mark.parametrize(
    "away",
    [
        {"reach": Reach.SILENT, "hardware_known": None},
        {"reach": Reach.UNREACHABLE, "hardware_known": False},
        {"reach": Reach.REFUSED, "hardware_known": True},  # its daemon is down, or another has its address now
        {"address": "", "reach": None, "interface": None},
        {"address": "10.3.0.4", "reach": Reach.SILENT, "hardware_known": None},  # where it was yesterday
    ],
)
def test_a_laptop_that_is_away_is_no_fault_of_the_network(away: dict[str, object]) -> None:
    assert not diagnose(with_bert(**away))


def test_a_laptop_is_kept_apart_only_where_the_router_answers() -> None:
    """Else this laptop itself has no network, or it is not known."""
    facts = STAGED[Fault.ISOLATION][0]
    for answers in (False, None):
        assert not diagnose(replace(facts, lan_way=replace(ROUTER, gateway_answers=answers)))
    heard_not = with_bert(reach=Reach.UNREACHABLE, hardware_known=False, state="named", said_on=True)
    assert only(heard_not).fault is Fault.ISOLATION, "who asks says that it is on"
    assert "(if it is on)" in only(heard_not).what


def test_multicast_that_this_laptop_keeps_to_itself() -> None:
    mdns = replace(HEALTHY, hearing={"wlan0": Hearing.DEAF})
    assert only(mdns).mend == "meshtrain pair CODE --at HOST", "nobody is apart: nothing better is known"
    by_nft = replace(mdns, blocks=(Block(Firewall.NFTABLES, "5353/udp", place="inet filter input"),))
    assert only(by_nft).mend.startswith("sudo nft insert rule inet filter input udp dport 5353 accept ")
    by_firewalld = replace(mdns, blocks=(Block(Firewall.FIREWALLD, "5353/udp", zone="public"),))
    assert only(by_firewalld).mend == (
        "sudo firewall-cmd --zone=public --add-service=mdns && sudo firewall-cmd --runtime-to-permanent"
    )
    heard = replace(by_nft, hearing={"wlan0": Hearing.WELL})
    assert not diagnose(heard), "what was heard counts more than what was read"
    assert "holds 5353/udp alone" in only(replace(HEALTHY, hearing={"wlan0": Hearing.TAKEN})).what


def test_a_laptop_that_does_not_speak_multicast_dns_is_no_fault() -> None:
    """It was told --no-mdns, perhaps: only one that answers when asked alone should have answered before."""
    assert not diagnose(replace(HEALTHY, laptops=(replace(BERT, heard=False, answered=False),)))


def test_every_firewall_is_opened_in_its_own_words() -> None:
    blocks = (
        Block(Firewall.FIREWALLD, "29610/tcp", zone="home"),
        Block(Firewall.NFTABLES, "29610/tcp", place="ip filter INPUT"),
        Block(Firewall.NFTABLES, "29610/tcp", place="inet filter out", outward=True),
    )
    found = diagnose(replace(HEALTHY, blocks=blocks))
    assert [one.mend.partition("    #")[0] for one in found] == [
        "sudo firewall-cmd --zone=home --add-port=29610/tcp && sudo firewall-cmd --runtime-to-permanent",
        "sudo nft insert rule ip filter INPUT tcp dport 29610 accept",
        "sudo nft insert rule inet filter out tcp dport 29610 accept",
    ]
    assert "lets nothing out to 29610/tcp" in found[2].what
    forbidden = with_bert(reach=Reach.FORBIDDEN)
    assert only(forbidden).fault is Fault.FIREWALL, "the rule could not be read, and has worked"


def test_a_daemon_that_only_this_laptop_reaches() -> None:
    facts = replace(HEALTHY, laptops=(), daemon=replace(HEALTHY.daemon, host="127.0.0.1", interfaces=()))
    assert only(facts).mend == "meshtrain down && meshtrain up --listen 0.0.0.0:29610"


def test_an_interface_of_ones_own_choice_is_no_fault_where_laptops_are_linked() -> None:
    """A cable between two laptops, while the way out is WiFi."""
    assert not diagnose(replace(HEALTHY, daemon=replace(HEALTHY.daemon, interfaces=("eth1",))))


def test_a_vpn_beside_which_laptops_meet_is_no_fault() -> None:
    """It leaves the local network alone: others are linked, heard or reached, and who is not is away."""
    facts = replace(HEALTHY, way_out=WayOut("tun0"))
    away = replace(BERT, name="carl", state="paired", reach=Reach.UNREACHABLE, hardware_known=False)
    for laptops in (HEALTHY.laptops, (*HEALTHY.laptops, away), (replace(BERT, state="heard", heard=True),)):
        assert not diagnose(replace(facts, laptops=laptops))
    assert only(replace(facts, laptops=())).fault is Fault.VPN, "nobody is paired yet"
    for name, mend in (("wg0", "sudo wg-quick down wg0"), ("tailscale0", "sudo tailscale down")):
        other = replace(facts, adapters=(WIFI, replace(TUNNEL, name=name)), way_out=WayOut(name), laptops=())
        assert only(other).mend == mend


def test_a_vpn_that_leads_to_the_other_laptop_is_no_fault() -> None:
    """A tailnet is a way round isolation; and where a laptop was yesterday may be behind an office's VPN."""
    assert not diagnose(with_bert(address="10.8.0.7", interface="tun0", reach=Reach.OPEN))
    assert not diagnose(with_bert(address="10.9.0.7", interface="tun0", reach=Reach.SILENT, hardware_known=None))
    taken = with_bert(interface="tun0", reach=Reach.SILENT, hardware_known=None, heard=True)
    assert only(taken).what == "The VPN on tun0 takes what is sent to bert (192.168.1.20)."


def test_a_clock_before_this_program_was_made_is_wrong() -> None:
    assert "before this version of meshtrain was made" in only(replace(ALONE, now_s=EARLIEST_S - 1)).what
    expired = with_bert(dial_failed="[SSL] certificate verify failed: certificate has expired (_ssl.c:1006)")
    assert only(expired).fault is Fault.CLOCK
    ahead = replace(HEALTHY, daemon=replace(HEALTHY.daemon, ahead_s=-3 * 86_400.0))
    assert "at least 3 days ahead of" in only(ahead).what


@pytest.mark.parametrize(("refused", "where"), [("bert", "bert"), ("anna", None)])
def test_versions_are_told_of_by_the_daemon_too(refused: str, where: str | None) -> None:
    """Where no announcement says it, the link has; whoever is behind has to be updated."""
    told = f"bert speaks wire version 99, anna {WIRE_VERSION}: update meshtrain on {refused}"
    assert only(with_bert(refused=told)).where == where
    assert only(with_bert(wire_version=WIRE_VERSION + 1)).where is None
    assert "wire version 7" in only(replace(ALONE, daemon=Daemon(running=True, other_version=7))).what


def test_radios_that_lead_to_nobody_may_sleep() -> None:
    cable = WayOut("eth0", "192.168.1.1", True)
    plugged = replace(
        ALONE,
        adapters=(WIFI, Adapter("eth0", AdapterKind.CABLE, ("192.168.1.6/24",))),
        way_out=cable,
        lan_way=cable,
        radios=(Radio("wlan0", True, -85.0, 2437.0, 0.9),),
    )
    assert not diagnose(plugged)


def test_a_weak_signal_on_a_good_band() -> None:
    weak = replace(HEALTHY, radios=(Radio("wlan0", False, -71.0, 5180.0),))
    assert "received at -71 dBm" in only(weak).what
    assert not diagnose(replace(HEALTHY, radios=(Radio("wlan0", None, -70.0, 5180.0, None),)))
