"""How much longer local steps are than the script's, by O13, so that a period moves as far as steps in common would.

An optimizer that divides by the size of gradients takes steps of about the learning rate, whatever the gradients'
length. Of these only what all batches agree on leads anywhere, and that is the smaller a part, the more of the size is
noise: in the mean over the batches of m learners the noise is smaller by sqrt(m), so that the same rate leads sqrt(m)
times as far there. With a period each learner divides by the size of its own gradients, and the mean of what m of them
change has come only 1/sqrt(m) as far, for the same samples. Local steps at sqrt(m) times the rate make up for it: as
far as all is noise, the mean then moves as far as steps on the mean would, and as much noise is left in it. It is the
square root rule (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv
2205.10287) read from the other side. SGD's steps are as long as its gradients: their mean is the step on the mean, and
nothing is to be made up for.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer

from meshtrain.train.optim.optimizer_step import OptimizerStep
from meshtrain.train.optim.scaled_rates import BY_SIZE, rates_times


class NewestRound(Protocol):
    """The newest round that a learner has taken into its base."""

    @property
    def contributors(self) -> int:
        """How many devices it is of; 0 before the first one."""


def local_factor(optimizer: Optimizer, learners: int) -> float:
    """How many times the script's rate local steps take, where so many learners are in a round."""
    return math.sqrt(learners) if type(optimizer) in BY_SIZE else 1.0


def what_is_longer(optimizer: Optimizer, learners: int) -> str | None:
    """For people; None: steps are the script's."""
    factor = local_factor(optimizer, learners)
    if factor == 1.0:
        return None
    return (
        f"local steps take {factor:.3g} times the script's learning rate, the root of {learners} learners, for "
        f"{type(optimizer).__name__} goes further on their mean than each of them does by itself; --scale-lr none "
        "leaves the rate as it is"
    )


class LongerSteps:
    """From its creation on the optimizer's own step is taken at longer rates: those of as many learners as were in the
    newest round. The script reads and sets its own ones.

    Args:
        step: of the script's optimizer, which moves the local weights.
        members: devices that take part, which count before the first round.
        learners: of each device (R6).
    """

    def __init__(self, step: OptimizerStep, newest: NewestRound, members: int, learners: int) -> None:
        self._optimizer = step.optimizer
        self._step = step.original
        self._newest = newest
        self._members = members
        self._learners = learners
        step.original = self._longer

    def _longer(self, closure: Callable[[], Any] | None = None) -> Any:
        devices = self._newest.contributors or self._members
        with rates_times(self._optimizer, local_factor(self._optimizer, devices * self._learners)):
            return self._step(closure)
