"""Real daemons as processes, real learners: what a person does, and what goes wrong for them."""

import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshtrain.client import RequestError
from meshtrain.demo.localmesh import LocalMesh
from meshwire.messages.job import Checkpoints, ListCheckpoints, ListOutputs, Outputs
from meshwire.messages.local import Cancel, ChangeSettings, GetStatus, Leave, SettingsTaken, Status
from tests.daemon import realjobs as jobs
from tests.tiers import mostly_long

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with LocalMesh(("anna", "bert", "cleo"), print) as started:
        yield started


@pytest.fixture(autouse=True)
def _nothing_left_running(mesh: LocalMesh) -> Iterator[None]:
    """Every job ends with all its processes."""
    yield
    for daemon in mesh.daemons:
        deadline_s = time.monotonic() + 10
        while children := psutil.Process(daemon.process.pid).children(recursive=True):
            assert time.monotonic() < deadline_s, f"{daemon.name} still runs {children}"
            time.sleep(0.05)


def test_a_job_trains_on_all_and_its_results_are_had_from_all(mesh: LocalMesh, tmp_path: Path) -> None:
    """O9: replicas are bit-equal; outputs and logs are had from any peer. Here the last one submits."""
    summary = jobs.run(mesh.daemons[2], tmp_path, jobs.TRAIN)
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True
    assert summary.hashes_compared >= 4
    assert summary.rounds == 8  # two epochs of 96 samples, 24 a round
    weights = set()
    for daemon in mesh.daemons:
        listed = daemon.request(ListOutputs(job=summary.job), jobs.TIMEOUT_S, "outputs")
        assert isinstance(listed, Outputs)
        assert sorted((file.rank, file.path) for file in listed.files) == [
            (rank, "sub/weights.txt") for rank in range(3)
        ]
        for rank in range(3):
            weights.add(jobs.read(daemon, summary.job, "output", rank, "sub/weights.txt"))
            assert f"rank {rank} of 3 ends" in jobs.read(daemon, summary.job, "log", rank)
    assert len(weights) == 1


