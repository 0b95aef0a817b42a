"""How much longer local steps are than the script's, by O13, so that a period moves as far as steps in common would.

An optimizer that divides by the size of gradients takes steps of about the learning rate, whatever the gradients'
length. Of these only what all batches agree on leads anywhere, and that is the smaller a part, the more of the size is
noise: in the mean over the batches of m learners the noise is smaller by sqrt(m), so that the same rate leads sqrt(m)
times as far there. With a period each learner divides by the size of its own gradients, and the mean of what m of them
change has come only 1/sqrt(m) as far, for the same samples. Local steps at sqrt(m) times the rate make up for it: as
far as all is noise, the mean then moves as far as steps on the mean would, and as much noise is left in it. It is the
square root rule (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv
2205.10287) read from the other side. SGD's steps are as long as its gradients: their mean is the step on the mean, and
nothing is to be made up for. Nor of the decay of weights that is no gradient's (AdamW, Loshchilov and Hutter 2019),
which is alike in all steps and stays what it is: rate times decay.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from meshtrain.train.optim.optimizer_step import OptimizerStep, run_closure
from meshtrain.train.optim.scaled_rates import BY_SIZE, rates_times
from meshwire.messages.job import JobSpec


class RoundsTakenIn(Protocol):
    """The rounds that a learner has taken into its base."""

    @property
    def applied(self) -> int:
        """The newest one's number, by whomever it was taken in; 0 at the beginning of the job."""

    @property
    def contributors(self) -> int:
        """How many devices the newest one is of that was anybody's; 0 where that is not known."""


def local_steps_longer(spec: JobSpec, of_muon: Sequence[object]) -> bool:
    """Whether a job's local steps may be longer than its script's: `--scale-lr none` leaves them, and so does `muloco`,
    of whose matrices no such rule is known.

    Args:
        of_muon: what Muon steps in place of the script's optimizer.
    """
    return bool(spec.sync.period) and spec.scale_lr is None and not of_muon


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
    newest round. The script reads and sets its own ones, in a closure, too. A state that was saved tells of its newest
    round, but by an older version: then they are the script's until the first one.

    Args:
        step: of the script's optimizer, which moves the local weights.
        members: devices that the job begins with.
        learners: of each device (R6).
    """

    def __init__(self, step: OptimizerStep, rounds: RoundsTakenIn, members: int, learners: int) -> None:
        self._optimizer = step.optimizer
        self._step = step.original
        self._rounds = rounds
        self._members = members
        self._learners = learners
        step.original = self._longer

    def _longer(self, closure: Callable[[], Any] | None = None) -> Any:
        factor = local_factor(self._optimizer, self._counted())
        if factor == 1.0:
            return self._step(closure)
        loss = run_closure(closure)
        with rates_times(self._optimizer, factor), _decay_divided(self._optimizer, factor):
            self._step(None)
        return loss

    def _counted(self) -> int:
        """Learners of a round, as far as is known."""
        rounds = self._rounds
        if rounds.contributors:
            return rounds.contributors * self._learners
        return 1 if rounds.applied else self._members * self._learners


@contextmanager
def _decay_divided(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Inside, weights that decay by rate times decay, beside the gradient, do so by as much as without the factor."""
    apart = [group for group in optimizer.param_groups if _decays_apart(optimizer, group)]
    own = [group["weight_decay"] for group in apart]
    for group, decay in zip(apart, own, strict=True):
        group["weight_decay"] = decay / factor
    try:
        yield
    finally:
        for group, decay in zip(apart, own, strict=True):
            group["weight_decay"] = decay


def _decays_apart(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
