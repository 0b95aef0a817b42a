"""BatchNorm's statistics and other buffers of a model in a round, by O5 (buffers).

Parameters follow from the rounds alone, but a forward pass moves buffers on each peer in its own way. So what each peer
has moved travels in the vector, behind the gradients: floats as weight * (buffer - where the step began), whose mean is
added to the base; integers, which count things, as their maximum.
"""

from collections.abc import Iterator, Mapping

import torch

from meshtrain.train.link.shared_slots import view
from meshtrain.train.model.tensors import ModelTensors
from meshwire.model.plan import Plan, Span


class ModelBuffers:
    """The buffers of a model and their state after the last round, where each step begins on that (s=0).

    Args:
        plan: of a round in which all values travel.
    """

    def __init__(self, tensors: ModelTensors, plan: Plan) -> None:
        specs = tensors.manifest.tensors
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
        """weight * what the step has moved into the raw slot. A value that did not change counts as 0, even an infinite
        one."""
        for span in self._travelling(plan):
            moved = self._moved(span.tensor)
            view(raw, span, moved.shape).copy_(moved.mul_(weight))

    def integers(self) -> tuple[int, ...]:
        """The values of all integer buffers, in the manifest's order."""
        return tuple(value for index in self._integers for value in self._places[index].tensor().flatten().tolist())

    def keep(self, step: int, plan: Plan) -> None:
        """The contribution of this step is on its way into a round that nobody waits for."""

    def drop(self, step: int) -> None:
        """The step is in the base, or never will be."""

    def take(self, result: torch.Tensor, integers: tuple[int, ...], plan: Plan) -> None:
        """base + mean difference, and the maxima, into base and model; what did not travel is the base's again."""
        self._take_into_base(result, integers, plan)
        self.restore()

    @torch.no_grad()
    def _take_into_base(self, result: torch.Tensor, integers: tuple[int, ...], plan: Plan) -> None:
        for span in self._travelling(plan):
            base = self._base[span.tensor]
            base.copy_(base.float().add_(view(result, span, base.shape).to(base.device)))
        position = 0
        for index in self._integers:
            base = self._base[index]
            received = torch.tensor(integers[position : position + base.numel()], dtype=base.dtype).view(base.shape)
            base.copy_(self._counted(received, base))
            position += base.numel()

    def begin_step(self) -> None:
        """A step begins. The model holds the base already, but for what a script has run through it since, which counts
        for the next step."""

    @torch.no_grad()
    def restore(self) -> None:
        """Where the next step begins into the model: nothing remains of a step that is lost, or of a void round."""
        self.show(self._base)

    def held(self) -> dict[int, torch.Tensor]:
        """Copies of what the model holds, for `show`."""
        return {index: self._places[index].tensor().detach().clone() for index in self._base}

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

    def _travelling(self, plan: Plan) -> Iterator[Span]:
        return (plan.spans[index] for index in self._floats if plan.spans[index].count)

    def _start(self, index: int) -> torch.Tensor:
        """Where the step at hand began."""
        return self._base[index]

    def _moved(self, index: int) -> torch.Tensor:
        """What the step at hand has moved, in fp32."""
        tensor, start = self._places[index].tensor(), self._start(index)
        return torch.where(tensor == start, 0.0, tensor.float() - start.float())

    def _counted(self, received: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """What integers of the base are behind a round."""
        return received


class BuffersAhead(ModelBuffers):
    """The same under a bound s > 0, where a step begins before the rounds of the own ones before it are there: on the
    base and what these have moved.

    If all began on the base, each would move it as far as its batches ask: with periods of 8 steps and a bound of 1 two
    rounds take a variance past its value, and below zero.

    A round may lack the learner that has counted farthest, so integers never go back: neither in the base, nor in a
    model that has counted on meanwhile.
    """

    def __init__(self, tensors: ModelTensors, plan: Plan) -> None:
        super().__init__(tensors, plan)
        self._own: dict[int, dict[int, torch.Tensor]] = {}  # by step on its way: what it has moved, by index
        self._starts: dict[int, torch.Tensor] = {}  # of float buffers, by index: where the step at hand began

    @torch.no_grad()
    def keep(self, step: int, plan: Plan) -> None:
        """The next step begins ahead by what this one has moved."""
        self._own[step] = {span.tensor: self._moved(span.tensor) for span in self._travelling(plan)}

    def drop(self, step: int) -> None:
        """The next step does not begin ahead by it."""
        self._own.pop(step, None)

    def take(self, result: torch.Tensor, integers: tuple[int, ...], plan: Plan) -> None:
        """base + mean difference, and the maxima, into the base; the model has them when its next step begins."""
        self._take_into_base(result, integers, plan)

    def begin_step(self) -> None:
        """Not with what a script has run through the model since."""
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """As without a bound, but that counts go on."""
        for index, base in self._base.items():
            tensor = self._places[index].tensor()
            if base.is_floating_point():
                self._starts[index] = self._ahead(index)
                tensor.copy_(self._starts[index])
            else:
                tensor.copy_(_larger(tensor, base))

    def _start(self, index: int) -> torch.Tensor:
        return self._starts[index]

    def _ahead(self, index: int) -> torch.Tensor:
        """The base, and what is on its way into it from here."""
        ahead = self._base[index].clone()
        for moved in self._own.values():
            if index in moved:
                ahead.copy_(ahead.float().add_(moved[index]))
        return ahead

    def _counted(self, received: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return _larger(received, base)


def _larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise, in Python: torch.maximum does not know all unsigned types."""
    values = list(map(max, a.flatten().tolist(), b.flatten().tolist()))
    return torch.tensor(values, dtype=a.dtype).view(a.shape)
