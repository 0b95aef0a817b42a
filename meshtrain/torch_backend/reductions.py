"""torch.distributed's reductions on two tensors: what a collective does with what has come."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Combine = Callable[[torch.Tensor, torch.Tensor], object]

_KINDS: Any = dist.ReduceOp.RedOpType
_COMBINES: dict[object, Combine] = {
    _KINDS.SUM: lambda into, part: into.add_(part),
    _KINDS.AVG: lambda into, part: into.add_(part),
    _KINDS.PRODUCT: lambda into, part: into.mul_(part),
    _KINDS.MIN: lambda into, part: torch.minimum(into, part, out=into),
    _KINDS.MAX: lambda into, part: torch.maximum(into, part, out=into),
    _KINDS.BAND: lambda into, part: into.bitwise_and_(part),
    _KINDS.BOR: lambda into, part: into.bitwise_or_(part),
    _KINDS.BXOR: lambda into, part: into.bitwise_xor_(part),
}


class TensorReduction:
    """One of them.

    Args:
        op: a ReduceOp, or one of its kinds.

    Attributes:
        combine: makes the first tensor the two together, in place.

    Raises:
        NotImplementedError: for premultiplied sums, which gloo has not either.
    """

    def __init__(self, op: object) -> None:
        kind = next((each for each in _COMBINES if op == each), None)
        if kind is None:
            raise NotImplementedError(f"the meshtrain backend has no {op}: use SUM and multiply before")
        self.combine = _COMBINES[kind]
        self._mean = kind == _KINDS.AVG

    def finish(self, total: torch.Tensor, count: int) -> None:
        """What is left to do once all `count` are in it."""
        if self._mean and (total.is_floating_point() or total.is_complex()):
            total.div_(count)
        elif self._mean:
            total.div_(count, rounding_mode="trunc")
