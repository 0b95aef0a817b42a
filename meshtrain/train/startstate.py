"""J1: the state that all peers start from, in units: what differs from rank 0's is loaded from its files.

A unit is one trainable parameter with its optimizer state, or one buffer; then all frozen tensors together, if there
are any; last the values of the optimizer's options.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer

from meshtrain.errors import MeshtrainError, NotSupported
from meshtrain.train.optimizers import options, plain, set_option
from meshtrain.train.tensors import ModelTensors

VALUE = "value"
STATE = "state."
PLAIN = "plain"  # metadata: values that are not tensors


@dataclass(frozen=True)
class _Content:
    """Tensors by name, and plain values."""

    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]


class StartState:
    """Reads and writes the units of one model and optimizer."""

    def __init__(self, tensors: ModelTensors, optimizer: Optimizer) -> None:
        self._tensors = tensors
        self._optimizer = optimizer
        kinds = [spec.kind for spec in tensors.manifest.tensors]
        self._singles = [index for index, kind in enumerate(kinds) if kind != "frozen"]
        self._frozen = [index for index, kind in enumerate(kinds) if kind == "frozen"]
        self._group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self._singles) + bool(self._frozen) + 1

    def digests(self) -> tuple[bytes, ...]:
        """SHA-256 of every unit."""
        return tuple(_digest(self._read(unit)) for unit in range(self.count))

    def export(self, units: Iterable[int], folder: Path) -> None:
        """Writes units as FOLDER/<unit>.safetensors."""
        for unit in units:
            content = self._read(unit)
            tensors = {name: _storable(tensor) for name, tensor in content.tensors.items()}
            save_file(tensors, folder / f"{unit}.safetensors", {PLAIN: json.dumps(content.plain, sort_keys=True)})

    def load(self, units: Iterable[int], folder: Path) -> None:
        """Takes units over from FOLDER. Raises MeshtrainError for a file that does not suit the model."""
        for unit in units:
            path = folder / f"{unit}.safetensors"
            try:
                with safe_open(path, framework="pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
                    values = json.loads((file.metadata() or {}).get(PLAIN, "{}"))
            except (OSError, SafetensorError, ValueError) as error:
                raise MeshtrainError(f"unit {unit} of rank 0's start state cannot be read: {error}") from error
            self._write(unit, _Content(tensors, values))

    def _read(self, unit: int) -> _Content:
        if unit < len(self._singles):
            tensor = self._tensors.places[self._singles[unit]].tensor()
            state = self._optimizer.state.get(tensor, {})
            tensors = {VALUE: tensor}
            values = {}
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[STATE + name] = value
                elif isinstance(value, bool | int | float | str | None):
                    values[name] = value
                else:
                    raise NotSupported(
                        f"{type(self._optimizer).__name__} keeps {name} as {type(value).__name__}, which cannot be "
                        "sent to other peers: call mt.prepare before its first step"
                    )
            return _Content(tensors, values)
        if self._frozen and unit == len(self._singles):
            return _Content({str(index): self._tensors.places[index].tensor() for index in self._frozen}, {})
        groups = enumerate(self._optimizer.param_groups)
        return _Content(
            {}, {f"{n}.{name}": plain(value) for n, group in groups for name, value in options(group).items()}
        )

    @torch.no_grad()
    def _write(self, unit: int, content: _Content) -> None:
        if unit < len(self._singles):
            self._write_single(self._singles[unit], content)
        elif self._frozen and unit == len(self._singles):
            for index in self._frozen:
                self._copy(index, content.tensors.get(str(index)))
        else:
            for n, group in enumerate(self._optimizer.param_groups):
                for name in options(group):
                    value = content.plain.get(f"{n}.{name}")
                    if value is not None:
                        set_option(group, name, value)

    def _write_single(self, index: int, content: _Content) -> None:
        self._copy(index, content.tensors.get(VALUE))
        tensor = self._tensors.places[index].tensor()
        if id(tensor) not in self._group_of:
            return
        group = self._group_of[id(tensor)]
        state: dict[str, Any] = dict(content.plain)
        for name, value in content.tensors.items():
            if name == VALUE:
                continue
            # As torch's own load_state_dict places it: a step counter stays on the CPU unless a kernel reads it.
            on_device = name != STATE + "step" or group.get("capturable") or group.get("fused")
            state[name.removeprefix(STATE)] = value.to(tensor.device if on_device else "cpu")
        if state or tensor in self._optimizer.state:
            self._optimizer.state[tensor] = state

    def _copy(self, index: int, value: torch.Tensor | None) -> None:
        spec, tensor = self._tensors.manifest.tensors[index], self._tensors.places[index].tensor()
        if value is not None and tensor.is_complex():
            value = torch.view_as_complex(value)
        if value is None or value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise MeshtrainError(f"rank 0's start state does not hold {spec.name} as this model has it")
        tensor.copy_(value)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, contiguous, sharing memory with nothing, of a type that the format has."""
    tensor = tensor.detach().cpu()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).clone(memory_format=torch.contiguous_format)


def feed(digest: "hashlib._Hash", tensor: torch.Tensor) -> None:
    """Adds type, shape and bytes of a tensor to a hash."""
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
    if tensor.numel():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)


def _digest(content: _Content) -> bytes:
    digest = hashlib.sha256(json.dumps(content.plain, sort_keys=True).encode())
    for name in sorted(content.tensors):
        digest.update(name.encode() + b"\0")
        feed(digest, content.tensors[name])
    return digest.digest()
