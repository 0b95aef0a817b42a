"""Real daemons and learners: BSP equals one process on the joint batch; every sample is used once (O1, W3, X1, X4)."""

import functools
import itertools
import json
import runpy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.demo.localmesh import LocalMesh
from meshwire.samples.epochs import epoch_seed, rounds_per_epoch
from tests.daemon import realjobs as jobs
from tests.plannedeal import deal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SEED = 7
TOLERANCE = 1e-6  # relative, in fp32

# What the learners and the one process share; travels with the job beside the script.
TASK = """
import torch

torch.set_num_threads(1)


class Indexed(torch.utils.data.Dataset):
    def __init__(self, total):
        generator = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(total, 6, generator=generator), torch.randn(total, 3, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index], self.y[index]


def model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)
    return torch.nn.Sequential(*layers)


def optimizer(model, momentum, adamw):
    if adamw:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=0.01)


def loss(model, x, y, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return torch.nn.functional.mse_loss(model(x), y)
"""

SCRIPT = """
import json, sys, time
from torch.utils.data import DataLoader
import meshtrain as mt
import task

options = json.loads(sys.argv[1])
model = task.model()
optimizer = task.optimizer(model, options["momentum"], options["adamw"])
loader = DataLoader(
    task.Indexed(options["total"]), batch_size=options["batch_size"], shuffle=True, num_workers=options["workers"]
)
model, optimizer, loader = mt.prepare(model, optimizer, loader)
seen = []
for epoch in range(options["epochs"]):
    seen.append([])
    micro = 0
    for indices, x, y in loader:
        seen[-1].append(indices.tolist())
        time.sleep(options["pauses_s"][mt.rank()])
        loss = task.loss(model, x, y, options["autocast"]) / options["micro"]
        micro += 1
        if micro % options["micro"]:
            with mt.no_sync():
                loss.backward()
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
weights = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
(mt.output_dir() / "seen.json").write_text(json.dumps(seen))
(mt.output_dir() / "weights.json").write_text(json.dumps(weights))
mt.finish()
"""

Indices = list[list[list[int]]]  # by epoch, by batch


@dataclass(frozen=True)
class Case:
    """How a script trains. `micro` batches make a step; a rank sleeps `pauses_s` over each batch."""

    members: int
    momentum: float = 0.0
    adamw: bool = False
    total: int = 96
    batch_size: int = 4
    epochs: int = 2
    micro: int = 1
    autocast: bool = False
    workers: int = 0
    pauses_s: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    sync: str = "bsp"
    period: int = 1
    scale_lr: str | None = None


@dataclass(frozen=True)
class Trained:
    """`seen`: by rank. `weights`: the same on all ranks."""

    task: dict[str, Any]
    rounds: int
    seen: list[Indices]
    weights: dict[str, list[float]]


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with jobs.forked_learners(), LocalMesh(("anna", "bert", "cleo", "dora"), print) as started:
        yield started


def train(mesh: LocalMesh, folder: Path, case: Case) -> Trained:
    """Runs a job to its end; replicas must be bit-equal (O9)."""
    (folder / "work").mkdir()
    (folder / "work" / "task.py").write_text(TASK)
    on = tuple(daemon.name for daemon in mesh.daemons[: case.members])
    options = {"sync": case.sync, "scale_lr": case.scale_lr, "args": (json.dumps(asdict(case)),)}
    summary = jobs.run(mesh.daemons[0], folder, SCRIPT, on=on, seed=SEED, **options)
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True

    def output(rank: int, name: str) -> Any:
        # from another daemon than the rank's own
        return json.loads(jobs.read(mesh.daemons[(rank + 1) % len(mesh.daemons)], summary.job, "output", rank, name))

    weights = [output(rank, "weights.json") for rank in range(case.members)]
    assert all(other == weights[0] for other in weights[1:])
    seen = [output(rank, "seen.json") for rank in range(case.members)]
    return Trained(runpy.run_path(str(folder / "work" / "task.py")), summary.rounds, seen, weights[0])


