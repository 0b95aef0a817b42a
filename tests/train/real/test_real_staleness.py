"""Real daemons and learners under a bound s: bases, bits, delayed gradients, a stopped learner (R0, R5, R8, O2, V2)."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtrain.demo.localmesh import LocalMesh
from meshwire.messages.job import JobSummary
from meshwire.rounds.learner_state import DEADLINE_FACTOR, DEADLINE_S_MIN
from meshwire.sync_modes.mode import sync_settings
from tests.bench import paced
from tests.daemon import realjobs as jobs
from tests.tiers import mostly_long

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MEMBERS = 3

TRAIN = """
import json, random, sys, time
import torch
import meshtrain as mt

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))
if options["adamw"]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
xs = torch.randn(options["total"], 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(torch.arange(len(xs)), xs, xs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)
pauses = random.Random(options["timing"] * 100 + mt.rank())
seen = []
for epoch in range(options["epochs"]):
    seen.append([])
    for indices, x, y in loader:
        seen[-1] += indices.tolist()
        time.sleep(pauses.random() * options["pause_s"] * (options["slow"] if mt.rank() == 2 else 1.0))
        optimizer.zero_grad()
        model.train(len(x) > 1)  # BatchNorm has no statistics of a last batch of one, which may be dealt
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
mt.finish()
state = {name: value.double().flatten().tolist() for name, value in model.state_dict().items()}
(mt.output_dir() / "state.json").write_text(json.dumps(state))
(mt.output_dir() / "seen.json").write_text(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with jobs.forked_learners(), LocalMesh(("anna", "bert", "cleo"), print) as started:
        yield started


def output(mesh: LocalMesh, job: str, rank: int, name: str) -> Any:
    return json.loads(jobs.read(mesh.daemons[0], job, "output", rank, name))


def trained(
    mesh: LocalMesh,
    folder: Path,
    *,
    timing: int = 0,
    adamw: bool = False,
    pause_s: float = 0.02,
    slow: float = 1.0,
    total: int = 120,
    **options: Any,
) -> tuple[JobSummary, dict[str, list[float]]]:
    """Runs TRAIN. Replicas must be bit-equal all the time (O9), and after the flush; every sample used once (X4)."""
    arguments = {"timing": timing, "adamw": adamw, "pause_s": pause_s, "slow": slow}
    arguments |= {"epochs": 2, "total": total}
    summary = jobs.run(mesh.daemons[0], folder, TRAIN, args=(json.dumps(arguments),), hash_every=1, **options)
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True
    assert summary.hashes_compared >= summary.rounds
    states = [output(mesh, summary.job, rank, "state.json") for rank in range(MEMBERS)]
    assert states[1] == states[0]
    assert states[2] == states[0]
    seen = [output(mesh, summary.job, rank, "seen.json") for rank in range(MEMBERS)]
    for epoch in range(2):
        assert sorted(index for rank in seen for index in rank[epoch]) == list(range(total))
    return summary, states[0]


@pytest.mark.parametrize(
    "options",
    mostly_long(
        [
            {"sync": "ssp:3", "straggler": "carry", "shares": "speed", "adamw": True},
            {"sync": "ssp:2", "own": "1", "shares": "equal"},
            {"sync": "diloco:4,rate=0.8,ssp:1", "shares": None, "codec": "int8", "adamw": True},
            {"sync": "ssp:2", "straggler": "carry", "shares": "equal"},
            {"sync": "local:3,ssp:2", "shares": None},
        ],
        3,
    ),
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_replicas_are_bit_equal_at_any_bound_and_timing(
    mesh: LocalMesh, tmp_path: Path, options: dict[str, Any]
) -> None:
    """R0 bounds the ages; bases are equal at equal rounds, and after a flush nothing else is left."""
    summary, _ = trained(mesh, tmp_path, **options)
    staleness = sync_settings(options["sync"]).staleness
    assert len(jobs.ages(summary)) <= staleness + 1
    assert sum(jobs.ages(summary)) == sum(report.metrics.step for report in summary.ranks), "every step is contributed"


def test_two_fixed_runs_give_identical_bits(mesh: LocalMesh, tmp_path: Path) -> None:
    """R8, whatever the timing."""
    states = [
        trained(mesh, tmp_path, sync="ssp:2", visibility="fixed", shares=None, timing=timing)[1] for timing in (1, 2)
    ]
    assert states[0] == states[1]


def test_who_is_slower_takes_shorter_periods(mesh: LocalMesh, tmp_path: Path) -> None:
    """R9: it is in the rounds with what it has."""
    summary, _ = trained(mesh, tmp_path, sync="local:8,ssp:1", shares=None, slow=4.0, total=1200)
    samples = [report.metrics.samples for report in summary.ranks]
    assert sum(samples) == 2 * 1200
    assert samples[2] < 0.6 * min(samples[:2]), f"samples {samples}: it is four times slower"
    periods = [report.metrics.step for report in summary.ranks]
    assert periods[2] > 0.7 * min(periods[:2]), f"periods {periods}: each is as long as the fastest's"


DELAYED = """
import json, sys
import torch
import meshtrain as mt

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
model = torch.nn.Module()
model.w = torch.nn.Parameter(torch.zeros(len(options["a"][0][0])))
optimizer = torch.optim.SGD(model.parameters(), lr=options["eta"])
a, b = (torch.tensor(options[name][mt.rank()]) for name in "ab")
model, optimizer = mt.prepare(model, optimizer)
for _ in range(options["steps"]):
    optimizer.zero_grad()
    (0.5 * (a @ model.w - b) ** 2).mean().backward()
    optimizer.step()
with mt.base():
    base = model.w.tolist()
(mt.output_dir() / "w.json").write_text(json.dumps([model.w.tolist(), base]))
mt.finish()
(mt.output_dir() / "end.json").write_text(json.dumps(model.w.tolist()))
"""


@pytest.mark.parametrize("staleness", [3])
def test_fixed_with_c_1_is_delayed_gradient_averaging(mesh: LocalMesh, tmp_path: Path, staleness: int) -> None:
    """DGA (Zhu et al. 2021) with K=1, D=s: own steps at once, corrected by the mean when it arrives. It is computed in
    fp64, of the same fp32 data; how far learners are from it is relative, of the weights as a whole."""
    random = np.random.default_rng(5)
    a, b = (random.normal(size=size).astype(np.float32).astype(np.float64) for size in ((MEMBERS, 6, 4), (MEMBERS, 6)))
    steps, eta = 30, 0.05
    arguments = json.dumps({"a": a.tolist(), "b": b.tolist(), "eta": eta, "steps": steps})
    summary = jobs.run(
        mesh.daemons[0], tmp_path, DELAYED, args=(arguments,), sync=f"ssp:{staleness}", visibility="fixed", own="1",
        shares=None, hash_every=1,
    )  # fmt: skip
    assert summary.state == "succeeded", summary.error

    w = np.zeros((MEMBERS, 4))
    sent: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = []
    for step in range(steps):
        if step > staleness:
            arrived = sent[step - staleness - 1]
            w -= eta * (arrived.mean(axis=0) - arrived)
        g = np.einsum("mni,mn->mi", a, np.einsum("mni,mi->mn", a, w) - b) / a.shape[1]
        sent.append(g)
        w = w - eta * g
    arrived = sent[steps - staleness - 1]
    w -= eta * (arrived.mean(axis=0) - arrived)  # at the boundary after the last step

    base = -eta * sum(g.mean(axis=0) for g in sent[: steps - staleness])
    end = -eta * sum(g.mean(axis=0) for g in sent)
    for rank in range(MEMBERS):
        view, in_base = output(mesh, summary.job, rank, "w.json")
        flushed = output(mesh, summary.job, rank, "end.json")
        for ours, expected in ((view, w[rank]), (in_base, base), (flushed, end)):
            assert np.linalg.norm(ours - expected) <= 1e-6 * np.linalg.norm(expected)


STABILITY = """
import json, sys
import torch
import meshtrain as mt

rates, steps = json.loads(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
model = torch.nn.Module()
model.w = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(1)) for _ in rates)
optimizer = torch.optim.SGD([{"params": [w], "lr": rate} for w, rate in zip(model.w, rates)])
model, optimizer = mt.prepare(model, optimizer)
seen = []
for _ in range(steps):
    optimizer.zero_grad()
    sum((0.5 * w**2).sum() for w in model.w).backward()
    optimizer.step()
    seen.append([w.item() for w in model.w])
(mt.output_dir() / "seen.json").write_text(json.dumps(seen))
mt.finish()
"""


@pytest.mark.parametrize("staleness", [2])
def test_the_stability_bound_of_delayed_gradients(mesh: LocalMesh, tmp_path: Path, staleness: int) -> None:
    """w <- w - eta * lambda * w(s steps ago) is stable iff eta * lambda < 2 sin(pi / (2 (2s + 1))); that is c=0."""
    bound = 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))
    rates = [0.97 * bound, 1.03 * bound]
    summary = jobs.run(
        mesh.daemons[0], tmp_path, STABILITY, args=(json.dumps(rates), "400"), sync=f"ssp:{staleness}",
        visibility="fixed", own="0", shares=None, hash_every=0,
    )  # fmt: skip
    assert summary.state == "succeeded", summary.error
    seen = np.abs(output(mesh, summary.job, 0, "seen.json"))
    early, late = seen[20:60].max(axis=0), seen[-40:].max(axis=0)
    assert late[0] < 0.5 * early[0]
    assert late[1] > 2 * early[1]


@pytest.mark.parametrize(("sync", "layer"), mostly_long([("ssp:2", 3), ("ssp:2", None)], 1))
def test_a_stopped_learner_is_cut_off(mesh: LocalMesh, tmp_path: Path, sync: str, layer: int | None) -> None:
    """SIGSTOP for 5 s. R5 if it had not bound its step, V2 if it had: the others stand still no longer than its step
    deadline + 0.5 s, and the log says so."""
    step_s, stop_step = 0.12, 12
    script = paced.options(
        values=40_000, sample_s=step_s / 4, batch=4, slowness=(1.0,) * MEMBERS, count=40,
        stop={"step": stop_step, "layer": layer},
    )  # fmt: skip
    with paced.Waking(mesh.daemons[2], 5.0):
        summary = jobs.run(mesh.daemons[0], tmp_path, paced.SCRIPT, args=(script,), sync=sync, hash_every=5, cold=True)
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True
    ranks = [paced.steps(mesh.daemons[0], summary.job, rank) for rank in range(MEMBERS)]
    longest_s = max(step.ended_s - step.began_s for step in ranks[2][: stop_step - 1])
    deadline_s = max(DEADLINE_FACTOR * longest_s, DEADLINE_S_MIN)
    stood_s = max(paced.standstill_s(ranks[rank][5:]) for rank in (0, 1))
    assert stood_s <= deadline_s + 0.5
    metrics = summary.ranks[2].metrics
    log = mesh.daemons[2].log_path.read_text()
    assert f"job {summary.job}: the learner was cut off" in log
    if layer is None:
        assert metrics.nulls > 0
        assert metrics.void_rounds == 0
        assert "(R5)" in log
    else:
        assert metrics.void_rounds == 1
        assert metrics.steps_lost == 1
        assert f"step {stop_step} passed its step deadline" in log
