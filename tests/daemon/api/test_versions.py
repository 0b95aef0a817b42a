"""W6: what a person sees where versions of meshtrain meet on a screen: a command and a daemon, a job's members."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import meshtraind.api.rundir
from meshtraind.api.endpoint import Endpoint as DaemonsEndpoint
from meshtraind.api.rundir import RunDir
from meshwire.frames.header import WIRE_VERSION, Header, Kind, other_version
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.job import RankReport
from meshwire.messages.local import GetJobs, GetPeers, GetStatus, Peers, PeerSummary
from meshwire.peer_news import news
from tests.daemon.fakedaemon import BERT, JOB, STATUS, Endpoint, known_jobs, run, summary

pytestmark = pytest.mark.usefixtures("plain_environment")

DEADLINE_S = 20.0
SAID = "bert speaks wire version 7, anna 6: update meshtrain on anna"
HOLDER = """
import signal, sys
from pathlib import Path
from meshtraind.api.rundir import RunDir
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with RunDir(Path(sys.argv[1])):
    print("ready", flush=True)
    print(signal.sigwait([signal.SIGTERM]), flush=True)
"""


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("command", [["status"], ["up"], ["jobs"], ["submit", "train.py"]])
def test_a_daemon_of_another_version_is_named_with_what_to_do(endpoint: Endpoint, command: list[str]) -> None:
    """`up` starts no second one beside it."""
    endpoint.version = WIRE_VERSION - 1
    shown = run(*command)
    assert shown.exit_code == 1
    assert f"daemon on this device speaks wire version {WIRE_VERSION - 1}, what is installed here {WIRE_VERSION}" in (
        shown.stderr
    )
    assert "try: meshtrain down && meshtrain up" in shown.stderr
    assert not (endpoint.data_dir / "daemon.log").exists()


def test_down_stops_a_daemon_of_another_version(endpoint: Endpoint) -> None:
    """It cannot read what this version asks; it ends by the signal as it does when it is asked."""
    described = (endpoint.data_dir / "run" / "daemon.json").read_text()
    token = (endpoint.data_dir / "run" / "token").read_text()
    paths = [str(Path(meshtraind.api.rundir.__file__).parents[2] / part) for part in ("daemon", "protocol")]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(endpoint.data_dir)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert holder.stdout is not None
    with holder, holder.stdout:
        assert holder.stdout.readline() == "ready\n"
        (endpoint.data_dir / "run" / "daemon.json").write_text(described)
        (endpoint.data_dir / "run" / "token").write_text(token)
        endpoint.version = WIRE_VERSION - 1
        shown = run("down")
        assert (shown.exit_code, shown.stdout) == (0, "meshtraind is down\n")
        assert "another version" in shown.stderr
        assert holder.stdout.readline() == "15\n"


def test_down_ends_no_process_that_holds_no_data_folder(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock names the daemon before, and its number may be anybody's by now."""
    ended: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _signal: ended.append(pid))
    endpoint.version = WIRE_VERSION - 1
    (endpoint.data_dir / "run" / "lock").write_text(f"{os.getpid()}\n")
    shown = run("down")
    assert shown.exit_code == 1
    assert "no daemon holds" in shown.stderr
    assert not ended


@pytest.mark.asyncio
async def test_a_daemon_tells_once_of_commands_that_are_newer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that `pip install` has overtaken, or a command that asks every second, fills no log."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    with RunDir(tmp_path / "data") as rundir:
        endpoint = DaemonsEndpoint(rundir)
        await endpoint.start(cast(Any, None))  # nobody attaches
        newer = bytearray(Header(Kind.CONTROL, 8).encode() + bytes(8))
        newer[4] = WIRE_VERSION + 1
        for _ in range(3):
            reader, writer = await asyncio.open_unix_connection(endpoint.address.removeprefix("unix:"))
            writer.write(newer)
            answer = await asyncio.wait_for(reader.read(4096), DEADLINE_S)
            writer.close()
        await asyncio.wait_for(endpoint.close(), DEADLINE_S)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("meshtraind")]
    assert len(told) == 1
    assert f"speaks wire version {WIRE_VERSION + 1}, this daemon {WIRE_VERSION}" in told[0]
    assert b"meshtrain down, then meshtrain up" in answer


def test_peers_of_another_version_are_named(endpoint: Endpoint) -> None:
    bert = PeerSummary(
        device=BERT,
        name="bert",
        state="paired",
        address="192.168.1.20:29610",
        rtt_s=None,
        software=None,
        cores=None,
        memory_bytes=None,
        refused=SAID,
    )
    endpoint.answers[GetPeers] = Peers(peers=(bert,))
    assert f"warning: {SAID}" in run("peers").stderr


def test_a_jobs_screens_say_whose_version_keeps_it_out(endpoint: Endpoint) -> None:
    """The one that was updated first: the others go on, and it returns when they have been updated as well."""
    reports = tuple(RankReport(job=JOB, rank=rank, state="running") for rank in range(2))
    before = summary(JobState.RUNNING, ranks=reports, generation=2, present=(0,), learning=(0,))
    job = before.model_copy(update={"unlinkable": ((1, SAID),)})
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"jobs_running": 1})
    endpoint.answers[GetJobs] = known_jobs(job)
    assert f"note: {SAID}" in run("status").stdout.splitlines()
    assert news(before, job) == [SAID]
    assert news(job, job) == []


def test_every_version_is_told_by_the_same_byte() -> None:
    """W6: also of versions that are not there yet."""
    said = bytearray(Header(Kind.CONTROL, 8).encode())
    assert other_version(said) is None
    said[4] = 200
    assert other_version(said) == 200
    assert other_version(bytes(80)) is None
