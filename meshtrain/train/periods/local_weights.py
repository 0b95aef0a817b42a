"""The weights that a learner's own steps move with a period (`--sync local:H` and its kin), and what lies beside."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch

from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.optim.own_steps import OwnSteps
from meshwire.messages.learner import RoundDone


class _ParametersHold(Enum):
    """What the parameters hold, and what lies beside them."""

    BASE = "the base; what lies beside them counts for nothing"
    LOCAL = "local weights; the base lies beside them"
    LENT = "the base; local weights lie beside them"


class LocalWeights:
    """Keeps the base beside the parameters while these are stepped on locally.

    A period begins on the base. With a bound s > 0 earlier periods may be on their way into it: then it begins where
    the outer optimizer would bring the base by these (`OwnSteps`), and that start is kept as well.

    Args:
        parameters: that are trained; they hold the base.
        own: periods that have ended, and are in no round that is applied. With s=0 none ever is.
        kept: is told where the base lies.
    """

    apart = False  # a round is of all weights
    in_flight = 0  # none is taken in within a period

    def __init__(self, parameters: Sequence[torch.Tensor], own: OwnSteps, kept: NoKeptState) -> None:
        self._parameters = list(parameters)
        self._own = own
        self._kept = kept
        self._beside = copies_of(parameters)
        self._start: list[torch.Tensor] | None = None  # where the period began, if not at the base
        self._held = _ParametersHold.BASE

    @property
    def beside(self) -> list[torch.Tensor]:
        """What lies beside the parameters, which may be the base. Whoever replaces one gives an equal one."""
        return self._beside

    @torch.no_grad()
    def difference(self, position: int) -> torch.Tensor:
        """Start - local weights of the parameter at `position`, at least in fp32: what a period contributes."""
        local, base = self._pair(position)
        start = base if self._start is None else self._start[position]
        return in_full_precision(start).sub(local)

    def weight(self, round_: int, samples: float, *, moved: bool) -> float:
        """The samples of the period that ends."""
        return samples

    def mixing(self) -> AbstractContextManager[None]:
        """Nothing is left: a period begins from the base."""
        return nullcontext()

    @torch.no_grad()
    def keep(self, step: int, round_: int) -> None:
        """What the period of this step has changed is on its way into a round; the next one begins ahead by it."""
        if self._own.coefficient:
            changes = [self.difference(at).to(each.dtype) for at, each in enumerate(self._parameters)]
            self._own.keep(step, list(changes), b"")

    @torch.no_grad()
    def show_base(self, round_: int | None = None) -> None:
        """The parameters hold the base, and may be stepped as such. Local weights are kept."""
        if self._held is _ParametersHold.LOCAL:
            self._kept.turning()
            swap(self._parameters, self._beside)
            self._held = _ParametersHold.LENT
            self._kept.in_parameters()

    @torch.no_grad()
    def show_view(self) -> None:
        """The parameters hold the local weights. Where a period begins, these are where it begins."""
        if self._held is _ParametersHold.LENT:
            self._kept.turning()
            swap(self._parameters, self._beside)
            self._kept.beside()
        elif self._held is _ParametersHold.BASE:
            for parameter, beside in zip(self._parameters, self._beside, strict=True):
                beside.copy_(parameter)
            self._kept.beside()
            self._start = None
            if self._own:
                self._own.go_ahead(self._beside)
                self._start = copies_of(self._parameters)
        self._held = _ParametersHold.LOCAL

    def follow(self, done: RoundDone) -> None:
        """Nothing: a period that begins is made of the base anew."""

    def begin_step(self, newest_squared_norm: float) -> None:
        """A period begins anew: what the one before has changed is on its way, in the base, or lost."""
        self.end_period()
        self._own.begin_step(newest_squared_norm)

    def stepped(self, round_: int, taken: int) -> None:
        """Nothing: local weights are this learner's alone."""

    def take_part(self, members: int) -> None:
        """Nothing: local weights end with their period."""

    def end_period(self) -> None:
        """The parameters hold the base, and local weights count no more."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """As `end_period`, where the local steps are lost, too: the next period begins on the base."""
        self.show_base()
        self._held = _ParametersHold.BASE

    def drop(self, step: int) -> None:
        """The period of this step is in the base, or will never be: the next one does not begin ahead by it."""
        self._own.drop(step)

    def clear(self) -> None:
        """No period is on its way any more."""
        self.begin_anew()
        self._own.clear()

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(local weights, base) of each parameter, to be changed in place. Where there are local weights."""
        return map(self._pair, range(len(self._parameters)))

    def _pair(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        held, beside = self._parameters[position], self._beside[position]
        return (beside, held) if self._held is _ParametersHold.LENT else (held, beside)


def swap(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Each of these holds what its other one has held, and the other way round. No memory for all of them is taken."""
    for one, other in zip(some, others, strict=True):
        held = one.clone(memory_format=torch.preserve_format)
        one.copy_(other)
        other.copy_(held)


def copies_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As they are, with their layouts."""
    return [p.detach().clone(memory_format=torch.preserve_format) for p in parameters]


def in_full_precision(values: torch.Tensor) -> torch.Tensor:
    """At least in fp32, in which differences of weights are taken."""
    return values.float() if values.element_size() < torch.float32.itemsize else values
