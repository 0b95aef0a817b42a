"""Addresses as people type them, and what the book dials next."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire import limits
from meshwire.addresses import DEFAULT_PORT, Address, same_host, split_host_port
from meshwire.discovery.addressbook import (
    ATTEMPT_DELAY_MIN_S,
    ATTEMPT_DELAY_S,
    BACKOFF_MAX_S,
    BACKOFF_MIN_S,
    STABLE_LINK_S,
    AddressBook,
    Dial,
    Source,
)
from meshwire.messages.link import Addresses

OWN, A, B, C = (digit * 64 for digit in "0abc")


def at(text: str) -> Address:
    return Address.parse(text)


def book(*pinned: str) -> AddressBook:
    made = AddressBook(OWN)
    made.set_pinned(pinned, now_s=0.0)
    return made


def due(made: AddressBook, now_s: float = 0.0) -> Dial:
    dial = made.next_dial(now_s)
    assert dial is not None
    return dial


def fail_next(made: AddressBook, now_s: float) -> Dial:
    dial = due(made)
    assert dial.at_s <= now_s
    made.dialling(dial, now_s)
    made.ended(dial, now_s)
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
    assert made.next_dial(0.0) is None
    made.set_pinned([A], 1.0)
    assert made.next_dial(1.0) == Dial(A, at("10.0.0.1"), 0.0)
    made.set_pinned([], 2.0)
    assert made.next_dial(0.0) is None


def test_neither_this_device_nor_its_addresses_are_ever_dialled() -> None:
    made = book(A, OWN)
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    made.set_own_addresses([at("10.0.0.1"), at("10.0.0.9")])
    made.configure(at("10.0.0.9"), 0.0)
    assert not made.learn(OWN, at("10.0.0.3"), Source.MDNS, 0.0)
    assert not made.learn(A, at("10.0.0.9"), Source.GOSSIP, 0.0)
    assert made.next_dial(0.0) is None


def test_a_configured_name_that_leads_back_here_is_dialled_once() -> None:
    made = book(A)
    made.configure(at("localhost"), 0.0)
    made.dialling(due(made), 0.0)
    made.connected(OWN, 0.1, dialled=at("localhost"))
    made.ended(Dial(None, at("localhost"), 0.0), 0.1)
    assert made.next_dial(0.0) is None
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


def test_candidates_are_dialled_side_by_side_each_a_little_after_the_one_before() -> None:
    """RFC 8305: silent addresses cost a delay each, and not a time-out."""
    made = book(A)
    hosts = [f"10.0.0.{i}" for i in range(1, 5)]
    made.sighted(A, map(at, hosts), 0.0)
    for i, host in enumerate(hosts):
        dial = due(made)
        assert (dial.address.host, dial.at_s) == (host, i * ATTEMPT_DELAY_S)
        made.dialling(dial, dial.at_s)
    assert made.next_dial(5.0) is None, "each is dialled once at a time"


def test_after_a_failure_the_next_candidate_is_dialled_sooner() -> None:
    made = book(A)
    made.sighted(A, [at("10.0.0.1"), at("10.0.0.2")], 0.0)
    fail_next(made, 0.0)
    assert due(made) == Dial(A, at("10.0.0.2"), ATTEMPT_DELAY_MIN_S)


def test_all_candidates_are_dialled_before_one_is_dialled_again() -> None:
    made = book(A)
    hosts = [f"10.0.0.{i}" for i in range(1, 5)]
    made.sighted(A, map(at, hosts), 0.0)
    assert [fail_next(made, i * ATTEMPT_DELAY_S).address.host for i in range(4)] == hosts
    assert due(made).address.host == hosts[0]


def test_silent_addresses_do_not_delay_the_next_try_of_one_that_failed() -> None:
    """A daemon that is being restarted refuses at once: its address is not kept waiting for the time-out of others."""
    made = book(A)
    made.connected(A, 0.0, dialled=at("10.0.0.1"))
    made.disconnected(A, 60.0)
    made.sighted(A, [at("10.9.0.1"), at("10.9.0.2")], 60.0)
    fail_next(made, 60.25)
    for _ in range(2):
        silent = due(made, 60.75)
        made.dialling(silent, silent.at_s)
    again = due(made, 61.0)
    assert again.address == at("10.0.0.1")
    assert again.at_s <= 61.0


DIAL_TIMEOUT_S = 5.0


def reached_s(made: AddressBook, device: str, right: Address, now_s: float) -> float:
    """When the device is linked if its right address answers within 50 ms and all others say nothing."""
    ends: dict[Dial, float] = {}
    while True:
        dial = made.next_dial(now_s)
        at_s = min([math.inf if dial is None else max(dial.at_s, now_s), *ends.values()])
        assert at_s < now_s + 60.0, "nothing happens any more"
        now_s = at_s
        over = [one for one, end_s in ends.items() if end_s <= now_s]
        for one in over:
            if one.device == device and one.address == right:
                made.connected(device, now_s, right)
                return now_s
            made.ended(one, now_s)
            del ends[one]
        if not over and dial is not None and dial.at_s <= now_s:
            made.dialling(dial, now_s)
            answers = dial.device == device and dial.address == right
            ends[dial] = now_s + (0.05 if answers else DIAL_TIMEOUT_S)


@pytest.mark.parametrize("spoofed", [0, 1, 3, 40])
def test_false_announcements_do_not_delay_a_return_to_where_the_device_was(spoofed: int) -> None:
    made, right = book(A), at("10.0.0.1")
    made.connected(A, 0.0, dialled=right)
    for i in range(spoofed):
        made.sighted(A, [at(f"10.{i}.9.{j}") for j in range(limits.ADDRESSES_PER_SIGHTING_MAX)], 1.0 + i)
    made.disconnected(A, 60.0)
    assert reached_s(made, A, right, 60.0) == 60.0 + BACKOFF_MIN_S + 0.05


def test_the_right_address_is_reached_before_any_false_one_has_timed_out() -> None:
    made, right = book(A), at("10.0.0.1")
    made.learn(A, right, Source.GOSSIP, 0.0)
    made.sighted(A, [at(f"10.9.0.{i}") for i in range(limits.ADDRESSES_PER_SIGHTING_MAX)], 0.0)
    assert reached_s(made, A, right, 0.0) <= limits.ADDRESSES_PER_SIGHTING_MAX * ATTEMPT_DELAY_S + 0.05 < DIAL_TIMEOUT_S


def test_absent_devices_with_many_addresses_do_not_keep_another_waiting() -> None:
    """All places are taken by their dials; each that becomes free goes to who has the fewest."""
    absent = [f"{i:064x}" for i in range(1, 21)]
    made, right = book(A, *absent), at("10.0.0.1")
    for number, device in enumerate(absent):
        made.sighted(device, [at(f"10.9.{number}.{i}") for i in range(limits.ADDRESSES_PER_SIGHTING_MAX)], 0.0)
    for _ in range(limits.DIALS_MAX):
        dial = due(made, 2.0)
        assert dial.at_s <= 2.0
        made.dialling(dial, dial.at_s)
    assert made.next_dial(2.0) is None
    made.sighted(A, [right], 2.0)
    made.ended(dial, 5.0)
    assert due(made, 5.0).address == right


def test_dials_of_one_device_are_bounded_even_if_its_addresses_keep_being_replaced() -> None:
    made = book(A)
    now_s = 0.0
    for i in range(3 * limits.DIALS_PER_DEVICE_MAX):
        made.sighted(A, [at(f"10.9.0.{i}")], now_s)
        dial = made.next_dial(now_s)
        if i >= limits.DIALS_PER_DEVICE_MAX:
            assert dial is None
        else:
            assert dial is not None
            assert now_s <= dial.at_s <= now_s + ATTEMPT_DELAY_S, "and so is their rate"
            made.dialling(dial, now_s := dial.at_s)


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


def test_where_it_worked_last_comes_before_what_anybody_may_announce_and_hearsay_last() -> None:
    made = book(A)
    for last, source in enumerate(reversed(Source), start=1):
        made.learn(A, at(f"10.0.0.{last}"), source, 0.0)
    made.learn(A, at("10.0.0.8"), Source.REMEMBERED, 2.0)
    made.learn(A, at("10.0.0.9"), Source.REMEMBERED, 1.0)
    made.learn(A, at("10.0.0.9"), Source.MDNS, 1.0)
    assert [address.host[-1] for address in made.addresses_of(A)] == ["9", "8", "5", "4", "3", "2", "1"]


def test_addresses_of_former_networks_do_not_come_before_those_of_this_one() -> None:
    """A laptop that has been everywhere: but for the last one, where it once was does not delay what is announced."""
    made = book(A)
    for i in range(10):
        made.learn(A, at(f"10.{i}.0.1"), Source.REMEMBERED, float(i))
    made.sighted(A, [at("192.168.1.2")], 20.0)
    assert made.addresses_of(A)[:3] == (at("10.9.0.1"), at("192.168.1.2"), at("10.8.0.1"))


def test_what_is_announced_replaces_what_was_announced_before() -> None:
    made = book(A)
    made.connected(A, 0.0, dialled=at("10.0.0.1"))
    made.learn(A, at("10.0.0.2"), Source.OBSERVED, 0.0)
    made.sighted(A, [at("10.0.0.1"), at("10.0.0.2"), at("10.0.0.3"), at("10.0.0.4")], 1.0)
    made.sighted(A, [at("10.0.0.4"), at("10.0.0.5")], 2.0)
    assert set(made.addresses_of(A)) == {at(f"10.0.0.{i}") for i in (1, 2, 4, 5)}
    made.sighted(B, [at("10.0.0.6")], 2.0)
    made.sighted(B, [], 3.0)
    assert made.unpinned() == ()


def test_linked_devices_and_running_dials_are_left_alone() -> None:
    made = book(A, B)
    made.learn(A, at("10.0.0.1"), Source.MDNS, 0.0)
    made.learn(B, at("10.0.0.2"), Source.MDNS, 0.0)
    made.connected(A, 0.0)
    dial = due(made)
    assert dial.device == B
    made.dialling(dial, 0.0)
    assert made.next_dial(0.0) is None


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
    made.ended(dial, 0.1)
    assert made.next_dial(0.0) is None
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
    st.tuples(st.just("sighted"), st.sampled_from(DEVICES), st.lists(st.sampled_from(ADDRESSES), max_size=3)),
    st.tuples(st.just("withdraw"), st.sampled_from(DEVICES), st.sampled_from(Source)),
    st.tuples(st.just("pin"), st.sets(st.sampled_from(DEVICES[1:]))),
    st.tuples(st.just("own"), st.sets(st.sampled_from(ADDRESSES), max_size=1)),
    st.tuples(st.just("configure"), st.sampled_from(ADDRESSES)),
    st.tuples(st.just("dial"), st.sampled_from([None, *DEVICES])),
    st.tuples(st.just("inbound"), st.sampled_from(DEVICES[1:])),
    st.tuples(st.just("lost"), st.sampled_from(DEVICES)),
)


@settings(max_examples=150)
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
        elif name == "sighted":
            made.sighted(args[0], args[1], now_s)
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
        elif name == "dial" and (dial := made.next_dial(now_s)) is not None:
            now_s = max(now_s, dial.at_s)
            made.dialling(dial, now_s)
            assert made.next_dial(now_s) != dial
            (answered,) = args
            if answered in pinned or answered == OWN:
                made.connected(answered, now_s, dial.address)
                linked |= {answered} - {OWN}
            made.ended(dial, now_s)
        elif name == "inbound" and args[0] in pinned:
            made.connected(args[0], now_s)
            linked.add(args[0])
        elif name == "lost":
            made.disconnected(args[0], now_s)
            linked.discard(args[0])
        following = made.next_dial(now_s)
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
