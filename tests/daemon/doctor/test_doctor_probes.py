"""How the doctor finds facts out: packets of multicast DNS, what `ip` prints, ports, the daemon on this machine."""

import contextlib
import json
import socket
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtrain.doctor.facts import Adapter, AdapterKind, Daemon, OtherLaptop, PortHolder, Reach, WayOut
from meshtrain.doctor.local_daemon import ask_daemon, clock_ahead_s
from meshtrain.doctor.multicast import Answer, parse_answer
from meshtrain.doctor.reach import port_holder, reach
from meshtrain.doctor.routes import adapters, hardware_known, way, way_without_tunnels
from meshtrain.doctor.tools import Said
from meshwire.addresses import Address
from meshwire.frames.header import WIRE_VERSION
from meshwire.messages.local import GetJobs, GetStatus
from meshwire.messages.network import DeviceSeen, GetNetwork, NetworkView
from tests.daemon.doctor.announcements import announcement
from tests.daemon.fakedaemon import ANNA, BERT, STATUS, Endpoint, known_jobs, summary

SOURCE = "192.168.1.20"
PACKET = announcement(BERT, "bert", 13, 29611, SOURCE)


# --- multicast DNS ---


def test_an_announcement_is_read() -> None:
    assert parse_answer(PACKET, SOURCE) == Answer(SOURCE, BERT, "bert", 29611, 13)


def test_what_is_no_answer_of_ours_is_not_read() -> None:
    question = struct.pack(">6H", 0, 0, 1, 0, 0, 0) + b"\x0a_meshtrain\x04_tcp\x05local\0" + struct.pack(">HH", 12, 1)
    others = PACKET.replace(b"_meshtrain", b"_someother")
    assert parse_answer(question, SOURCE) is None
    assert parse_answer(others, SOURCE) is None


def test_a_name_of_a_stranger_cannot_draw_on_the_terminal() -> None:
    read = parse_answer(announcement(BERT, "b\x1b[2J\u202e", 13, 1, SOURCE), SOURCE)
    assert read is not None
    assert read.name == "b\\x1b[2J\\u202e"


@given(st.data())
def test_packets_that_lie_are_refused_or_read_in_bounds(data: st.DataObject) -> None:
    """Cut off, overwritten, with names that point at themselves: nothing raises, nothing takes long."""
    packet = bytearray(PACKET[: data.draw(st.integers(0, len(PACKET)))])
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=12)):
        if at < len(packet):
            packet[at] = value
    read = parse_answer(bytes(packet), SOURCE)
    assert read is None or read.port is None or 0 < read.port <= 65535


def test_a_name_that_points_at_itself_ends() -> None:
    loop = struct.pack(">6H", 0, 0x8400, 0, 1, 0, 0) + b"\xc0\x0c" + struct.pack(">HHIH", 12, 1, 60, 0)
    assert parse_answer(loop, SOURCE) is None


# --- ip ---


def link(name: str, *addresses: str, kind: str = "", flags: tuple[str, ...] = ("UP",)) -> dict[str, object]:
    """An object of `ip -j -d addr`, as far as it is read."""
    info = [{"family": "inet", "local": one.split("/")[0], "prefixlen": int(one.split("/")[1])} for one in addresses]
    return {"ifname": name, "flags": list(flags), "linkinfo": {"info_kind": kind}, "addr_info": info}


def test_interfaces_are_told_apart() -> None:
    listed = [
        link("lo", "127.0.0.1/8", flags=("LOOPBACK", "UP")),
        link("wlp2s0", "192.168.1.5/24"),
        link("enp0s31f6", "192.168.1.6/24", "169.254.3.4/16"),
        link("office", "10.9.0.2/32", kind="wireguard"),
        link("tun0", "10.8.0.2/24", kind="tun"),
        link("docker0", "172.17.0.1/16", kind="bridge"),
        link("eth7", kind="veth"),
    ]
    found = adapters(json.dumps(listed), frozenset({"wlp2s0"}))
    assert [(one.name, one.kind) for one in found] == [
        ("lo", AdapterKind.LOOPBACK),
        ("wlp2s0", AdapterKind.WIFI),
        ("enp0s31f6", AdapterKind.CABLE),
        ("office", AdapterKind.TUNNEL),
        ("tun0", AdapterKind.TUNNEL),
        ("docker0", AdapterKind.VIRTUAL),
    ]
    assert found[2] == Adapter("enp0s31f6", AdapterKind.CABLE, ("192.168.1.6/24", "169.254.3.4/16"))
    assert found[2].holds("192.168.1.77")
    assert not found[2].holds("192.168.2.77")


def test_ways_out_are_read() -> None:
    routed = '[{"dst":"203.0.113.1","gateway":"192.168.1.1","dev":"wlp2s0","prefsrc":"192.168.1.5","flags":[]}]'
    assert way(routed) == WayOut("wlp2s0", "192.168.1.1")
    assert way("") is None
    assert way("not json") is None
    defaults = [
        {"dst": "default", "dev": "tun0", "metric": 50},
        {"dst": "default", "gateway": "192.168.1.1", "dev": "wlp2s0", "metric": 600},
        {"dst": "default", "gateway": "192.168.1.1", "dev": "enp0s31f6", "metric": 100},
    ]
    assert way_without_tunnels(json.dumps(defaults), frozenset({"tun0"})) == WayOut("enp0s31f6", "192.168.1.1")


