"""How many times the script's learning rate a round is stepped with, where its mean is over the batches of several
laptops (`--scale-lr`, O12).

m laptops with the script's batch make one batch that is m times as large, from which fewer steps are taken for the same
samples. For SGD each of them may then be m times as long (Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv
1706.02677, section 2.1), but not at once: while the weights change fast the rate rises from the script's own, by equal
amounts (section 2.2, gradual warm-up). For optimizers that divide by the size of gradients the square root of m is what
keeps the noise of the steps as it was (Krizhevsky 2014, arXiv 1404.5997, section 5; Malladi et al. 2022, arXiv
2205.10287, for Adam and RMSprop).

All that decides is in the round and equal for all who apply it, now or later: its number, its weight, and what its
leader has told. So no state of the base is added.

With a period, rates are multiplied by themselves and by another rule (`periods/local_rates.py`, O13): there `none` is
all that can be typed.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from meshwire.message_base import Wire
from meshwire.sync_modes.mode import SyncSettings

RateKind = Literal["none", "linear", "sqrt"]

RULE_OF: Mapping[str, RateKind] = {"SGD": "linear", "Adam": "sqrt", "AdamW": "sqrt", "RMSprop": "sqrt"}
"""By the name of an optimizer of torch.optim, the rule that suits it. SGD takes the other one as well."""

WARMUP_ROUNDS_MAX = 10**7
# Goyal et al. 2017, section 2.2: 5 epochs, which at their batch of 8192 are 782 rounds of ImageNet.
WARMUP_EPOCHS = 5
WARMUP_ROUNDS = 780

_LEGAL = (
    "use linear or sqrt, behind which ,warmup=N sets the rounds until all of it counts, such as linear,warmup=200 (N "
    f"from 0 to {WARMUP_ROUNDS_MAX}; else it is {WARMUP_EPOCHS} epochs, and at most {WARMUP_ROUNDS} rounds); or none"
)


class RateRule(Wire):
    """Equal on all members of a job.

    Attributes:
        kind: the rate grows with the batch, or with its square root; none: it is the script's, in local steps, too.
        warmup: rounds until all of it counts; None: WARMUP_EPOCHS epochs or WARMUP_ROUNDS rounds, what is over sooner.
    """

    kind: RateKind
    warmup: Annotated[int, Field(ge=0, le=WARMUP_ROUNDS_MAX)] | None = None

    def text(self) -> str:
        """As typed after --scale-lr."""
        return self.kind if self.warmup is None else f"{self.kind},warmup={self.warmup}"

    def factor(self, round_: int, samples: float, alone: float, epoch: int | None) -> float:
        """What the script's rate is multiplied by in a round; never less than 1, which is a learner's by itself.

        Args:
            round_: its number, from 1.
            samples: in it, of all that have contributed.
            alone: that a step has where one learner trains by itself.
            epoch: samples of an epoch; None: not known.
        """
        if self.kind == "none":
            return 1.0
        batches = max(1.0, samples / alone)
        whole = batches if self.kind == "linear" else math.sqrt(batches)
        warm = self._warm(round_ - 1, samples, epoch)
        return whole if warm >= 1.0 else 1.0 + (whole - 1.0) * warm

    def _warm(self, rounds: int, samples: float, epoch: int | None) -> float:
        """How much of it counts behind so many rounds: from 0, by equal amounts, to 1."""
        if self.warmup is not None:
            return rounds / self.warmup if self.warmup else 1.0
        of_epochs = 0.0 if epoch is None else rounds * samples / (WARMUP_EPOCHS * epoch)
        return max(rounds / WARMUP_ROUNDS, of_epochs)


def parse_rate_rule(typed: str) -> RateRule:
    """What is typed behind --scale-lr. Raises ValueError, which names what is legal."""
    kind, *rest = typed.split(",")
    warmup: int | None = None
    if rest:
        name, _, number = rest[0].partition("=")
        counts = number.isascii() and number.isdigit() and len(number) <= 8
        if kind == "none" or len(rest) > 1 or name != "warmup" or not counts:
            raise ValueError(f"--scale-lr {typed}: {_LEGAL}")
        warmup = int(number)
    try:
        return RateRule.model_validate({"kind": kind, "warmup": warmup})
    except ValidationError:
        raise ValueError(f"--scale-lr {typed}: {_LEGAL}") from None


def rate_rule_of(typed: str | None, sync: SyncSettings) -> RateRule | None:
    """The rule of a job, from --scale-lr; None: nothing was typed, or nothing else than is so without it. Raises
    ValueError, which names what is legal."""
    if typed is None:
        return None
    rule = parse_rate_rule(typed)
    if rule.kind == "none":
        return rule if sync.period else None
    if sync.period:
        raise ValueError(
            f"--scale-lr {typed} with --sync {sync.text()}: there local steps have a rule of their own, the script's "
            "rate times the root of how many learners there are, for Adam, AdamW and RMSprop: omit it, type none to "
            "have the script's rate, or use --sync bsp or ssp:2"
        )
    if sync.signs:
        raise ValueError(
            f"--scale-lr {typed} with --sync demo: a step on signs is as long as the rate says, however many samples "
            "stand behind it: omit it, or use --sync bsp"
        )
    return rule
