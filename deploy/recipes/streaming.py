"""Data that is read as a stream: an IterableDataset, of which each laptop takes its part.

    meshtrain submit streaming.py

Nothing is written for that: of two laptops each reads all items and takes every second one. Where reading is the
expensive part, let the data set begin at `mt.rank()` and skip `mt.world_size()` itself; then it is read as it is.
Nobody knows how long a stream is, so `mt.steps(n)` ends the loop on all of them, after n steps.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import meshtrain as mt

STEPS = 120


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless. In place of this, lines of a file, or what a socket says."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        dice = torch.Generator().manual_seed(1)
        while True:
            x = torch.randn(8, generator=dice)
            yield x, x.sum().sin()


torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
loader = DataLoader(Stream(), batch_size=32)
model, optimizer, loader = mt.prepare(model, optimizer, loader)

for step, (x, y) in zip(mt.steps(STEPS), loader, strict=False):
    loss = nn.functional.mse_loss(model(x)[:, 0], y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mt.log(loss=loss)
    if mt.is_main() and step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
mt.finish()
