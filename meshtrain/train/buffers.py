"""O5: buffers in a round. Floats travel as weighted differences from the base, integers as their maximum."""

import hashlib

import torch

from meshtrain.train.slots import view
from meshtrain.train.startstate import feed
from meshtrain.train.tensors import ModelTensors
from meshwire.plan import Plan, Span


class Buffers:
    """The buffers of a model and their state after the last round."""

    def __init__(self, tensors: ModelTensors, plan: Plan) -> None:
        specs = tensors.manifest.tensors
        self._places = tensors.places
        self._spans: list[Span] = [span for span in plan.spans if specs[span.tensor].kind == "buffer"]
        self._integers = [index for index, spec in enumerate(specs) if spec.in_seal]
        watched = [span.tensor for span in self._spans] + self._integers
        self._base = {index: tensors.places[index].tensor().detach().clone() for index in watched}

    def base(self, index: int) -> torch.Tensor | None:
        """The value of buffer `index` of the manifest after the last round; None for what does not change."""
        return self._base.get(index)

    @torch.no_grad()
    def write(self, raw: torch.Tensor, weight: float) -> None:
        """weight * (buffer - base) into the raw slot. A value that did not change counts as 0, even an infinite one."""
        for span in self._spans:
            tensor, base = self._places[span.tensor].tensor(), self._base[span.tensor]
            changed = torch.where(tensor == base, 0.0, tensor.float() - base.float())
            view(raw, span, tensor.shape).copy_(changed.mul_(weight))

    def integers(self) -> tuple[int, ...]:
        """The values of all integer buffers, in the manifest's order."""
        return tuple(value for index in self._integers for value in self._places[index].tensor().flatten().tolist())

    @torch.no_grad()
    def take(self, result: torch.Tensor, integers: tuple[int, ...]) -> None:
        """base + mean difference, and the maxima, into base and model."""
        for span in self._spans:
            base = self._base[span.tensor]
            base.copy_(base.float().add_(view(result, span, base.shape).to(base.device)))
        position = 0
        for index in self._integers:
            base = self._base[index]
            values = integers[position : position + base.numel()]
            base.copy_(torch.tensor(values, dtype=base.dtype).view(base.shape))
            position += base.numel()
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """The base into the model: after a void round nothing of it remains."""
        for index, base in self._base.items():
            self._places[index].tensor().copy_(base)


def base_hash(tensors: ModelTensors, buffers: Buffers) -> bytes:
    """O9: SHA-256 of the base: trainable parameters and buffers after the last round, in the manifest's order."""
    digest = hashlib.sha256()
    for index, _, tensor in tensors.kind("parameter", "buffer"):
        base = buffers.base(index)
        feed(digest, tensor if base is None else base)
    return digest.digest()
