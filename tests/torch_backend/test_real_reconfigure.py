"""A script that goes on with the ranks that are left, on real daemons (P4, P8): a rank is killed, and a daemon."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtrain.demo.localmesh import LocalMesh
from tests.daemon import realjobs as jobs
from tests.torch_backend import conformance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# Where torch has no such call yet, by what it would call.
SCRIPT = """
import os, sys, time
from datetime import timedelta
from types import SimpleNamespace
import torch
import torch.distributed as dist
from meshtrain.torch_backend.registration import WORLD

LIMIT = timedelta(seconds=20)
if hasattr(dist, "_reconfigure"):
    dist.init_process_group("gloo", enable_reconfigure=True, timeout=LIMIT)
    group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    reconfigure, handle = dist._reconfigure, dist._get_reconfigure_handle()
else:
    store, rank, size = WORLD.store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = WORLD.open(SimpleNamespace(group_id="0", group_rank=rank, group_size=size, timeout=LIMIT))
    handle = group.get_reconfigure_handle()
    def reconfigure(uuid, handles, timeout=None):
        return group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={}))

rank, size = group.rank(), group.size()
store.set(f"handle/{rank}", handle)
handles = [store.get(f"handle/{each}").decode() for each in range(size)]
reconfigure(1, handles, timeout=LIMIT).wait()
ones = torch.ones(500_000)
group.allreduce([ones]).wait()
assert ones.eq(size).all()
print("pid", os.getpid(), flush=True)
try:
    while True:
        began_s = time.monotonic()
        group.allreduce([ones.fill_(1)]).wait()
except dist.DistBackendError as error:
    lost = int(str(error).split("rank ")[1].split()[0])
    print(f"after {time.monotonic() - began_s:.3f} s: {error}", flush=True)
if sys.argv[1] == "fail":
    raise SystemExit("it does not go on")
began_s = time.monotonic()
reconfigure(2, [each for rank, each in enumerate(handles) if rank != lost], timeout=LIMIT).wait()
assert group.size() == size - 1
group.allreduce([ones.fill_(group.rank() + 1)]).wait()
assert ones.eq(sum(range(1, size))).all()
later_s = time.monotonic() - began_s
print(f"goes on as {group.rank()} of {group.size()} without {lost}, {later_s:.3f} s later", flush=True)
group.shutdown()
"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with LocalMesh(conformance.NAMES, print) as started:
        yield started


def start(mesh: LocalMesh, folder: Path, how: str) -> tuple[str, list[int]]:
    """The job, and the process of each rank; rank 0 is the first daemon's."""
    job = jobs.submit(mesh.daemons[0], folder, SCRIPT, args=(how,)).job

    def log(rank: int) -> str:
        return jobs.read(mesh.daemons[0], job, "log", rank)

    jobs.wait_for(
        mesh.daemons[0],
        job,
        lambda seen: seen.state == "running" and all("pid" in log(rank) for rank in range(3)),
        "a process group",
    )
    return job, [int(log(rank).split("pid")[1].split()[0]) for rank in range(3)]


def test_a_killed_rank_is_gone_without(mesh: LocalMesh, tmp_path: Path) -> None:
    """The others are told at once, and their scripts end the job well, for all; what it ended by stays to be read."""
    job, processes = start(mesh, tmp_path, "go on")
    os.kill(processes[2], signal.SIGKILL)
    for daemon in mesh.daemons:
        ended = jobs.ended(daemon, job)
        assert ended.state == "succeeded", ended.error
    for rank in range(2):
        told, then = jobs.read(mesh.daemons[0], job, "log", rank).splitlines()[-2:]
        assert "rank 2 (cleo) has left the process group" in told
        assert float(told.split()[1]) < 1.0
        assert then.startswith(f"goes on as {rank} of 2 without 2")


def test_where_no_script_goes_on_the_job_fails(mesh: LocalMesh, tmp_path: Path) -> None:
    job, processes = start(mesh, tmp_path, "fail")
    killed_s = time.monotonic()
    os.kill(processes[2], signal.SIGKILL)
    for daemon in mesh.daemons:
        ended = jobs.ended(daemon, job)
        assert ended.state == "failed", ended
    assert time.monotonic() - killed_s < 20.0


def test_a_killed_daemon_is_gone_without(tmp_path: Path) -> None:
    with LocalMesh(conformance.NAMES, print) as mesh:
        job, _ = start(mesh, tmp_path, "go on")
        mesh.daemons[2].process.kill()
        mesh.daemons[2].process.wait(10.0)
        for daemon in mesh.daemons[:2]:
            ended = jobs.ended(daemon, job)
            assert ended.state == "succeeded", ended.error
        told, then = jobs.read(mesh.daemons[0], job, "log", 0).splitlines()[-2:]
        lost = told.split("(")[1].split(")")[0]
        assert lost == "cleo"
        assert "of 2 without" in then
