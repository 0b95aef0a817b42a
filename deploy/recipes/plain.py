"""The smallest whole script: a network learns to tell two spirals apart.

python plain.py                  on this machine alone
meshtrain submit plain.py        on all your laptops
"""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshtrain as mt

EPOCHS = 20


def spirals(points: int) -> tuple[Tensor, Tensor]:
    turns = torch.linspace(0.3, 3 * math.pi, points // 2).repeat(2)
    arm = torch.arange(points) // (points // 2)
    angle = turns + math.pi * arm
    noise = 0.1 * torch.randn(points, 2, generator=torch.Generator().manual_seed(1))
    return torch.stack([turns * angle.cos(), turns * angle.sin()], 1) / 5 + noise, arm


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(*spirals(2048)), batch_size=64, shuffle=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)

for epoch in range(EPOCHS):
    for x, y in loader:  # each laptop has other points
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # from here on p.grad is the average over all laptops
        optimizer.step()
        mt.log(loss=loss)
    if mt.is_main() and epoch % 4 == 3:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

if mt.is_main():
    torch.save(model.state_dict(), mt.output_dir() / "model.pt")
mt.finish()
