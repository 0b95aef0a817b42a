"""The lab itself: its rates are right, and nothing of it stays."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.lab.lab import ACCESS_POINT, Cell, Delay, Lab, LabError, RateSchedule, lab_unavailable
from tests.lab.links import QUEUE_BYTES
from tests.lab.namespaces import PREFIX, remove_stale
from tests.lab.probes import Flows, lost_percent, reachable, round_trips_ms
from tests.lab.videocall import Heard, VideoCall

pytestmark = pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))
in_the_air = pytest.mark.skipif(lab_unavailable("nft") is not None, reason=str(lab_unavailable("nft")))
delayed = pytest.mark.skipif(
    lab_unavailable("nft", "/dev/net/tun") is not None, reason=str(lab_unavailable("nft", "/dev/net/tun"))
)

RATE_MBIT = 50.0
BYTES = 6_000_000  # about a second

# From the first byte to the last, so that neither the connection's start nor the queue's content counts.
RECEIVER = f"""
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
connection, _ = server.accept()
taken = first = len(connection.recv(1 << 16))
start = time.monotonic()
while taken < {BYTES}:
    taken += len(connection.recv(1 << 16))
print((taken - first) * 8e-6 / (time.monotonic() - start), flush=True)
"""
SENDER = f"""
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=10) as connection:
    connection.sendall(bytes({BYTES}))
"""
# Makes a lab with something running in it, says so, and waits to be killed.
CRASHING = """
import time
from tests.lab.lab import Cell, Delay, Lab
with LAB as lab:
    sleeper = lab.run(0, ["sleep", "60"])
    print(sleeper.pid, flush=True)
    time.sleep(60)
