"""`--sync local:H,gossip=G`: within a period, local weights are mixed with those of neighbours.

Behind each G local steps w_i becomes the sum of W_ij w_j (D-PSGD, Lian et al. 2017, arXiv 1705.09056), and each H-th
step ends in a round as ever: gossip with periodic global averaging (Gossip-PGA, Chen et al. 2021, arXiv 2105.09080).

What mixing has moved of w_i is kept apart, as m_i, and a learner contributes what its own steps have changed, base -
(w_i - m_i). So a round is the base and the mean of these, and of the same samples, whatever of the mixing was late or
lost: that decides at which weights gradients are computed, and nothing else. Where all of it arrives, W keeps the mean
of all w_i, and this mean is what the round makes of the base: Gossip-PGA to rounding.

A neighbour's weights that come late are mixed in by what both were when the turn began, w_i += W_ij (w_j - w_i of
then), until the next turn begins, so that slow links cost no time. What two give each other adds up to nothing there,
too (as with AD-PSGD, Lian et al. 2018, arXiv 1710.06952).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.optim.own_steps import OwnSteps
from meshtrain.train.periods.local_weights import LocalWeights, in_full_precision
from meshwire.sync_modes.neighbours import Turn

WAIT_S_MAX = 2.0  # for neighbours, in a turn


def wait_s(step_s: float) -> float:
    """How long neighbours are waited for in a turn, behind a local step that has taken `step_s`."""
    return min(step_s, WAIT_S_MAX)


class ShownWeights(Protocol):
    """What a neighbour has shown in a turn.

    Attributes:
        weight: W_ij.
    """

    weight: float

    def difference(self, position: int) -> torch.Tensor:
        """The neighbour's weights less those that were shown to it in the turn, of the parameter at `position`."""


class Neighbourhood(Protocol):
    """Whoever shows neighbours this learner's weights, and theirs to it: `NeighbourSlots`."""

    def begin(self, turn: Turn, apart: Callable[[int], torch.Tensor]) -> None:
        """A turn begins. `apart`: what the own weights are apart from the base by, by parameter, at least in fp32."""

    def come(self, wait_s: float) -> Iterable[ShownWeights]:
        """What has come in the turn of now and was not given yet. Waits for the rest of it, but no longer."""

    def end_period(self) -> None:
        """The turn of now is over: nothing more of it is given."""


class MixedWeights(LocalWeights):
    """Local weights that are mixed with those of neighbours within a period.

    Args:
        parameters: that are trained; they hold the base.
        own: as of `LocalWeights`; with s=0 there is none.
        kept: as of `LocalWeights`.
        neighbours: shows weights, and has them shown.
        every: G, local steps between two turns.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        own: OwnSteps,
        kept: NoKeptState,
        neighbours: Neighbourhood,
        every: int,
    ) -> None:
        super().__init__(parameters, own, kept)
        self._neighbours = neighbours
        self._every = every
        self._moved = [torch.zeros_like(in_full_precision(each.detach())) for each in parameters]
        self._began_s = time.monotonic()  # the local step at hand

    def difference(self, position: int) -> torch.Tensor:
        """Base - local weights of the parameter at `position` as own steps alone have made them, at least in fp32."""
        return super().difference(position).add_(self._moved[position])

    def stepped(self, round_: int, taken: int) -> None:
        """What has come late is mixed in; then, behind each G steps, a turn begins, and is waited for as long as a
        local step has taken."""
        step_s = time.monotonic() - self._began_s
        self._mix(self._neighbours.come(0.0))
        if taken % self._every == 0:
            self._neighbours.begin(Turn(round_, taken // self._every), self._apart)
            self._mix(self._neighbours.come(wait_s(step_s)))
        self._began_s = time.monotonic()

    def show_view(self) -> None:
        """As of `LocalWeights`. Where a period begins, its first local step does."""
        super().show_view()
        self._began_s = time.monotonic()

    def begin_anew(self) -> None:
        """As of `LocalWeights`: what mixing has moved ends with the period."""
        super().begin_anew()
        self._neighbours.end_period()
        for moved in self._moved:
            moved.zero_()

    @torch.no_grad()
    def _apart(self, position: int) -> torch.Tensor:
        return super().difference(position).neg_()

    @torch.no_grad()
    def _mix(self, shown: Iterable[ShownWeights]) -> None:
        for one in shown:
            for position, (local, _) in enumerate(self.pairs()):
                before = local.clone()
                local.add_(one.difference(position).mul_(one.weight).to(local))
                # What has become of them: of weights in 16 bits that is not all that was added.
                self._moved[position].add_(in_full_precision(local) - in_full_precision(before))
