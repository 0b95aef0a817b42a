"""DDP with what may be put around it: a sharded optimizer (ZeRO-1), PowerSGD and fp16 hooks, uneven inputs (Join)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, batch: slice, steps: int = 12) -> float:
    xs = torch.randn(steps, 12, 16, generator=torch.Generator().manual_seed(5))
    loss = torch.zeros(())
    for x in xs:
        optimizer.zero_grad()
        loss = (model(x[batch]) - x[batch].sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
    return float(loss)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * 4, rank * 4 + 4)
    plain = make_model()
    last = train(plain, torch.optim.Adam(plain.parameters(), lr=0.01), batch=slice(None))

    sharded = DDP(make_model())
    zero = ZeroRedundancyOptimizer(sharded.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    train(sharded, zero, batch=mine)
    for a, b in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    zero.consolidate_state_dict(to=0)
    assert rank != 0 or zero.state_dict()["state"]

    power = DDP(make_model(), bucket_cap_mb=0.001)  # several buckets, all under way at once
    power.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), powerSGD_hook)
    train(power, torch.optim.Adam(power.parameters(), lr=0.01), batch=mine)

    half = DDP(make_model())
    half.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(half, torch.optim.Adam(half.parameters(), lr=0.01), batch=mine)
    for a, b in zip(half.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)

    uneven = DDP(make_model())
    with Join([uneven]):
        train(uneven, torch.optim.SGD(uneven.parameters(), lr=0.01), batch=mine, steps=3 + 2 * rank)
    weights = torch.cat([p.detach().flatten() for p in uneven.parameters()])
    everybodys = [torch.empty_like(weights) for _ in range(world)]
    dist.all_gather(everybodys, weights)
    assert all(torch.equal(each, weights) for each in everybodys)
    assert last < 20.0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    print("as it should be", flush=True)
