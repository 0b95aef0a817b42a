"""Masks with local steps: which of the weights that are left out are worth having, by the gradients that they get.

RigL (Evci et al. 2020, arXiv 1911.11134, section 3, "grow criterion") lets those weights come in whose gradients are
largest. Without a period a round's mean is a gradient and shows it. A period (R9) contributes what local steps have
changed instead, and weights that are left out do not move. So their gradients are summed here, and travel in their
place.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from meshtrain.train.optim.loss_scaling import LossScaling
from meshtrain.train.partial.mask_choice import only
from meshtrain.train.step.base import Base


class MaskGrowth:
    """Hooks on the masked tensors set the gradients of weights that are left out to zero, so that clipping and the
    optimizer see the kept ones alone; in a period whose round changes the masks they add them up first.

    Attributes:
        idle: while it is set, nothing is added.
    """

    def __init__(self, base: Base, scaling: LossScaling) -> None:
        self._base = base
        self._masks = base.means.masks
        self._scaling = scaling
        self._sums: dict[int, Tensor] = {}
        self.idle = False
        self._hooks = [
            base.means.tensors.places[index].tensor().register_post_accumulate_grad_hook(self._hook(index))
            for index in self._masks.masked
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
            if not self.idle and self._masks.change_in(self._base.applied + 1):
                self._add(index, gradient.sub(kept))
            gradient.copy_(kept)

        return on_gradient

    def _add(self, index: int, left_out: Tensor) -> None:
        """An overflow, or what else is not finite, says nothing: the kept weights show whether it is one (V1,
        non-finite values)."""
        finite = left_out.float().div_(self._scaling.current_scale()).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._sums[index] = self._sums[index].add_(finite) if index in self._sums else finite
