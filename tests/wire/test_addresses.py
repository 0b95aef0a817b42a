"""Addresses as people type them, and what the book dials next."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire import limits
from meshwire.addressbook import BACKOFF_MAX_S, BACKOFF_MIN_S, STABLE_LINK_S, AddressBook, Dial, Source
from meshwire.addresses import DEFAULT_PORT, Address, same_host, split_host_port
from meshwire.messages.link import Addresses

OWN, A, B, C = (digit * 64 for digit in "0abc")


def at(text: str) -> Address:
    return Address.parse(text)


def book(*pinned: str) -> AddressBook:
    made = AddressBook(OWN)
    made.set_pinned(pinned, now_s=0.0)
    return made


def due(made: AddressBook) -> Dial:
    dial = made.next_dial()
    assert dial is not None
    return dial


def fail_next(made: AddressBook, now_s: float) -> Dial:
    dial = due(made)
    assert dial.at_s <= now_s
    made.dialling(dial, now_s)
    made.failed(dial, now_s)
    return dial


# Text


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("192.168.1.20", "192.168.1.20", DEFAULT_PORT),
        ("192.168.1.20:5000", "192.168.1.20", 5000),
        ("NAS.local.", "nas.local", DEFAULT_PORT),
        (" laptop-b:1 ", "laptop-b", 1),
        ("[fd00:0:0::2]", "fd00::2", DEFAULT_PORT),
        ("[FE80::1%eth0]:65535", "fe80::1%eth0", 65535),
    ],
)
def test_an_address_is_read_in_every_usual_form_and_prints_so_that_it_reads_back(
    text: str, host: str, port: int
) -> None:
    address = at(text)
    assert (address.host, address.port) == (host, port)
    assert at(str(address)) == address


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no host"),
        (":5000", "no host"),
        ("fd00::2", r"brackets, as in \[fd00::2\]"),
        ("[fd00::2", r"\[ADDRESS\]:PORT"),
        ("[fd00::2]5000", r"\[ADDRESS\]:PORT"),
        ("[192.168.1.2]:5000", "only; write 192.168.1.2:5000"),
        ("[fd00::zz]", "neither an IP address nor a host name"),
        ("[2001:db8::1%\x1b[31m]", "name or number of a network interface"),
        ("[2001:db8::1%" + "x" * 60 + "]", "name or number of a network interface"),  # no resolver takes it
        ("nas:", "number up to 65535"),
        ("nas:65536", "number up to 65535"),
        ("nas:-1", "number up to 65535"),
        ("nas:٣", "number up to 65535"),
        ("nas:0", "port 0"),
        ("192.168.1", "not a complete IPv4 address"),
        ("192.168.1.256", "not a complete IPv4 address"),
        ("http://nas", "number up to 65535"),
        ("my nas", "neither an IP address nor a host name"),
        ("nas..local", "neither an IP address nor a host name"),
        ("a" * 64, "neither an IP address nor a host name"),
    ],
)
def test_a_wrong_address_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        at(text)


def test_port_zero_is_for_listening_only() -> None:
    assert split_host_port("127.0.0.1:0") == ("127.0.0.1", 0)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Address(host="127.0.0.1", port=0)


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        address = at(text)
    except ValueError:
        return
    assert at(str(address)) == address


# What is dialled


def test_only_pinned_devices_are_dialled() -> None:
    """DESIGN 10: an unpaired device may be known, and is not dialled until it is paired."""
    made = book()
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    assert made.unpinned() == (A,)
    assert made.next_dial() is None
    made.set_pinned([A], 1.0)
    assert made.next_dial() == Dial(A, at("10.0.0.1"), 0.0)
    made.set_pinned([], 2.0)
    assert made.next_dial() is None


def test_neither_this_device_nor_its_addresses_are_ever_dialled() -> None:
    made = book(A, OWN)
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    made.set_own_addresses([at("10.0.0.1"), at("10.0.0.9")])
    made.configure(at("10.0.0.9"), 0.0)
    assert not made.learn(OWN, at("10.0.0.3"), Source.MDNS, 0.0)
    assert not made.learn(A, at("10.0.0.9"), Source.GOSSIP, 0.0)
    assert made.next_dial() is None


def test_a_configured_name_that_leads_back_here_is_dialled_once() -> None:
    made = book(A)
    made.configure(at("localhost"), 0.0)
    made.dialling(due(made), 0.0)
    made.connected(OWN, 0.1, dialled=at("localhost"))
    assert made.next_dial() is None
    assert not made.learn(A, at("localhost"), Source.GOSSIP, 0.2)


@pytest.mark.parametrize("host", ["0.0.0.0", "224.0.0.1", "::", "ff02::1", "fe80::1"])
def test_addresses_that_nobody_can_have_are_not_learned(host: str) -> None:
    assert not book(A).learn(A, Address(host=host, port=1), Source.MDNS, 0.0)


def test_back_off_doubles_from_a_quarter_of_a_second_to_thirty() -> None:
    made = book(A)
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    now_s, waits_s = 0.0, []
    for _ in range(9):
        fail_next(made, now_s)
        waits_s.append(due(made).at_s - now_s)
        now_s = due(made).at_s
    assert waits_s == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_all_candidates_are_tried_before_the_back_off_grows() -> None:
    made = book(A)
    hosts = [f"10.0.0.{i}" for i in range(1, 5)]
    for host in hosts:
        made.learn(A, at(host), Source.MDNS, 0.0)
    assert {fail_next(made, 0.0).address.host for _ in hosts} == set(hosts)
    assert due(made).at_s == BACKOFF_MIN_S


def test_a_pass_ends_when_its_untried_candidate_is_withdrawn() -> None:
    made = book(A)
    made.learn(A, at("10.0.0.1"), Source.REMEMBERED, 0.0)
    made.learn(A, at("10.0.0.2"), Source.MDNS, 0.0)
    made.learn(A, at("10.0.0.3"), Source.GOSSIP, 0.0)
    fail_next(made, 0.0)
    fail_next(made, 0.0)
    made.withdraw(A, Source.GOSSIP)
    assert due(made).address == at("10.0.0.2")


def test_a_new_sighting_resets_the_back_off_but_not_the_spacing() -> None:
    """A flood of sightings must not become a flood of dials."""
    made = book(A)
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    now_s = 0.0
    for _ in range(8):
        fail_next(made, now_s)
        now_s = due(made).at_s
    fail_next(made, now_s)
    assert due(made).at_s == now_s + BACKOFF_MAX_S
    made.learn(A, at("10.0.0.1"), Source.MDNS, now_s + 0.01)
    assert due(made).at_s == now_s + BACKOFF_MIN_S
    made.learn(A, at("10.0.0.1"), Source.GOSSIP, now_s + 0.02)
    assert due(made).at_s == now_s + BACKOFF_MIN_S


def test_known_gossip_does_not_reset_the_back_off() -> None:
    made = book(A)
    made.learn(A, at("10.0.0.1"), Source.GOSSIP, 0.0)
    fail_next(made, 0.0)
    assert not made.learn(A, at("10.0.0.1"), Source.GOSSIP, 0.1)
    assert due(made).at_s == BACKOFF_MIN_S
    assert made.learn(A, at("10.0.0.2"), Source.GOSSIP, 10.0)
    assert due(made).at_s <= 10.0


def test_what_is_announced_now_comes_before_what_once_worked_and_hearsay_last() -> None:
    made = book(A)
    for last, source in enumerate(reversed(Source), start=1):
        made.learn(A, at(f"10.0.0.{last}"), source, 0.0)
    made.learn(A, at("10.0.0.9"), Source.REMEMBERED, 0.0)
    made.learn(A, at("10.0.0.9"), Source.MDNS, 0.0)
    assert [address.host[-1] for address in made.addresses_of(A)] == ["9", "5", "4", "3", "2", "1"]


def test_linked_devices_and_running_dials_are_left_alone() -> None:
    made = book(A, B)
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    made.learn(B, at("10.0.0.2"), Source.MDNS, 0.0)
    made.connected(A, 0.0)
    dial = due(made)
    assert dial.device == B
    made.dialling(dial, 0.0)
    assert made.next_dial() is None


def test_a_lost_link_is_dialled_at_once_and_a_link_that_keeps_breaking_ever_later() -> None:
    made = book(A)
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    made.connected(A, 0.0)
    made.disconnected(A, STABLE_LINK_S)
    assert due(made).at_s == STABLE_LINK_S + BACKOFF_MIN_S
    made.connected(A, 100.0)
    made.disconnected(A, 100.0)
    made.connected(A, 101.0)
    made.disconnected(A, 101.0)
    assert due(made).at_s == 101.0 + 4 * BACKOFF_MIN_S


def test_a_configured_address_is_dialled_without_a_name_until_the_handshake_gives_one() -> None:
    made = book(A)
    made.configure(at("nas.local"), 0.0)
    dial = due(made)
    assert dial == Dial(None, at("nas.local"), 0.0)
    made.dialling(dial, 0.0)
    made.connected(A, 0.1, dialled=dial.address)
    assert made.next_dial() is None
    assert made.remembered(A) == (at("nas.local"),)
    made.disconnected(A, 60.0)
    assert due(made).device == A
    made.set_pinned([], 61.0)
    assert due(made).device is None


def test_an_address_belongs_to_whoever_showed_the_key_there() -> None:
    """Identity by key and never by address: a lease that moved on is not dialled for its former holder."""
    made = book(A, B)
    made.learn(A, at("10.0.0.1"), Source.REMEMBERED, 0.0)
    made.connected(B, 1.0, dialled=at("10.0.0.1"))
    assert made.addresses_of(A) == ()
    assert made.addresses_of(B) == (at("10.0.0.1"),)


def test_a_goodbye_withdraws_what_was_announced_and_keeps_what_worked() -> None:
    made = book(A)
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    made.connected(A, 1.0, dialled=at("10.0.0.1"))
    made.disconnected(A, 2.0)
    made.learn(A, at("10.0.0.2"), Source.MDNS, 3.0)
    made.withdraw(A, Source.MDNS)
    assert made.addresses_of(A) == (at("10.0.0.1"),)
    made.learn(B, at("10.0.0.3"), Source.MDNS, 4.0)
    made.withdraw(B, Source.MDNS)
    assert made.unpinned() == ()


# Gossip


def test_gossip_names_other_paired_devices_by_first_hand_addresses_only() -> None:
    made = book(A, B, C)
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    made.learn(B, at("10.0.0.2"), Source.OBSERVED, 0.0)
    made.learn(C, at("10.0.0.3"), Source.GOSSIP, 0.0)
    made.learn("d" * 64, at("10.0.0.4"), Source.MDNS, 0.0)
    assert [(entry.device, entry.addresses) for entry in made.gossip_for(A)] == [(B, (at("10.0.0.2"),))]


def test_loopback_addresses_are_told_only_on_this_machine() -> None:
    made = book(A, B)
    made.learn(B, at("127.0.0.1:5000"), Source.MDNS, 0.0)
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    assert made.gossip_for(A) == ()
    made.learn(A, at("127.0.0.1:5001"), Source.MDNS, 0.0)
    assert made.gossip_for(A)[0].addresses == (at("127.0.0.1:5000"),)


def test_the_largest_gossip_fits_into_one_control_message() -> None:
    devices = [f"{i:064x}" for i in range(1, limits.PEERS_MAX + 1)]
    made = book(*devices)
    host = ".".join(["a" * 60] * 4)
    for device in devices:
        for i in range(limits.ADDRESSES_PER_PEER_MAX):
            made.learn(device, Address(host=f"{host}{i:x}", port=65535), Source.OBSERVED, 0.0)
    gossip = made.gossip_for(A)
    assert len(gossip) == limits.PEERS_MAX
    assert len(Addresses(peers=gossip).pack()) < limits.CONTROL_BYTES_MAX


# Bounds


def test_candidates_of_a_device_are_bounded_and_what_worked_survives_a_flood() -> None:
    made = book(A)
    made.connected(A, 0.0, dialled=at("10.0.0.1"))
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    for i in range(200):
        made.learn(A, at(f"10.1.0.{i}"), Source.MDNS, float(i))
    assert len(made.addresses_of(A)) == limits.ADDRESSES_PER_PEER_MAX
    assert made.addresses_of(A)[0] == at("10.0.0.1")


def test_strangers_are_bounded_and_never_displace_a_paired_device() -> None:
    made = book(A)
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    for i in range(limits.DEVICES_SEEN_MAX + 50):
        made.learn(f"{i + 1000:064x}", at("10.0.0.2"), Source.MDNS, 1.0)
    assert len(made.unpinned()) == limits.DEVICES_SEEN_MAX
    assert due(made).device == A


def test_configured_addresses_are_bounded() -> None:
    made = book()
    for i in range(limits.PEERS_MAX):
        made.configure(at(f"10.0.{i // 250}.{i % 250}"), 0.0)
    made.configure(at("10.0.0.0"), 0.0)
    with pytest.raises(ValueError, match="at most"):
        made.configure(at("10.9.9.9"), 0.0)


ADDRESSES = [at(f"10.0.0.{i}") for i in range(4)]
DEVICES = [OWN, A, B, C]
EVENT = st.one_of(
    st.tuples(st.just("learn"), st.sampled_from(DEVICES), st.sampled_from(ADDRESSES), st.sampled_from(Source)),
    st.tuples(st.just("withdraw"), st.sampled_from(DEVICES), st.sampled_from(Source)),
    st.tuples(st.just("pin"), st.sets(st.sampled_from(DEVICES[1:]))),
    st.tuples(st.just("own"), st.sets(st.sampled_from(ADDRESSES), max_size=1)),
    st.tuples(st.just("configure"), st.sampled_from(ADDRESSES)),
    st.tuples(st.just("dial"), st.sampled_from([None, *DEVICES])),
    st.tuples(st.just("inbound"), st.sampled_from(DEVICES[1:])),
    st.tuples(st.just("lost"), st.sampled_from(DEVICES)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENT, max_size=40))
def test_whatever_happens_no_linked_unpaired_or_own_target_is_dialled(events: list[tuple[Any, ...]]) -> None:
    """The schedule's invariants after every event, dials ending in failure or at any device."""
    made, now_s = AddressBook(OWN), 0.0
    pinned: set[str] = set()
    linked: set[str] = set()
    own: set[Address] = set()
    for name, *args in events:
        now_s += 0.1
        if name == "learn":
            made.learn(args[0], args[1], args[2], now_s)
        elif name == "withdraw":
            made.withdraw(*args)
        elif name == "pin":
            (pinned,) = args
            for device in linked - pinned:
                made.disconnected(device, now_s)
            linked &= pinned
            made.set_pinned(pinned, now_s)
        elif name == "own":
            (own,) = args
            made.set_own_addresses(own)
        elif name == "configure":
            made.configure(args[0], now_s)
        elif name == "dial" and (dial := made.next_dial()) is not None:
            now_s = max(now_s, dial.at_s)
            made.dialling(dial, now_s)
            assert made.next_dial() != dial
            (answered,) = args
            if answered in pinned or answered == OWN:
                made.connected(answered, now_s, dial.address)
                linked |= {answered} - {OWN}
            if answered != dial.device:
                made.failed(dial, now_s)
        elif name == "inbound" and args[0] in pinned:
            made.connected(args[0], now_s)
            linked.add(args[0])
        elif name == "lost":
            made.disconnected(args[0], now_s)
            linked.discard(args[0])
        following = made.next_dial()
        if following is not None:
            assert following.device is None or following.device in pinned - linked
            assert following.address not in own
            assert following.at_s <= now_s + BACKOFF_MAX_S


def test_both_ends_of_a_connection_on_one_machine() -> None:
    """M3: learners there share its cores."""
    assert same_host("192.168.1.20", "192.168.1.20")
    assert same_host("127.0.0.1", "127.64.3.1")
    assert same_host("::1", "::1")
    assert not same_host("192.168.1.20", "192.168.1.21")
    assert not same_host("fe80::1%eth0", "fe80::2%eth0")
