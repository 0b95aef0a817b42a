"""`python -m tests.bench.codec_seeds CODEC[@SYNC] ...`: the loss that codecs end at in one process, without daemons.

Members are simulated: each takes gradients of its own batches, or H local steps, and what they add goes through the
job's codecs, parts and error feedback, of workers and of owners, segment by segment. It is for comparing codecs, and
two versions of one, on a few seeds in minutes; what jobs of daemons reach says `codec_table`.

SYNC is what `--sync` takes, such as `diloco:8` or `demo`; 8 is short for `local:8`. Where no codec stands
before it, that is the one that it brings. `--rate` is the learning rate, for `demo` of SGD without momentum.

`hook:4,10` is PowerSGD of rank 4 as torch's hook has it, after 10 rounds that travel whole. `--model cnn` trains the
example CNN on digits, `cnn-adamw` the same with AdamW.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from meshtrain.examples.cnn import CNN
from meshtrain.examples.digits import HELD_OUT_EVERY, fetch_digits, read_digits
from meshtrain.examples.gpt import GPT, GPTConfig
from meshtrain.examples.text import stdlib_text
from meshtrain.train.optim.frozen_variance import FrozenVariance
from meshtrain.train.optim.optimizer_step import OptimizerStep
from meshtrain.train.periods.inner_muon import WithMuon, hidden_matrices, inner_muon
from meshtrain.train.periods.outer_optimizer import outer_optimizer
from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Terms, Values
from meshtraind.contributions.received import MemberPart, mean_into, senders_mean_into
from meshtraind.contributions.segments import Segment
from meshwire.codecs.registry import CodecSpec, Reduction, parse_codec
from meshwire.model.plan import SELECTED_VALUES_MIN, values_per_segment
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from tests.bench.lowrank_means import ProjectedExchange, Shapes, TorchsPowerSgd

TEXT_BYTES = 300_000
BATCH = 24  # of all members together
RATE = 2e-3
SIGN_RATE = 1e-3
CONTEXT = 64


class Exchange:
    """The mean of what members add, as a job's codec makes it; all have the same number of samples."""

    def __init__(self, text: str, values: int, members: int) -> None:
        spec = parse_codec(text)
        self._codec = codec_named(text)
        self._decay = np.float32(spec.decay)
        self._warmup = spec.warmup
        self._feedback, self.gathered, self._senders = (
            spec.error_feedback,
            spec.reduction is Reduction.GATHER,
            getattr(spec, "of_senders", False),
        )
        least = {"least": SELECTED_VALUES_MIN} if spec.family.selects else {}
        self._cut = values_per_segment(values, **least)
        self._owed = np.zeros((members + 1, values), np.float32)  # the last one's are owners'
        counts = {min(values, self._cut), values % self._cut}
        self._out = memoryview(bytearray(max(map(spec.segment_bytes_max, counts))))
        self.sent_bytes = 0  # by all members, each a vector there, and the mean back where it is not gathered
        self._round = 0

    def mean(self, parts: Sequence[Values]) -> Values:
        """What a round of these parts comes to on every member."""
        self._round += 1
        if self._round <= self._warmup:
            self.sent_bytes += 2 * len(parts[0]) * (len(parts) + 1)
            whole: Values = np.mean(parts, 0, dtype=np.float32)
            return whole
        made = np.empty_like(parts[0])
        for start in range(0, len(made), self._cut):
            run = slice(start, min(start + self._cut, len(made)))
            segment = Segment(self._codec, 0, len(self._out), start, run.stop - run.start, measured=True)
            arrived = [
                MemberPart(member, [segment], self._encoded(member, part[run], run))
                for member, part in enumerate(parts)
            ]
            if self._senders:
                senders_mean_into(arrived, 0, [1.0] * len(parts), made[run])
            else:
                mean_into(arrived, 0, float(len(parts)), made[run])
            if self._codec.spec.reduction is Reduction.LINEAR:
                self.sent_bytes += self._codec.bytes_max(run.stop - run.start)
            elif not self.gathered:
                self._codec.decode_into(self._encoded(len(parts), made[run].copy(), run), made[run])
        return made

    def _encoded(self, member: int, values: Values, run: slice) -> memoryview:
        terms = Terms(self._round, hash((member, self._round, run.start)) & 0xFFFFFFFF)
        if self._feedback:
            owed = self._owed[member, run]
            owed *= self._decay
            owed += values
            length = self._codec.encode_rest_into(owed, self._out, terms)
        else:
            length = self._codec.encode_into(values, self._out, terms)
        self.sent_bytes += length
        return memoryview(bytes(self._out[:length]))


def flat(tensors: Sequence[torch.Tensor]) -> Values:
    vector: Values = torch.cat([each.detach().reshape(-1) for each in tensors]).numpy()
    return vector


