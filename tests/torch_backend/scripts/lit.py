"""Lightning, told what it is told on any cluster of CPUs: `Trainer(strategy="ddp", accelerator="cpu")`."""

import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], _at: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _at: int) -> None:
        x, y = batch
        self.log("validation", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    seed_everything(7)
    xs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(xs, xs.sum(1, keepdim=True)), batch_size=8)
    trainer = Trainer(
        strategy="ddp", accelerator="cpu", devices=1, num_nodes=3, max_epochs=2, logger=False, enable_progress_bar=False
    )
    model = Regression()
    trainer.fit(model, loader, loader)
    assert trainer.world_size == 3, "each laptop would train alone"
    assert trainer.global_step == 2 * 4
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everybodys = trainer.strategy.all_gather(weights)
    assert all(torch.equal(each, weights) for each in everybodys)


if __name__ == "__main__":
    main()
    print("as it should be", flush=True)
