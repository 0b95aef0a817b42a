"""P9 on real daemons: torch's own gloo carries the gradients, and the daemons do all else."""

import os
import signal
from pathlib import Path

import pytest

from meshtrain.demo.localmesh import LocalMesh
from meshwire.messages.job import JobSummary
from tests.daemon import realjobs as jobs
from tests.torch_backend import conformance

pytestmark = pytest.mark.slow

# mt.prepare, and what torch itself has opened for it.
PREPARED = (
    jobs.PREAMBLE
    + """
import torch.distributed as dist
model, optimizer, loader = mt.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    mt.log(loss=loss)
print("group", dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).name(), flush=True)
print("seed", os.environ["MESHTRAIN_SEED"], "token", os.environ.get("MESHTRAIN_TOKEN"), flush=True)
print("data", (mt.data_dir() / "note.txt").read_text(), flush=True)
(mt.output_dir() / "weights.txt").write_text(" ".join(repr(p.sum().item()) for p in model.parameters()))
mt.finish()
"""
)

# A script of torch's own, until a rank is killed.
GROUP = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
print("pid", os.getpid(), flush=True)
while True:
    dist.all_reduce(torch.ones(1000))
"""


@pytest.mark.long  # torch aborts a gloo rank at its very end now and then, and the job fails with it
def test_gloo_carries_the_gradients_and_a_killed_rank_ends_the_job_by_name(tmp_path: Path) -> None:
    """P9."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "note.txt").write_text("shipped")
    with LocalMesh(conformance.NAMES, print, patience_s=5.0) as mesh:
        submitted = jobs.submit(mesh.daemons[0], tmp_path, PREPARED, engine="torchrun", data=data, seed=7)
        assert any("gradients travel unencrypted, by gloo" in note for note in submitted.notes)
        well = jobs.ended(mesh.daemons[0], submitted.job)
        logs = [jobs.read(mesh.daemons[0], well.job, "log", rank) for rank in range(3)]
        assert (well.state, well.error) == ("succeeded", None), logs
        assert all("group gloo\nseed 7 token None\ndata shipped" in log for log in logs)
        assert "step 2: loss " in logs[0], "mt.log is the log's"
        weights = {jobs.read(mesh.daemons[0], well.job, "output", rank, "weights.txt") for rank in range(3)}
        assert len(weights) == 1

        job = jobs.submit(mesh.daemons[0], tmp_path, GROUP, engine="torchrun", on=("anna", "bert")).job

        def begun(_seen: JobSummary) -> bool:
            return all("pid " in jobs.read(mesh.daemons[0], job, "log", rank) for rank in range(2))

        jobs.wait_for(mesh.daemons[0], job, begun, "all ranks")
        os.kill(int(jobs.read(mesh.daemons[0], job, "log", 1).partition("pid ")[2].split()[0]), signal.SIGKILL)
        failed = jobs.ended(mesh.daemons[0], job)
        assert failed.state == "failed"
        assert (failed.error or "").startswith("rank 1 (bert): the script was killed by signal 9")
