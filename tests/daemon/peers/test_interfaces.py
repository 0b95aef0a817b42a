"""Which interfaces a daemon announces itself on."""

from collections import namedtuple

import psutil
import pytest

from meshtraind.peers import interfaces
from meshtraind.peers.interfaces import (
    Interface,
    InterfaceError,
    likely_addresses,
    reachable_addresses,
    usable_interfaces,
)

State = namedtuple("State", "isup")
Entry = namedtuple("Entry", "address")

MACHINE = {
    "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
    "wlan0": ["192.168.1.20", "fd00::20", "fe80::20%wlan0", "02:00:00:00:00:01"],
    "br0": ["10.7.0.1"],
    "awdl0": ["fe80::3%awdl0"],
    "docker0": ["172.17.0.1"],
    "br-0a1b2c3d": ["172.18.0.1"],
    "veth12": ["172.19.0.2"],
    "virbr0": ["192.168.122.1"],
    "cni0": ["10.42.0.1"],
    "flannel.1": ["10.42.0.0"],
    "tun0": ["10.8.0.2"],
    "tap0": ["10.8.1.2"],
    "utun3": ["10.9.0.2"],
    "wg0": ["10.10.0.2"],
    "tailscale0": ["100.64.0.1"],
    "ppp0": ["10.64.0.2"],
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What psutil says about a laptop that has everything on it, and an ethernet port without a cable."""
    addresses = {name: [Entry(a) for a in texts] for name, texts in MACHINE.items()}
    addresses["eth0"] = [Entry("10.0.0.5")]
    states = {name: State(isup=name != "eth0") for name in addresses}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)


@pytest.mark.usefixtures("machine")
def test_loopback_containers_and_tunnels_are_skipped() -> None:
    """A daemon that announces docker0's address cannot be reached there by anybody."""
    assert usable_interfaces() == (
        Interface("br0", ("10.7.0.1",)),
        Interface("wlan0", ("192.168.1.20", "fd00::20")),
    )


@pytest.mark.usefixtures("machine")
def test_a_named_interface_is_used_whatever_it_is_and_no_other() -> None:
    assert usable_interfaces(["tailscale0", "lo", "lo"]) == (
        Interface("tailscale0", ("100.64.0.1",)),
        Interface("lo", ("127.0.0.1", "::1")),
    )


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", ["eth9", "eth0", "awdl0"])
def test_an_unknown_or_dead_interface_is_refused_and_the_usable_ones_are_named(name: str) -> None:
    with pytest.raises(InterfaceError, match=rf"no interface '{name}'.*wlan0 \(192\.168\.1\.20\)"):
        usable_interfaces(["wlan0", name])


def test_this_machine_has_a_loopback_interface() -> None:
    loopback = [i for name in psutil.net_if_addrs() if name.startswith("lo") for i in usable_interfaces([name])]
    assert any("127.0.0.1" in interface.addresses for interface in loopback)


def test_only_addresses_that_the_listener_is_bound_to_are_announced() -> None:
    two = [Interface("a", ("10.0.0.1", "fd00::1")), Interface("b", ("10.0.0.2",))]
    assert reachable_addresses(two, "::") == ("10.0.0.1", "fd00::1", "10.0.0.2")
    assert reachable_addresses(two, "0.0.0.0") == ("10.0.0.1", "10.0.0.2")
    assert reachable_addresses(two, "fd00:0::1") == ("fd00::1",)
    assert reachable_addresses(two, "127.0.0.1") == ()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("present", "named", "listen_host", "on_route", "shown"),
    [
        (None, [], "0.0.0.0", "192.168.1.20", ("192.168.1.20", "10.7.0.1")),
        (None, [], "::", "192.168.1.20", ("192.168.1.20", "10.7.0.1")),
        (None, [], "0.0.0.0", "10.8.0.2", ("10.7.0.1", "192.168.1.20")),  # the route is a VPN's
        (None, [], "0.0.0.0", None, ("10.7.0.1", "192.168.1.20")),
        (None, ["wg0"], "0.0.0.0", "192.168.1.20", ("10.10.0.2",)),
        (None, [], "192.168.1.20", None, ("192.168.1.20",)),
        (None, [], "127.0.0.1", "192.168.1.20", ("127.0.0.1",)),
        (["lo", "veth12"], [], "0.0.0.0", None, ("172.19.0.2",)),  # a machine that is a container itself
        (["lo"], [], "0.0.0.0", None, ("127.0.0.1",)),
        ([], [], "0.0.0.0", None, ("0.0.0.0",)),
    ],
)
def test_addresses_for_people_are_such_that_others_can_reach(
    monkeypatch: pytest.MonkeyPatch,
    present: list[str] | None,
    named: list[str],
    listen_host: str,
    on_route: str | None,
    shown: tuple[str, ...],
) -> None:
    """Also where there is no default route; containers' and loopback only where there is nothing better."""
    if present is not None:
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: {n: [Entry(a) for a in MACHINE[n]] for n in present})
    monkeypatch.setattr(interfaces, "_address_on_default_route", lambda: on_route)
    assert likely_addresses(named, listen_host) == shown
