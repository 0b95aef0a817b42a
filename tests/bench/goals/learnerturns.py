"""One process of a side that `sides.py` measures: takes as many steps as it is told, and says how long they took.

It is a job's script, a rank of DDP, or plain torch alone; so it imports nothing of the tests.
"""

import contextlib
import cProfile
import io
import json
import os
import pstats
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PROFILE_LINES = 45
DDP_TIMEOUT_S = 300
TEXT_BYTES = 1_000_000
HELD_OUT = {"digits": 256, "text": 48}  # images, windows of text
WIDE = 2037  # 12 layers of it are 190 MiB

Batch = tuple[Tensor, Tensor]


class Samples(NamedTuple):
    """What a model is trained on, and what nobody trains on: inputs and labels, by sample."""

    training: Batch
    held_out: Batch


class Task:
    """A model, its optimizer and its batches.

    Args:
        samples: None: the same batch of noise at each step.
        size: samples of one rank's batch.
        momentum: of SGD.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        size: int,
        rate: float,
        fixed: Batch,
        samples: Samples | None,
        momentum: float = 0.9,
    ) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        self._size = size
        self._fixed = fixed
        self._samples = samples

    def dealt(self, seed: int, rank: int, members: int) -> Callable[[int], Batch]:
        """What this rank gets in each step: the members' batches are one piece of a shuffled epoch."""
        samples = self._samples
        if samples is None:
            return lambda _step: self._fixed
        inputs, labels = samples.training
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))

        def batch(step: int) -> Batch:
            first = (step * members + rank) * self._size
            own = order[torch.arange(first, first + self._size) % len(order)]
            return inputs[own], labels[own]

        return batch

    def held_out_loss(self) -> float:
        """In nats, with the model as it is now."""
        assert self._samples is not None
        inputs, labels = self._samples.held_out
        self.model.eval()
        with torch.no_grad():
            parts = zip(inputs.split(self._size), labels.split(self._size), strict=True)
            losses = [float(loss_of(self.model, part)) for part in parts]
        self.model.train()
        return sum(losses) / len(losses)


class Pace(torch.autograd.Function):
    """Gives a tensor noise for its gradient, not before a moment: the part of the backward pass that computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, noise: Tensor, due_s: float) -> Tensor:
        ctx.noise, ctx.due_s = noise, due_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        asleep_until(ctx.due_s)
        return gradients[0], ctx.noise, None, None


def asleep_until(due_s: float) -> None:
    """Returns at this moment of the monotonic clock, or at once behind it."""
    time.sleep(max(0.0, due_s - time.monotonic()))


class Paced(torch.nn.Module):
    """Parameters of the shapes of another model, whose passes take a stated time: a third of it forwards, and backwards
    by how large each is. What this machine really does meanwhile is in that time, not on top of it. Gradients are
    noise, for links pack what shrinks."""

    def __init__(self, shapes: list[torch.Size], step_s: float) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.full(shape, 0.1)) for shape in shapes)
        self.noise = [torch.randn(shape) for shape in shapes]
        self.step_s = step_s
        sizes = [shape.numel() for shape in shapes]
        self.ready = [sum(sizes[at:]) / sum(sizes) for at in range(len(sizes))]

    def forward(self, x: Tensor) -> Tensor:
        forward_until_s = time.monotonic() + self.step_s / 3
        for weight, noise, ready in zip(self.weights, self.noise, self.ready, strict=True):
            due_s = forward_until_s + self.step_s * 2 / 3 * ready
            x = Pace.apply(x, weight, noise, due_s)  # type: ignore[no-untyped-call]
        asleep_until(forward_until_s)
        return x


def loss_of(net: torch.nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of classes, for each position where there are several; squared error of values."""
    inputs, labels = batch
    if labels.dtype == torch.int64:
        return torch.nn.functional.cross_entropy(net(inputs).flatten(0, -2), labels.flatten())
    return torch.nn.functional.mse_loss(net(inputs), labels)


def made(what: str, seed: int, data: Path | None) -> Task:
    """The task of this name: noise for `resnet`, `gpt`, `lm`, `tiny`, `wide`, real samples for `digits` and `text`.

    `paced:MODEL:SECONDS` has the shapes of one of these, whose step takes so long.
    """
    from meshtrain.examples.gpt import GPT, GPTConfig

    torch.manual_seed(seed)
    if what.startswith("paced:"):
        _, name, seconds = what.split(":")
        shapes = [each.shape for each in made(name, seed, None).model.parameters()]
        # Without momentum: what this machine computes beside the stated time should be little.
        return Task(Paced(shapes, float(seconds)), 16, 1e-3, (torch.ones(16), torch.zeros(16)), None, momentum=0.0)
    if what in ("resnet", "digits"):
        from meshtrain.examples.resnet import ResNet18

        if what == "digits":
            assert data is not None
            # At four times this rate two hooks that differ by their first basis alone end far apart (`codec_studies`).
            return Task(Enlarged(ResNet18()), 16, 0.005, _no_batch(), digits(data))
        return Task(ResNet18(), 16, 1e-3, (torch.randn(16, 3, 64, 64), torch.randint(1000, (16,))), None)
    if what in ("gpt", "text"):
        config = GPTConfig(context=128, num_layers=6, num_heads=6, width=384)
        if what == "text":
            return Task(GPT(config), 4, 0.05, _no_batch(), windows(config.context))
        tokens = torch.randint(60, (4, 129))
        return Task(GPT(config), 4, 1e-3, (tokens[:, :-1], tokens[:, 1:]), None)
    if what == "lm":  # 30.8 M parameters, as a language model of words has them
        config = GPTConfig(vocabulary_size=5200, context=512, num_layers=8, num_heads=8, width=512)
        tokens = torch.randint(5200, (1, 513))
        return Task(GPT(config), 1, 1e-3, (tokens[:, :-1], tokens[:, 1:]), None)
    if what == "wide":
        layers = [torch.nn.Linear(WIDE, WIDE) for _ in range(12)]
        return Task(torch.nn.Sequential(*layers), 1, 1e-3, (torch.randn(1, WIDE), torch.randn(1, WIDE)), None)
    if what == "mlp":
        model = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        return Task(model, 16, 1e-3, (torch.randn(16, 784), torch.randint(10, (16,))), None)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    return Task(model, 8, 1e-3, (torch.randn(8, 16), torch.randn(8, 4)), None)


