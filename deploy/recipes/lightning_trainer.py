"""Lightning with `mt.prepare`: the Trainer trains one device, and the averages come from meshtrain.

    meshtrain submit lightning_trainer.py       (`pip install lightning` on each laptop, or submit -r requirements.txt)

A script that is written for Lightning's own `strategy="ddp"` runs unchanged, too: without `mt.prepare`, all in step.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import meshtrain as mt


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer: Optimizer | None = None

    def training_step(self, batch: list[Tensor], _number: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        mt.log(loss=loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        assert self.optimizer is not None
        return self.optimizer  # the prepared one


torch.manual_seed(0)
xs = torch.randn(512, 8)
model = Regression()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(xs, xs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model, model.optimizer, loader = mt.prepare(model, optimizer, loader)  # before fit

# One device, no strategy: the other machines are meshtrain's business.
trainer = Trainer(accelerator="cpu", devices=1, max_epochs=4, logger=False, enable_checkpointing=False)
trainer.fit(model, loader)
mt.finish()
