"""R6 on real daemons: a learner that is killed takes the others of its device with it, but no round and no sample. That
devices with several learners train as that many devices do: `test_real_equalities.py`."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshtrain.demo.localmesh import LocalMesh
from tests.daemon import realjobs as jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LONG = (
    jobs.PREAMBLE
    + """
model, optimizer, loader = mt.prepare(model, optimizer, loader)
sys.stdout.write(f"learner {mt.rank()} of {mt.world_size()}\\n")  # whole, for two processes write into the log
if mt.rank() % 2:
    open(f"pid{mt.rank()}.{os.getpid()}", "w").close()
for step in mt.steps(int(sys.argv[1])):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(xs[:8]), data.tensors[1][:8]).backward()
    optimizer.step()
    time.sleep(0.03)
mt.finish()
"""
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with LocalMesh(("anna", "bert"), print) as started:
        yield started


def test_a_second_learner_that_is_killed_begins_again_with_the_first(mesh: LocalMesh, tmp_path: Path) -> None:
    """J3: the device's learners begin again from the others' state, and all replicas are equal at the end."""
    anna, bert = mesh.daemons[:2]
    rounds = 200
    job = jobs.submit(anna, tmp_path, LONG, on=("anna", "bert"), learners=2, args=(str(rounds),), hash_every=10).job
    jobs.wait_for(anna, job, lambda seen: seen.rounds >= 20, "round 20")
    (told,) = (bert.data_dir / "jobs" / job).glob("*/pid3.*")
    killed = int(told.suffix[1:])
    others = {child.pid for child in psutil.Process(bert.process.pid).children(recursive=True)} - {killed}
    os.kill(killed, signal.SIGKILL)
    deadline_s = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in others):
        assert time.monotonic() < deadline_s, "the learners of the device end together"
        time.sleep(0.05)
    summary = jobs.ended(anna, job)
    assert summary.state == "succeeded", summary.error
    assert summary.rounds >= rounds
    assert summary.replicas_equal is True
    log = jobs.read(anna, job, "log", 1)
    assert "learner 2 of this device was killed by signal 9" in log
    assert {"learner 2 of 4", "[learner 2] learner 3 of 4"} <= set(log.splitlines())
    deadline_s = time.monotonic() + 20
    while any(psutil.Process(daemon.process.pid).children(recursive=True) for daemon in (anna, bert)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_learner_whose_script_ends_early_ends_the_job_by_its_name(mesh: LocalMesh, tmp_path: Path) -> None:
    """The other one would wait for it for hours, in mt.prepare."""
    text = jobs.PREAMBLE + "if mt.rank() % 2:\n    sys.exit()\nmt.prepare(model, optimizer)\n"
    summary = jobs.run(mesh.daemons[0], tmp_path, text, on=("anna",), learners=2)
    assert summary.state == "failed"
    assert "learner 2 of this device has ended without meshtrain.prepare, and others" in str(summary.error)