@pytest.mark.slow
def test_two_jobs_at_once_do_not_disturb_each_other(mesh: LocalMesh, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first, second = mesh.daemons[:2]
    started = [
        jobs.submit(first, folders[0], jobs.TRAIN, peers=2),
        jobs.submit(second, folders[1], jobs.TRAIN, on=("bert", "cleo"), codec="fp16"),
    ]
    for daemon, submitted in zip((first, second), started, strict=True):
        summary = jobs.ended(daemon, submitted.job)
        assert summary.state == "succeeded", summary.error
        assert summary.replicas_equal is True


@pytest.mark.slow
def test_jobs_go_on_when_their_submitter_leaves(tmp_path: Path) -> None:
    """DESIGN 9: no master. In one job it only submits; in the other it takes part, as a member like any other."""
    stop = tmp_path / "stop"
    with LocalMesh(("anna", "bert", "cleo"), print) as mesh:
        anna, bert, cleo = mesh.daemons
        submitted = []
        for name, on in (("without it", ("bert", "cleo")), ("with it", ())):
            folder = tmp_path / name
            folder.mkdir()
            submitted.append(jobs.submit(anna, folder, jobs.UNTIL_STOPPED, on=on, args=(str(stop),)).job)
        jobs.wait_for(anna, submitted[1], lambda seen: seen.rounds >= 2, "round 2")
        anna.ask_to_stop()
        anna.stop()
        for id_ in submitted:
            jobs.go_on(bert, id_, 20, "rounds without anna")
        stop.touch()
        for id_ in submitted:
            for daemon in (bert, cleo):
                summary = jobs.ended(daemon, id_)
                assert summary.state == "succeeded", summary.error


SLOW = (
    jobs.PREAMBLE
    + """
model, optimizer, loader = mt.prepare(model, optimizer, loader)
while True:
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        mt.log(loss=1.0)
"""
)


@pytest.mark.slow
def test_devices_leave_a_job_one_by_one_and_the_last_one_cannot(mesh: LocalMesh, tmp_path: Path) -> None:
    """G: a person takes a device out and the others go on; it is not taken in again, and ends nothing for them."""
    anna, bert, cleo = mesh.daemons
    id_ = jobs.submit(anna, tmp_path, SLOW).job
    jobs.wait_for(anna, id_, lambda seen: seen.rounds >= 2, "round 2")
    taken = bert.request(ChangeSettings(job=id_, codec="int8"), jobs.TIMEOUT_S, "changing")
    assert isinstance(taken, SettingsTaken)
    assert [(one.first, one.codec) for one in jobs.summary(cleo, id_).changes] == [(taken.first, "int8")]
    with pytest.raises(RequestError, match="go by --codec int8 already"):
        cleo.request(ChangeSettings(job=id_, codec="int8"), jobs.TIMEOUT_S, "changing")

    def goes_on_among(ranks: tuple[int, ...]) -> None:
        jobs.wait_for(bert, id_, lambda seen: seen.present == ranks, "generation without it")
        jobs.go_on(bert, id_, 5, "five rounds more")

    for daemon, others in ((cleo, (0, 1)), (anna, (1,))):
        daemon.request(Leave(job=id_), jobs.TIMEOUT_S, "leaving")
        out = jobs.summary(daemon, id_)
        assert (out.state, out.error) == ("cancelled", f"{daemon.name} left it, the others went on")
        goes_on_among(others)
    assert [report.part for report in jobs.summary(bert, id_).ranks] == ["leaves", "computes", "leaves"]
    with pytest.raises(RequestError, match=f"no other device could go on with .* meshtrain cancel {id_}"):
        bert.request(Leave(job=id_), jobs.TIMEOUT_S, "leaving")
    assert jobs.summary(bert, id_).present == (1,)
    bert.request(Cancel(job=id_, now=True), jobs.TIMEOUT_S, "cancelling")
    assert [jobs.ended(daemon, id_).state for daemon in mesh.daemons] == ["cancelled"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("now", mostly_long([False, True], 1))
def test_cancel_ends_a_job_everywhere(mesh: LocalMesh, tmp_path: Path, now: bool) -> None:
    submitted = jobs.submit(mesh.daemons[0], tmp_path, SLOW)
    jobs.wait_for(mesh.daemons[0], submitted.job, lambda seen: seen.rounds >= 2, "round 2")
    mesh.daemons[1].request(Cancel(job=submitted.job, now=now), jobs.TIMEOUT_S, "cancelling")
    for daemon in mesh.daemons:
        summary = jobs.ended(daemon, submitted.job)
        assert summary.state == "cancelled"
        assert summary.error is not None
        assert "cancelled on bert" in summary.error


@pytest.mark.slow
def test_a_device_that_is_not_in_a_job_can_cancel_it(mesh: LocalMesh, tmp_path: Path) -> None:
    """A member does it in its name, and saves before what has been learned."""
    anna, bert, cleo = mesh.daemons
    id_ = jobs.submit(anna, tmp_path, SLOW, on=("anna", "bert")).job
    jobs.wait_for(anna, id_, lambda seen: seen.rounds >= 2, "round 2")
    cleo.request(Cancel(job=id_, now=False), jobs.TIMEOUT_S, "cancelling")
    for daemon in (anna, bert):
        ended = jobs.ended(daemon, id_)
        assert ended.state == "cancelled"
        assert (ended.error or "").startswith("cancelled on cleo (")
    listed = cleo.request(ListCheckpoints(job=id_), jobs.TIMEOUT_S, "checkpoints")
    assert isinstance(listed, Checkpoints)
    assert listed.checkpoints
    with pytest.raises(RequestError, match=f"{id_} has ended already: it is cancelled"):
        cleo.request(Cancel(job=id_, now=False), jobs.TIMEOUT_S, "cancelling")


ZERO = "optimizer.zero_grad()"
STEP = "        optimizer.step()"
PREPARE = "model, optimizer, loader = mt.prepare"

FAILURES = {
    "at import": ("import no_such_package_here", ["rank ", "ModuleNotFoundError", "Install no_such_package_here"]),
    "at its first step": (
        SLOW.replace(ZERO, f"{ZERO}\n        raise KeyError('boom')"),
        ["rank ", "train.py, line ", "KeyError: 'boom'"],
    ),
    "by differing models": (
        SLOW.replace(
            PREPARE,
            "model[2] = torch.nn.Linear(32, 1, bias=mt.rank() == 0)\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n" + PREPARE,
        ),
        ["differ", "2.bias"],
    ),
    "by a NaN gradient": (
        SLOW.replace(ZERO, f"{ZERO}\n        if mt.rank() == 2: x = x * float('nan')"),
        ["NaN or infinity", "rank 2 (cleo)", "2.bias", "round 1"],
    ),
    "by a second backward pass": (
        SLOW.replace(STEP, f"        torch.nn.functional.mse_loss(model(x), y).backward()\n{STEP}"),
        ["no_sync"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", mostly_long(FAILURES, 2))
def test_a_script_that_fails_ends_the_job_everywhere(mesh: LocalMesh, tmp_path: Path, how: str) -> None:
    """Which peer, and its traceback, on every daemon."""
    script, complaints = FAILURES[how]
    # Where all scripts fail at the same moment the last one may be left without a majority, and waits for that.
    submitted = jobs.submit(mesh.daemons[0], tmp_path, script, partition_wait=2.0)
    for daemon in mesh.daemons:
        summary = jobs.ended(daemon, submitted.job)
        assert summary.state == "failed"
        for complaint in complaints:
            assert complaint in (summary.error or ""), summary.error


@pytest.mark.slow
def test_a_nan_gradient_can_be_skipped(mesh: LocalMesh, tmp_path: Path) -> None:
    """V1: the round is void on all, and the job goes on with equal replicas."""
    script = jobs.TRAIN.replace(
        "optimizer.zero_grad()", "optimizer.zero_grad()\n        if mt.rank() == 2 and epoch == 0: x = x * float('nan')"
    )
    summary = jobs.run(mesh.daemons[0], tmp_path, script, on_nan="skip")
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sync": "ssp:x"}, "--sync ssp:x: use bsp"),
        ({"codec": "zip"}, "there is no codec 'zip'"),
        ({"codec": "int8", "topology": "tree"}, "--topology tree is not for --codec int8: use sharded"),
        ({"topology": "moon"}, "there is no such topology; there are ring, tree, butterfly"),
        ({"topology": "star:3"}, "--topology star:3: the job has no such rank; rank 0 is "),
        ({"peers": 4}, "only 3 devices"),
        ({"on": ("anna", "zoe")}, "no linked device is called 'zoe'"),
        ({"script": "other.py"}, "other.py is not among the files"),
    ],
)
def test_a_job_that_cannot_be_is_refused(
    mesh: LocalMesh, tmp_path: Path, options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        jobs.submit(mesh.daemons[0], tmp_path, jobs.TRAIN, **options)
    assert complaint in str(refusal.value)


@pytest.mark.slow
def test_a_killed_daemon_leaves_nothing_and_the_job_goes_on(tmp_path: Path) -> None:
    """G7: half of the learners are enough. The killed daemon's learner dies with it."""
    with LocalMesh(("anna", "bert"), print) as mesh:
        anna, bert = mesh.daemons
        submitted = jobs.submit(anna, tmp_path, SLOW)
        jobs.wait_for(anna, submitted.job, lambda seen: seen.rounds >= 2, "round 2")
        learners = psutil.Process(bert.process.pid).children()
        assert learners
        bert.process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(learners, timeout=20)
        assert not alive
        before = jobs.summary(anna, submitted.job).ranks[1].metrics.round
        jobs.wait_for(anna, submitted.job, lambda seen: seen.rounds >= before + 50, "rounds of anna alone")
        anna.request(Cancel(job=submitted.job, now=False), jobs.TIMEOUT_S, "cancelling")
        assert jobs.ended(anna, submitted.job).state == "cancelled"


@pytest.mark.slow
def test_one_device_alone_runs_jobs(tmp_path: Path) -> None:
    """A world of one, and a word on how to add a peer."""
    with LocalMesh(("anna",), print) as mesh:
        submitted = jobs.submit(mesh.daemons[0], tmp_path, jobs.TRAIN)
        assert any("meshtrain pair" in note for note in submitted.notes)
        summary = jobs.ended(mesh.daemons[0], submitted.job)
        assert summary.state == "succeeded", summary.error
        assert summary.rounds == 24


def test_nobody_unpaired_gets_past_the_handshake(mesh: LocalMesh) -> None:
    """DESIGN 10. TLS 1.3 lets a client believe for a moment that it is connected; what it then reads is the end."""
    status = mesh.daemons[0].request(GetStatus(), jobs.TIMEOUT_S, "status")
    assert isinstance(status, Status)
    host, _, port = status.listen.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection((host, int(port)), 10) as plain:
        try:
            with context.wrap_socket(plain) as wrapped:
                assert wrapped.recv(1) == b""
        except (ssl.SSLError, ConnectionError):
            pass
    for noise in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection((host, int(port)), 10) as plain:
            plain.sendall(noise)
    again = mesh.daemons[0].request(GetStatus(), jobs.TIMEOUT_S, "status")
    assert isinstance(again, Status)
    assert again.peers_linked == 2
