"""Rules left out, for several clusters: each patches the machine, and a cluster that runs it must notice."""

import pytest

from meshwire.roundcore import RoundCore
from meshwire.roundevents import Effect


def no_freeze(patch: pytest.MonkeyPatch) -> None:
    """G2: after its promise a daemon completes what it has all parts of."""
    settle = RoundCore._settle

    def melted(self: RoundCore, now_s: float) -> list[Effect]:
        fenced, self._fenced = self._fenced, False
        effects = settle(self, now_s)
        self._fenced = fenced
        return effects

    patch.setattr(RoundCore, "_settle", melted)
