"""`import meshtrain as mt` in a script of its own, without and with a job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwire.memory_layout.shared_slots import ENDPOINT_VARIABLE, JOB_VARIABLE, MEMORY_FD_VARIABLE, TOKEN_VARIABLE
from tests.daemon.realjobs import WITHOUT_COMPILER
from tests.train.localdaemon import LocalDaemon

SCRIPT = """
import os, sys
import meshtrain as mt
assert "torch" not in sys.modules
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(16, 3), torch.randn(16, 1)), batch_size=4, shuffle=True)
given = model, optimizer
torch.set_num_threads(2)  # not what the daemon says: the script knows better
model, optimizer, loader = mt.prepare(model, optimizer, loader)
assert (model, optimizer) == given and isinstance(loader, DataLoader)
assert "MESHTRAIN_TOKEN" not in os.environ
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(mt.device())), y.to(mt.device()))
        with mt.no_sync():
            pass
        loss.backward()
        optimizer.step()
        mt.log(loss=loss)
mt.barrier()
with mt.base():
    torch.save(model.state_dict(), mt.output_dir() / "model.pt")
print(mt.rank(), mt.world_size(), mt.is_main(), len(loader), torch.get_num_threads(), mt.data_dir())
"""


def start(script: str, folder: Path, environment: dict[str, str], *fds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=fds,
    )


def start_learner(script: str, daemon: LocalDaemon, rank: int) -> subprocess.Popen[str]:
    environment = daemon.environment(rank)
    variables = {
        ENDPOINT_VARIABLE: environment.endpoint,
        TOKEN_VARIABLE: environment.token,
        JOB_VARIABLE: environment.job,
        MEMORY_FD_VARIABLE: str(environment.memory_fd),
    }
    return start(WITHOUT_COMPILER + script, daemon.folder, variables, environment.memory_fd)


@pytest.mark.slow
def test_without_a_job_the_script_runs_as_it_is(tmp_path: Path) -> None:
    """A world of one: nothing is changed, results go to ./out."""
    (tmp_path / "data").mkdir()
    out, err = (process := start(SCRIPT, tmp_path, {})).communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.split()[:4] == ["0", "1", "True", "4"]
    assert out.split()[-1] == "data"
    assert (tmp_path / "out" / "model.pt").exists()


@pytest.mark.parametrize("sync", ["bsp", pytest.param("ssp:2", marks=pytest.mark.long)])
def test_in_a_job(sync: str) -> None:
    """The same script on two learners; the end of the script finishes it, with s>0 after a flush."""
    with LocalDaemon(2, sync=sync) as daemon:
        processes = [start_learner(SCRIPT, daemon, rank) for rank in range(2)]
        outputs = [process.communicate(timeout=60) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        assert [out.split()[:5] for out, _ in outputs] == [["0", "2", "True", "2", "2"], ["1", "2", "False", "2", "2"]]
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values())
        states = [torch.load(daemon.folder / f"out{rank}" / "model.pt") for rank in range(2)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert set(daemon.hashes[daemon.round]) == {0, 1}
        assert {rank for rank, idle in daemon.idle if idle.finished} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bsp", pytest.param("ssp:2", marks=pytest.mark.long)])
def test_script_that_raises_is_not_finished(sync: str) -> None:
    """V2: what it had begun is void; its exit code tells."""
    script = SCRIPT.replace("mt.barrier()", "raise ValueError('my bug')")
    with LocalDaemon(1, sync=sync) as daemon:
        process = start_learner(script, daemon, 0)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "ValueError: my bug" in err
        assert daemon.idle == []


@pytest.mark.slow
@pytest.mark.parametrize("finish", ["", "mt.finish()"])
def test_what_fails_at_the_end_fails_the_script(finish: str) -> None:
    """V1, `--on-nan stop`: also for a round that comes after the last step, and in a script without mt.finish()."""
    script = f"""
import meshtrain as mt
import torch
from torch import nn
model = nn.Linear(3, 1)
model, optimizer = mt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for value in (0.0, 0.0, float("nan")):
    optimizer.zero_grad()
    model(torch.full((2, 3), value)).sum().backward()
    optimizer.step()
{finish}
"""
    with LocalDaemon(1, sync="ssp:2", visibility="fixed") as daemon:
        process = start_learner(script, daemon, 0)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "NonFiniteGradient: round 3 is void" in err


@pytest.mark.slow
def test_stopped_script_may_clean_up() -> None:
    """A job that ends: SIGTERM raises JobStopped in the script, its finally blocks run."""
    script = """
import time
import meshtrain as mt
try:
    mt.rank()
    print("ready", flush=True)
    time.sleep(60)
finally:
    print("cleaned up", flush=True)
"""
    with LocalDaemon(1) as daemon:
        process = start_learner(script, daemon, 0)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        out, err = process.communicate(timeout=30)
        assert out == "cleaned up\n"
        assert "JobStopped" in err


@pytest.mark.slow
def test_other_processes_of_the_script_are_told() -> None:
    """The token is for the learner alone."""
    script = """
import subprocess, sys
import meshtrain as mt
mt.rank()
child = subprocess.run([sys.executable, "-c", "import meshtrain as mt; mt.rank()"], capture_output=True, text=True)
print(child.stderr)
"""
    with LocalDaemon(1) as daemon:
        out, _ = start_learner(script, daemon, 0).communicate(timeout=60)
    assert "UsageError" in out
    assert "__main__" in out


@pytest.mark.parametrize("name", ["prepare", "log", "device", "finish", "barrier", "base", "steps", "clip_grad_norm_"])
def test_api_is_documented(name: str) -> None:
    import meshtrain

    assert name in meshtrain.__all__
    assert getattr(meshtrain, name).__doc__