def assert_each_sample_once(case: Case, trained: Trained) -> None:
    """X4: every epoch's permutation is dealt, whole and in order; round r's batches together are its next positions."""
    sizes = [case.batch_size] * case.members
    batches = rounds_per_epoch(case.total, sizes)
    assert trained.rounds == case.epochs * -(-batches // (case.micro * case.period))
    assert all(len(seen) == case.epochs for seen in trained.seen)
    for epoch in range(case.epochs):
        used = [index for seen in trained.seen for batch in seen[epoch] for index in batch]
        assert sorted(used) == list(range(case.total))
        generator = torch.Generator().manual_seed(epoch_seed(SEED, epoch))
        order = torch.randperm(case.total, generator=generator).tolist()
        for index in range(batches):
            cuts = deal(case.total, sizes, index)
            assert [seen[epoch][index] for seen in trained.seen] == [order[first:end] for first, end in cuts]


def one_process(
    case: Case,
    trained: Trained,
    *,
    joint: bool,
    order: Sequence[int] | None = None,
    scaled: Callable[[int, int], float] | None = None,
) -> nn.Module:
    """Plain torch on the samples that the ranks saw: as joint batches, or the ranks' batches averaged by samples.

    Args:
        order: of the ranks, in which their batches are added.
        scaled: what the rate is multiplied by in a round, from 1, of so many samples.
    """
    data = trained.task["Indexed"](case.total)
    model: nn.Module = trained.task["model"]()
    optimizer = trained.task["optimizer"](model, case.momentum, case.adamw)
    rate = optimizer.param_groups[0]["lr"]
    rounds = itertools.count(1)

    def gradients(indices: list[int]) -> list[Tensor]:
        loss = trained.task["loss"](model, data.x[indices], data.y[indices], case.autocast)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for epoch in range(case.epochs):
        by_rank = [trained.seen[rank][epoch] for rank in (range(case.members) if order is None else order)]
        for first in range(0, len(by_rank[0]), case.micro):
            parts = [batch for batches in by_rank for batch in batches[first : first + case.micro]]
            if joint:
                parts = [[index for part in parts for index in part]]
            total = sum(map(len, parts))
            weighted = [[g * (len(part) / total) for g in gradients(part)] for part in parts]
            for parameter, *shares in zip(model.parameters(), *weighted, strict=True):
                parameter.grad = functools.reduce(torch.add, shares)
            if scaled is not None:
                optimizer.param_groups[0]["lr"] = rate * scaled(next(rounds), total)
            optimizer.step()
    return model


def assert_equals(trained: Trained, reference: nn.Module) -> None:
    start = trained.task["model"]().state_dict()
    for name, wanted in reference.state_dict().items():
        got = torch.tensor(trained.weights[name]).view_as(wanted)
        assert float((wanted - start[name]).norm() / wanted.norm()) > 100 * TOLERANCE, f"{name} has not been trained"
        assert float((got - wanted).norm() / wanted.norm()) <= TOLERANCE, name


CASES = {
    "2 peers, SGD, a last round of 1 and 2 samples": Case(2, total=27),
    "2 peers, momentum": Case(2, momentum=0.9),
    "3 peers, SGD, one three times slower, a remainder of 2": Case(3, total=98, pauses_s=(0.02, 0.06, 0.02)),
    "4 peers, momentum": Case(4, momentum=0.9, total=130),
    "3 peers, momentum, loader workers, a last round of 1, 1 and 2": Case(3, momentum=0.9, total=100, workers=2),
}


# The same with other peers, with and without momentum, is among the others.
ALSO = {"2 peers, momentum", "4 peers, momentum"}


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.long] * (how in ALSO)) for how in CASES])
def test_equals_one_process_on_each_sample_once(mesh: LocalMesh, tmp_path: Path, how: str) -> None:
    """O1, W3, X4, R7: whatever the pace, the joint batches are the epoch's order, and weigh by their samples."""
    trained = train(mesh, tmp_path, CASES[how])
    assert_each_sample_once(CASES[how], trained)
    assert_equals(trained, one_process(CASES[how], trained, joint=True))


