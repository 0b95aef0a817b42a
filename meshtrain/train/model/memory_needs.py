"""How large a model and its optimizer are: for the sum of memory before a job runs (M1, memory)."""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from meshtrain.train.model.joint_optimizer import members_of
from meshtrain.train.model.tensors import ModelTensors
from meshwire.memory_layout.footprint import ModelSize, footprint
from meshwire.model.masks import MaskSettings, mask_bytes
from meshwire.sync_modes.mode import SyncSettings

GUESSED_VALUES = 2  # of state for each of a parameter's values, in an optimizer that is not in the table

# Tensors of state as large as the parameter, by the options of its group. Of subclasses the nearest one counts.
STATE_TENSORS: Mapping[str, Callable[[Mapping[str, Any]], int]] = MappingProxyType(
    {
        "SGD": lambda group: int(group["momentum"] != 0),
        "Adam": lambda group: 2 + int(group["amsgrad"]),
        "AdamW": lambda group: 2 + int(group["amsgrad"]),
        "NAdam": lambda _: 2,
        "RAdam": lambda _: 2,
        "Adamax": lambda _: 2,
        "Adagrad": lambda _: 1,
        "Adadelta": lambda _: 2,
        "RMSprop": lambda group: 1 + int(group["momentum"] > 0) + int(group["centered"]),
        "Rprop": lambda _: 2,
        "Muon": lambda _: 1,
        "ASGD": lambda _: 1,
    }
)


def model_size(tensors: ModelTensors, optimizer: Optimizer, of_muon: Iterable[torch.Tensor] = ()) -> ModelSize:
    """Sizes of a prepared model. State that the optimizer has not made yet is what it will make at its first step.

    Args:
        of_muon: parameters that Muon steps in its place.
    """
    by_kind = {
        kind: sum(tensor.numel() * tensor.element_size() for _, _, tensor in tensors.kind(kind))
        for kind in ("parameter", "frozen", "buffer")
    }
    muons = {id(parameter) for parameter in of_muon}
    states = [_state(member, muons) for member in members_of(optimizer)]
    return ModelSize(
        parameters=by_kind["parameter"],
        frozen=by_kind["frozen"],
        buffers=by_kind["buffer"],
        optimizer=" and ".join(type(member).__name__ for member in members_of(optimizer)),
        optimizer_state=sum(state for state, _ in states),
        optimizer_known=all(known for _, known in states),
    )


def learner_bytes(
    tensors: ModelTensors,
    optimizer: Optimizer,
    coefficient: float,
    sync: SyncSettings,
    masks: MaskSettings | None = None,
    of_muon: Iterable[torch.Tensor] = (),
) -> int:
    """How many bytes the learner's process will hold beside the shared memory, for M1 (memory).

    Args:
        coefficient: c, of what its own gradients that no round has covered would change (O2, base and view).
        of_muon: see `model_size`.
    """
    size = model_size(tensors, optimizer, of_muon)
    places_bytes = mask_bytes(tensors.manifest.tensors, masks, sync)
    return footprint(size, 0, 0, coefficient, sync, mask_bytes=places_bytes).learner_bytes


def _state(optimizer: Optimizer, of_muon: Collection[int]) -> tuple[int, bool]:
    """Bytes, of which those that Muon steps have its own, by `id`, and whether they are known."""
    count = next(
        (
            STATE_TENSORS[kind.__name__]
            for kind in type(optimizer).__mro__
            if kind.__module__.startswith("torch.optim") and kind.__name__ in STATE_TENSORS
        ),
        None,
    )
    total_bytes, known = 0, count is not None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            made = sum(
                value.numel() * value.element_size()
                for value in optimizer.state.get(parameter, {}).values()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            )
            if made:
                total_bytes += made
            elif parameter.requires_grad:
                of_parameter = STATE_TENSORS["Muon"] if id(parameter) in of_muon else count
                tensor_count = GUESSED_VALUES if of_parameter is None else of_parameter(group)
                total_bytes += tensor_count * parameter.numel() * parameter.element_size()
    return total_bytes, known
