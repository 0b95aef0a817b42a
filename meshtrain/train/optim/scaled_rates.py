"""Learning rates that follow the samples of a round (`--scale-lr`, O12): the factor of each round, and how it acts.

The rate that the script, or its scheduler, has set is multiplied while the optimizer takes the step of a round, and is
the script's again behind it. So the script reads and sets its own rate, a scheduler that multiplies the last one is
right, and what is saved, compared and told to others is unscaled.

Momentum correction (Goyal et al. 2017, arXiv 1706.02677, section 3, remark 2) is for optimizers whose momentum holds
the rate, v = mu v + lr g; p -= v: there mu is to be multiplied by the new rate over the old one, which makes them equal
to u = mu u + g; p -= lr u where lr changes. torch's SGD, and each optimizer that is allowed here, is of this second
kind: what it keeps does not depend on its rate (a test proves it for each), so nothing is left to correct. The same
holds for momenta that codecs keep (`dgc`, `onebit:momentum`), which are sums of gradients.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from meshtrain.errors import MeshtrainError, NotSupported, UsageError
from meshtrain.train.model.joint_optimizer import members_of
from meshtrain.train.model.optimizers import set_option
from meshtrain.train.optim.hyperparameters import RoundOptions
from meshwire.messages.learner import RoundDone, SampleSpace
from meshwire.sync_modes.rate_rule import RateKind, RateRule

BY_SIZE: tuple[type[Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
"""They divide by the size of gradients: their rate grows with the square root (Malladi et al. 2022)."""

LEGAL: Mapping[RateKind, tuple[type[Optimizer], ...]] = {
    "linear": (torch.optim.SGD,),
    "sqrt": (torch.optim.SGD, *BY_SIZE),
}


def check_scaled(optimizer: Optimizer, rule: RateRule) -> None:
    """Raises NotSupported for an optimizer of which no such rule is known."""
    if rule.kind == "none":
        return
    for member in members_of(optimizer):
        kind, name = type(member), type(member).__name__
        if kind in LEGAL[rule.kind]:
            continue
        if kind in BY_SIZE:
            raise NotSupported(
                f"--scale-lr {rule.text()} is for torch.optim.SGD, and {name} divides by the size of the gradients, so "
                "that a larger batch bears a rate that grows with its square root alone: use --scale-lr sqrt"
            )
        raise NotSupported(
            f"--scale-lr {rule.text()}: how the rate of {name} is to follow the batch is not known here. linear is for "
            "torch.optim.SGD, sqrt for SGD, Adam, AdamW and RMSprop: use one of them, or omit --scale-lr and set the "
            "rate in the script, by mt.world_size()"
        )


class ScaledRates:
    """What the rates of one learner's optimizer are multiplied by.

    Args:
        rule: of the job; None, or `none`, which is all that there is with a period (O13): by nothing.
        space: what the prepared loader reads; None: there is none, and each step counts as one sample.
        learners: of each device, which share each unit that is dealt (R6).

    Attributes:
        newest: the factor of the newest round that this process has stepped on; 1 before the first one.
    """

    def __init__(self, rule: RateRule | None, space: SampleSpace | None = None, learners: int = 1) -> None:
        self.rule = None if rule is None or rule.kind == "none" else rule
        self._epoch = None if space is None or space.whole_batches else space.total * learners
        self.newest = 1.0

    def begin_round(self, done: RoundDone, told: RoundOptions | None) -> float:
        """The factor of a round that is about to be stepped on, which becomes the newest one.

        Args:
            told: by its leader.

        Raises:
            MeshtrainError: its leader has not told what a step has alone.
        """
        assert self.rule is not None
        if told is None or told.alone is None:
            raise MeshtrainError(f"round {done.round} does not say how many samples a step has alone: versions differ")
        self.newest = self.rule.factor(done.round, done.weight, told.alone, self._epoch)
        return self.newest


@contextmanager
def rates_times(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Inside, the rates of all param groups are multiplied; afterwards they are what they were.

    Raises UsageError where something within the step has set one: what was meant, with the factor or without, is not
    known.
    """
    if factor == 1.0:
        yield
        return
    own = [_rate(group["lr"]) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, own, strict=True):
        set_option(group, "lr", rate * factor)
    scaled = [_rate(group["lr"]) for group in optimizer.param_groups]
    try:
        yield
        if [_rate(group["lr"]) for group in optimizer.param_groups] != scaled:
            raise UsageError(
                "a hook of optimizer.step() sets the learning rate, which meshtrain multiplies for that step, by the "
                "learners in a round: set it behind optimizer.step(), or submit with --scale-lr none"
            )
    finally:
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            set_option(group, "lr", rate)


def _rate(value: float | torch.Tensor) -> float:
    return float(value)
