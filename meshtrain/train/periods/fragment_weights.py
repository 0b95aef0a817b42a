"""The weights that a learner's own steps move where parts of the model take turns (`--sync diloco:H,stream=P`).

Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, algorithm 2). A round is of one fragment: it carries the
fragment's base - its local weights, and the outer optimizer steps that part of the base. All other fragments go on from
their local weights, each apart from its base by what its learner has done since its own last round.

With a delay tau the learner goes on while the fragment's round is under way. Tau local steps later, theta = alpha *
local + (1 - alpha) * base, with alpha = 1/2 as the paper has it: so half of what the learner has and the others lack
stays, the steps made meanwhile with it, and is part of what the fragment carries H steps later.

Fragments may be drawn values of every tensor, others in each cycle of P rounds (SPARTA, Beton et al. 2025,
openreview.net stFPf3gzq1). There a value can have travelled up to 2P - 1 rounds ago, and all are the base once a whole
cycle of rounds has passed without a local step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from meshtrain.train.periods.local_weights import copies_of, in_full_precision
from meshwire.messages.learner import RoundDone

OWN_PART = 0.5  # alpha


class DrawnFragments(Protocol):
    """Knows which values a round carries where these are drawn: `RoundMeans`."""

    def drawn_places(self, number: int, position: int, /) -> torch.Tensor:
        """The places of those of one parameter."""


class FragmentWeights:
    """Keeps the base beside the parameters while these are stepped on locally, fragment by fragment.

    Args:
        parameters: that are trained; they hold the base.
        fragments: which of them each fragment has, or of which it has drawn values, by their positions. Round k carries
            fragment (k - 1) mod P.
        drawn: which values these are; None: all of the tensor.

    Attributes:
        in_flight: the step whose round is on its way and not taken in; 0: none is.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], fragments: Sequence[Sequence[int]], drawn: DrawnFragments | None
    ) -> None:
        self._parameters = list(parameters)
        self._fragments = [list(fragment) for fragment in fragments]
        self._drawn = drawn
        self._beside = copies_of(parameters)  # the base, or with `_shows_base` the local weights
        self._shows_base = True
        self._samples = [0.0] * len(fragments)  # behind what each is apart from its base by
        self._cycles_left = 0  # how many have to end before all drawn values have travelled since the last local step
        self._own_part = 0.0
        self.in_flight = 0

    @property
    def apart(self) -> bool:
        """Whether local steps have moved a value since its last round began."""
        return any(self._samples) or self._cycles_left > 0

    def weight(self, round_: int, samples: float, *, moved: bool) -> float:
        """What a round weighs that begins: all samples behind the change of its fragment.

        Args:
            samples: of the period that ends, or of the last one.
            moved: whether there is one: whether local steps were taken since the round before.
        """
        if moved:
            self._samples = [each + samples for each in self._samples]
            if self._drawn is not None:
                self._cycles_left = 1 if self._index(round_) == 0 else 2
        return self._samples[self._index(round_)] or samples

    @torch.no_grad()
    def difference(self, position: int) -> torch.Tensor:
        """Base - local weights of the parameter at `position`, at least in fp32."""
        base, local = self._beside[position], self._parameters[position]
        if self._shows_base:
            base, local = local, base
        return in_full_precision(base).sub(local)

    def keep(self, step: int, round_: int) -> None:
        """The contribution of this step is on its way into a round. What local steps do from now on is for the
        fragment's next one."""
        self._samples[self._index(round_)] = 0.0
        self.in_flight = step

    def take_part(self, members: int) -> None:
        """Nothing: what a round leaves of the local weights is settled when it is in the base."""

    @contextmanager
    def mixing(self) -> Iterator[None]:
        """Inside, a round that is taken in leaves half of what a fragment's local weights are apart from its base."""
        self._own_part = OWN_PART
        try:
            yield
        finally:
            self._own_part = 0.0

    @torch.no_grad()
    def follow(self, done: RoundDone) -> None:
        """The base, which the parameters hold, is that after this round: so are the local weights of its fragment,
        but for what `mixing` leaves. After a void round they begin again from it (V1)."""
        own_part = 0.0 if done.void else self._own_part
        index = self._index(done.round)
        for position in self._fragments[index]:
            local, base = self._beside[position], self._parameters[position]
            if self._drawn is not None:
                places = self._drawn.drawn_places(done.round, position).to(base.device)
                local.put_(places, base.take(places))
            elif own_part:
                local.lerp_(base, 1.0 - own_part)
            else:
                local.copy_(base)
        if not own_part:
            self._samples[index] = 0.0
        if index == len(self._fragments) - 1:
            self._cycles_left = max(0, self._cycles_left - 1)

    @torch.no_grad()
    def show_base(self) -> None:
        """The parameters hold the base, and may be stepped as such. Local weights are kept."""
        if not self._shows_base:
            self._swap()
            self._shows_base = True

    @torch.no_grad()
    def show_view(self) -> None:
        """The parameters hold the local weights."""
        if self._shows_base:
            self._swap()
            self._shows_base = False

    def begin_step(self, newest_squared_norm: float) -> None:
        """Nothing: a period goes on from where the local weights are."""

    def end_period(self) -> None:
        """Nothing: the round that is taken in has moved its fragment."""

    def drop(self, step: int) -> None:
        """The round of this step is in the base, or nobody waits for it any more."""
        if step == self.in_flight:
            self.in_flight = 0

    @torch.no_grad()
    def begin_anew(self) -> None:
        """The parameters hold the base, and all local weights begin again from it."""
        self.show_base()
        for beside, base in zip(self._beside, self._parameters, strict=True):
            beside.copy_(base)
        self._samples = [0.0] * len(self._fragments)
        self._cycles_left = 0

    def clear(self) -> None:
        """No period is on its way any more, and local weights count no more."""
        self.begin_anew()
        self.in_flight = 0

    def _index(self, round_: int) -> int:
        return (round_ - 1) % len(self._fragments)

    def _swap(self) -> None:
        for parameter, beside in zip(self._parameters, self._beside, strict=True):
            held = parameter.clone(memory_format=torch.preserve_format)
            parameter.copy_(beside)
            beside.copy_(held)
