"""torch.distributed over real daemons: scripts that know nothing of meshtrain, torch's own tests, and what fails."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshtrain.demo.localmesh import LocalMesh
from meshtrain.packing.imports import uses_process_groups
from meshtrain.packing.tree import scan
from meshwire.messages.job import JobSummary
from tests.daemon import realjobs as jobs
from tests.tiers import mostly_long
from tests.torch_backend import conformance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# Of torch's suite: each collective, subgroups, objects, tags, whoever sends first, timeouts, DDP with a hook.
SLICE = (
    *(
        "test_all_gather",
        "test_all_gather_coalesced_simple",
        "test_all_gather_complex",
        "test_all_gather_object_subgroup",
    ),
    *("test_all_reduce_full_group_sum", "test_all_reduce_full_group_product", "test_all_reduce_sum_async"),
    *(
        "test_all_reduce_coalesced_max",
        "test_sparse_all_reduce_sum",
        "test_barrier_timeout_full_group",
        "test_barrier",
    ),
    *("test_broadcast_full_group", "test_gather_full_group", "test_get_future", "test_isend", "test_irecv"),
    *("test_monitored_barrier_gloo", "test_reduce_full_group_max", "test_reduce_sum_twice"),
    *("test_scatter_full_group", "test_scatter_object_list", "test_send_recv_any_source", "test_send_recv_with_tag"),
    *("test_batch_isend_irecv_gloo", "test_DistributedDataParallelCPU", "test_static_graph_api_cpu"),
    *("test_accumulate_gradients_no_sync_allreduce_with_then_hook", "test_destroy_full_group", "test_get_backend"),
)

# What anybody writes who has read torch's tutorial: nothing in it knows of meshtrain.
DDP = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

def main(backend):
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    xs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(xs, xs.sum(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=False)
    for epoch in range(2):
        for x, y in DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(replica(x), y).backward()
            optimizer.step()
    dist.barrier()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everybodys = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, weights)
    assert all(torch.equal(each, weights) for each in everybodys)
    print(json.dumps({"rank": rank, "world": os.environ["WORLD_SIZE"], "backend": dist.get_backend(),
                      "weights": weights.double().tolist()[:50]}), flush=True)
    dist.destroy_process_group()

main(sys.argv[1] if len(sys.argv) > 1 else None)
"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with jobs.forked_learners(jobs.OF_GROUPS), LocalMesh(conformance.NAMES, print) as started:
        yield started


def log(mesh: LocalMesh, job: str, rank: int) -> str:
    return jobs.read(mesh.daemons[0], job, "log", rank)


def test_a_script_for_torchrun_trains_as_one_process_would(mesh: LocalMesh, tmp_path: Path) -> None:
    """No line of it is ours. Whatever backend it names; equal bits on all ranks, and the weights of one process that
    takes all three batches in each step."""
    expected = one_process()
    for backend in ("gloo", "nccl"):
        folder = tmp_path / backend
        folder.mkdir()
        ended = jobs.run(mesh.daemons[0], folder, DDP, args=(backend,))
        assert ended.state == "succeeded", ended.error
        said = [json.loads(log(mesh, ended.job, rank).splitlines()[-1]) for rank in range(3)]
        assert [(each["rank"], each["world"], each["backend"]) for each in said] == [(k, "3", "gloo") for k in range(3)]
        weights = torch.tensor(said[0]["weights"], dtype=torch.float64)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def one_process() -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    xs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    ys = xs.sum(1, keepdim=True)
    for _ in range(2):
        for step in range(8):
            rows = [rank + 3 * (4 * step + each) for rank in range(3) for each in range(4)]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(xs[rows]), ys[rows]).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()[:50]


def test_torchs_own_suite_in_part(mesh: LocalMesh, tmp_path: Path) -> None:
    """All of it: `python -m tests.torch_backend.conformance`."""
    ended, results = conformance.run(mesh, tmp_path, SLICE)
    assert ended.state == "succeeded", ended.error
    assert {name: why for name, (what, why) in results.items() if what != "pass"} == {}
    known = json.loads(conformance.RESULTS.read_text())
    assert set(SLICE) <= set(known["pass"]), "what is published was seen"


WAITING = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group()
ones = torch.ones(2_000_000)
dist.all_reduce(ones)
print("pid", os.getpid(), flush=True)
try:
    while True:
        began_s = time.monotonic()
        dist.all_reduce(ones.fill_(1))
except dist.DistBackendError as error:
    print(f"after {time.monotonic() - began_s:.3f} s: {error}", flush=True)
    raise
"""