@pytest.mark.parametrize(
    ("state", "confirmed_s", "known"),
    [
        ("REACHABLE", 1, True),
        ("REACHABLE", 25, None),  # the lid was closed since, perhaps
        ("STALE", 1, None),
        ("DELAY", 1, None),
        ("FAILED", 60_000, False),
        ("INCOMPLETE", 60_000, False),
    ],
)
def test_only_an_answer_of_now_says_that_a_card_is_there(state: str, confirmed_s: int, known: bool | None) -> None:
    listed = json.dumps([{"dst": SOURCE, "dev": "wlp2s0", "used": 3, "confirmed": confirmed_s, "state": [state]}])
    assert hardware_known(listed, SOURCE) is known
    assert hardware_known(listed, "192.168.1.2") is None


# --- TCP ---


def test_a_connection_is_open_refused_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtrain.doctor.reach.CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        port = listener.getsockname()[1]
        assert reach("127.0.0.1", port) is Reach.OPEN
        while (came := reach("127.0.0.1", port)) is Reach.OPEN:  # until its queue is full: then nothing answers
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        assert came is Reach.SILENT
    assert reach("127.0.0.1", port) is Reach.REFUSED


def test_who_holds_a_port_is_named() -> None:
    def ss(*argv: str) -> Said:
        assert argv[0] == "ss"
        return Said('LISTEN 0 5 0.0.0.0:29610 0.0.0.0:* users:(("python3",pid=4711,fd=3))\n')

    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        holder = port_holder(ss, port)
        assert holder is not None
        assert holder.program == "python3 (pid 4711)"
        assert holder.free is None or holder.free > port
        nameless = port_holder(lambda *_: Said("LISTEN 0 5 0.0.0.0:29610 0.0.0.0:*\n"), port)
        assert nameless == PortHolder(port, None, nameless.free if nameless else None)
    assert port_holder(ss, port) is None


# --- the daemon ---


def view(*devices: DeviceSeen) -> NetworkView:
    return NetworkView(host="0.0.0.0", port=29610, mdns=True, interfaces=("wlp2s0",), devices=devices)


def test_the_daemon_tells_where_the_others_may_be(endpoint: Endpoint) -> None:
    addresses = tuple(
        Address(host=host, port=29610) for host in ("192.168.1.20", "fd00::2", "172.17.0.1", "10.0.0.1", "10.0.0.2")
    )
    bert = DeviceSeen(
        device=BERT,
        name="be\x1brt",
        state="paired",
        addresses=addresses,
        announced_version=12,
        refused="no",
        dial_failed="e",
    )
    carl = DeviceSeen(device="ef" * 32, name="carl", state="paired", addresses=())
    endpoint.answers = {GetStatus: STATUS, GetJobs: known_jobs(), GetNetwork: view(bert, carl)}
    asked = ask_daemon(endpoint.data_dir, time.time())
    assert asked.daemon == Daemon(running=True, host="0.0.0.0", port=29610, interfaces=("wlp2s0",))
    assert asked.own_device == ANNA
    known = OtherLaptop("be\\x1brt", "192.168.1.20", wire_version=12, refused="no", dial_failed="e")
    assert asked.places[0] == (BERT, known)
    assert [place.address for _, place in asked.places] == ["192.168.1.20", "172.17.0.1", "10.0.0.1", ""]


def test_a_daemon_that_is_not_there_or_of_another_version(endpoint: Endpoint, tmp_path: Path) -> None:
    assert ask_daemon(tmp_path / "nothing", 0.0).daemon == Daemon()
    old = ask_daemon(endpoint.data_dir, 0.0)  # it knows nothing of the network: from before this command
    assert old.daemon == Daemon(running=True)
    assert old.unknown[0].command == "meshtrain down && meshtrain up"
    endpoint.version = WIRE_VERSION - 1
    assert ask_daemon(endpoint.data_dir, 0.0).daemon == Daemon(running=True, other_version=WIRE_VERSION - 1)


NOW_S = 1_800_000_000.0


@pytest.mark.parametrize(
    ("created_s", "started_s", "submitter", "ahead_s"),
    [
        (NOW_S - 3, NOW_S, BERT, 0.0),
        (NOW_S - 3600, NOW_S, BERT, 0.0),  # an hour of shipping, or a clock: nobody knows
        (NOW_S + 3600, NOW_S, BERT, 3600.0),
        (NOW_S - 200_000, NOW_S, BERT, -200_000.0),
        (NOW_S + 3600, NOW_S, ANNA, None),  # its own
        (NOW_S + 3600, None, BERT, None),
        (NOW_S - 96_400, NOW_S - 100_000, BERT, None),  # days ago: clocks may have been set since
    ],
)
def test_jobs_of_another_laptop_tell_of_its_clock(
    created_s: float, started_s: float | None, submitter: str, ahead_s: float | None
) -> None:
    job = summary(created_at_s=created_s, started_at_s=started_s, submitter=submitter)
    assert clock_ahead_s([job], ANNA, NOW_S) == ahead_s


def test_the_newest_job_tells() -> None:
    """A clock that was set since is right."""
    wrong = summary(created_at_s=NOW_S + 3000, started_at_s=NOW_S - 600, submitter=BERT)
    right = summary(created_at_s=NOW_S - 2, started_at_s=NOW_S, submitter=BERT)
    assert clock_ahead_s([wrong, right], ANNA, NOW_S) == 0.0