def test_adamw_is_no_further_than_orders_of_addition_are(mesh: LocalMesh, tmp_path: Path) -> None:
    """AdamW magnifies rounding: after 56 steps at most twice as far as one-process runs that add in other orders."""
    case = Case(3, adamw=True, epochs=7)
    trained = train(mesh, tmp_path, case)
    assert trained.rounds == 56
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 1, 0)]
    vectors = [
        torch.cat(
            [value.flatten() for value in one_process(case, trained, joint=False, order=order).state_dict().values()]
        )
        for order in orders
    ]
    largest = max(float((one - other).norm()) for one, other in itertools.combinations(vectors, 2))
    mine = torch.cat([torch.tensor(values) for values in trained.weights.values()])
    assert float((mine - vectors[0]).norm()) <= 2 * largest


def test_autocast_to_bfloat16(mesh: LocalMesh, tmp_path: Path) -> None:
    """Gradients of fp32 parameters are averaged in fp32. bf16 rounds by batch, so the one process adds equal ones."""
    case = Case(2, momentum=0.9, autocast=True)
    trained = train(mesh, tmp_path, case)
    assert_equals(trained, one_process(case, trained, joint=False))


def test_accumulation_is_one_large_batch(mesh: LocalMesh, tmp_path: Path) -> None:
    """O6: backward passes under mt.no_sync() are part of the next one outside, with all their samples."""
    case = Case(3, momentum=0.9, micro=2)
    trained = train(mesh, tmp_path, case)
    assert_each_sample_once(case, trained)
    assert_equals(trained, one_process(case, trained, joint=True))


def test_rounds_of_several_steps_are_those_of_one_large_batch(mesh: LocalMesh, tmp_path: Path) -> None:
    """O6: the script steps after each batch, and knows nothing of it; a round ends with its epoch, too."""
    case = Case(2, momentum=0.9, total=58, sync="bsp,accumulate=3", period=3)
    trained = train(mesh, tmp_path, case)
    assert_each_sample_once(case, trained)
    assert_equals(trained, one_process(replace(case, micro=3), trained, joint=True))


def test_scaled_rates_are_those_of_one_large_batch(mesh: LocalMesh, tmp_path: Path) -> None:
    """O12: linear scaling with a warm-up of 6 rounds, at which the last round of each epoch, of 1 and 2 samples, is no
    faster than one laptop alone."""
    case = Case(2, momentum=0.9, total=27, scale_lr="linear,warmup=6")
    trained = train(mesh, tmp_path, case)
    assert_each_sample_once(case, trained)

    def scaled(round_: int, samples: int) -> float:
        return 1 + (max(1.0, samples / case.batch_size) - 1) * min(1.0, (round_ - 1) / 6)

    assert_equals(trained, one_process(case, trained, joint=True, scaled=scaled))


def test_local_steps_are_local_sgd(mesh: LocalMesh, tmp_path: Path) -> None:
    """R9, O8: H steps each, momentum included, then the mean of all weights; a period ends with its epoch, too."""
    case = Case(2, momentum=0.9, total=80, sync="local:4", period=4, workers=2, pauses_s=(0.0, 0.01))
    trained = train(mesh, tmp_path, case)
    assert_each_sample_once(case, trained)
    data = trained.task["Indexed"](case.total)
    models = [trained.task["model"]() for _ in range(case.members)]
    optimizers = [trained.task["optimizer"](model, case.momentum, case.adamw) for model in models]
    for epoch, first in itertools.product(range(case.epochs), range(0, 10, case.period)):
        for model, optimizer, seen in zip(models, optimizers, trained.seen, strict=True):
            for indices in seen[epoch][first : first + case.period]:
                optimizer.zero_grad()
                trained.task["loss"](model, data.x[indices], data.y[indices], case.autocast).backward()
                optimizer.step()
        for places in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([place.detach() for place in places]).mean(0)
            for place in places:
                place.data.copy_(mean)
    assert_equals(trained, models[0])