def start(mesh: LocalMesh, folder: Path) -> tuple[str, list[int]]:
    """The job, and the process of each rank."""
    job = jobs.submit(mesh.daemons[0], folder, WAITING, cold=True).job  # one of them is killed

    def all_have_begun(seen: JobSummary) -> bool:
        return seen.state == "running" and all("pid" in log(mesh, job, rank) for rank in range(3))

    jobs.wait_for(mesh.daemons[0], job, all_have_begun, "a process group")
    return job, [int(log(mesh, job, rank).split("pid")[1].split()[0]) for rank in range(3)]


def test_a_killed_rank_is_named_to_all_others(mesh: LocalMesh, tmp_path: Path) -> None:
    job, processes = start(mesh, tmp_path)
    os.kill(processes[2], signal.SIGKILL)
    killed_s = time.monotonic()
    ended = jobs.ended(mesh.daemons[0], job)
    assert ended.state == "failed"
    assert ended.error is not None
    assert "rank 2 (cleo): the script was killed by signal 9" in ended.error
    for rank in range(2):
        told = next(line for line in log(mesh, job, rank).splitlines() if line.startswith("after"))
        assert "rank 2 (cleo)" in told
    assert time.monotonic() - killed_s < 5.0, "scripts that end by themselves are not waited for"


AGAIN = """
import torch
import torch.distributed as dist
for life in range(3):
    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    total = torch.ones(70_000) * (dist.get_rank() + life)
    dist.all_reduce(total)
    assert total.eq(3 + 3 * life).all()
    if dist.get_rank() < 2:
        dist.all_reduce(total, group=pairs[0])
        assert total.eq(6 + 6 * life).all()
    try:
        dist.all_reduce(total.to("meta"))
    except ValueError as error:
        assert "the meshtrain backend exchanges CPU tensors, not meta" in str(error), error
    dist.destroy_process_group()
print("all lives", flush=True)
"""


def test_a_world_can_be_made_again(mesh: LocalMesh, tmp_path: Path) -> None:
    ended = jobs.run(mesh.daemons[0], tmp_path, AGAIN)
    assert ended.state == "succeeded", ended.error
    assert all("all lives" in log(mesh, ended.job, rank) for rank in range(3))


def test_settings_of_rounds_are_refused(mesh: LocalMesh, tmp_path: Path) -> None:
    ended = jobs.run(mesh.daemons[0], tmp_path, DDP, codec="int8")
    assert ended.state == "failed"
    assert "uses torch.distributed: its collectives are exact" in (ended.error or "")
    assert "of --codec it takes fp16, bf16 and powersgd" in (ended.error or "")


COMPRESSED = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)  # a bucket for each layer, all of them under way at once
weight = model[0].weight
noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
steps = []
for _ in range(4):
    ddp.zero_grad()
    ddp(noise).square().mean().backward()
    own = torch.autograd.grad(model(noise).square().mean(), weight)[0]
    exact = own.clone()
    dist.all_reduce(exact)  # the script's own: exact
    exact /= dist.get_world_size()
    steps.append([float((weight.grad - exact).norm() / exact.norm()),
                  int(torch.linalg.matrix_rank(weight.grad, rtol=1e-4))])
