"""In the shape of Accelerate's nlp_example: an Accelerator, two loaders, a scheduler, metrics of all outputs."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def loaders(size: int) -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    ids = torch.randint(5, 40, (60, 10), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(ids, (ids[:, 0] > 20).long())
    train, evaluation = torch.utils.data.random_split(data, [48, 12], generator=torch.Generator().manual_seed(1))
    return DataLoader(train, shuffle=True, batch_size=size, drop_last=True), DataLoader(evaluation, batch_size=5)


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 3, "each laptop would train alone"
    set_seed(42)
    train, evaluation = loaders(4)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    model: nn.Module = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=len(train) * 2)
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    for _ in range(2):
        model.train()
        for ids, labels in train:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=labels).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        seen = 0
        for ids, labels in evaluation:
            with torch.no_grad():
                predictions = model(input_ids=ids).logits.argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            assert predictions.shape == references.shape
            seen += len(references)
        assert seen == 12, f"{seen} samples evaluated of 12"
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everybodys = accelerator.gather(weights[None])
    assert all(torch.equal(each, weights) for each in everybodys)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
    print("as it should be", flush=True)