def unflatten(vector: Values, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = torch.from_numpy(vector).split([each.numel() for each in tensors])
    return [piece.view_as(each) for piece, each in zip(pieces, tensors, strict=True)]


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

    model: torch.nn.Module
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
    optimizer = lambda rate: torch.optim.AdamW(model.parameters(), lr=rate or RATE)  # noqa: E731
    return Task(model, loss, cut - CONTEXT - 1, held_out, BATCH, optimizer)


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images, and what they show: those to train with first, then those held out."""
    with tempfile.TemporaryDirectory() as folder:
        fetch_digits(Path(folder))
        pixels, labels = read_digits(Path(folder))
    order = np.argsort(np.arange(len(labels)) % HELD_OUT_EVERY == 0, kind="stable")
    images = torch.from_numpy(pixels[order]).float().div_(255).unsqueeze(1)
    return images, torch.from_numpy(labels[order]).long()


def digits_task(*, adamw: bool) -> Task:
    """The example CNN, with SGD and momentum, or with AdamW."""
    model, (images, labels) = CNN(), digits()
    cut = len(labels) - len(labels) // HELD_OUT_EVERY

    def loss(numbers: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(images[numbers]), labels[numbers])

    def optimizer(rate: float | None) -> torch.optim.Optimizer:
        if adamw:
            return torch.optim.AdamW(model.parameters(), lr=rate or RATE)
        return torch.optim.SGD(model.parameters(), lr=rate or 0.02, momentum=0.9)

    return Task(model, loss, cut, torch.arange(cut, len(labels)), 64, optimizer)


TASKS: dict[str, Callable[[], Task]] = {
    "gpt": text_task,
    "cnn": lambda: digits_task(adamw=False),
    "cnn-adamw": lambda: digits_task(adamw=True),
}


def exchange_of(text: str, shapes: Shapes, members: int) -> Exchange | ProjectedExchange | TorchsPowerSgd:
    """What makes means, of a codec as typed or of `hook:RANK,WARMUP`."""
    name, _, of_hook = text.partition("hook:")
    if not name and of_hook:
        rank, _, warmup = of_hook.partition(",")
        return TorchsPowerSgd(int(rank), int(warmup or 0), shapes, members)
    if parse_codec(text).family.transforms:
        return ProjectedExchange(text, shapes, members)
    return Exchange(text, sum(map(math.prod, shapes)), members)


class Trained(NamedTuple):
    """What a way ends at.

    Attributes:
        loss: held-out.
        fewer: times fewer bytes than fp32 in an encoded vector, by step.
        link_bytes: that a member sends in a step: to each other member of a gather the whole of its vector, else all
            but its own shard of it, and of the mean.
    """

    loss: float
    fewer: float
    link_bytes: float


def train(way: str, task_name: str, members: int, steps: int, seed: int, rate: float | None = None) -> Trained:
    """Trains a model anew."""
    typed, _, mode = way.partition("@")
    sync = sync_settings(f"local:{mode}" if mode.isdigit() else mode or "bsp")
    text = typed or str(codec_of(sync, None))
    period = sync.period
    torch.manual_seed(seed)
    task = TASKS[task_name]()
    model, parameters = task.model, list(task.model.parameters())
    if sync.signs:
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(parameters, lr=rate or SIGN_RATE)]
    else:
        optimizers = [task.optimizer(rate) for _ in range(members if period else 1)]
    base_optimizer = outer_optimizer(sync, parameters)
    codec = None if text.startswith("hook:") else parse_codec(text)
    own_steps = [_own_step(model, each, sync, codec) for each in optimizers]
    exchange = exchange_of(text, [tuple(each.shape) for each in parameters], members)
    draws = [torch.Generator().manual_seed(1000 * seed + member) for member in range(members)]

    def step(member: int) -> None:
        model.zero_grad()
        task.loss(torch.randint(0, task.count, (task.batch // members,), generator=draws[member])).backward()

    for _ in range(steps // (period or 1)):
        base, parts = flat(parameters), []
        for member in range(members):
            for _ in range(period or 1):
                step(member)
                if period:
                    own_steps[member].original()
            if period:
                parts.append(base - flat(parameters))
                with torch.no_grad():
                    for each, value in zip(parameters, unflatten(base, parameters), strict=True):
                        each.copy_(value)
            else:
                added = (own_steps[0].contributed(each, each.grad, 1.0) for each in parameters)
                parts.append(flat([each for each in added if each is not None]))
        mean = exchange.mean(parts)
        for each, value in zip(parameters, unflatten(mean, parameters), strict=True):
            each.grad = value.sign() if sync.signs else value.clone()
        if period:
            base_optimizer.step()
        else:
            own_steps[0].take()
    model.eval()
    with torch.no_grad():
        held_out = task.loss(task.held_out).item()
    gathered = isinstance(exchange, Exchange) and exchange.gathered
    vector_bytes = exchange.sent_bytes / (members if gathered else members + 1) / steps
    copies = members - 1 if gathered else 2 * (members - 1) / members
    dense_bytes = 4 * sum(each.numel() for each in parameters)
    return Trained(held_out, dense_bytes / vector_bytes, copies * vector_bytes)


def _own_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync: SyncSettings, codec: CodecSpec | None
) -> OptimizerStep:
    if codec is not None and codec.of_momentum:
        return FrozenVariance(optimizer, codec.warmup)
    if sync.muon and (muon := inner_muon(optimizer, hidden_matrices(model, [model], optimizer))) is not None:
        return WithMuon(optimizer, muon)
    return OptimizerStep(optimizer)


def main() -> None:
    """Prints a line for each codec: the loss that it ends at, by seed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.codec_seeds", description=__doc__)
    parser.add_argument("ways", nargs="+", metavar="CODEC[@SYNC]")
    parser.add_argument("--model", choices=TASKS, default="gpt")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rate", type=float)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for way in options.ways:
        found = [
            train(way, options.model, options.members, options.steps, seed, options.rate)
            for seed in range(options.seeds)
        ]
        losses = ", ".join(f"{each.loss:.3f}" for each in found)
        mean = sum(each.loss for each in found) / len(found)
        print(
            f"{way}: loss {mean:.3f} ({losses}), {found[0].fewer:.0f} times fewer bytes, "
            f"{found[0].link_bytes / 1000:.2f} kB a member and step",
            flush=True,
        )


if __name__ == "__main__":
    main()
