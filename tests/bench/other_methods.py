"""What members' gradients come to by methods that are no codec of ours, for comparison, in one process: PowerSGD as
torch's hook has it, EF21 with momentum, the largest values alone, and Dion."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from meshtraind.codecs.base import Values
from tests.bench.simulated_rounds import Shapes


class TorchsPowerSgd:
    """The mean by `powerSGD_hook` of torch 2.13 with warm start and error feedback, step by step.

    Args:
        warmup: so many rounds travel whole.
        basis: seed of the bases that the first round behind them begins with.
    """

    gathered = False

    def __init__(self, rank: int, warmup: int, shapes: Shapes, members: int, basis: int = 0) -> None:
        self._rank = rank
        self._warmup = warmup
        self._shapes = shapes
        self._owed = [[torch.zeros(shape) for shape in shapes] for _ in range(members)]
        self._rights: dict[int, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(basis)
        self._round = 0
        self.sent_bytes = 0

    def begin_with(self, rights: dict[int, torch.Tensor]) -> None:
        """Takes these bases, by tensor: columns x rank, in place of those that it would draw."""
        self._rights = rights

    def mean(self, parts: Sequence[Values]) -> Values:
        """What a round of these parts comes to on every member."""
        self._round += 1
        sizes = [math.prod(shape) for shape in self._shapes]
        pieces = [torch.from_numpy(part).split(sizes) for part in parts]
        made = []
        for at, shape in enumerate(self._shapes):
            of_members = [piece[at].view(shape) for piece in pieces]
            rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
            rank = min(rows, columns, self._rank)
            if self._round <= self._warmup or (rows + columns) * rank * 2 >= rows * columns:
                made.append(torch.stack(of_members).mean(0))
                self._sent(rows * columns)
                continue
            made.append(self._low_rank(at, [each.reshape(rows, columns) for each in of_members], rank).view(shape))
            self._sent((rows + columns) * rank)
        vector: Values = torch.cat([each.reshape(-1) for each in made]).numpy()
        return vector

    def _low_rank(self, at: int, of_members: list[torch.Tensor], rank: int) -> torch.Tensor:
        owed = [of[at].view_as(each) for of, each in zip(self._owed, of_members, strict=True)]
        inputs = [each + rest for each, rest in zip(of_members, owed, strict=True)]
        right = self._rights.get(at)
        if right is None:
            right = torch.randn(inputs[0].shape[1], rank, generator=self._generator)
        right = torch.linalg.qr(right).Q
        left = torch.linalg.qr(torch.stack([each @ right for each in inputs]).sum(0)).Q
        self._rights[at] = right = torch.stack([each.T @ left for each in inputs]).mean(0)
        mean: torch.Tensor = left @ right.T
        for rest, each in zip(owed, inputs, strict=True):
            rest.copy_(each - mean)
        return mean

    def _sent(self, values: int) -> None:
        self.sent_bytes += 4 * values * (len(self._owed) + 1)


class Ef21Momentum:
    """EF21-SGDM (Fatkhullin et al. 2023, arXiv 2305.15155, algorithm 1), with the largest values of the whole vector.

    Each member keeps its momentum, v <- mu v + g, and an estimate of it that all know, h. It sends the largest of
    v - h, which enter h; the step is along the mean of all h. What waits does so as a difference that is measured anew
    in each round, and is not added up. The first round travels whole.

    Args:
        ratio: the part of the values that is sent. A value takes 4 bytes and its place 2.
        momentum: mu; the optimizer then has none.
    """

    gathered = True

    def __init__(self, ratio: float, shapes: Shapes, members: int, momentum: float) -> None:
        values = sum(map(math.prod, shapes))
        self._kept = max(1, math.ceil(ratio * values))
        self._momentum = np.float32(momentum)
        self._velocity = np.zeros((members, values), np.float32)
        self._known: Values | None = None
        self._mean: Values = np.zeros(values, np.float32)
        self.sent_bytes = 0

    def mean(self, parts: Sequence[Values]) -> Values:
        """The mean of what all know of each other's momentum, behind a round of these gradients."""
        self._velocity *= self._momentum
        self._velocity += parts
        if self._known is None:
            self._known = self._velocity.copy()
            self.sent_bytes += 4 * self._known.size
            self._mean = self._known.mean(0)
            return self._mean.copy()
        for velocity, known in zip(self._velocity, self._known, strict=True):
            change = torch.from_numpy(velocity - known)
            places = change.abs().topk(self._kept).indices.numpy()
            sent = change.numpy()[places]
            known[places] += sent
            self._mean[places] += sent / np.float32(len(parts))
            self.sent_bytes += 6 * self._kept
        return self._mean.copy()


