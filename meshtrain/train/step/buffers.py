"""BatchNorm's statistics and other buffers of a model in a round, by O5 (buffers).

Parameters follow from the rounds alone, but a forward pass moves buffers on each peer in its own way. So what each peer
has moved travels in the vector, behind the gradients: floats as weight * (buffer - base), whose mean is added to the
base; integers, which count things, as their maximum.
"""

from collections.abc import Iterator, Mapping

import torch

from meshtrain.train.link.shared_slots import view
from meshtrain.train.model.tensors import ModelTensors
from meshwire.model.plan import Plan, Span


class ModelBuffers:
    """The buffers of a model and their state after the last round.

    Args:
        plan: of a round in which all values travel.
        staleness: the bound s. With s > 0 a round may lack the learner that has counted farthest, so integers never go
            back: neither in the base, nor in a model that has counted on meanwhile.
    """

    def __init__(self, tensors: ModelTensors, plan: Plan, staleness: int) -> None:
        specs = tensors.manifest.tensors
        self._ascending = staleness > 0
        self._places = tensors.places
        self._floats = [index for index, span in enumerate(plan.spans) if specs[span.tensor].kind == "buffer"]
        self._integers = [index for index, spec in enumerate(specs) if spec.in_seal]
        watched = [plan.spans[index].tensor for index in self._floats] + self._integers
        self._base = {index: tensors.places[index].tensor().detach().clone() for index in watched}

    @property
    def watched(self) -> dict[int, torch.Tensor]:
        """What `base` has of each, by index; whoever replaces one of these tensors gives an equal one."""
        return self._base

    def base(self, index: int) -> torch.Tensor | None:
        """The value of buffer `index` of the manifest after the last round; None for what does not change."""
        return self._base.get(index)

    @torch.no_grad()
    def write(self, raw: torch.Tensor, weight: float, plan: Plan) -> None:
        """weight * (buffer - base) into the raw slot. A value that did not change counts as 0, even an infinite one."""
        for span in self._travelling(plan):
            tensor, base = self._places[span.tensor].tensor(), self._base[span.tensor]
            changed = torch.where(tensor == base, 0.0, tensor.float() - base.float())
            view(raw, span, tensor.shape).copy_(changed.mul_(weight))

    def integers(self) -> tuple[int, ...]:
        """The values of all integer buffers, in the manifest's order."""
        return tuple(value for index in self._integers for value in self._places[index].tensor().flatten().tolist())

    @torch.no_grad()
    def take(self, result: torch.Tensor, integers: tuple[int, ...], plan: Plan) -> None:
        """base + mean difference, and the maxima, into base and model; what did not travel is the base's again."""
        for span in self._travelling(plan):
            base = self._base[span.tensor]
            base.copy_(base.float().add_(view(result, span, base.shape).to(base.device)))
        position = 0
        for index in self._integers:
            base = self._base[index]
            received = torch.tensor(integers[position : position + base.numel()], dtype=base.dtype).view(base.shape)
            base.copy_(_larger(received, base) if self._ascending else received)
            position += base.numel()
        self.restore()

    def _travelling(self, plan: Plan) -> Iterator[Span]:
        return (plan.spans[index] for index in self._floats if plan.spans[index].count)

    def begin_step(self) -> None:
        """A step begins. With s > 0 it does so from the base's buffers; with s=0 the model holds these already, but for
        what a script has run through it since, which counts for the next step."""
        if self._ascending:
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """The base into the model, where the next step's differences are taken from it.

        After a void round of s=0 nothing of it remains.
        """
        for index, base in self._base.items():
            tensor = self._places[index].tensor()
            counts = self._ascending and not base.is_floating_point()
            tensor.copy_(_larger(tensor, base) if counts else base)

    def held(self) -> dict[int, torch.Tensor]:
        """Copies of what the model holds, for `show`."""
        return {index: self._places[index].tensor().detach().clone() for index in self._base}

    @torch.no_grad()
    def show_base(self) -> dict[int, torch.Tensor]:
        """The base into the model, whatever that holds. Returns what it held, for `show`."""
        held = self.held()
        self.show(self._base)
        return held

    @torch.no_grad()
    def show(self, values: Mapping[int, torch.Tensor]) -> None:
        """These values into the model."""
        for index, value in values.items():
            self._places[index].tensor().copy_(value)


def _larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise, in Python: torch.maximum does not know all unsigned types."""
    values = list(map(max, a.flatten().tolist(), b.flatten().tolist()))
    return torch.tensor(values, dtype=a.dtype).view(a.shape)
