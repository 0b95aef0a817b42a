"""How the optimizer that changes the base takes one step on the gradients in `p.grad`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """What the closure returns that a script may give to `step()`, run as torch's optimizers do; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class OptimizerStep:
    """One optimizer with its own `step`, remembered before the job puts another function in its place.

    Plainly, the optimizer steps as it is. The heirs do what a codec or a mode of `--sync` asks for besides:
    `WithoutMomentum` (`--codec dgc`), `FrozenVariance` (`--codec onebit:momentum`), `OnSigns` (`--sync demo`), and in a
    period `WithMuon` (`--sync muloco`).

    Attributes:
        optimizer: whose parameters are the base.
        original: its own `step`, with the closure that a script may give.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.original: Callable[..., Any] = optimizer.step

    def take(self) -> None:
        """One step of the optimizer: the base is changed."""
        self.around(self.optimizer, self.original)

    def take_with(self, clone: Optimizer) -> None:
        """Takes the same step by a clone (`clone_optimizer`), which goes ahead of the base."""
        self.around(clone, lambda: type(clone).step(clone))

    def contributed(self, parameter: torch.Tensor, gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
        """What this learner adds to a round for a parameter with this gradient, or without one; None: nothing.

        Args:
            scale: what a GradScaler has multiplied the gradient by, and the result is to be divided by.
        """
        return gradient

    def forget(self) -> None:
        """What earlier steps have left in the optimizer's state counts no more."""
        self.optimizer.state.clear()

    def around(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        """One call of `step`, which steps this optimizer, and what belongs before and after it."""
        step()