def _no_batch() -> Batch:
    return torch.empty(0), torch.empty(0)


class Enlarged(torch.nn.Module):
    """Gives a model for images (3, 64, 64) those of one channel and any size."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(torch.nn.functional.interpolate(x, size=64).expand(-1, 3, -1, -1))
        return logits


def digits(folder: Path) -> Samples:
    """Handwritten digits, (1, 28, 28)."""
    from meshtrain.examples.digits import HELD_OUT_EVERY, read_digits

    images, labels = read_digits(folder)
    whole = torch.from_numpy(images).float().div(255).unsqueeze(1)
    kinds = torch.from_numpy(labels).long()
    held = torch.arange(len(kinds)) % HELD_OUT_EVERY == 0
    few = torch.randperm(int(held.sum()), generator=torch.Generator().manual_seed(0))[: HELD_OUT["digits"]]
    return Samples((whole[~held], kinds[~held]), (whole[held][few], kinds[held][few]))


def windows(context: int) -> Samples:
    """Text of Python's standard library, a tenth of which is held out."""
    from meshtrain.examples.dataset import CharDataset
    from meshtrain.examples.text import stdlib_text

    text = CharDataset(stdlib_text(TEXT_BYTES), context)
    x, y = (torch.stack(column) for column in zip(*(text[at] for at in range(len(text))), strict=True))
    cut = len(x) * 9 // 10
    every = (len(x) - cut) // HELD_OUT["text"]
    return Samples((x[:cut], y[:cut]), (x[cut::every], y[cut::every]))


def main() -> None:
    """One argument, in JSON: side (plain, job, ddp), model, seed, data, at (the socket of who says how many steps);
    for ddp: rank, members, store, the hook (fp16, or PowerSGD's rank) or nothing, and the seed of a first basis."""
    told = json.loads(sys.argv[1])
    side, seed = told["side"], told["seed"]
    if side != "job":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for who measures, and ends this process itself
    torch.set_num_threads(1)
    task = made(told["model"], seed, Path(told["data"]) if told["data"] else None)
    model, net, rank, members = task.model, task.model, 0, 1
    if side == "job":
        import meshtrain as mt

        model, task.optimizer = mt.prepare(model, task.optimizer)
        net, rank, members = model, mt.rank(), mt.world_size()
        torch.set_num_threads(1)
    elif side == "ddp":
        import torch.distributed as dist

        rank, members = told["rank"], told["members"]
        timeout, store = timedelta(seconds=DDP_TIMEOUT_S), f"file://{told['store']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=members, timeout=timeout)
        net = distributed(model, told["hook"], told["basis"])
    batch = task.dealt(seed, rank, members)
    step = 0
    with socket.socket(socket.AF_UNIX) as stream:  # which crosses network namespaces
        stream.connect(told["at"])
        with stream.makefile("rw") as lines:
            lines.write(json.dumps({"side": side, "rank": rank, "pid": os.getpid()}) + "\n")
            lines.flush()
            for line in lines:
                asked = json.loads(line)
                if asked["held_out"]:
                    answer: dict[str, Any] = {"loss": task.held_out_loss() if rank == 0 else None}
                else:
                    answer = taken(task, net, batch, range(step, step + asked["steps"]), asked)
                    step += asked["steps"]
                lines.write(json.dumps(answer) + "\n")
                lines.flush()
    if side == "job":
        mt.finish()
    elif side == "ddp":
        dist.destroy_process_group()


def distributed(model: torch.nn.Module, hook: int | str | None, basis: int) -> torch.nn.Module:
    """DDP, with the hook fp16, or with PowerSGD of this rank as its hook has it: two steps travel whole, the fewest
    that it takes.

    With the hook there is one bucket: over gloo with several, ranks issue collectives in different orders, and hang.
    """
    if hook is None:
        return torch.nn.parallel.DistributedDataParallel(model)
    if hook == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        net = torch.nn.parallel.DistributedDataParallel(model)
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return net
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    net = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1000)
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=hook, start_powerSGD_iter=2, random_seed=basis)
    net.register_comm_hook(state, powersgd.powerSGD_hook)
    return net


def taken(
    task: Task, net: torch.nn.Module, batch: Callable[[int], Batch], steps: range, asked: dict[str, Any]
) -> dict[str, Any]:
    """Takes these steps. `alone`: without exchanging anything, which only DDP can."""
    profile = cProfile.Profile() if asked["profile"] else None
    apart = net.no_sync() if asked["alone"] else contextlib.nullcontext()  # type: ignore[operator]
    if profile is not None:
        profile.enable()
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    with apart:
        for step in steps:
            task.optimizer.zero_grad()
            loss_of(net, batch(step)).backward()
            task.optimizer.step()
    answer: dict[str, Any] = {"s": time.monotonic() - began_s, "cpu_s": time.process_time() - began_cpu_s}
    if profile is not None:
        profile.disable()
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
        answer["profile"] = text.getvalue()
    return answer


if __name__ == "__main__":
    main()
