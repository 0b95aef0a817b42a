"""What a person sees who follows a job that does not go well: the whole screen, line by line, with real learners."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtrain.demo.localmesh import LocalMesh
from meshtrain.following.status_line import STAGES
from meshwire.messages.local import Cancel
from tests.daemon import realjobs as jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FAILS = jobs.TRAIN.replace("        loss.backward()\n", "        loss.backward()\n        import no_such_package\n")
LINE = next(at for at, line in enumerate((jobs.WITHOUT_COMPILER + FAILS).splitlines(), 1) if "import no_such" in line)
LONG = jobs.TRAIN.replace("        mt.log(loss=loss)\n", "        mt.log(loss=loss)\n        time.sleep(0.02)\n")


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with LocalMesh(("anna", "bert"), print) as made:
        yield made


def followed(mesh: LocalMesh, job: str) -> "subprocess.Popen[str]":
    """`meshtrain logs -f`, which is how `submit` goes on."""
    command = [sys.executable, "-m", "meshtrain.cli", "logs", "-f", job, "--data-dir", str(mesh.daemons[0].data_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def screen(process: "subprocess.Popen[str]", job: str) -> tuple[int, list[str], list[str]]:
    """Exit code, what the scripts have said, in no order, and what is said of them: without states on the way, which
    whoever looks a little later does not see."""
    logs, said = process.communicate(timeout=jobs.TIMEOUT_S)
    lines = re.sub(r"after [\d.]+ (s|min)", "after T", said.replace(job, "JOB")).splitlines()
    passing = [f"job JOB {state}" for state in ("starting", "running", "finishing", "failing", "cancelling")]
    told = [line for line in lines if line not in passing and not line.endswith(tuple(STAGES.values()))]
    return process.returncode, sorted(logs.splitlines()), told


def test_the_same_error_on_all_is_one_block(mesh: LocalMesh, tmp_path: Path) -> None:
    """J3: nobody begins a script anew that cannot end otherwise. Its whole traceback is in the logs of both."""
    job = jobs.submit(mesh.daemons[0], tmp_path, FAILS).job
    code, logs, lines = screen(followed(mesh, job), job)
    assert (code, logs) == (1, [])
    assert lines == [
        "job JOB failed",
        "job JOB (test) failed after T, 1 rounds",
        f"error on both devices: train.py, line {LINE}: ModuleNotFoundError: No module named 'no_such_package'",
        "    import no_such_package",
        "Install no_such_package into the Python environment of meshtraind there; if it is a file of yours, submit "
        "from a folder that holds it.",
        "All that the scripts said: meshtrain logs JOB",
    ]
    for rank in range(2):
        log = jobs.read(mesh.daemons[0], job, "log", rank)
        assert log.count("Traceback (most recent call last):") == 1
        assert "ModuleNotFoundError" in log
    assert jobs.summary(mesh.daemons[0], job).ranks[0].restarts == 0


def test_a_script_without_prepare_has_not_succeeded(mesh: LocalMesh, tmp_path: Path) -> None:
    """J4, and with --independent it has."""
    script = "print('trained alone')\n"
    job = jobs.submit(mesh.daemons[0], tmp_path, script).job
    code, logs, lines = screen(followed(mesh, job), job)
    assert (code, logs) == (1, ["[0 anna] trained alone", "[1 bert] trained alone"])
    assert lines == [
        "job JOB failed",
        "job JOB (test) failed after T",
        "error: nothing was exchanged: each device has trained by itself. Call mt.prepare(model, optimizer, loader), "
        "of `import meshtrain as mt`, before the training loop, or make a process group of torch.distributed; if each "
        "is meant to train by itself, meshtrain submit --independent",
    ]
    assert jobs.run(mesh.daemons[0], tmp_path, script, independent=True).state == "succeeded"


def test_a_cancelled_job_is_one_line(mesh: LocalMesh, tmp_path: Path) -> None:
    """Wherever its learners were: in the backward pass, most of the time."""
    anna = mesh.daemons[0]
    job = jobs.submit(anna, tmp_path, LONG, args=("1000",)).job
    following = followed(mesh, job)
    jobs.wait_for(anna, job, lambda seen: seen.rounds >= 5, "round 5")
    time.sleep(1.0)  # the follower has connected by then
    anna.request(Cancel(job=job, now=False), jobs.TIMEOUT_S, "cancelling")
    code, logs, lines = screen(following, job)
    assert (code, logs) == (130, [])
    assert len(lines) == 2, lines
    assert lines[0] == "job JOB cancelled"
    assert re.fullmatch(r"job JOB \(test\) cancelled after T, \d+ rounds.*, on anna( \(\w+\))?", lines[1]), lines
