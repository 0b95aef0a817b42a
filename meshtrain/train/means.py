"""The means of a round in the result slot, as each parameter's own."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshtrain.train.slots import Slots, view
from meshtrain.train.tensors import ModelTensors
from meshwire.messages.learner import RoundDone
from meshwire.plan import Plan
from meshwire.roundplans import RoundPlans


@dataclass(frozen=True)
class Means:
    """Reads the result slot of one model.

    Attributes:
        plans: where values lie in it, by round.
    """

    tensors: ModelTensors
    plans: RoundPlans
    slots: Slots

    @property
    def plan(self) -> Plan:
        """Of a round in which all values travel."""
        return self.plans.whole

    def parameters(self) -> list[torch.Tensor]:
        """All that are trained, in the plan's order."""
        return [parameter for _, parameter in self._places()]

    def coded(self) -> list[torch.Tensor]:
        """Those that the job's codec is for, in the plan's order."""
        spans = [self.plan.spans[at] for bucket in self.plan.buckets[: self.plan.coded_buckets] for at in bucket.spans]
        return [self.tensors.places[span.tensor].tensor() for span in spans]

    def of(self, done: RoundDone) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Every trained parameter with its mean, fp32 in shared memory, or None when nobody has used it (O5), or
        nothing of it travels in the round (T1)."""
        spans = self.plans.of(done.round).spans
        for index, parameter in self._places():
            span = spans[index]
            used = span.count and done.used[span.tensor // 8] >> span.tensor % 8 & 1
            yield parameter, view(self.slots.result, span, parameter.shape) if used else None

    def _places(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index, span in enumerate(self.plan.spans):
            if self.tensors.manifest.tensors[span.tensor].kind == "parameter":
                yield index, self.tensors.places[span.tensor].tensor()
