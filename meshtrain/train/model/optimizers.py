"""Reads a torch optimizer: whether it can take part in a job, how it is laid out, its options as plain values."""

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.model.joint_optimizer import members_of
from meshtrain.train.model.tensors import TensorPlace
from meshwire import limits
from meshwire.model.manifest import OPTIMIZERS_JOINT, TensorSpec

Options = dict[str, Any]

SCALER_ATTRIBUTES = ("grad_scale", "found_inf")  # by which a GradScaler tells a fused optimizer to unscale


def check(optimizer: Optimizer) -> None:
    """Refuses by name what cannot work with averaged gradients, by O6 (refusals). Raises NotSupported."""
    for member in members_of(optimizer):
        _check_one(member)


def _check_one(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    if isinstance(optimizer, torch.optim.LBFGS) or needs_closure:
        raise NotSupported(
            f"{name} evaluates the model several times in one step through a closure, which cannot be averaged: "
            "use an optimizer that steps once per backward pass, e.g. torch.optim.AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise NotSupported(f"{name} is for sparse gradients, which cannot be averaged: use torch.optim.Adam")


def describe(
    optimizer: Optimizer,
    specs: tuple[TensorSpec, ...],
    places: tuple[TensorPlace, ...],
    of_muon: Iterable[torch.Tensor] = (),
) -> str:
    """Class and layout of the param groups; the values of the options belong to the start state instead.

    Args:
        of_muon: parameters that Muon steps in its place.

    Raises UsageError when it holds a parameter that the model does not.
    """
    number = {id(place.tensor()): index for index, place in enumerate(places)}
    members = members_of(optimizer)
    parts = [
        OPTIMIZERS_JOINT.join(
            f"{type(member).__module__}.{type(member).__qualname__}"
            + (f" of {len(member.param_groups)} groups" if members[1:] else "")
            for member in members
        )
    ]
    for position, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in number:
                raise UsageError(
                    f"param group {position} of {type(optimizer).__name__} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not in the model given to mt.prepare: "
                    "put all that is trained into one module, e.g. an nn.ModuleDict"
                )
        tensors = _ranges([number[id(parameter)] for parameter in group["params"]])
        parts.append(f"group {position}: tensors {tensors}, options {','.join(sorted(options(group)))}")
    if tensors := _ranges([number[id(parameter)] for parameter in of_muon]):
        parts.append(f"Muon: tensors {tensors}")
    text = "; ".join(parts)
    if len(text) > limits.OPTIMIZER_CHARS_MAX:
        raise NotSupported(f"{len(optimizer.param_groups)} param groups are too many to compare between peers")
    assert len(specs) == len(places)
    return text


def options(group: Options) -> Options:
    """The options of a param group."""
    return {name: value for name, value in group.items() if name != "params"}


def plain(value: Any) -> Any:
    """An option or state value as JSON knows it; None for what is not a plain value (a function)."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None


def restore_options(group: Options, saved: Mapping[str, Any]) -> None:
    """Puts back what `plain` has read from the options of a group, as `Optimizer.load_state_dict` does: also what a
    scheduler has added to them, such as `initial_lr`, by which a new one knows the rate that all began with."""
    for name, value in saved.items():
        if value is not None and name != "params":
            set_option(group, name, value)


def set_option(group: Options, name: str, value: Any) -> None:
    """Writes a value that `plain` has read from another peer's group, in the type that this group has."""
    here = group.get(name)
    if isinstance(here, torch.Tensor):
        here.fill_(value)
    elif isinstance(here, tuple):
        group[name] = tuple(value)
    else:
        group[name] = value


def _ranges(numbers: list[int]) -> str:
    """Numbers with runs joined: 0,1,2,5 as 0-2,5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
