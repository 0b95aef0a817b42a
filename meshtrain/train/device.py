"""Where a learner computes."""

import os
from typing import Any

import torch

from meshtrain.errors import NotSupported

DEVICE_VARIABLE = "MESHTRAIN_DEVICE"


def best_device() -> torch.device:
    """CUDA, then MPS, then CPU, unless $MESHTRAIN_DEVICE says otherwise. Raises RuntimeError for a wrong name."""
    told = os.environ.get(DEVICE_VARIABLE)
    if told:
        return torch.device(told)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def device_of_learner(number: int, count: int) -> torch.device:
    """Where one of several learners on this machine computes: each on a GPU of its own, as far as there are so many.
    With one it is the best device. The GPU becomes the current one of this process.

    Args:
        number: which learner, from 0.
    """
    device = best_device()
    if count == 1 or device.type != "cuda" or os.environ.get(DEVICE_VARIABLE):
        return device
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def device_of(model: torch.nn.Module) -> torch.device | None:
    """Where a model's first tensor lies; None when it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return None


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device`: in tuples, lists, dicts and whatever has a method `to`."""
    match batch:
        case torch.Tensor():
            return batch.to(device, non_blocking=batch.is_pinned())
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(moved(item, device) for item in batch))
        case tuple() | list():
            return type(batch)(moved(item, device) for item in batch)
        case dict():
            return type(batch)((key, moved(value, device)) for key, value in batch.items())
    to = getattr(batch, "to", None)
    return to(device) if callable(to) else batch


def move_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> torch.device:
    """Moves a model that lies on the CPU, with its optimizer's state; any other stays. Returns where it is.

    Parameters stay the same objects: the optimizer refers to them.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if device.type == "cpu" or any(tensor.device.type != "cpu" for tensor in tensors):
        return device_of(model) or torch.device("cpu")
    before = {id(parameter) for parameter in model.parameters()}
    model.to(device)
    if {id(parameter) for parameter in model.parameters()} != before:
        raise NotSupported(
            f"torch replaced the parameters when it moved the model: call model.to({str(device)!r}) "
            "before you create the optimizer"
        )
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
                state[name] = value.to(device)
    return device
