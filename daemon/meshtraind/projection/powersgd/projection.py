"""Low rank: matrices travel as factors, of which the other one, the basis, is known to all.

Where they lie: `meshwire.layout.powersgd`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.parts.error_feedback import Residual
from meshtraind.parts.segments import Form, Forms
from meshtraind.projection.base import Transform
from meshtraind.projection.contribution import Inputs
from meshtraind.projection.powersgd.bases import Bases
from meshtraind.projection.powersgd.contribution import FactorPart
from meshtraind.projection.powersgd.expansion import FactorExpansion

if TYPE_CHECKING:
    from meshtraind.executor.round_buffers import Round


class LowRank(Transform):
    """Arguments as of `Bases`."""

    def __init__(
        self, forms: Forms, rounds: Mapping[int, "Round"], seed: int, staleness: int, first: int | None
    ) -> None:
        self._bases = Bases(forms, rounds, seed, staleness, first)
        self._leaving: Values = np.zeros(forms.shorter_values, np.float32)
        self._arriving: Values = np.empty(forms.shorter_values, np.float32)

    def enter(self, place: int | None, learners: int) -> None:
        """It has no part in it."""

    def part(
        self, form: Form, area: memoryview, scratch: Values, number: int, residual: Residual, weight: float
    ) -> FactorPart:
        return FactorPart(Inputs(form, area, scratch, self._leaving, number, residual, weight), self._bases)

    def expansion(self, form: Form, number: int, values: Values) -> FactorExpansion:
        return FactorExpansion(form, number, self._bases, self._arriving, values)

    def settled(self, round_: "Round", *, contributed: bool) -> None:
        """A basis is made of it when it is first asked for."""

    def forget(self, number: int) -> None:
        self._bases.forget(number)

    @property
    def reaches_back(self) -> int:
        return self._bases.lag
