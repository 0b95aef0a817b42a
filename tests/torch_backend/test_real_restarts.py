"""P6 on real daemons: scripts that are begun again with whoever is there, from their own checkpoints."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshtrain.client import RequestError
from meshtrain.demo.localmesh import LocalMesh
from meshwire.messages.job import JobSummary
from tests.daemon import realjobs as jobs
from tests.torch_backend import conformance

pytestmark = pytest.mark.slow

# As torchrun's scripts: each rank saves where it is, and all go on from the newest of these.
ELASTIC = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

orders = Path(sys.argv[1])
dist.init_process_group("gloo")
saved = Path("checkpoint")
epoch = torch.tensor([int(saved.read_text()) if saved.exists() else 0])
own = int(epoch)
dist.all_reduce(epoch, op=dist.ReduceOp.MAX)
elastic = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_WORLD_SIZE", *elastic)}
print("life", json.dumps({"pid": os.getpid(), "own": own, "epoch": int(epoch), **told}), flush=True)
assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
while True:
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.eq(dist.get_world_size()).all()
    epoch += 1
    saved.write_text(str(int(epoch)))
    if (orders / f"fail{dist.get_rank()}").exists():
        raise ValueError("as ordered")
    ends = torch.tensor([int((orders / "end").exists())])
    dist.all_reduce(ends)
    if ends:
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""


@pytest.fixture
def orders() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def lives(mesh: LocalMesh, at: int, job: str, rank: int) -> list[dict[str, Any]]:
    """What a rank's script has printed, as a daemon tells it."""
    lines = jobs.read(mesh.daemons[at], job, "log", rank).splitlines()
    return [json.loads(line.removeprefix("life ")) for line in lines if line.startswith("life ")]


def all_in(mesh: LocalMesh, at: int, job: str, counts: dict[int, int]) -> list[dict[str, Any]]:
    """The newest life of each of these ranks, once they have had so many."""

    def begun(_seen: JobSummary) -> bool:
        return all(len(lives(mesh, at, job, rank)) == count for rank, count in counts.items())

    jobs.wait_for(mesh.daemons[at], job, begun, f"lives {counts}")
    return [lives(mesh, at, job, rank)[-1] for rank in counts]


def test_scripts_go_on_with_whoever_is_there_until_restarts_are_used_up(tmp_path: Path, orders: Path) -> None:
    """P6, P7: a script that stands still; the daemon of rank 0, which keeps the store; an error of a script's own."""
    with LocalMesh(conformance.NAMES, print, patience_s=2.0) as mesh:
        job = jobs.submit(mesh.daemons[0], tmp_path, ELASTIC, args=(str(orders),), restarts_max=2).job
        first = all_in(mesh, 1, job, {0: 1, 1: 1, 2: 1})
        assert [each["TORCHELASTIC_RESTART_COUNT"] for each in first] == ["0"] * 3
        os.kill(first[1]["pid"], signal.SIGSTOP)
        second = all_in(mesh, 1, job, {0: 2, 1: 2, 2: 2})
        assert [(each["RANK"], each["TORCHELASTIC_RESTART_COUNT"]) for each in second] == [
            (str(k), "1") for k in range(3)
        ]
        stands = "bert: its process stands still: no answer and no computing for 2 s"
        assert jobs.summary(mesh.daemons[1], job).restarted == f"{stands}: restarting on anna, bert and cleo, 1 of 2"
        assert all(each["own"] > 0 for each in second), "what a script has saved is there"
        assert len({each["epoch"] for each in second}) == 1
        mesh.daemons[0].process.kill()
        mesh.daemons[0].process.wait(10.0)
        third = all_in(mesh, 1, job, {1: 3, 2: 3})
        names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_WORLD_SIZE")
        assert [[each[name] for name in names] for each in third] == [["0", "2", "0", "2"], ["1", "2", "1", "2"]]
        assert [each["TORCHELASTIC_RESTART_COUNT"] for each in third] == ["2", "2"]
        assert {each["TORCHELASTIC_MAX_RESTARTS"] for each in third} == {"2"}
        said = "anna was lost: restarting on bert and cleo, 2 of 2"
        assert jobs.summary(mesh.daemons[1], job).restarted == said
        assert f"meshtrain: {said}\n" in jobs.read(mesh.daemons[1], job, "log", 2)
        (orders / "fail1").touch()
        ended = jobs.ended(mesh.daemons[1], job)
        assert ended.state == "failed"
        assert "rank 2 (cleo)" in (ended.error or "")
        assert "ValueError: as ordered" in (ended.error or "")


@pytest.mark.long
def test_who_comes_back_is_taken_in_and_the_same_error_twice_ends_the_job(tmp_path: Path, orders: Path) -> None:
    """P6: a daemon that stands still is lost; when it goes on it is in the next world. (Then a script that always
    fails.) And --restart is not for mt.prepare."""
    with LocalMesh(conformance.NAMES, print, patience_s=1.0) as mesh:
        job = jobs.submit(mesh.daemons[0], tmp_path, ELASTIC, args=(str(orders),), restarts_max=5).job
        all_in(mesh, 1, job, {0: 1, 1: 1, 2: 1})
        mesh.daemons[2].process.send_signal(signal.SIGSTOP)
        try:
            two = all_in(mesh, 1, job, {0: 2, 1: 2})
            assert [(each["RANK"], each["WORLD_SIZE"]) for each in two] == [("0", "2"), ("1", "2")]
        finally:
            mesh.daemons[2].process.send_signal(signal.SIGCONT)
        three = all_in(mesh, 1, job, {0: 3, 1: 3, 2: 2})
        assert [(each["RANK"], each["WORLD_SIZE"]) for each in three] == [(str(rank), "3") for rank in range(3)]
        assert {each["TORCHELASTIC_RESTART_COUNT"] for each in three} == {"1"}, "who comes is no failure"
        (orders / "fail0").touch()
        ended = jobs.ended(mesh.daemons[0], job)
        assert ended.state == "failed"
        assert "it ends by this error whenever it is started" in (ended.error or "")
        assert len(lives(mesh, 1, job, 0)) == 4, "it was started again once"

        with pytest.raises(RequestError, match=r"uses mt\.prepare, and --restart is for scripts without it"):
            jobs.submit(mesh.daemons[0], tmp_path, jobs.TRAIN, restarts_max=1)
