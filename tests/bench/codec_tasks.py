"""What `codec_seeds` and `codec_studies` train: each in seconds on one core, and without a download.

Codecs were chosen with `gpt` and the two kinds of `cnn` in view. `brackets` and `table` were written afterwards, for
codecs to meet something that nobody had tuned them on.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from meshtrain.examples.cnn import CNN
from meshtrain.examples.digits import HELD_OUT_EVERY, fetch_digits, read_digits
from meshtrain.examples.gpt import GPT, GPTConfig
from meshtrain.examples.resnet import BasicBlock, ResNet18, convolution
from meshtrain.examples.text import stdlib_text
from tests.bench.goals.learnerturns import Enlarged

TEXT_BYTES = 300_000
CONTEXT = 64
RATE = 2e-3  # of AdamW
KINDS = 4  # of brackets
LENGTH = 32  # of a row of them
CARDINALITIES = (1000, 500, 400, 300, 200, 100, 60, 40)  # of the categorical columns
NUMBERS = 12  # numeric columns
WIDTH = 24  # of an embedding


@dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        loss: of the samples with these numbers.
        count: of samples to train with, numbered from 0.
        held_out: the numbers of others.
        batch: of all members together.
        optimizer: of one member, with a learning rate, or with the task's own.
    """

    model: nn.Module
    loss: Callable[[torch.Tensor], torch.Tensor]
    count: int
    held_out: torch.Tensor
    batch: int
    optimizer: Callable[[float | None], torch.optim.Optimizer]


