"""The lab itself: its rates are right, and nothing of it stays."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.lab import Lab, LabError, lab_unavailable
from tests.lab.namespaces import PREFIX, remove_stale

pytestmark = pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))

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
from tests.lab.lab import Lab
with Lab(stations=1, rate_mbit=10) as lab:
    sleeper = lab.run(0, ["sleep", "60"])
    print(sleeper.pid, flush=True)
    time.sleep(60)
"""
ROOT = Path(__file__).parents[2]


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"{PREFIX}-{pid}-")]


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
    crashing = subprocess.Popen([sys.executable, "-c", CRASHING], stdout=subprocess.PIPE, cwd=ROOT)
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
    status = Path(f"/proc/{sleeper}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"
