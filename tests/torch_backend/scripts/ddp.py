"""As torch's tutorial for DistributedDataParallel has it: train, save on rank 0, load everywhere, go on."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def train(ddp: DDP) -> None:
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp.parameters(), lr=0.001)
    optimizer.zero_grad()
    loss_fn(ddp(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()


def equal_everywhere(model: nn.Module) -> None:
    for p in model.parameters():
        everybodys = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(everybodys, p.detach())
        assert all(torch.equal(each, p) for each in everybodys)


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == 3
    torch.manual_seed(rank)  # DDP starts all of them from rank 0's weights
    model = ToyModel()
    ddp = DDP(model)
    equal_everywhere(model)
    train(ddp)
    equal_everywhere(model)
    path = os.path.join(tempfile.gettempdir(), f"model-{os.environ['TORCHELASTIC_RUN_ID']}.checkpoint")
    if rank == 0:
        torch.save(ddp.state_dict(), path)
    dist.barrier()
    ddp.load_state_dict(torch.load(path, weights_only=True))
    train(ddp)
    equal_everywhere(model)
    dist.barrier()
    if rank == 0:
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    print("as it should be", flush=True)
