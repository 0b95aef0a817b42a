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

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.periods.local_weights import copies_of, in_full_precision, swap
from meshwire.messages.learner import RoundDone

OWN_PART = 0.5  # alpha
NOTHING_WEIGHS = 2.0**-20  # samples, behind a change that is none: a contribution has to weigh something


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
        kept: is told where the base lies.

    Attributes:
        in_flight: the step whose round is on its way and not taken in; 0: none is.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        fragments: Sequence[Sequence[int]],
        drawn: DrawnFragments | None,
        kept: NoKeptState,
    ) -> None:
        self._parameters = list(parameters)
        self._kept = kept
        self._fragments = [list(fragment) for fragment in fragments]
        self._drawn = drawn
        self._beside = copies_of(parameters)  # the base; of parameters that hold that the local weights
        self._holds_base = [True] * len(self._parameters)
        self._samples = [0.0] * len(fragments)  # behind what each is apart from its base by
        self._last = 0.0  # of them, those of the newest period
        self._moved_in = 0  # the newest round that a period of local steps has ended with; 0: none
        self._newest = 0  # that was begun, or is in the base
        self._own_part = 0.0
        self.in_flight = 0

    @property
    def beside(self) -> list[torch.Tensor]:
        """What lies beside the parameters, which may be the base. Whoever replaces one gives an equal one."""
        return self._beside

    @property
    def apart(self) -> bool:
        """Whether a value had no round since the last local step. It follows from the rounds alone, also where local
        steps were lost here: learners that end their periods together are in equally many rounds then."""
        return self._moved_in > 0 and self._newest < self._last_for_all(self._moved_in)

    def weight(self, round_: int, samples: float, *, moved: bool) -> float:
        """All samples behind the change of its fragment."""
        if moved:
            self._samples = [each + samples for each in self._samples]
            self._moved_in, self._newest = round_, round_ - 1
            self._last = samples
        # Of drawn values some had their round already, in a part that was drawn otherwise, and some had none.
        others = self._last if self._drawn is not None else 0.0
        return self._samples[self._index(round_)] or others or NOTHING_WEIGHS

    @torch.no_grad()
    def difference(self, position: int) -> torch.Tensor:
        """Base - local weights of the parameter at `position`, at least in fp32."""
        base, local = self._beside[position], self._parameters[position]
        if self._holds_base[position]:
            base, local = local, base
        return in_full_precision(base).sub(local)

    def keep(self, step: int, round_: int) -> None:
        """The contribution of this step is on its way into a round. What local steps do from now on is for the
        fragment's next one."""
        self._samples[self._index(round_)] = 0.0
        self._newest = round_
        self.in_flight = step

    def stepped(self, round_: int, taken: int) -> None:
        """Nothing: local weights are this learner's alone."""

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
        """The base, which the parameters of its fragment hold, is that after this round: so are their local weights,
        but for what `mixing` leaves, and the parameters hold these again. After a void round they begin again from it
        (V1)."""
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
        if not all(self._holds_base):  # else somebody looks at all of the base
            self._show(self._fragments[index], base=False)
        if not own_part:
            self._samples[index] = 0.0
        self._newest = max(self._newest, done.round)

    def show_base(self, round_: int | None = None) -> None:
        """The parameters hold the base, and may be stepped as such; with `round_` those of its fragment do. Local
        weights are kept."""
        everywhere = range(len(self._parameters))
        self._show(everywhere if round_ is None else self._fragments[self._index(round_)], base=True)

    def show_view(self) -> None:
        """The parameters hold the local weights."""
        self._show(range(len(self._parameters)), base=False)

    def begin_step(self, newest_squared_norm: float) -> None:
        """Nothing: a period goes on from where the local weights are."""

    def end_period(self) -> None:
        """Nothing: a round that is taken in has moved its fragment, and local weights go on."""

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

    def clear(self) -> None:
        """No period is on its way any more, and local weights count no more."""
        self.begin_anew()
        self._moved_in = self.in_flight = 0

    @torch.no_grad()
    def _show(self, positions: Iterable[int], *, base: bool) -> None:
        turned = [at for at in positions if self._holds_base[at] is not base]
        if not turned:
            return
        self._kept.turning()
        swap([self._parameters[at] for at in turned], [self._beside[at] for at in turned])
        for at in turned:
            self._holds_base[at] = base
        if all(self._holds_base):
            self._kept.in_parameters()
        elif not any(self._holds_base):
            self._kept.beside()

    def _last_for_all(self, round_: int) -> int:
        """The round with which every value has travelled once, from this round on. Which values a fragment has is drawn
        anew with each cycle: from the middle of one it takes the whole of the next."""
        parts = len(self._fragments)
        if self._drawn is None or self._index(round_) == 0:
            return round_ + parts - 1
        return round_ + 2 * parts - 1 - self._index(round_)

    def _index(self, round_: int) -> int:
        return (round_ - 1) % len(self._fragments)
