"""In the shape of torch's minGPT-ddp: a Trainer with snapshots, DistributedSampler, AMP, clipping, a second life."""

import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class GPTConfig:
    vocab: int = 16
    block: int = 12
    width: int = 24
    heads: int = 2


class CharDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, block: int) -> None:
        self.text = torch.randint(0, 16, (200,), generator=torch.Generator().manual_seed(3))
        self.block = block

    def __len__(self) -> int:
        return len(self.text) - self.block

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[at : at + self.block + 1]
        return piece[:-1], piece[1:]


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Parameter(torch.zeros(1, config.block, config.width))
        self.layer = nn.TransformerEncoderLayer(config.width, config.heads, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        logits = self.head(self.layer(self.token(x) + self.position, src_mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Trainer:
    def __init__(self, model: nn.Module, data: CharDataset, snapshot: str) -> None:
        self.global_rank = int(os.environ["RANK"])
        self.loader = DataLoader(data, batch_size=16, shuffle=False, num_workers=1, sampler=DistributedSampler(data))
        self.epochs_run = 0
        self.snapshot = snapshot
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if os.path.exists(snapshot):
            kept = torch.load(snapshot, weights_only=True)
            model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.epochs_run = kept["epoch"]
        self.model = DDP(model)

    def run_batch(self, x: torch.Tensor, y: torch.Tensor) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss = self.model(x, y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss)

    def train(self, epochs: int) -> list[float]:
        losses = []
        for epoch in range(self.epochs_run, epochs):
            assert isinstance(self.loader.sampler, DistributedSampler)
            self.loader.sampler.set_epoch(epoch)
            losses.append(sum(self.run_batch(x, y) for x, y in self.loader))
            kept = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**kept, "epoch": epoch + 1}, self.snapshot)  # on each laptop: each has its own disk
        return losses


def main() -> None:
    init_process_group(backend="gloo")
    torch.manual_seed(1)
    snapshot = f"snapshot-{get_rank()}.pt"
    first = Trainer(GPT(GPTConfig()), CharDataset(12), snapshot).train(2)
    again = Trainer(GPT(GPTConfig()), CharDataset(12), snapshot)
    assert again.epochs_run == 2
    second = again.train(4)
    assert second[-1] < first[0], (first, second)
    destroy_process_group()


if __name__ == "__main__":
    main()
    print("as it should be", flush=True)
