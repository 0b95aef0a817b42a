"""A job in one WiFi cell, of which a laptop loses the air for a moment: it goes on in the same generation."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bench.overlap_lab import linked_stations
from tests.daemon import realjobs as jobs
from tests.lab.lab import Lab, lab_unavailable
from tests.lab.links import Cell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(lab_unavailable("nft") is not None, reason=str(lab_unavailable("nft"))),
]

AIR_MBIT = 50.0
DOWN_S = 1.0  # much less than patience
ROUNDS, STEP_S = 30, 0.05
SCRIPT = f"""
import time
import torch
import meshtrain as mt

model = torch.nn.Linear(200, 100, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones({ROUNDS * 2 * 4}, 200))
model, optimizer, loader = mt.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for (x,) in loader:
    optimizer.zero_grad()
    time.sleep({STEP_S})
    model(x).mean().backward()
    optimizer.step()
"""


def test_a_flap_in_a_shared_cell_costs_time_and_nothing_else(tmp_path: Path) -> None:
    """No round runs twice, nobody is lost, and no generation is made for it."""
    with Lab(2, cell=Cell(AIR_MBIT)) as lab, jobs.forked_learners(), ExitStack() as stack:
        daemons = linked_stations(lab, ("anna", "bert"), tmp_path)
        for daemon in daemons:
            stack.callback(daemon.stop)
            stack.callback(daemon.ask_to_stop)
        anna = daemons[0]
        job = jobs.submit(anna, tmp_path, SCRIPT).job
        before = jobs.wait_for(anna, job, lambda seen: seen.rounds >= 5, "five rounds")
        began_s = time.monotonic()
        lab.flap(1, DOWN_S)
        missed = round((time.monotonic() - began_s) / STEP_S)
        assert jobs.summary(anna, job).rounds < before.rounds + missed / 2, "the job went on over a link that was down"
        ends = [jobs.ended(daemon, job) for daemon in daemons]
    for end in ends:
        assert (end.state, end.error) == ("succeeded", None)
        assert (end.rounds, end.replicas_equal) == (ROUNDS, True)
        assert (end.generation, end.learning) == (before.generation, (0, 1))
