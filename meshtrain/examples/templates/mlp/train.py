"""Fit a small network to the area of a disc. Try `python train.py`, then `meshtrain submit train.py`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshtrain as mt

torch.manual_seed(0)  # every machine draws the same points; the loader then deals each point to one machine
points = torch.rand(8192, 2) * 2 - 1
inside = (points.square().sum(dim=1, keepdim=True) < 0.5).float()

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(points, inside), batch_size=64, shuffle=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)

for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        mt.log(loss=loss)
    print(f"rank {mt.rank()} of {mt.world_size()}, epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

if mt.is_main():
    torch.save(model.state_dict(), mt.output_dir() / "model.pt")
mt.finish()