def text_task() -> Task:
    """The demo's GPT, smaller, with AdamW."""
    codes = np.frombuffer(stdlib_text(TEXT_BYTES).encode("ascii", "replace"), np.uint8).astype(np.int64) % 128
    data = torch.from_numpy(codes)
    cut = len(data) * 9 // 10
    model = GPT(GPTConfig(vocabulary_size=128, context=CONTEXT, num_layers=2, num_heads=4, width=96))

    def loss(starts: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([data[at : at + CONTEXT + 1] for at in starts.tolist()])
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    held_out = torch.arange(cut, len(data) - CONTEXT - 1, 97)
    return Task(model, loss, cut - CONTEXT - 1, held_out, 24, _adamw(model))


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images, and what they show: those to train with first, then those held out."""
    with tempfile.TemporaryDirectory() as folder:
        fetch_digits(Path(folder))
        pixels, labels = read_digits(Path(folder))
    order = np.argsort(np.arange(len(labels)) % HELD_OUT_EVERY == 0, kind="stable")
    images = torch.from_numpy(pixels[order]).float().div_(255).unsqueeze(1)
    return images, torch.from_numpy(labels[order]).long()


def _of_digits(model: nn.Module, optimizer: Callable[[float | None], torch.optim.Optimizer], held_out: int) -> Task:
    images, labels = digits()
    cut = len(labels) - len(labels) // HELD_OUT_EVERY

    def loss(numbers: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(images[numbers]), labels[numbers])

    return Task(model, loss, cut, torch.arange(cut, len(labels))[:held_out], 64, optimizer)


def digits_task(*, adamw: bool) -> Task:
    """The example CNN, with SGD and momentum, or with AdamW."""
    model = CNN()
    return _of_digits(model, _adamw(model) if adamw else _sgd(model, 0.02, 0.9), len(digits()[1]))


class NarrowResNet(nn.Module):
    """ResNet-18 with a quarter of its channels: 703,000 parameters, and as deep."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 16, 16, 32, 32, 64, 64, 128, 128]
        self.stem = nn.Sequential(convolution(3, 16, 7, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(
            *(BasicBlock(before, after, 1 if before == after else 2) for before, after in pairwise(widths))
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return logits


def resnet_task(model: nn.Module, momentum: float = 0.9) -> Task:
    """One on digits of 64 x 64, as `goals loss` trains ResNet-18; without momentum at the rate that moves as far."""
    model = Enlarged(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.025  # one model stands for four members: its statistics move four times a step
    return _of_digits(model, _sgd(model, 0.02 if momentum else 0.2, momentum), 512)


class NextBracket(nn.Module):
    """An LSTM that says which symbol comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * KINDS + 1, 32)
        self.lstm = nn.LSTM(32, 160, batch_first=True)
        self.head = nn.Linear(160, 2 * KINDS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.lstm(self.embedding(symbols))[0])
        return logits


@cache
def brackets(rows: int) -> torch.Tensor:
    """Rows of brackets of several kinds that open and close by chance, all closed in the end: what closes must be of
    the kind that was opened last. A row begins with a symbol of its own."""
    rng = np.random.default_rng(11)
    found = np.empty((rows, LENGTH + 1), np.int64)
    found[:, 0] = 2 * KINDS
    for row in found:
        open_now: list[int] = []
        for at in range(1, LENGTH + 1):
            must_close = len(open_now) >= LENGTH + 1 - at
            if open_now and (must_close or rng.random() < 0.5):
                row[at] = KINDS + open_now.pop()
            else:
                open_now.append(int(rng.integers(KINDS)))
                row[at] = open_now[-1]
    return torch.from_numpy(found)


def brackets_task() -> Task:
    """An LSTM learns which bracket comes next, with AdamW."""
    rows, model = brackets(4500), NextBracket()

    def loss(numbers: torch.Tensor) -> torch.Tensor:
        own = rows[numbers]
        return F.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())

    return Task(model, loss, 4000, torch.arange(4000, 4500), 32, _adamw(model, 5e-3))


class OfColumns(nn.Module):
    """A perceptron on numeric columns and on embeddings of categorical ones; one number comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, WIDTH) for count in CARDINALITIES)
        for each in self.embeddings:
            nn.init.normal_(each.weight, std=0.1)  # type: ignore[arg-type]
        columns = NUMBERS + WIDTH * len(CARDINALITIES)
        self.layers = nn.Sequential(
            *(nn.Linear(columns, 192), nn.ReLU(), nn.Linear(192, 96), nn.ReLU(), nn.Linear(96, 1))
        )

    def forward(self, numbers: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        embedded = [each(column) for each, column in zip(self.embeddings, kinds.unbind(1), strict=True)]
        out: torch.Tensor = self.layers(torch.cat([numbers, *embedded], 1)).squeeze(1)
        return out


@cache
def columns(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numeric columns, categorical ones, some values of which are frequent and most rare, and what follows from both:
    effects of each value, two that depend on each other, a curve, and noise of a tenth of the variance."""
    rng = np.random.default_rng(12)
    numbers = rng.standard_normal((rows, NUMBERS))
    kinds = np.stack([(count * rng.random(rows) ** 3).astype(np.int64) for count in CARDINALITIES], 1)
    target = np.sin(2 * numbers[:, 0]) + numbers[:, 1] * numbers[:, 2] + numbers @ rng.normal(0, 0.3, NUMBERS)
    for column, count in enumerate(CARDINALITIES):
        target += rng.normal(0, 0.5, count)[kinds[:, column]]
    target += numbers[:, 3] * rng.normal(0, 1.0, CARDINALITIES[4])[kinds[:, 4]]
    target = (target - target.mean()) / target.std()
    target = (target + rng.normal(0, 0.1**0.5, rows)) / 1.1**0.5
    return torch.from_numpy(numbers).float(), torch.from_numpy(kinds), torch.from_numpy(target).float()


def table_task() -> Task:
    """A regression on a table, with SGD and momentum. The loss is the part of the variance that is not explained."""
    (numbers, kinds, target), model = columns(22_000), OfColumns()

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(numbers[rows], kinds[rows]), target[rows])

    return Task(model, loss, 20_000, torch.arange(20_000, 22_000), 128, _sgd(model, 0.05, 0.9))


def _sgd(model: nn.Module, own: float, momentum: float) -> Callable[[float | None], torch.optim.Optimizer]:
    return lambda rate: torch.optim.SGD(model.parameters(), lr=rate or own, momentum=momentum)


def _adamw(model: nn.Module, own: float = RATE) -> Callable[[float | None], torch.optim.Optimizer]:
    return lambda rate: torch.optim.AdamW(model.parameters(), lr=rate or own)


TASKS: dict[str, Callable[[], Task]] = {
    "gpt": text_task,
    "cnn": lambda: digits_task(adamw=False),
    "cnn-adamw": lambda: digits_task(adamw=True),
    "resnet": lambda: resnet_task(ResNet18()),
    "narrow": lambda: resnet_task(NarrowResNet()),
    "narrow-plain": lambda: resnet_task(NarrowResNet(), 0.0),
    "brackets": brackets_task,
    "table": table_task,
}
