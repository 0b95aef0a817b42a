"""`--masks`: which weights of a model are trained and exchanged, from round to round; all others are zero.

This is dynamic sparse training as in RigL (Evci et al. 2020, arXiv 1911.11134, section 3), on all peers alike as in
FedDST (Bibikar et al. 2022, arXiv 2112.09824). A mask is the set of places in a tensor whose weights are kept:

- at the start these are the weights of the largest magnitude;
- every so many rounds some of the smallest kept weights are dropped, and as many grow where the mean is largest; for
  that, all values travel in such a round (`mask_choice.py` has the comparisons).

Everything follows from the base and from means, which are equal on all members: so no mask is ever sent, but in a saved
state. A weight that is left out is zero in every base, and so is what optimizers keep of it, by T3 (masks).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshtrain.errors import NotSupported
from meshtrain.train.model.tensors import ModelTensors
from meshtrain.train.partial.mask_choice import largest, moved, only
from meshwire.model.manifest import TensorSpec
from meshwire.model.masks import MaskSettings, kept_of, travel_of
from meshwire.model.schedule import Travel


def travel(specs: Sequence[TensorSpec], settings: MaskSettings | None) -> Travel | None:
    """How many values of each tensor travel in which rounds (T1, travel). Raises NotSupported when none would
    remain."""
    try:
        return travel_of(specs, settings)
    except ValueError as error:
        raise NotSupported(str(error)) from error


class Masks:
    """The masks of one model, and the zeros that they stand for in its parameters and its optimizers' state.

    A change takes effect in two steps: `decide` computes the new places while the parameters hold the base before the
    round, `hold` puts them in force once the optimizer has stepped.

    Args:
        settings: of `--masks`. None: every weight is kept, and nothing here does anything.
    """

    def __init__(self, tensors: ModelTensors, settings: MaskSettings | None) -> None:
        self._tensors = tensors
        self._settings = settings
        self._kept = kept_of(tensors.manifest.tensors, settings)
        self._places: dict[int, Tensor] = {}  # that are kept, on the tensor's device
        self._next: dict[int, Tensor] = {}  # after the step on the round at hand
        self._optimizers: Sequence[Optimizer] = ()

    @property
    def masked(self) -> Iterable[int]:
        """Indices into the manifest of the tensors that are not whole."""
        return self._kept

    def places(self, index: int) -> Tensor | None:
        """The places of the kept values of a tensor; None where it is whole."""
        return self._places.get(index)

    def change_in(self, number: int) -> bool:
        """Whether masks change with this round."""
        return self._settings is not None and self._settings.changes_in(number)

    # State of the base

    def mask(self, index: int) -> Tensor | None:
        """Which values of a tensor are kept, as bool, for a saved state; None where it is whole, or nothing has
        begun."""
        places = self._places.get(index)
        if places is None:
            return None
        kept = torch.zeros(self._tensor(index).shape, dtype=torch.bool)
        kept.view(-1)[places.cpu()] = True
        return kept

    def load(self, index: int, mask: Tensor) -> None:
        """What a saved state says of a tensor. A mask of a job that keeps another number of weights says nothing."""
        if self._kept.get(index) == int(mask.count_nonzero()) and mask.shape == self._tensor(index).shape:
            self._places[index] = mask.flatten().nonzero().view(-1).to(self._tensor(index).device)

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """The parameters hold the base that all start from. Tensors that it has no masks of get them from it.

        Args:
            optimizers: which keep state of weights.
        """
        self._optimizers = optimizers
        for index, kept in self._kept.items():
            if index not in self._places:
                self._next[index] = largest(self._tensor(index), kept)
        self.hold()

    # Rounds

    def decide(self, number: int, means: Iterable[tuple[int, Tensor]]) -> None:
        """A round is there and not yet in the base, which the parameters hold: how masks change with it.

        Args:
            means: of all values of tensors, by index.
        """
        if self._settings is None or not self.change_in(number):
            return
        for index, mean in means:
            if index in self._kept:
                count = self._settings.moved(number, self._kept[index])
                self._next[index] = moved(self._places[index], self._tensor(index), mean, count)

    def hold(self) -> None:
        """The optimizer has stepped the base: masks are what was decided, and what they leave out is zero."""
        for index, places in self._next.items():
            tensor = self._tensor(index)
            self._places[index] = places.to(tensor.device)
            for optimizer in self._optimizers:
                for state in optimizer.state.get(tensor, {}).values():
                    if isinstance(state, Tensor) and state.shape == tensor.shape:
                        state.copy_(only(state, self._places[index].to(state.device)))
        self._next.clear()
        self.hold_weights()

    @torch.no_grad()
    def hold_weights(self) -> None:
        """Sets to zero what the masks leave out of the parameters, whatever these hold: base or local weights."""
        for index, places in self._places.items():
            tensor = self._tensor(index)
            tensor.copy_(only(tensor, places))

    def _tensor(self, index: int) -> Tensor:
        return self._tensors.places[index].tensor()
