"""One train.py as a job on three daemons, under torchrun and alone: the same samples, losses and weights (O1, X4)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.demo.localmesh import LocalMesh
from meshwire.memory_layout.shared_slots import SCRIPT_SEED_VARIABLE
from meshwire.samples.epochs import epoch_seed, rounds_per_epoch
from tests.daemon import realjobs as jobs
from tests.plannedeal import deal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SEED, RANKS, TOTAL, BATCH, EPOCHS = 7, 3, 44, 4, 2  # the last turn of an epoch has 8 samples: batches of 2, 3 and 3
TOLERANCE = 1e-5
TIMEOUT_S = 90.0

SCRIPT = """
import contextlib, json, sys
import torch
from torch.utils.data import DataLoader, Dataset
import meshtrain as mt

torch.set_num_threads(1)


class Numbered(Dataset):
    def __init__(self, total):
        self.x = torch.randn(total, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index], self.x[index].sum().sin().view(1)


class Listed:
    # Alone: the batches that three ranks would take, epoch by epoch.
    def __init__(self, epochs):
        self.epochs = iter(epochs)

    def __iter__(self):
        return iter(next(self.epochs))


def main(total, batch, epochs, listed):
    torch.manual_seed(mt.rank())
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    alone = mt.world_size() == 1
    how = {"batch_sampler": Listed(listed)} if alone else {"batch_size": batch, "shuffle": True}
    model, optimizer, loader = mt.prepare(model, optimizer, DataLoader(Numbered(total), **how))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    micro = 3 if alone else 1
    steps = []
    for epoch in range(epochs):
        held = []
        for indices, x, y in loader:
            held.append((indices.tolist(), x, y))
            if len(held) < micro:
                continue
            samples = sum(len(x) for _, x, _ in held)
            optimizer.zero_grad()
            losses = []
            for at, (_, x, y) in enumerate(held):
                with contextlib.nullcontext() if at == micro - 1 else mt.no_sync():
                    loss = torch.nn.functional.mse_loss(model(x), y) * (len(x) / samples)
                    loss.backward()
                losses.append(loss.item())
            norm = mt.clip_grad_norm_(model.parameters(), 0.5).item()
            optimizer.step()
            scheduler.step()
            mt.log(loss=sum(losses))
            steps.append([[indices for indices, _, _ in held], sum(losses), norm])
            held = []
    mt.barrier()
    mt.finish()
    weights = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    (mt.output_dir() / "trained.json").write_text(json.dumps([type(optimizer).__name__, steps, weights]))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
"""


def planned() -> list[list[list[int]]]:
    """By epoch, the ranks' batches one after the other, as X4 deals them."""
    epochs = []
    for epoch in range(EPOCHS):
        order = torch.randperm(TOTAL, generator=torch.Generator().manual_seed(epoch_seed(SEED, epoch))).tolist()
        rounds = rounds_per_epoch(TOTAL, [BATCH] * RANKS)
        cuts = [cut for index in range(rounds) for cut in deal(TOTAL, [BATCH] * RANKS, index)]
        epochs.append([order[first:end] for first, end in cuts])
    return epochs


def run(folder: Path, arguments: str, *launcher: str) -> Path:
    """Runs the script as a person would. Returns its output folder."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    variables = {**os.environ, SCRIPT_SEED_VARIABLE: str(SEED), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, "train.py", arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


def assert_same(ranks: list[Any], alone: Any) -> None:
    """Steps of all ranks together against those of one process: samples, losses, norms; and the weights of each."""
    kind, steps, weights = alone
    for at, (batches, loss, norm) in enumerate(steps):
        own = [trained[1][at] for trained in ranks]
        assert [indices for (indices,), _, _ in own] == batches
        sizes = [len(indices) for indices in batches]
        mean = sum(size * each[1] for size, each in zip(sizes, own, strict=True)) / sum(sizes)
        assert mean == pytest.approx(loss, rel=TOLERANCE), f"step {at + 1}"
        assert [each[2] for each in own] == pytest.approx([norm] * len(own), rel=TOLERANCE), f"step {at + 1}"
    for name, trained_steps, trained_weights in ranks:
        assert (name, len(trained_steps)) == (kind, len(steps))
        assert trained_weights == ranks[0][2]
        for tensor, values in weights.items():
            assert trained_weights[tensor] == pytest.approx(values, rel=TOLERANCE, abs=1e-7)


def test_a_script_trains_alike_in_a_job_under_torchrun_and_alone(tmp_path: Path) -> None:
    """O1, O4, O6, X4, over two epochs with a shuffle, clipping, a scheduler and an incomplete last turn."""
    arguments = json.dumps([TOTAL, BATCH, EPOCHS, planned()])
    alone = json.loads((run(tmp_path / "alone", arguments) / "trained.json").read_text())
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    out = run(tmp_path / "torchrun", arguments, *launcher)
    launched = [json.loads((out / f"rank{rank}" / "trained.json").read_text()) for rank in range(RANKS)]
    assert_same(launched, alone)

    (tmp_path / "job").mkdir()
    with LocalMesh(("anna", "bert", "cleo"), print) as mesh:
        first = mesh.daemons[0]
        summary = jobs.run(first, tmp_path / "job", SCRIPT, seed=SEED, args=(arguments,))
        assert summary.state == "succeeded", summary.error
        texts = [jobs.read(first, summary.job, "output", rank, "trained.json") for rank in range(RANKS)]
    assert_same([json.loads(text) for text in texts], alone)
    assert len(alone[1]) == EPOCHS * 4
