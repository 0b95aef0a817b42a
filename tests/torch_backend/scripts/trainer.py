"""HF Trainer with a tiny model: a checkpoint, an evaluation, from the checkpoint on."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: int) -> None:
        self.ids = torch.randint(0, 40, (rows, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[at], "labels": self.ids[at]}


def main() -> None:
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, num_train_epochs=2,
        report_to=[], save_steps=4, logging_steps=2, disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Tokens(48), eval_dataset=Tokens(13))
    assert arguments.world_size == 3, "each laptop would train alone"
    trainer.train()
    assert trainer.state.global_step == 8
    first = trainer.evaluate()["eval_loss"]
    assert first < 4.0
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    everybodys = trainer.accelerator.gather(weights[None])
    assert all(torch.equal(each, weights) for each in everybodys)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
    print("as it should be", flush=True)