pair = dist.new_group([0, 1])
if dist.get_rank() < 2:  # a model of a subgroup: exact, too
    other = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False), process_group=pair)
    other(noise).square().mean().backward()
    sums = [torch.empty(64, 64) for _ in range(2)]
    dist.all_gather(sums, torch.autograd.grad(other.module(noise).square().mean(), other.module.weight)[0], group=pair)
    torch.testing.assert_close(other.module.weight.grad, sums[0] / 2 + sums[1] / 2, rtol=0, atol=1e-9)
everybodys = [torch.empty(64, 64) for _ in range(dist.get_world_size())]
dist.all_gather(everybodys, weight.grad)
assert all(torch.equal(each, weight.grad) for each in everybodys)
try:
    ddp.register_comm_hook(None, allreduce_hook)
except Exception as error:
    said = str(error)
print(json.dumps({"steps": steps, "said": said}), flush=True)
"""


@pytest.mark.parametrize(
    ("codec", "error", "ranks"),
    mostly_long(
        [
            ("bf16", 2e-2, (30, 64)),
            ("powersgd:3,warmup=2+fp16", 1.0, (3, 8)),
            ("fp16", 2e-3, (30, 64)),
            ("powersgd:3,warmup=2", 1.0, (3, 3)),
        ],
        2,
    ),
)
def test_a_codec_is_for_the_gradients_of_ddp_alone(
    mesh: LocalMesh, tmp_path: Path, codec: str, error: float, ranks: tuple[int, int]
) -> None:
    """P5. Compressed, equal on all ranks; what the script reduces itself, and models of subgroups, are exact."""
    ended = jobs.run(mesh.daemons[0], tmp_path, COMPRESSED, codec=codec)
    assert ended.state == "succeeded", ended.error
    said = json.loads(log(mesh, ended.job, 0).splitlines()[-1])
    *_, (off, kept) = said["steps"]
    assert 1e-6 < off < error
    assert ranks[0] <= kept <= ranks[1], "of the gradient as a matrix"
    assert "the script registers a communication hook of its own" in said["said"]


@pytest.mark.parametrize("first", ["prepare", "group"])
def test_both_ways_in_one_script_are_refused(mesh: LocalMesh, tmp_path: Path, first: str) -> None:
    prepare, group = "mt.prepare(model, optimizer, loader)", "torch.distributed.init_process_group('gloo')"
    lines = (prepare, group) if first == "prepare" else (group, prepare)
    text = jobs.PREAMBLE + "import torch.distributed\n" + "\n".join(lines) + "\n"
    ended = jobs.run(mesh.daemons[0], tmp_path, text)
    assert ended.state == "failed"
    assert "mt.prepare and torch.distributed in one script" in (ended.error or "")


def test_which_scripts_use_process_groups(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("import torch.distributed as dist\n")
    for name, text, expected in (
        ("a.py", "import torch\nfrom torch.distributed import init_process_group\n", True),
        ("b.py", "import parts\n", True),
        ("c.py", "from accelerate import Accelerator\n", True),
        ("d.py", "import torch.distributed\nimport meshtrain as mt\n", False),
        ("e.py", "import torch\n", False),
    ):
        (tmp_path / name).write_text(text)
        assert uses_process_groups(scan(tmp_path).manifest, tmp_path, name) is expected, name


def test_a_killed_daemon_is_named_to_all_others(tmp_path: Path) -> None:
    """The last of its mesh."""
    with LocalMesh(conformance.NAMES, print) as mesh:
        job, _ = start(mesh, tmp_path)
        mesh.daemons[2].process.kill()
        mesh.daemons[2].process.wait(10.0)
        ended = jobs.ended(mesh.daemons[0], job)
        assert ended.state == "failed"
        assert "rank 2 (cleo) is gone: the connection broke" in (ended.error or "")
        for rank in range(2):
            told = next(line for line in log(mesh, job, rank).splitlines() if line.startswith("after"))
            assert "rank 2 (cleo)" in told
            assert float(told.split()[1]) < 1.0
