"""The masks of one learner's model from round to round (`--masks`): dynamic sparse training, FedDST and RigL.

A weight that is left out is zero in every base, and so is what optimizers keep of it. All members have the same masks:
the first ones are of the weights of largest magnitude in the start state, each later one follows from the one before,
the base and the mean of a round of which all values have travelled (`masks.py`). Masks are state of the base.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshtrain.errors import NotSupported
from meshtrain.train.model.mask_choice import largest, moved, only
from meshtrain.train.model.tensors import ModelTensors
from meshwire.model.manifest import TensorSpec
from meshwire.model.masks import MaskSettings, kept_of, travel_of
from meshwire.model.schedule import Travel


def travel(specs: Sequence[TensorSpec], settings: MaskSettings | None) -> Travel | None:
    """What travels in which rounds (T1). Raises NotSupported when a tensor would keep nothing."""
    try:
        return travel_of(specs, settings)
    except ValueError as error:
        raise NotSupported(str(error)) from error


class Masks:
    """One model's.

    Args:
        settings: None: every weight is kept, and nothing here does anything.
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
        """Where the kept values of a tensor are; None: it is whole."""
        return self._places.get(index)

    def change_in(self, number: int) -> bool:
        """Whether masks change with this round."""
        return self._settings is not None and self._settings.changes_in(number)

    # State of the base

    def mask(self, index: int) -> Tensor | None:
        """For a saved state: which values of a tensor are kept, as bool; None: it is whole, or nothing has begun."""
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
        """What the masks leave out of the parameters is zero, whatever they hold."""
        for index, places in self._places.items():
            tensor = self._tensor(index)
            tensor.copy_(only(tensor, places))

    def _tensor(self, index: int) -> Tensor:
        return self._tensors.places[index].tensor()
