"""R9 with masks: where weights that are left out would go, which local steps do not show, for they do not move."""

from collections.abc import Callable

import torch
from torch import Tensor

from meshtrain.train.model.mask_choice import only
from meshtrain.train.model.masks import Masks
from meshtrain.train.model.tensors import ModelTensors
from meshtrain.train.optim.amp import LossScaling


class MaskGrowth:
    """Takes from each gradient of a local step what is of such weights, so that clipping and optimizer see the kept
    ones alone. In periods that end in a change of masks it is summed, and takes the place of what these weights have
    changed: by its mean some of them are chosen.

    Args:
        round_: number of the round that the period at hand ends in.
    """

    def __init__(self, masks: Masks, tensors: ModelTensors, scaling: LossScaling, round_: Callable[[], int]) -> None:
        self._masks = masks
        self._scaling = scaling
        self._round = round_
        self._sums: dict[int, Tensor] = {}
        self._hooks = [
            tensors.places[index].tensor().register_post_accumulate_grad_hook(self._hook(index))
            for index in masks.masked
        ]

    def added_to(self, index: int, change: Tensor) -> Tensor:
        """What a period has changed of a tensor, zero where it is left out, with the sums there."""
        return change.add_(self._sums[index]) if index in self._sums else change

    def forget(self) -> None:
        """The period is over."""
        self._sums.clear()

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def on_gradient(parameter: Tensor) -> None:
            gradient, places = parameter.grad, self._masks.places(index)
            assert gradient is not None
            assert places is not None
            kept = only(gradient, places)
            if self._masks.change_in(self._round()):
                self._add(index, gradient.sub(kept))
            gradient.copy_(kept)

        return on_gradient

    def _add(self, index: int, left_out: Tensor) -> None:
        """An overflow, or what else is not finite, says nothing: the kept weights show whether it is one (V1)."""
        finite = left_out.float().div_(self._scaling.begin()).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._sums[index] = self._sums[index].add_(finite) if index in self._sums else finite
