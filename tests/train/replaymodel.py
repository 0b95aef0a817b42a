"""The rules of late rounds as one process: a run of learners is computed again from what was drawn and decided.

Rounds are applied to one base in their order (O2), with the options of their leader (O3). Each step computes on the
base that it began with (R0), ahead by its learner's own gradients that no round in that base has covered.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.train.localrounds import LocalRounds

Batches = list[tuple[Tensor, Tensor]]
Drawn = Mapping[tuple[int, int], Batches]  # by rank and step: the micro-batches
GradientHooks = list[Tensor | None]
Rates = Callable[[int, int], dict[str, Any]]  # by rank and calls of its scheduler: the options of all its groups


def accumulate(model: nn.Module, batches: Batches) -> GradientHooks:
    """The gradients of a step: of the mean of the losses of its micro-batches."""
    model.zero_grad()
    for x, y in batches:
        (nn.functional.mse_loss(model(x), y) / len(batches)).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def replay(
    model: nn.Module, optimizer: torch.optim.Optimizer, rounds: LocalRounds, drawn: Drawn, options: Rates, c: float
) -> list[nn.Module]:
    """The bases after 0, 1, 2, … rounds.

    Args:
        model: with its optimizer as all learners began; both are trained.
        drawn: what each learner's steps computed on.
        options: what a scheduler sets.
        c: of what the learners' own gradients would change.
    """
    base_of = {(rank, step): base for rank, step, base in rounds.starts}
    round_of = {
        (rank, step): number
        for number, round_ in rounds.rounds.items()
        for rank, step in round_.steps.items()
        if round_.seals.get(rank) is not None  # else it was cut off, and its learner knows (V2)
    }
    gradients: dict[tuple[int, int], GradientHooks] = {}
    bases = [copy.deepcopy((model, optimizer))]

    def compute(rank: int, step: int) -> GradientHooks:
        if (rank, step) not in gradients:
            base = base_of[rank, step]
            view, ahead = copy.deepcopy(bases[base])
            for earlier in range(1, step):
                if c and round_of.get((rank, earlier), 0) > base:
                    _assign(view, [compute(rank, earlier)], [1.0])
                    _step(ahead, options(rank, earlier - 1))
            with torch.no_grad():
                for p, of_base in zip(view.parameters(), bases[base][0].parameters(), strict=True):
                    p.copy_(of_base + c * (p - of_base))
            gradients[rank, step] = accumulate(view, drawn[rank, step])
        return gradients[rank, step]

    for number in range(1, rounds.complete + 1):
        round_ = rounds.rounds[number]
        assert round_.done is not None
        if not round_.done.void:
            steps = sorted(round_.steps.items())
            weights = [float(round_.binds[rank].weight) for rank, _ in steps]
            parts = [compute(rank, step) for rank, step in steps]
            _assign(model, parts, weights)
            leader, step = max(steps, key=lambda item: (item[1], -item[0]))
            _step(optimizer, options(leader, step - 1))
        bases.append(copy.deepcopy((model, optimizer)))
    return [base for base, _ in bases]


def _step(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        group.update(options)
    optimizer.step()


def _assign(model: nn.Module, parts: Sequence[GradientHooks], weights: Sequence[float]) -> None:
    """sum(w*g) / sum(w) into p.grad; a part without a gradient counts as zero (O5)."""
    for index, p in enumerate(model.parameters()):
        given = [(part[index], weight) for part, weight in zip(parts, weights, strict=True)]
        total = [gradient * weight for gradient, weight in given if gradient is not None]
        p.grad = torch.stack(total).sum(0) / sum(weights) if total else None
