"""`python -m tests.bench.support_overlap`: how much the values overlap that members send of their gradients by topk.

Members share one process: each has its own samples of every step and its own residual, and all step by the mean of what
was sent. What is counted are places: k that one member sends, and the union of those that m members send. From that
follow bytes a step: of topk, which is encoded here, sharded and gathered, and of cells with room for just this union
(`homomorphic`).
"""

import argparse
import sys
from collections.abc import Callable
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from platformdirs import user_cache_path
from torch import Tensor, nn

from meshtrain.examples.cnn import CNN
from meshtrain.examples.digits import FILE_NAME, fetch_digits, read_digits
from meshtrain.examples.gpt import GPT, GPTConfig
from meshtrain.examples.text import stdlib_text
from meshtraind.codecs import codec_named
from meshwire.codecs.sketch import sketch_bytes
from meshwire.model.plan import values_per_segment

Values = NDArray[np.float32]

MEMBERS = (2, 4, 8)
RATIOS = (0.01, 0.1)
STEPS = 30
COUNTED = 10  # the last ones
COLUMNS = ("gradients of", "m", "sent", "union / (m k)", "sharded", "gathered", "cells", "cells / sharded")


def transformer() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    """The demo's: loss of 8 windows of real text."""
    model, context = GPT(GPTConfig()), GPTConfig().context
    text = torch.tensor(list(stdlib_text(1_000_000).encode("ascii", "replace"))) % GPTConfig().vocabulary_size

    def loss() -> Tensor:
        rows = torch.stack([text[at : at + context + 1] for at in torch.randint(len(text) - context - 1, (8,))])
        return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss


def convolutions() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    """The example's: loss of 16 handwritten digits."""
    cache = user_cache_path("meshtrain") / "digits"
    if not (cache / FILE_NAME).exists():
        fetch_digits(cache)
    pixels, digits = read_digits(cache)
    images = torch.from_numpy(pixels).float().div_(255).unsqueeze(1)
    labels = torch.from_numpy(digits).long()
    model = CNN()

    def loss() -> Tensor:
        chosen = torch.randint(len(labels), (16,))
        return nn.functional.cross_entropy(model(images[chosen]), labels[chosen])

    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), loss


MODELS = {"the example CNN, SGD": convolutions, "the demo's GPT, AdamW": transformer}


def measure(name: str, members: int, ratio: float) -> tuple[float, float, float, float]:
    """(union / (m k), and kB that each member sends in a step: sharded, gathered, as cells), of the last steps."""
    torch.manual_seed(0)
    model, optimizer, loss = MODELS[name]()
    parameters = list(model.parameters())[::-1]
    total = sum(parameter.numel() for parameter in parameters)
    side = values_per_segment(total)
    codec = codec_named(f"topk:{ratio:g}")
    area = memoryview(bytearray(codec.spec.segment_bytes_max(side)))
    residuals, owed = np.zeros((members, total), np.float32), np.zeros(total, np.float32)
    counted: list[tuple[float, float, float, float]] = []
    for _ in range(STEPS):
        for residual in residuals:
            optimizer.zero_grad()
            torch.autograd.backward(loss())
            residual += torch.cat([_gradient(parameter).flatten() for parameter in parameters]).numpy()
        mean = np.zeros(total, np.float32)
        sent, union, part_bytes, mean_bytes, cell_bytes = 0, 0, 0, 0, 0
        for start in range(0, total, side):
            run = slice(start, min(start + side, total))
            parts = np.zeros((members, run.stop - start), np.float32)
            for part, residual in zip(parts, residuals[:, run], strict=True):
                length = codec.encode_rest_into(residual, area)
                codec.decode_into(area[:length], part)
                part_bytes += length
            sent += int(np.count_nonzero(parts))
            here = int(np.count_nonzero(parts.any(axis=0)))
            union += here
            cell_bytes += sketch_bytes(here, run.stop - start)
            owed[run] += parts.mean(axis=0)
            length = codec.encode_rest_into(owed[run], area)
            codec.decode_into(area[:length], mean[run])
            mean_bytes += length
        at = 0
        for parameter in parameters:
            shape = parameter.shape
            parameter.grad = torch.from_numpy(mean[at : at + parameter.numel()].copy()).reshape(shape)
            at += parameter.numel()
        optimizer.step()
        others = members - 1
        sharded = others / members * (part_bytes / members + mean_bytes)
        counted.append((union / sent, sharded, others * part_bytes / members, 2 * others / members * cell_bytes))
    overlap, sharded, gathered, cells = (fmean(column) for column in zip(*counted[-COUNTED:], strict=True))
    return overlap, sharded / 1e3, gathered / 1e3, cells / 1e3


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.support_overlap", description=__doc__)
    parser.add_argument("--members", nargs="+", type=int, default=MEMBERS, metavar="M", help="default 2 4 8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in MODELS:
        for members in options.members:
            for ratio in RATIOS:
                overlap, sharded, gathered, cells = measure(name, members, ratio)
                sizes = (f"{sharded:.1f} kB", f"{gathered:.1f} kB", f"{cells:.1f} kB", f"{cells / sharded:.1f}")
                print(f"| {' | '.join((name, str(members), f'{ratio:.1%}', f'{overlap:.2f}', *sizes))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
