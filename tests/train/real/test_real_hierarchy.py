"""Three levels on real daemons: gradients are added up among the learners of a machine (R6), then among the machines of
a site, then between sites (C2), and the job trains as over a ring, and as one process."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshtrain.demo.localmesh import LocalMesh
from tests.daemon import realjobs as jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TOLERANCE = 1e-6  # relative, of each tensor: sums are made in other orders
SITES, LEARNERS, MACHINES = "hierarchical:2", 2, 4  # the sites begin at the ranks 0 and 2
TOTAL = 96

TRAIN = """
import json
import torch
import meshtrain as mt

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
xs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(torch.arange(len(xs)), xs, xs.sum(1, keepdim=True) + 1)
loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)
seen = []
for epoch in range(2):
    for indices, x, y in loader:
        seen.append(indices.tolist())
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
mt.finish()
weights = [p.double().flatten().tolist() for p in model.parameters()]
(mt.output_dir() / "all.json").write_text(json.dumps([weights, seen]))
"""


@dataclass(frozen=True)
class Trained:
    """By learner, machine by machine, what it drew in each step; and the weights, the same on all, bit for bit. By
    machine, how many bytes of chunks it has sent, in models."""

    weights: list[Tensor]
    seen: list[list[list[int]]]
    sent: list[float]


def trained(mesh: LocalMesh, folder: Path, sync: str, topology: str | None) -> Trained:
    folder.mkdir()
    anna = mesh.daemons[0]
    summary = jobs.run(anna, folder, TRAIN, learners=LEARNERS, sync=sync, topology=topology, hash_every=1)
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True
    assert len(summary.ranks) == MACHINES
    places = [(rank, own) for rank in range(MACHINES) for own in ("", "learner2/")]
    texts = [jobs.read(anna, summary.job, "output", rank, f"{own}all.json") for rank, own in places]
    weights, seen = zip(*map(json.loads, texts), strict=True)
    assert all(each == weights[0] for each in weights), "replicas, bit for bit"
    values = sum(map(len, weights[0]))
    sent = [report.metrics.payload_bytes / (4 * values * summary.rounds) for report in summary.ranks]
    return Trained([torch.tensor(each, dtype=torch.float64) for each in weights[0]], list(seen), sent)


def alone(seen: list[list[list[int]]]) -> list[Tensor]:
    """One process on the joint batches of all learners."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))
    xs = torch.randn(TOTAL, 8, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batches in zip(*seen, strict=True):
        x = xs[[index for batch in batches for index in batch]]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) + 1).backward()
        optimizer.step()
    return [p.detach().double().flatten() for p in model.parameters()]


def far(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((p - q).norm() / q.norm()) for p, q in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with jobs.forked_learners(), LocalMesh(("anna", "bert", "cleo", "dora"), print) as started:
        yield started


@pytest.mark.parametrize("sync", [pytest.param("bsp", marks=pytest.mark.long), "local:3"])
def test_learners_then_machines_then_sites_are_a_ring(mesh: LocalMesh, tmp_path: Path, sync: str) -> None:
    """R6, C2: of the same samples the same weights, to rounding; of gradients, as one process on all of them. A machine
    sends its learners' sum once, and only the first machine of a site sends to the other site."""
    sites, ring = (trained(mesh, tmp_path / name, sync, topology) for name, topology in (("s", SITES), ("r", "ring")))
    assert sites.seen == ring.seen
    assert sorted(index for each in sites.seen for batch in each for index in batch) == sorted([*range(TOTAL)] * 2)
    assert far(sites.weights, ring.weights) <= TOLERANCE
    if sync == "bsp":
        assert far(sites.weights, alone(sites.seen)) <= TOLERANCE
    assert sites.sent == pytest.approx([2, 1, 2, 1], rel=0.1), "the sum to the other machine, and half each to the site"
    assert ring.sent == pytest.approx([1.5] * MACHINES, rel=0.1)
