"""The doctor in networks whose faults are staged: it names each, and nothing where there is none.

Two laptops on a switch that is also their router; where nothing else is said no daemon runs, and the other laptop is a
port and an announcement by multicast DNS. The radio's three faults are not staged: there is no radio here, and they
come from recorded output in `test_doctor_radio.py`.
"""

import contextlib
import select
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtrain.demo.localmesh import LocalDaemon
from meshtrain.doctor import multicast, reach
from meshtrain.doctor.diagnosis import diagnose
from meshtrain.doctor.examination import Examination
from meshtrain.doctor.facts import Facts, Hearing, Reach
from meshtrain.doctor.finding import Fault, Finding
from meshtrain.doctor.firewalls import ufw_is_active, ufw_lets_in
from meshtrain.doctor.multicast import GROUP, PORT
from meshwire.addresses import DEFAULT_PORT, Address
from meshwire.frames.header import WIRE_VERSION
from meshwire.messages.local import GetJobs, GetStatus
from meshwire.messages.network import DeviceSeen, GetNetwork, NetworkView
from tests.daemon.doctor.announcements import announcement
from tests.daemon.fakedaemon import BERT, JOB, STATUS, Endpoint, known_jobs, run, summary
from tests.lab.lab import ACCESS_POINT, Lab, lab_unavailable
from tests.lab.links import port_name
from tests.lab.namespaces import do

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        lab_unavailable("nft", "/dev/net/tun") is not None, reason=str(lab_unavailable("nft", "/dev/net/tun"))
    ),
]

ANNA_AT, BERT_AT = "10.77.0.1", "10.77.0.2"
TIMEOUT_S = 20.0
DROP = """
table {family} stage {{
    chain c {{
        type filter hook {hook} priority 0
        {rule} drop
    }}
}}
"""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers here does so at once: nothing here proves how long a slow one is waited for."""
    monkeypatch.setattr(multicast, "LISTEN_S", 0.5)
    monkeypatch.setattr(multicast, "ASK_AGAIN_S", 0.2)
    monkeypatch.setattr(multicast, "ALONE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(reach, "CONNECT_TIMEOUT_S", 0.5)


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Station 0 is anna, on which the doctor runs, station 1 is bert; both have a way out, by the switch."""
    with Lab(stations=2) as made:
        for station in (0, 1):
            do(*made.command(station, ["ip", "route", "add", "default", "via", made.host(ACCESS_POINT)]))
        yield made


def drop(lab: Lab, station: int, rule: str, hook: str = "input", family: str = "inet") -> None:
    do(*lab.command(station, ["nft", "-f", "-"]), text=DROP.format(family=family, hook=hook, rule=rule))


@contextlib.contextmanager
def bert(lab: Lab, version: int = WIRE_VERSION, port: int = DEFAULT_PORT) -> Iterator[None]:
    """The other laptop: it takes connections, and answers questions by multicast DNS, to all and to it alone."""
    said = announcement(BERT, "bert", version, port, BERT_AT)
    with contextlib.ExitStack() as stack:
        with lab.inside(1):
            stack.enter_context(socket.create_server((BERT_AT, port)))
            ear = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            ear.bind(("", PORT))
        member = socket.inet_aton(GROUP) + socket.inet_aton(BERT_AT)
        ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        ear.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(BERT_AT))
        ended = threading.Event()

        def answer() -> None:
            while not ended.is_set():
                if select.select([ear], [], [], 0.05)[0]:
                    _, source = ear.recvfrom(9000)
                    if source[0] != BERT_AT:
                        ear.sendto(said, (GROUP, PORT) if source[1] == PORT else source)

        thread = threading.Thread(target=answer, name="bert")
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        yield


def examined(lab: Lab, data_dir: Path, *at: str) -> tuple[Facts, tuple[Finding, ...]]:
    with lab.inside(0):
        facts = Examination(data_dir, [Address.parse(one) for one in at]).run()
    return facts, diagnose(facts)


