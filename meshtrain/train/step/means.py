"""The means of a round in the result slot, as each parameter's own."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from meshtrain.train.link.shared_slots import SharedSlots
from meshtrain.train.model.tensors import ModelTensors
from meshtrain.train.partial.drawn_values import DrawnValues
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
        drawn: where a round carries drawn values of each tensor; None: none does.
    """

    tensors: ModelTensors
    plans: RoundPlans
    slots: SharedSlots
    masks: Masks
    drawn: DrawnValues | None = None

    @property
    def plan(self) -> Plan:
        """The plan of a round in which all values travel."""
        return self.plans.whole

    def parameters(self) -> list[torch.Tensor]:
        """All that are trained, in the plan's order."""
        return [parameter for _, parameter in self._places()]

    def places(self, number: int, tensor: int) -> torch.Tensor | None:
        """Where the values of a tensor lie that travel in a round, if these are not all of them: the places that masks
        keep, or those that were drawn. None: the tensor has neither."""
        return self.masks.places(tensor) if self.drawn is None else self.drawn.places(number, tensor)

    def drawn_places(self, number: int, position: int) -> torch.Tensor:
        """Of `parameters()[position]`, where the values lie that a round carries, if they are drawn."""
        assert self.drawn is not None
        return self.drawn.places(number, self.plan.spans[self._trained[position]].tensor)

    def positions_of_rounds(self, rounds: int) -> list[list[int]]:
        """Of each of the first rounds, which of `parameters` travel in it (T1), by their positions there."""
        plans = [self.plans.of(number) for number in range(1, rounds + 1)]
        return [[at for at, index in enumerate(self._trained) if plan.spans[index].count] for plan in plans]

    def places_of_parameters(self) -> dict[int, tuple[Span, torch.Size]]:
        """Where each of `parameters` lies in a vector in which all values travel, by its position, and its shape."""
        specs, spans = self.tensors.manifest.tensors, self.plan.spans
        shapes = [torch.Size(specs[spans[index].tensor].shape) for index in self._trained]
        return {at: (spans[index], shapes[at]) for at, index in enumerate(self._trained)}

    def coded_parameters(self) -> list[torch.Tensor]:
        """Parameters that the job's codec encodes (matrices), in the plan's order; others travel as they are."""
        spans = [self.plan.spans[at] for bucket in self.plan.buckets[: self.plan.coded_buckets] for at in bucket.spans]
        return [self.tensors.places[span.tensor].tensor() for span in spans]

    def by_parameter(self, done: RoundDone) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Every trained parameter with its mean, fp32 in shared memory, or None when nobody has used it (O5), or
        nothing of it travels in the round (T1, travel)."""
        plan = self.plans.of(done.round)
        for index, parameter in self._places():
            span = plan.spans[index]
            if not span.count or not _used(done, span):
                yield parameter, None
            elif plan is self.plan and self.masks.places(span.tensor) is None:
                yield parameter, self._whole[index]
            else:
                places = self.places(done.round, span.tensor)
                yield parameter, _in_shape(self._values(span), places, parameter.shape)

    def whole_tensors(self, done: RoundDone) -> Iterator[tuple[int, torch.Tensor]]:
        """Of a round in which all values travel: every used parameter's index in the manifest with the mean of all of
        them, also of those that its mask leaves out."""
        for index, _ in self._places():
            span = self.plan.spans[index]
            if _used(done, span):
                yield span.tensor, self._values(span)

    @cached_property
    def _whole(self) -> dict[int, torch.Tensor]:
        """By span, the means of a parameter of which all values travel; each with a version of its own (`.data`), for
        they may become gradients, whose changes are told by that."""
        specs = self.tensors.manifest.tensors
        indices = self._trained
        spans = self.plan.spans
        return {index: self._values(spans[index]).view(specs[spans[index].tensor].shape).data for index in indices}

    def _values(self, span: Span) -> torch.Tensor:
        return self.slots.result[span.start : span.start + span.count]

    @cached_property
    def _trained(self) -> list[int]:
        specs = self.tensors.manifest.tensors
        return [index for index, span in enumerate(self.plan.spans) if specs[span.tensor].kind == "parameter"]

    def _places(self) -> Iterator[tuple[int, torch.Tensor]]:
        spans, places = self.plan.spans, self.tensors.places
        return ((index, places[spans[index].tensor].tensor()) for index in self._trained)


def _in_shape(mean: torch.Tensor, places: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """In the parameter's shape: zero is what lies at no place, whether it has travelled or not."""
    if places is None:
        return mean.view(shape)
    places = places.cpu()
    return spread(mean if len(mean) < shape.numel() else packed(mean, places), places, shape)


def _used(done: RoundDone, span: Span) -> bool:
    """Whether any contributor's backward pass has used the tensor, by O5 (unused parameters)."""
    return bool(done.used[span.tensor // 8] >> span.tensor % 8 & 1)
