"""Train a small convolutional network, BatchNorm included, to read handwritten digits.

    python -m meshtrain.examples.digits data           # once: 5,000 images of MNIST into data/digits.npz
    meshtrain submit --data data train_cnn.py          # on all your machines

Every fifth image is held out. Writes metrics.json and model.pt to the main machine's output folder.
"""

import argparse
import itertools
import json
import sys

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import meshtrain as mt
from meshtrain.examples.cnn import CNN, growing_cnn
from meshtrain.examples.digits import HELD_OUT_EVERY, DigitsError, read_digits


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of the job (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and machine (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of SGD (default %(default)s)")
    parser.add_argument("--momentum", type=float, default=0.9, help="default %(default)s")
    parser.add_argument("--grow", type=int, metavar="ROUNDS", help="begin with one layer, one more every ROUNDS rounds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of the images")
    arguments = parser.parse_args()
    for name in ("steps", "batch_size", "grow"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return arguments


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """(to train with, held out): images (1, 28, 28) from 0 to 1, and their digits."""
    pixels, digits = read_digits(mt.data_dir())
    images = torch.from_numpy(pixels).float().div_(255).unsqueeze(1)
    labels = torch.from_numpy(digits).long()
    held_out = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


@torch.no_grad()
def evaluate(model: torch.nn.Module, dataset: TensorDataset) -> tuple[float, float]:
    """(mean loss in nats, the part that is read right)."""
    model.eval()
    images, labels = dataset.tensors
    logits: Tensor = torch.cat([model(part.to(mt.device())).cpu() for part in images.split(500)])
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


def main() -> None:
    args = parse_arguments()
    try:
        training, held_out = load_digits()
    except DigitsError as error:
        sys.exit(f"error: {error}")
    torch.manual_seed(args.seed)
    model: torch.nn.Module = CNN() if args.grow is None else growing_cnn(args.grow, args.grow // 10)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    loader = DataLoader(training, batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = mt.prepare(model, optimizer, loader)

    losses: list[float] = []
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    for _ in mt.steps(args.steps):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        mt.log(loss=loss)
        losses.append(loss.item())

    mt.finish()  # now the model is the same on all machines
    if mt.is_main():
        loss_held_out, accuracy = evaluate(model, held_out)
        metrics = {"losses": losses, "held_out_loss": loss_held_out, "held_out_accuracy": accuracy}
        (mt.output_dir() / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        torch.save(model.state_dict(), mt.output_dir() / "model.pt")
        print(f"{accuracy:.1%} of {len(held_out)} images that nobody trained on are read right", flush=True)


if __name__ == "__main__":
    main()
