"""Means of a round of s=0 as `p.grad`, where the daemon has put them: in the result slot, without a copy (M1, memory).

The slot is free for the next round once the learner has applied this one, and yet the script may look at `p.grad`, or
add to it, until the next backward pass has overwritten it. That is no conflict while the learner computes: a value of
the next round's means is written only when all members, this one too, have contributed to its bucket, and by then the
script's gradient there has been sent (R7). It would be one where rounds go on without this learner, and where gradients
are accumulated that leave in a later pass: before that they become the script's own.
"""

import torch


class LentGradients:
    """The means that parameters have as `p.grad` now."""

    def __init__(self) -> None:
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the parameter: it, and its mean

    def lend(self, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        """`p.grad` is this mean, or a copy of it where its memory is not laid out as the parameter's."""
        if mean.dtype is parameter.dtype and mean.device == parameter.device and mean.stride() == parameter.stride():
            parameter.grad = mean
            self._lent[id(parameter)] = parameter, mean
            return
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(mean)

    def own(self, parameter: torch.Tensor) -> None:
        """This parameter's gradient is the script's own from now on."""
        _, mean = self._lent.pop(id(parameter), (None, None))
        if mean is not None and parameter.grad is mean:
            parameter.grad = mean.clone()

    def own_all(self) -> None:
        """All are. Before the daemon hears that rounds may go on without this learner (R5, absent)."""
        for parameter, _ in list(self._lent.values()):
            self.own(parameter)
