"""The weights that a learner's own steps move with `--sync local:H`, and beside them the base where they began."""

from collections.abc import Sequence
from enum import Enum

import torch


class _ParametersHold(Enum):
    """What the parameters hold, and what lies beside them."""

    BASE = "the base; what lies beside them counts for nothing"
    LOCAL = "local weights; the base lies beside them"
    LENT = "the base; local weights lie beside them"


class LocalWeights:
    """Keeps the base beside the parameters while these are stepped on locally.

    Args:
        parameters: that are trained; they hold the base.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._beside = [p.detach().clone(memory_format=torch.preserve_format) for p in parameters]
        self._held = _ParametersHold.BASE

    @torch.no_grad()
    def difference(self, position: int) -> torch.Tensor:
        """base - local weights of the parameter at `position`, at least in fp32: what a period contributes."""
        local, base = self._parameters[position], self._beside[position]
        if self._held is _ParametersHold.LENT:
            local, base = base, local
        return _precise(base).sub(local)

    @torch.no_grad()
    def show_base(self) -> None:
        """The parameters hold the base, and may be stepped as such. Local weights are kept."""
        if self._held is _ParametersHold.LOCAL:
            self._swap()
            self._held = _ParametersHold.LENT

    @torch.no_grad()
    def show_view(self) -> None:
        """The parameters hold the local weights; where a new period begins, these are equal to the base."""
        if self._held is _ParametersHold.LENT:
            self._swap()
        elif self._held is _ParametersHold.BASE:
            for parameter, beside in zip(self._parameters, self._beside, strict=True):
                beside.copy_(parameter)
        self._held = _ParametersHold.LOCAL

    def begin_step(self, newest_squared_norm: float) -> None:
        """A period begins, on the base: what the one before has changed is in it, or lost."""
        self.clear()

    def drop(self, step: int) -> None:
        """The period is in the base, or will never be: the parameters hold the base alone."""
        self.clear()

    def clear(self) -> None:
        """No period is on its way any more."""
        self.show_base()
        self._held = _ParametersHold.BASE

    def _swap(self) -> None:
        for parameter, beside in zip(self._parameters, self._beside, strict=True):
            held = parameter.clone(memory_format=torch.preserve_format)
            parameter.copy_(beside)
            beside.copy_(held)


def _precise(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.element_size() < torch.float32.itemsize else values
