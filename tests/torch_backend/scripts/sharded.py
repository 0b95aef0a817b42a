"""In the shape of torch's examples for FSDP2, DTensor, tensor parallelism, and checkpoints of what is sharded (DCP)."""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 4))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return float(loss)


def full(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def fsdp2(world: int, rank: int) -> None:
    """Sharded weights, gradients and state train as plain torch does with everybody's batch, and checkpoints load."""
    mesh = init_device_mesh("cpu", (world,))
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plain = make_model()
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    xs = torch.randn(4, 5 * world, 12, generator=torch.Generator().manual_seed(2))
    for x in xs[:3]:
        step(model, optimizer, x.chunk(world)[rank])
        step(plain, plain_optimizer, x)
    for mine, expected in zip(full(model), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, expected.detach(), rtol=1e-5, atol=1e-6)

    folder = os.path.join(tempfile.gettempdir(), f"dcp-{os.environ['TORCHELASTIC_RUN_ID']}")
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    kept = [each.clone() for each in full(model)]
    step(model, optimizer, xs[3].chunk(world)[rank])
    after = full(model)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert all(torch.equal(a, b) for a, b in zip(full(model), kept, strict=True))
    step(model, optimizer, xs[3].chunk(world)[rank])
    assert all(torch.equal(a, b) for a, b in zip(full(model), after, strict=True)), "the optimizer's state is back too"
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)

    low = make_model()
    fully_shard(low, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    step(low, torch.optim.SGD(low.parameters(), lr=0.1), xs[0].chunk(world)[rank])


def dtensor(world: int, rank: int) -> None:
    """Placements, redistribution, arithmetic on what is sharded, a layer split in columns and rows."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    whole = torch.arange(world * 4 * 5, dtype=torch.float32).reshape(world * 4, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert rows.to_local().shape == (4, 5)
    assert torch.equal(rows.full_tensor(), whole)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    product = torch.mm(rows.t().redistribute(mesh, [Shard(1)]), rows)
    torch.testing.assert_close(product.full_tensor(), whole.t() @ whole)

    model = make_model()
    split = parallelize_module(make_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(split(x), model(x), rtol=1e-5, atol=1e-6)
    split(x).sum().backward()
    assert rank == dist.get_rank()


def main() -> None:
    dist.init_process_group()
    world, rank = dist.get_world_size(), dist.get_rank()
    fsdp2(world, rank)
    dtensor(world, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    print("as it should be", flush=True)
