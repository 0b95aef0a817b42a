"""Fine-tuning: a model that can something already, of which a small part learns on.

    meshtrain submit --data data fine_tuning.py

Only what has `requires_grad` travels: with a frozen body and a new head, or adapters, a round is a few kilobytes, so
even a slow network does. The pretrained weights travel once, in `--data`, which each laptop keeps.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshtrain as mt

EPOCHS = 6
RANK = 4


class Adapter(nn.Module):
    """LoRA (Hu et al. 2021): a frozen layer, and beside it a product of two thin matrices that learns."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # at first nothing changes

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + self.up(self.down(x))
        return out


torch.manual_seed(0)
body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
pretrained = mt.data_dir() / "body.pt"
if pretrained.exists():
    body.load_state_dict(torch.load(pretrained, weights_only=True))
body.requires_grad_(False)
body[2] = Adapter(body[2])
model: nn.Module = nn.Sequential(body, nn.Linear(64, 3))  # a new head
learning = [each for each in model.parameters() if each.requires_grad]

xs = torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))
ys = xs[:, :3].argmax(1)
optimizer = torch.optim.AdamW(learning, lr=0.01)
loader = DataLoader(TensorDataset(xs, ys), batch_size=32, shuffle=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)

for epoch in range(EPOCHS):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        mt.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        mt.log(loss=loss)
    if mt.is_main():
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

if mt.is_main():  # the adapters and the head, which are small
    kept = {name: value for name, value in model.state_dict().items() if ".frozen." not in name}
    torch.save(kept, mt.output_dir() / "adapters.pt")
mt.finish()
