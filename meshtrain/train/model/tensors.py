"""The tensors of a prepared model, in the order of its manifest."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from pydantic import ValidationError
from torch import nn

from meshtrain.errors import NotSupported
from meshwire.model.manifest import FLOAT_DTYPES, INTEGER_DTYPES, ModelManifest, Momentum, TensorSpec
from meshwire.model.schedule import Travel


@dataclass(frozen=True)
class TensorPlace:
    """A tensor by its owner and attribute: a forward pass may replace a buffer by another tensor."""

    module: nn.Module
    attribute: str

    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        found: torch.Tensor = getattr(self.module, self.attribute)
        return found


@dataclass(frozen=True)
class ModelTensors:
    """`places[i]` holds what `manifest.tensors[i]` describes."""

    manifest: ModelManifest
    places: tuple[TensorPlace, ...]

    def kind(self, *kinds: str) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        """Index, description and tensor of all of these kinds, in the manifest's order."""
        for index, spec in enumerate(self.manifest.tensors):
            if spec.kind in kinds:
                yield index, spec, self.places[index].tensor()


def collect(model: nn.Module) -> tuple[tuple[TensorSpec, ...], tuple[TensorPlace, ...]]:
    """Describes parameters, then buffers, in definition order; tied ones once, with their other names.

    Raises NotSupported for what cannot be shared, by name.
    """
    _refuse_sparse(model)
    specs: list[TensorSpec] = []
    places: list[TensorPlace] = []
    for kind, named in (
        ("parameter", list(model.named_parameters(remove_duplicate=False))),
        ("buffer", list(model.named_buffers(remove_duplicate=False))),
    ):
        names: dict[int, list[str]] = {}
        for name, tensor in named:
            names.setdefault(id(tensor), []).append(name)
        seen: set[int] = set()
        for name, tensor in named:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            specs.append(_described(kind, name, tensor, names[id(tensor)][1:]))
            owner, _, attribute = name.rpartition(".")
            places.append(TensorPlace(model.get_submodule(owner), attribute))
    return tuple(specs), tuple(places)


def build(
    model: nn.Module, optimizer: str, momentum: Momentum | None = None, travel: Travel | None = None
) -> ModelTensors:
    """The manifest that all peers compare, and where its tensors are.

    Args:
        optimizer: its description.
        momentum: what the codec takes over of it.
        travel: what of the tensors travels when.
    """
    specs, places = collect(model)
    try:
        manifest = ModelManifest(tensors=specs, optimizer=optimizer, momentum=momentum, travel=travel)
        return ModelTensors(manifest, places)
    except ValidationError as error:
        raise NotSupported(f"this model cannot be trained as a job: {error.errors()[0]['msg']}") from error


def _described(kind: str, name: str, tensor: torch.Tensor, aliases: list[str]) -> TensorSpec:
    if nn.parameter.is_lazy(tensor):
        raise NotSupported(f"{name} has no shape yet: run one batch through the model before mt.prepare")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise NotSupported(
            f"{name} is a {tensor.layout} tensor on {tensor.device}: only plain dense tensors are shared"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (kind == "parameter" and not tensor.requires_grad) or (
        kind == "buffer" and dtype not in FLOAT_DTYPES | INTEGER_DTYPES
    ):
        kind = "frozen"
    try:
        return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, kind=kind, aliases=tuple(aliases))
    except ValidationError as error:
        raise NotSupported(f"this model cannot be trained as a job: {error.errors()[0]['msg']}") from error


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise NotSupported(
                f"{name or type(module).__name__} makes sparse gradients, which cannot be averaged: "
                f"create it with sparse=False"
            )
