"""The averages of a step over all ranks, weighted by samples: one vector, whose buckets are added up as they fill.

The vector and its buckets are laid out as a job's (`meshwire.model.plan`): in the order in which a backward pass
produces gradients, so that the sums of the last layers travel while earlier layers are still computed.
"""

import math
from typing import Any

import torch

from meshtrain.train.link.shared_slots import view
from meshtrain.train.model.tensors import ModelTensors
from meshtrain.train.step.finite import are_finite
from meshtrain.train.torchrun.rank_group import RankGroup, Reaching
from meshwire.model.plan import Plan

BUCKET_BYTES = 25 * 1024 * 1024  # DDP's; a small model is cut finer, by the plan


class GradientAverages:
    """One step after the other: `begin`, `write` or `leave_out` each parameter, `seal`, `take`.

    Attributes:
        vector: of the step; after `take` it holds the averages.
        filled: parameters that this rank has written, by their spans in the plan.
    """

    def __init__(self, tensors: ModelTensors, plan: Plan, group: RankGroup) -> None:
        self._plan = plan
        self._group = group
        specs = tensors.manifest.tensors
        self._trained = {
            index: tensors.places[span.tensor]
            for index, span in enumerate(plan.spans)
            if specs[span.tensor].kind == "parameter"
        }
        self._bucket_of = {index: bucket.index for bucket in plan.buckets for index in bucket.spans}
        self.vector = torch.zeros(plan.total_values, device=group.device)
        # With a version of its own (`.data`) each: they become gradients, whose changes are told by that.
        self._means = {
            index: view(self.vector, plan.spans[index], place.tensor().shape).data
            for index, place in self._trained.items()
        }
        self.begin(1.0)

    def begin(self, weight: float) -> None:
        """What is written from now on is of a new step.

        Args:
            weight: of this rank, in samples.
        """
        self._weight = weight
        self._open = [sum(index in self._trained for index in bucket.spans) for bucket in self._plan.buckets]
        self._under_way: list[tuple[torch.Tensor, Any]] = []
        self._own_squares: list[torch.Tensor] = []  # by bucket; not looked at at once: a GPU would be waited for
        self._squares: list[torch.Tensor] = []
        self.filled: set[int] = set()

    def write(self, index: int, gradient: torch.Tensor) -> None:
        """weight * gradient into its place."""
        place = self._means[index]
        if gradient.device == place.device and gradient.dtype is place.dtype:
            torch.mul(gradient, self._weight, out=place)
        else:
            place.copy_(gradient).mul_(self._weight)
        self.filled.add(index)
        self._open[self._bucket_of[index]] -= 1

    def leave_out(self, index: int) -> None:
        """This rank has nothing for a parameter: it counts as zero."""
        self._means[index].zero_()
        self._open[self._bucket_of[index]] -= 1

    def send_full(self) -> None:
        """Begins to add up the buckets that are full, in the plan's order: all ranks have the same one. The one of
        buffers is full at the end: `seal`."""
        while (next_ := len(self._under_way)) < self._plan.parameter_buckets and not self._open[next_]:
            self._send(next_)

    def seal(self) -> None:
        """All is written: what is left is sent, buffers too."""
        for bucket in range(len(self._under_way), len(self._plan.buckets)):
            self._send(bucket)

    def take(self, step: int, total_weight: float) -> None:
        """Returns when the vector holds the averages. Raises ConnectionLost when another rank is gone."""
        with Reaching(f"waits for the gradients of step {step}"):
            for values, work in self._under_way:
                work.wait()
                values.div_(total_weight)
                self._squares.append(torch.dot(values, values))

    def mean(self, index: int) -> torch.Tensor:
        """A parameter's average, fp32, in the vector."""
        return self._means[index]

    def not_finite(self) -> str | None:
        """The first parameter or buffer whose average is NaN or infinite; None if all are finite."""
        if not self._squares or math.isfinite(torch.stack(self._squares).sum().item()):
            return None
        for span in self._plan.spans:
            if not are_finite(self.vector[span.start : span.start + span.count]):
                return span.name
        return None  # the squares alone were too large for one sum

    def own_not_finite(self) -> bool:
        """Whether this rank's own part of the step was not finite, before it was added to the others'."""
        return not all(math.isfinite(square.item()) for square in self._own_squares)

    def _send(self, index: int) -> None:
        bucket = self._plan.buckets[index]
        values = self.vector[bucket.start : bucket.start + bucket.count]
        self._own_squares.append(torch.dot(values, values))
        self._under_way.append((values, self._group.sum(values)))
