"""R6 on real daemons: two devices with two learners each train as four devices do, and a learner that is killed takes
the others of its device with it, but no round and no sample."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from meshtrain.demo.localmesh import LocalDaemon, LocalMesh
from tests.daemon import realjobs as jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TOLERANCE = 1e-6  # relative: sums of four are made in another order
TRAIN = (
    jobs.PREAMBLE
    + """
import json
model, optimizer, loader = mt.prepare(model, optimizer, loader)
seen = []
for epoch in range(3):
    for x, y in loader:
        seen.append(round(float(y.sum()), 3))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
weights = [p.flatten().tolist() for p in model.parameters()]
(mt.output_dir() / "weights.json").write_text(json.dumps(weights))
(mt.output_dir() / "seen.txt").write_text(str(seen))
print("learner", mt.rank(), "of", mt.world_size(), flush=True)
mt.finish()
"""
)
LONG = (
    jobs.PREAMBLE
    + """
model, optimizer, loader = mt.prepare(model, optimizer, loader)
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
    with LocalMesh(("anna", "bert", "cleo", "dora"), print) as started:
        yield started


def written(daemon: LocalDaemon, job: str, rank: int, learner: int, name: str) -> str:
    """What a learner has left as its result."""
    return jobs.read(daemon, job, "output", rank, f"learner{learner + 1}/{name}" if learner else name)


@pytest.mark.parametrize("sync", ["bsp", "local:3"])
def test_two_devices_of_two_learners_are_four_devices(mesh: LocalMesh, tmp_path: Path, sync: str) -> None:
    """To 1e-6; each learner draws the samples that this device draws."""
    anna = mesh.daemons[0]
    (crews := tmp_path / "crews").mkdir()
    (alone := tmp_path / "alone").mkdir()
    crew = jobs.run(anna, crews, TRAIN, on=("anna", "bert"), learners=2, sync=sync, hash_every=1)
    four = jobs.run(anna, alone, TRAIN, sync=sync, hash_every=1)
    assert (crew.state, four.state) == ("succeeded", "succeeded"), (crew.error, four.error)
    assert crew.replicas_equal is True
    assert crew.rounds == four.rounds
    places = [(rank, learner) for rank in range(2) for learner in range(2)]
    whole = {written(anna, crew.job, rank, learner, "weights.json") for rank, learner in places}
    assert len(whole) == 1, "bit for bit"
    ours, theirs = json.loads(whole.pop()), json.loads(written(anna, four.job, 0, 0, "weights.json"))
    for p, q in zip(map(torch.tensor, ours), map(torch.tensor, theirs), strict=True):
        assert float((p.double() - q.double()).norm() / q.double().norm()) <= TOLERANCE
    for place, (rank, learner) in enumerate(places):
        seen = written(anna, crew.job, rank, learner, "seen.txt")
        assert seen == written(anna, four.job, place, 0, "seen.txt")
    log = jobs.read(anna, crew.job, "log", 1)
    assert "learner 2 of 4" in log.splitlines()
    assert "[learner 2] learner 3 of 4" in log.splitlines()


def test_a_second_learner_that_is_killed_begins_again_with_the_first(mesh: LocalMesh, tmp_path: Path) -> None:
    """J3: the device's learners begin again from the others' state, and all replicas are equal at the end."""
    anna, bert = mesh.daemons[:2]
    rounds = 300
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
    assert "learner 2 of this device was killed by signal 9" in jobs.read(anna, job, "log", 1)
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
