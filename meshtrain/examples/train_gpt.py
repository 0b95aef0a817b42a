"""Train a small GPT on the characters of a text: the script that `meshtrain demo` submits.

Reads input.txt in the data folder; writes metrics.json, and on the main machine model.pt, to the output folder.
"""

import argparse
import itertools
import json

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import DataLoader

import meshtrain as mt
from meshtrain.examples.dataset import CharDataset
from meshtrain.examples.gpt import GPT, GPTConfig
from meshtrain.examples.text import unigram_entropy


def parse_arguments() -> argparse.Namespace:
    default = GPTConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of the job")
    parser.add_argument("--batch-size", type=int, default=16, help="windows per step and machine")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of the text")
    parser.add_argument("--context", type=int, default=default.context, help="characters per window")
    parser.add_argument("--width", type=int, default=default.width)
    parser.add_argument("--layers", type=int, default=default.num_layers)
    parser.add_argument("--heads", type=int, default=default.num_heads)
    arguments = parser.parse_args()
    for name in ("steps", "batch_size", "context", "width", "layers", "heads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return arguments


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    text = (mt.data_dir() / "input.txt").read_text(encoding="utf-8")
    config = GPTConfig(context=args.context, width=args.width, num_layers=args.layers, num_heads=args.heads)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(CharDataset(text, args.context), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = mt.prepare(model, optimizer, loader)

    losses: list[float] = []
    samples = 0
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    for _ in mt.steps(args.steps):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        mt.log(loss=loss)
        losses.append(loss.item())
        samples += len(x)

    mt.finish()  # now the model is the same on all machines
    output = mt.output_dir()
    if mt.is_main():
        torch.save(model.state_dict(), output / "model.pt")
    metrics = {
        "steps": len(losses),
        "world_size": mt.world_size(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "samples": samples,  # seen by this machine
        "losses": losses,  # nats per character on this machine's share of each step
        "unigram_entropy": unigram_entropy(text),
    }
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
