"""One rank of a script that torchrun would start: it measures an all-reduce, paced DDP steps, and says its losses.

`ddp_lab` runs it as a job's script and as a rank of gloo: it knows nothing of either. What is sent is noise, for links
pack what shrinks. The last line that it prints is a JSON object.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS = 16
LOSS_STEPS = 12


class Pace(torch.autograd.Function):
    """Sleeps before the gradient of a layer is ready: the layer's backward pass, which costs no processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Layers(nn.Module):
    """Layers of equal size, whose backward passes together take `backward_s`."""

    def __init__(self, values: int, backward_s: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((values,), 0.1)) for _ in range(LAYERS))
        self.noise = torch.randn(values)
        self.pace_s = backward_s / LAYERS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = Pace.apply(x + weight.dot(self.noise), self.pace_s)  # type: ignore[no-untyped-call]
        return x


def all_reduce_s(values: int, rounds: int) -> list[float]:
    """How long each of them takes, from barrier to end."""
    noise = torch.randn(values)
    took_s = []
    for _ in range(rounds):
        dist.barrier()
        began_s = time.monotonic()
        dist.all_reduce(noise)
        took_s.append(time.monotonic() - began_s)
    return took_s


def ddp_step_s(values: int, rounds: int, backward_s: float) -> list[float]:
    """How long each step takes: a paced backward pass, beside which DDP reduces its buckets."""
    model = Layers(values // LAYERS, backward_s)
    ddp = DistributedDataParallel(model, bucket_cap_mb=values * 4 / 2**20 / LAYERS)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    took_s = []
    for _ in range(rounds):
        dist.barrier()
        began_s = time.monotonic()
        optimizer.zero_grad()
        ddp(torch.ones(1)).sum().backward()
        optimizer.step()
        took_s.append(time.monotonic() - began_s)
    return took_s


def losses() -> list[float]:
    """Of a small transformer that trains with everybody's batches."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(40, 32), layer, nn.Linear(32, 40)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    size = 8
    tokens = torch.randint(0, 40, (LOSS_STEPS, size * dist.get_world_size(), 13), generator=torch.manual_seed(7))
    seen = []
    for batch in tokens:
        own = batch[dist.get_rank() * size :][:size]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        seen.append(float(mean) / dist.get_world_size())
    return seen


def main() -> None:
    """Arguments: values of the vector, rounds, seconds of a backward pass."""
    values, rounds, backward_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)  # the stations share this machine's cores
    dist.init_process_group("gloo")
    said = {
        "all_reduce_s": all_reduce_s(values, rounds),
        "ddp_step_s": ddp_step_s(values, rounds, backward_s),
        "losses": losses(),
    }
    dist.barrier()
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