"""
ROOT = Path(__file__).parents[2]


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"{PREFIX}-{pid}-")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_end(pid: int) -> None:
    deadline_s = time.monotonic() + 5
    while alive(pid):
        assert time.monotonic() < deadline_s, f"process {pid} does not end"
        time.sleep(0.01)


def forwarder_in(switch: str) -> int:
    return int(subprocess.check_output(["ip", "netns", "pids", switch], text=True))


def kill_the_forwarder(switch: str) -> None:
    forwarder = forwarder_in(switch)
    os.kill(forwarder, signal.SIGKILL)
    await_end(forwarder)


def test_one_flow_gets_the_rate() -> None:
    """DESIGN 13: per-station rates, as goodput."""
    with Lab(stations=2, rate_mbit=RATE_MBIT) as lab:
        receiver = lab.run(1, ["python", "-c", RECEIVER, lab.host(1)], stdout=subprocess.PIPE)
        assert receiver.stdout is not None
        with receiver.stdout as output:
            assert output.readline() == b"listening\n"
            sender = lab.run(0, ["python", "-c", SENDER, lab.host(1)])
            assert sender.wait(20) == 0
            measured_mbit = float(output.readline())
        assert receiver.wait(5) == 0
    assert 0.9 * RATE_MBIT < measured_mbit < 1.1 * RATE_MBIT


def test_what_is_made_inside_a_station_is_on_its_network() -> None:
    with Lab(stations=2, rate_mbit=RATE_MBIT) as lab:
        with lab.inside(0), socket.create_server((lab.host(0), 0)) as listener:
            address = listener.getsockname()
            with lab.inside(1):
                socket.create_connection(address, timeout=5).close()
                lab.plug(0, into=False)
                with pytest.raises(TimeoutError):
                    socket.create_connection(address, timeout=0.5)
                lab.plug(0, into=True)
                socket.create_connection(address, timeout=5).close()
        with pytest.raises(OSError, match="assign"):
            socket.create_server((lab.host(0), 0))


def test_nothing_is_left_of_a_lab() -> None:
    with Lab(stations=2, rate_mbit=10) as lab:
        process = lab.run(0, ["sleep", "60"])
        assert len(namespaces_of(os.getpid())) == 3
    assert process.returncode == -signal.SIGKILL
    assert not namespaces_of(os.getpid())


def test_a_lab_that_cannot_be_made_leaves_nothing() -> None:
    with pytest.raises(LabError, match="tc"), Lab(stations=1, rate_mbit=1e12):
        pytest.fail("this rate cannot be")
    assert not namespaces_of(os.getpid())


def test_what_a_killed_run_left_is_removed() -> None:
    """SIGKILL leaves namespaces and processes; they go with the next lab, whose own stay."""
    plain = CRASHING.replace("LAB", "Lab(stations=1, rate_mbit=10)")
    crashing = subprocess.Popen([sys.executable, "-c", plain], stdout=subprocess.PIPE, cwd=ROOT)
    assert crashing.stdout is not None
    with crashing.stdout as output:
        sleeper = int(output.readline())
        assert len(namespaces_of(crashing.pid)) == 2
        with Lab(stations=1, rate_mbit=10):
            assert len(namespaces_of(crashing.pid)) == 2, "a lab whose process lives is not stale"
            crashing.kill()
            crashing.wait(5)
            remove_stale()
            assert len(namespaces_of(os.getpid())) == 2
    assert not namespaces_of(crashing.pid)
    assert not alive(sleeper)


def goodputs_mbit(lab: Lab, flows: list[tuple[int, int]], seconds: float = 0.5) -> list[float]:
    with lab, Flows(lab, flows) as running:
        time.sleep(0.4)  # what the buckets let through at first
        return running.goodput_mbit(seconds)


def near(expected_mbit: float) -> Any:
    """On a machine that has other things to do as well, and is never too fast."""
    return pytest.approx(expected_mbit, rel=0.2)


@in_the_air
def test_two_stations_share_the_air() -> None:
    """And what one sends, the other cannot."""
    cell = Cell(20)
    flows = [(0, ACCESS_POINT), (1, ACCESS_POINT)]
    got = goodputs_mbit(Lab(2, cell=cell), flows)
    assert sum(got) / 2 == near(cell.goodput_mbit(flows))
    assert min(got) > 0.3 * sum(got)


@pytest.mark.slow
@in_the_air
@pytest.mark.parametrize(
    ("flows", "rate_mbit"),
    [
        pytest.param([(0, ACCESS_POINT)], 20, id="up"),
        pytest.param([(0, 1)], 40, id="station to station pays twice"),
        pytest.param([(2, 0)], 20, id="wired to wireless pays once"),
        pytest.param([(0, 2), (ACCESS_POINT, 1)], 40, id="up and down share"),
        pytest.param([(0, 1), (1, 2), (2, 0)], 60, id="ring with one wired"),
    ],
)
def test_every_byte_in_the_air_is_paid(flows: list[tuple[int, int]], rate_mbit: float) -> None:
    cell = Cell(rate_mbit, wired=frozenset({2}))
    got = goodputs_mbit(Lab(3, cell=cell), flows)
    assert sum(got) / len(got) == near(cell.goodput_mbit(flows))


@pytest.mark.slow
@in_the_air
def test_a_cable_s_rate_holds_beside_the_air() -> None:
    (got,) = goodputs_mbit(Lab(2, 10, cell=Cell(40)), [(0, ACCESS_POINT)])
    assert got == near(10)


@in_the_air
def test_stations_are_isolated_from_each_other_alone() -> None:
    with Lab(3, cell=Cell(50, wired=frozenset({2}))) as lab:
        assert reachable(lab, 0, 1)
        lab.isolate()
        assert not reachable(lab, 0, 1, timeout_s=0.15)
        assert not reachable(lab, 1, 0, timeout_s=0.15)
        for pair in ((0, 2), (2, 1), (0, ACCESS_POINT), (ACCESS_POINT, 1)):
            assert reachable(lab, *pair), pair
        lab.isolate(False)
        assert reachable(lab, 0, 1)


@in_the_air
def test_losses_are_of_one_station_and_one_direction() -> None:
    """20 % of 250 are 50; fewer than 20 or more than 80 are as good as never."""
    count = 250
    with Lab(2, cell=Cell(100)) as lab:
        lab.lose(0, up_percent=20)
        assert 8 < lost_percent(lab, 0, ACCESS_POINT, count) < 32
        assert lost_percent(lab, ACCESS_POINT, 0, count) < 3
        lab.lose(0, down_percent=20)
        assert lost_percent(lab, 0, ACCESS_POINT, count) < 3
        assert 8 < lost_percent(lab, ACCESS_POINT, 0, count) < 32
        assert lost_percent(lab, ACCESS_POINT, 1, count) < 3


def test_losses_of_whole_bursts_are_refused() -> None:
    with Lab(1, 1000) as lab, pytest.raises(LabError, match="single frames"):
        lab.lose(0, up_percent=1)


@delayed
def test_a_delay_is_paid_each_way_and_varies() -> None:
    with Lab(2, cell=Cell(50), delays={0: Delay(10, 5)}) as lab:
        trips_ms = round_trips_ms(lab, 0, ACCESS_POINT, 15, spacing_s=0.002)
        assert min(trips_ms) > 10
        assert 15 < median(trips_ms) < 30
        assert max(trips_ms) - min(trips_ms) > 3
        assert min(round_trips_ms(lab, 1, ACCESS_POINT, 5)) < 5, "the other station has none"


@delayed
def test_a_lab_whose_delays_broke_says_so() -> None:
    with pytest.raises(LabError, match="ended before the lab did"), Lab(1, delays={0: Delay(1)}) as lab:
        kill_the_forwarder(lab.namespace(ACCESS_POINT))


@pytest.mark.slow
@delayed
def test_a_delayed_station_takes_its_airtime_too() -> None:
    (got,) = goodputs_mbit(Lab(1, cell=Cell(20), delays={0: Delay(4, 2)}), [(0, ACCESS_POINT)])
    assert got == near(20)


@pytest.mark.slow
@in_the_air
@pytest.mark.parametrize("lab", [Lab(1, cell=Cell(40)), Lab(1, 40)], ids=["cell", "cables"])
def test_a_rate_varies_under_a_connection(lab: Lab) -> None:
    """It comes to each of them and again to the first; when, where the machine has other work, is not asked."""
    with lab, Flows(lab, [(0, ACCESS_POINT)]) as flow, lab.varying(RateSchedule(((1.0, 40.0), (1.0, 10.0)))):
        for rate_mbit in (40, 10, 40):
            deadline_s = time.monotonic() + 10
            while flow.goodput_mbit(0.3) != [near(rate_mbit)]:
                assert time.monotonic() < deadline_s, f"it never came to {rate_mbit} Mbit/s"


@in_the_air
def test_a_schedule_that_cannot_be_followed_is_told() -> None:
    schedule = RateSchedule(((0.001, 10.0), (10.0, 1e12)))  # the first is over before its rate is set

    def until_it_gave_up() -> None:
        deadline_s = time.monotonic() + 5
        while any(thread.name.startswith("rate schedule") for thread in threading.enumerate()):
            assert time.monotonic() < deadline_s, "it gives up"
            time.sleep(0.01)

    with Lab(1, cell=Cell(10)) as lab, pytest.raises(LabError, match="tc"), lab.varying(schedule):
        until_it_gave_up()


@pytest.mark.slow
@delayed
@pytest.mark.parametrize("delays", [{}, {0: Delay(1)}], ids=["plain", "delayed"])
def test_a_flap_is_silence_and_then_goes_on(delays: dict[int, Delay]) -> None:
    """The connection lives; its sender tries again at growing intervals."""
    with Lab(1, cell=Cell(20), delays=delays) as lab, Flows(lab, [(0, ACCESS_POINT)]) as flow:
        time.sleep(0.3)
        lab.flap(0, 0.5)
        time.sleep(0.9)
        assert flow.goodput_mbit(0.5) == [near(20)]
    assert 0.45 < flow.longest_gap_s[0] < 1.4


@pytest.mark.slow
@in_the_air
@pytest.mark.parametrize("one_queue", [False, True])
def test_a_neighbour_s_call_feels_a_download_in_the_queue_that_it_shares(one_queue: bool) -> None:
    full_ms = QUEUE_BYTES * 8 / 20e6 * 1e3
    lab = Lab(2, cell=Cell(20, one_queue=one_queue))
    with lab, VideoCall(lab, 1, 1.0) as call, Flows(lab, [(ACCESS_POINT, 0)]) as download:
        time.sleep(0.5)
        (got,) = download.goodput_mbit(1.0)
    assert got == near(20 - 2 * 1.0)
    assert isinstance(call.up, Heard)
    assert isinstance(call.down, Heard)
    assert call.up.sent > 100
    assert call.up.lost_percent == 0
    assert call.up.p95_ms < full_ms / 4
    assert (call.down.worst_ms > full_ms / 2) == one_queue


@delayed
def test_nothing_of_a_cell_with_delays_outlives_a_killed_run() -> None:
    """The process that holds frames ends with the run; the namespaces go with the next lab."""
    made = CRASHING.replace("LAB", "Lab(1, cell=Cell(10), delays={0: Delay(5)})")
    crashing = subprocess.Popen([sys.executable, "-c", made], stdout=subprocess.PIPE, cwd=ROOT)
    assert crashing.stdout is not None
    with crashing.stdout as output:
        output.readline()
        switch = next(name for name in namespaces_of(crashing.pid) if name.split()[0].endswith("-switch")).split()[0]
        forwarder = forwarder_in(switch)
        crashing.kill()
        crashing.wait(5)
        await_end(forwarder)
        remove_stale()
    assert not namespaces_of(crashing.pid)