def faults(found: tuple[Finding, ...]) -> list[Fault]:
    return [one.fault for one in found]


@contextlib.contextmanager
def daemon_of_anna(
    lab: Lab, data_dir: Path, *devices: DeviceSeen, interfaces: tuple[str, ...] = ("eth0",)
) -> Iterator[Endpoint]:
    """Anna's daemon, as far as it answers the doctor."""
    with lab.inside(0):
        endpoint = Endpoint(data_dir)
    endpoint.answers = {
        GetStatus: STATUS,
        GetJobs: known_jobs(),
        GetNetwork: NetworkView(host="0.0.0.0", port=DEFAULT_PORT, mdns=True, interfaces=interfaces, devices=devices),
    }
    try:
        yield endpoint
    finally:
        endpoint.close()


def known_bert(state: str = "paired", **more: object) -> DeviceSeen:
    return DeviceSeen.model_validate(
        {"device": BERT, "name": "bert", "state": state, "addresses": [{"host": BERT_AT, "port": DEFAULT_PORT}]} | more
    )


def test_nothing_is_named_where_nothing_is_wrong(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a daemon; with one that is linked; beside a laptop that is away, containers and an unused VPN."""
    monkeypatch.setenv("MESHTRAIN_DATA_DIR", str(tmp_path / "data"))
    for words in (["link", "add", "docker0", "type", "bridge"], ["link", "set", "docker0", "up"]):
        do(*lab.command(0, ["ip", *words]))
    do(*lab.command(0, ["ip", "addr", "add", "172.17.0.1/16", "dev", "docker0"]))
    stage_vpn(lab, "10.8.0.0/24")
    with bert(lab):
        with lab.inside(0):
            shown = run("doctor")
        assert (shown.exit_code, shown.stdout) == (0, "nothing wrong was found\n")
        assert "Looked at: port 29610/tcp, interface eth0" in shown.stderr
        assert "bert" in shown.stderr
        assert "No daemon runs on this laptop" in shown.stderr
        facts, found = examined(lab, tmp_path / "nobody", BERT_AT)
        assert not found
        assert facts.hearing["eth0"] is Hearing.WELL
        (there,) = facts.laptops
        assert (there.reach, there.heard, there.answered, there.wire_version) == (Reach.OPEN, True, True, WIRE_VERSION)
        away = DeviceSeen(device="ef" * 32, name="carl", state="paired", addresses=(Address(host="10.77.0.9", port=1),))
        with daemon_of_anna(lab, tmp_path / "data", known_bert("linked"), away):
            assert not examined(lab, tmp_path / "data")[1]


def test_multicast_that_is_dropped_here(lab: Lab, tmp_path: Path) -> None:
    drop(lab, 0, "udp dport 5353")
    with bert(lab):
        _, found = examined(lab, tmp_path)
    assert faults(found) == [Fault.MULTICAST]
    assert found[0].mend.startswith("sudo nft insert rule inet stage c udp dport 5353 accept")
    do(*lab.command(0, ["sh", "-c", found[0].mend.removeprefix("sudo ")]))
    with bert(lab):
        assert not examined(lab, tmp_path)[1], "the command mends it"


def test_multicast_that_may_not_leave(lab: Lab, tmp_path: Path) -> None:
    drop(lab, 0, "udp dport 5353", hook="output")
    facts, found = examined(lab, tmp_path)
    assert facts.hearing == {"eth0": Hearing.FORBIDDEN}
    assert faults(found) == [Fault.MULTICAST]


def test_multicast_that_the_network_drops(lab: Lab, tmp_path: Path) -> None:
    """As many mesh routers and guest networks do; a single address is reached all the same."""
    drop(lab, ACCESS_POINT, "ether daddr 01:00:5e:00:00:fb", hook="forward", family="bridge")
    with bert(lab):
        _, found = examined(lab, tmp_path, BERT_AT)
    assert faults(found) == [Fault.MULTICAST]
    assert found[0].mend == f"meshtrain pair CODE --at {BERT_AT}"


def test_another_program_that_holds_the_multicast_port(lab: Lab, tmp_path: Path) -> None:
    with lab.inside(0), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as alone:
        alone.bind(("", PORT))
        facts, found = examined(lab, tmp_path)
    assert facts.hearing == {"eth0": Hearing.TAKEN}
    assert faults(found) == [Fault.MULTICAST]


def test_a_network_that_keeps_laptops_apart(lab: Lab, tmp_path: Path) -> None:
    """Ports of a bridge that are isolated reach the router, and each other not even by ARP."""
    for station in (0, 1):
        flag = ("type", "bridge_slave", "isolated", "on")
        do("ip", "-n", lab.namespace(ACCESS_POINT), "link", "set", port_name(station), *flag)
    with bert(lab):
        facts, found = examined(lab, tmp_path, BERT_AT)
    assert facts.lan_way is not None
    assert facts.lan_way.gateway_answers
    assert faults(found) == [Fault.ISOLATION]
    assert BERT_AT in found[0].what


def test_a_firewall_here(lab: Lab, tmp_path: Path) -> None:
    drop(lab, 0, "tcp dport { 22, 29600-29700 }")
    with bert(lab):
        _, found = examined(lab, tmp_path)
        assert faults(found) == [Fault.FIREWALL]
        do(*lab.command(0, ["sh", "-c", found[0].mend.removeprefix("sudo ")]))
        assert not examined(lab, tmp_path)[1], "the command mends it"


@pytest.mark.skipif(shutil.which("ufw", path="/usr/sbin:/usr/bin") is None, reason="ufw not found")
def test_a_firewall_of_ufw(lab: Lab) -> None:
    """The real ufw, with its own copy of /etc/ufw, in a mount namespace of its own."""
    script = """
        mount -t tmpfs none /mnt && cp -a /etc/ufw /mnt/etc && cp -a /lib/ufw /mnt/lib
        mount --bind /mnt/etc /etc/ufw && mount --bind /mnt/lib /lib/ufw
        ufw --force enable && ufw status verbose && ufw allow 29610/tcp && ufw status verbose
    """
    done = subprocess.run(
        lab.command(0, ["unshare", "-m", "sh", "-c", script]),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    before, _, after = done.stdout.partition("Rule added")
    assert ufw_is_active(before)
    assert not ufw_lets_in(before, DEFAULT_PORT, "eth0", BERT_AT)
    assert ufw_lets_in(after, DEFAULT_PORT, "eth0", BERT_AT)


def test_a_firewall_there(lab: Lab, tmp_path: Path) -> None:
    drop(lab, 1, "tcp dport 29610")
    with bert(lab):
        _, found = examined(lab, tmp_path)
    assert faults(found) == [Fault.FIREWALL_THERE]
    assert found[0].where == "bert"


class Started(LocalDaemon):
    """A real daemon on anna's laptop."""

    def __init__(self, lab: Lab, folder: Path, *options: str) -> None:
        self.name, self.host = "anna", ANNA_AT
        self.data_dir = folder / "real"
        self.data_dir.mkdir()
        self.log_path = self.data_dir / "daemon.log"
        self.client = None
        command = ["python", "-m", "meshtraind", "run", "--name", "anna", "--data-dir", str(self.data_dir), *options]
        with self.log_path.open("ab") as log:
            self.process = lab.run(0, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def test_the_wrong_interface(lab: Lab, tmp_path: Path) -> None:
    """A real daemon that was told of a dock's interface, and the laptop's network is on the other one."""
    do(
        "ip",
        "link",
        "add",
        "eth1",
        "netns",
        lab.namespace(0),
        "type",
        "veth",
        "peer",
        "name",
        "dock",
        "netns",
        lab.namespace(1),
    )
    for station, name in ((0, "eth1"), (1, "dock")):
        do(*lab.command(station, ["ip", "link", "set", name, "up"]))
    do(*lab.command(0, ["ip", "addr", "add", "10.99.0.1/24", "dev", "eth1"]))
    daemon = Started(lab, tmp_path, "--interface", "eth1")
    try:
        daemon.wait()
        with bert(lab):
            facts, found = examined(lab, daemon.data_dir)
    finally:
        daemon.ask_to_stop()
        daemon.stop()
    assert facts.daemon.interfaces == ("eth1",)
    assert faults(found) == [Fault.INTERFACE]
    assert found[0].mend == "meshtrain down && meshtrain up --interface eth0"


def stage_vpn(lab: Lab, *routes: str) -> None:
    for words in (
        ["tuntap", "add", "dev", "tun0", "mode", "tun"],
        ["addr", "add", "10.8.0.2/32", "dev", "tun0"],
        ["link", "set", "tun0", "up"],
        *(["route", "add", route, "dev", "tun0"] for route in routes),
    ):
        do(*lab.command(0, ["ip", *words]))


def test_a_vpn_in_the_way(lab: Lab, tmp_path: Path) -> None:
    """It takes what is meant for the other laptop."""
    stage_vpn(lab, f"{BERT_AT}/32")
    with bert(lab):
        _, found = examined(lab, tmp_path, BERT_AT)
    assert faults(found) == [Fault.VPN]
    assert found[0].mend == "sudo ip link set tun0 down"


def test_a_vpn_that_takes_everything(lab: Lab, tmp_path: Path) -> None:
    """As OpenVPN's two halves do: told while nobody is met, for it leaves the local network alone, or not."""
    stage_vpn(lab, "0.0.0.0/1", "128.0.0.0/1")
    assert faults(examined(lab, tmp_path)[1]) == [Fault.VPN]
    with bert(lab):
        assert not examined(lab, tmp_path)[1]


@pytest.mark.parametrize("ahead_s", [3600.0, -3 * 86_400.0])
def test_clocks_that_differ(lab: Lab, tmp_path: Path, ahead_s: float) -> None:
    """Of the other laptop's clock a job of it tells, which was created by it and started here."""
    now_s = time.time()
    job = summary(job=JOB, submitter=BERT, created_at_s=now_s + ahead_s, started_at_s=now_s, ended_at_s=None)
    with bert(lab), daemon_of_anna(lab, tmp_path / "data", known_bert("linked")) as endpoint:
        endpoint.answers[GetJobs] = known_jobs(job)
        _, found = examined(lab, tmp_path / "data")
    assert faults(found) == [Fault.CLOCK]
    assert ("behind" if ahead_s > 0 else "ahead of") in found[0].what


def test_another_version(lab: Lab, tmp_path: Path) -> None:
    """Heard from its announcement, before anybody has paired."""
    with bert(lab, WIRE_VERSION - 1):
        _, found = examined(lab, tmp_path)
    assert faults(found) == [Fault.VERSION]
    assert found[0].where == "bert"
    assert f"wire version {WIRE_VERSION - 1}" in found[0].what


def test_a_port_that_is_taken(lab: Lab, tmp_path: Path) -> None:
    with lab.inside(0), socket.create_server(("0.0.0.0", DEFAULT_PORT)), bert(lab):
        _, found = examined(lab, tmp_path)
    assert faults(found) == [Fault.PORT]
    assert found[0].mend == f"meshtrain up --listen 0.0.0.0:{DEFAULT_PORT + 1}"


def test_nobody_at_the_address(lab: Lab, tmp_path: Path) -> None:
    _, found = examined(lab, tmp_path, BERT_AT)
    assert faults(found) == [Fault.NOBODY_THERE]


def test_a_laptop_in_another_network(lab: Lab, tmp_path: Path) -> None:
    drop(lab, ACCESS_POINT, "ip daddr 192.168.7.0/24", hook="forward", family="ip")
    _, found = examined(lab, tmp_path, "192.168.7.20")
    assert faults(found) == [Fault.OTHER_NETWORK]
