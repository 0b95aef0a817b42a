"""The means of a round in the result slot, as each parameter's own."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshtrain.train.link.shared_slots import SharedSlots
from meshtrain.train.model.tensors import ModelTensors
from meshtrain.train.partial.mask_choice import packed, spread
from meshtrain.train.partial.masks import Masks
from meshwire.messages.learner import RoundDone
from meshwire.model.plan import Plan, Span
from meshwire.model.plans_by_round import RoundPlans


@dataclass(frozen=True)
class RoundMeans:
    """Finds each parameter's mean in the result slot, by the plan of the round.

    Attributes:
        tensors: of the model.
        plans: where values lie in the slot, by round.
        slots: the shared memory.
        masks: weights that they leave out have a mean of zero.
    """

    tensors: ModelTensors
    plans: RoundPlans
    slots: SharedSlots
    masks: Masks

    @property
    def plan(self) -> Plan:
        """The plan of a round in which all values travel."""
        return self.plans.whole

    def parameters(self) -> list[torch.Tensor]:
        """All that are trained, in the plan's order."""
        return [parameter for _, parameter in self._places()]

    def coded_parameters(self) -> list[torch.Tensor]:
        """Parameters that the job's codec encodes (matrices), in the plan's order; others travel as they are."""
        spans = [self.plan.spans[at] for bucket in self.plan.buckets[: self.plan.coded_buckets] for at in bucket.spans]
        return [self.tensors.places[span.tensor].tensor() for span in spans]

    def by_parameter(self, done: RoundDone) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Every trained parameter with its mean, fp32 in shared memory, or None when nobody has used it (O5), or
        nothing of it travels in the round (T1, travel)."""
        spans = self.plans.of(done.round).spans
        for index, parameter in self._places():
            span = spans[index]
            mean = self._values(span) if span.count and _used(done, span) else None
            yield parameter, None if mean is None else self._unmasked(mean, span, parameter.shape)

    def whole_tensors(self, done: RoundDone) -> Iterator[tuple[int, torch.Tensor]]:
        """Of a round in which all values travel: every used parameter's index in the manifest with the mean of all of
        them, also of those that its mask leaves out."""
        for index, _ in self._places():
            span = self.plan.spans[index]
            if _used(done, span):
                yield span.tensor, self._values(span)

    def _values(self, span: Span) -> torch.Tensor:
        return self.slots.result[span.start : span.start + span.count]

    def _unmasked(self, mean: torch.Tensor, span: Span, shape: torch.Size) -> torch.Tensor:
        """In the parameter's shape: what its mask leaves out is zero, whether it has travelled or not."""
        places = self.masks.places(span.tensor)
        if places is None:
            return mean.view(shape)
        places = places.cpu()
        return spread(mean if span.count < shape.numel() else packed(mean, places), places, shape)

    def _places(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index, span in enumerate(self.plan.spans):
            if self.tensors.manifest.tensors[span.tensor].kind == "parameter":
                yield index, self.tensors.places[span.tensor].tensor()


def _used(done: RoundDone, span: Span) -> bool:
    """Whether any contributor's backward pass has used the tensor, by O5 (unused parameters)."""
    return bool(done.used[span.tensor // 8] >> span.tensor % 8 & 1)
