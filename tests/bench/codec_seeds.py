"""`python -m tests.bench.codec_seeds CODEC[@SYNC] ...`: the loss that codecs end at in one process, without daemons.

Members are simulated: each takes gradients of its own batches, or H local steps, and what they add goes through the
job's codecs, parts and error feedback, of workers and of owners, segment by segment. It is for comparing codecs, and
two versions of one, on a few seeds in minutes; what jobs of daemons reach says `codec_table`.

SYNC is what `--sync` takes, such as `diloco:8` or `demo`; 8 is short for `local:8`. Where no codec stands
before it, that is the one that it brings. `--rate` is the learning rate, for `demo` of SGD without momentum.

Of others' methods, `hook:4,10` is PowerSGD of rank 4 as torch's hook has it, after 10 rounds that travel whole, with a
third number from another first basis; `ef21:0.01` is EF21 with the momentum of SGD; `largest:0.01` is `topk`
without error feedback; `dion:4` is Dion of rank 4, whose matrices move at DION_RATE. What is trained says `--model`.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from meshtrain.train.optim.frozen_variance import FrozenVariance, check_variance_possible
from meshtrain.train.optim.momentum_handover import WithoutMomentum, momentum_of
from meshtrain.train.optim.optimizer_step import OptimizerStep
from meshtrain.train.periods.inner_muon import WithMuon, hidden_matrices, inner_muon
from meshtrain.train.periods.outer_optimizer import outer_optimizer
from meshtraind.codecs.base import Values
from meshwire.codecs.registry import CodecSpec, parse_codec
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from tests.bench.codec_tasks import TASKS, Task
from tests.bench.other_methods import Dion, Ef21Momentum, LargestAlone, TorchsPowerSgd, in_directions
from tests.bench.simulated_rounds import Shapes, SimulatedRounds

SIGN_RATE = 1e-3
DION_RATE = 5e-3


class Means(Protocol):
    """What makes means of what members add.

    Attributes:
        gathered: what a member sends goes to all others as it is.
        sent_bytes: by all members until now.
    """

    gathered: bool
    sent_bytes: int

    def mean(self, parts: Sequence[Values]) -> Values:
        """What a round of these parts comes to on every member."""


def flat(tensors: Sequence[torch.Tensor]) -> Values:
    vector: Values = torch.cat([each.detach().reshape(-1) for each in tensors]).numpy()
    return vector


def unflatten(vector: Values, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = torch.from_numpy(vector).split([each.numel() for each in tensors])
    return [piece.view_as(each) for piece, each in zip(pieces, tensors, strict=True)]


@torch.no_grad()
def hold(vector: Values, parameters: Sequence[torch.Tensor]) -> None:
    """The parameters hold these values."""
    for each, value in zip(parameters, unflatten(vector, parameters), strict=True):
        each.copy_(value)


def means_of(text: str, shapes: Shapes, members: int, optimizer: torch.optim.Optimizer) -> Means:
    """What makes means, of a codec as typed, or of another's method; it may take over the optimizer's momentum."""
    name, _, typed = text.partition(":")
    numbers = typed.split(",")
    if name == "hook":
        return TorchsPowerSgd(int(numbers[0]), int(numbers[1]), shapes, members, *map(int, numbers[2:]))
    if name == "ef21":
        return Ef21Momentum(float(numbers[0]), shapes, members, momentum_of(optimizer).factor)
    if name == "dion":
        return Dion(int(numbers[0]), shapes, members)
    if name == "largest":
        return LargestAlone(float(numbers[0]), shapes)
    return SimulatedRounds(text, shapes, members, momentum_of(optimizer) if parse_codec(text).momentum else None)


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
    """Trains a model anew. Raises CodecError when something is not finite, NotSupported for an optimizer that does not
    suit the codec."""
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
    own_steps = [_own_step(model, each, sync, text) for each in optimizers]
    exchange = means_of(text, [tuple(each.shape) for each in parameters], members, optimizers[0])
    draws = [torch.Generator().manual_seed(1000 * seed + member) for member in range(members)]
    own = [flat(parameters)] * members if sync.central else None  # weights that a round does not replace

    def step(member: int) -> None:
        model.zero_grad()
        task.loss(torch.randint(0, task.count, (task.batch // members,), generator=draws[member])).backward()

    for _ in range(steps // (period or 1)):
        base, parts = flat(parameters), []
        for member in range(members):
            if own is not None:
                hold(own[member], parameters)
            for _ in range(period or 1):
                step(member)
                if period:
                    own_steps[member].original()
            if period:
                parts.append(base - flat(parameters))
                if own is not None:
                    own[member] = flat(parameters) + parts[-1] / np.float32(members)
                hold(base, parameters)
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
    vector_bytes = exchange.sent_bytes / (members if exchange.gathered else members + 1) / steps
    copies = members - 1 if exchange.gathered else 2 * (members - 1) / members
    dense_bytes = 4 * sum(each.numel() for each in parameters)
    return Trained(_held_out_loss(task), dense_bytes / vector_bytes, copies * vector_bytes)


class DionStep(OptimizerStep):
    """The optimizer's step, but for these matrices, whose gradients are steps already."""

    def __init__(self, optimizer: torch.optim.Optimizer, matrices: Sequence[torch.Tensor]) -> None:
        super().__init__(optimizer)
        self._matrices = matrices

    @torch.no_grad()
    def around(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        steps = [each.grad for each in self._matrices]
        for each in self._matrices:
            each.grad = None
        step()
        for each, own in zip(self._matrices, steps, strict=True):
            assert own is not None
            each.add_(own, alpha=-DION_RATE)


def _held_out_loss(task: Task) -> float:
    task.model.eval()
    with torch.no_grad():
        return task.loss(task.held_out).item()


def _own_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync: SyncSettings, text: str) -> OptimizerStep:
    name = text.partition(":")[0]
    if name in ("hook", "largest"):
        return OptimizerStep(optimizer)
    parameters = list(model.parameters())
    if name == "ef21":
        return WithoutMomentum(optimizer, parameters, momentum_of(optimizer))
    if name == "dion":
        rank = int(text.partition(":")[2])
        return DionStep(optimizer, [each for each in parameters if in_directions(tuple(each.shape), rank)])
    codec: CodecSpec = parse_codec(text)
    if codec.momentum:
        coded = [each for each in parameters if codec.takes(tuple(each.shape))]
        return WithoutMomentum(optimizer, coded, momentum_of(optimizer))
    if codec.of_momentum:
        check_variance_possible(optimizer)
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