class LargestAlone:
    """The largest values of each member's gradient, without error feedback: what is left out is dropped (as in Aji and
    Heafield 2017, without their residual). What accumulation is worth shows beside `topk` of as many values.

    Args:
        ratio: the part of the values that is sent. A value takes 4 bytes and its place 2.
    """

    gathered = True

    def __init__(self, ratio: float, shapes: Shapes) -> None:
        self._kept = max(1, math.ceil(ratio * sum(map(math.prod, shapes))))
        self.sent_bytes = 0

    def mean(self, parts: Sequence[Values]) -> Values:
        """The mean of what all have sent."""
        made = np.zeros_like(parts[0])
        for part in parts:
            places = torch.from_numpy(part).abs().topk(self._kept).indices.numpy()
            made[places] += part[places] / np.float32(len(parts))
            self.sent_bytes += 6 * self._kept
        return made


class Dion:
    """Dion (Ahn et al. 2025, arXiv 2504.05295): a matrix moves along an orthonormal part of low rank of its momentum,
    and what that part leaves out stays in the momentum, which is the error feedback. Members' momenta are their own.

    What comes out for a matrix is a step of root mean square 0.2 where the rank is full, as Muon's beside AdamW; all
    else is a mean that travels whole.

    Args:
        momentum: mu; a matrix's momentum keeps mu of the part that has been applied.
    """

    gathered = False

    def __init__(self, rank: int, shapes: Shapes, members: int, momentum: float = 0.95) -> None:
        self._rank = rank
        self._shapes = shapes
        self._momentum = momentum
        self._of_members = [[torch.zeros(shape) for shape in shapes] for _ in range(members)]
        generator = torch.Generator().manual_seed(0)
        self._rights = {
            at: torch.randn(math.prod(shape[1:]), rank, generator=generator)
            for at, shape in enumerate(shapes)
            if in_directions(shape, rank)
        }
        self.sent_bytes = 0

    def mean(self, parts: Sequence[Values]) -> Values:
        """Steps of matrices, and means of all other gradients."""
        sizes = [math.prod(shape) for shape in self._shapes]
        pieces = [torch.from_numpy(part).split(sizes) for part in parts]
        made = []
        for at, shape in enumerate(self._shapes):
            of_members = [piece[at].view(shape) for piece in pieces]
            if at in self._rights:
                made.append(self._step(at, of_members))
                self.sent_bytes += 4 * (shape[0] + math.prod(shape[1:])) * self._rank * (len(parts) + 1)
            else:
                made.append(torch.stack(of_members).mean(0))
                self.sent_bytes += 4 * sizes[at] * (len(parts) + 1)
        vector: Values = torch.cat([each.reshape(-1) for each in made]).numpy()
        return vector

    def _step(self, at: int, of_members: list[torch.Tensor]) -> torch.Tensor:
        rows = self._shapes[at][0]
        momenta = [of[at].add_(each).view(rows, -1) for of, each in zip(self._of_members, of_members, strict=True)]
        left = torch.linalg.qr(torch.stack([each @ self._rights[at] for each in momenta]).mean(0)).Q
        right = torch.stack([each.T @ left for each in momenta]).mean(0)
        for each in momenta:
            each.sub_(left @ right.T, alpha=1 - self._momentum)
        self._rights[at] = right / right.norm(dim=0).clamp_min(1e-30)
        step: torch.Tensor = left @ self._rights[at].T * (0.2 * max(rows, len(right)) ** 0.5)
        return step.view(self._shapes[at])


def in_directions(shape: tuple[int, ...], rank: int) -> bool:
    """Whether Dion steps it: a matrix that two factors of this rank make smaller by half, as with PowerSGD."""
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 1)
    return (rows + columns) * rank * 2 < rows * columns
