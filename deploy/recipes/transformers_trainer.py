"""The Trainer of transformers as it is: not a line of meshtrain in it.

    meshtrain submit transformers_trainer.py    (`pip install transformers accelerate` on each laptop)

It finds a process group with one rank on each laptop, and sums gradients over the daemons' links. All in step; with
`--restart 3` it begins again from its own checkpoint when a laptop is lost.
"""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import meshtrain as mt


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Rows of numbers that go up by one."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = (at + torch.arange(12)) % 40
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir=str(mt.output_dir()),
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=3e-3,
        report_to=[],
        logging_steps=4,
        save_steps=8,
        use_cpu=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Counting())
    trainer.train()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
