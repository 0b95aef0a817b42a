"""The state of a replica between two rounds: compared at the start, written for checkpoints and for other peers.

It is cut into units, so that only those are sent that differ, by J1 (state in units). A unit is one trainable
parameter with the state of its optimizers, or one buffer; then all frozen tensors together, if there are any; last the
values of the optimizer's options and, after round 0, what else rounds have left.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer

from meshtrain.errors import MeshtrainError, NotSupported
from meshtrain.train.model.optimizers import options, plain, restore_options
from meshtrain.train.model.tensors import ModelTensors
from meshwire.checkpoints.manifest import unit_file
from meshwire.message_base import Wire

VALUE = "value"
STATE = "state."
MASK = "mask"  # which values are kept
SCRIPT = ""  # in `ReplicaState.optimizers`: the script's
OUTER = "outer."  # state of the outer optimizer
MUON = "muon."  # and of Muon
PLAIN = "plain"  # metadata: values that are not tensors
PROGRESS = "progress"  # among those of the last unit

BaseOf = Callable[[int], torch.Tensor | None]  # by the manifest's index; None: what the model holds is the base


class RoundProgress(Wire):
    """What a learner needs to go on after a round, besides its tensors and the optimizer's state.

    Attributes:
        round: the newest one in the base.
        squared_norm: of the means of the newest one that was not void.
        clip: what the next bind says of clipping (O4, clipping).
        clip_known: whether it can say so: a step was taken.
        written: by param group, the options that steps have written: state of the base (O3, leader's options).
        scaler: of the learner's GradScaler. A boundary lies inside its `step`, before the `update` that follows: after
            an overflow one more round may overflow.
        contributors: devices in the newest round that was anybody's, for O13; 0: not known.
    """

    round: Annotated[int, Field(ge=0)] = 0
    squared_norm: float = 0.0
    clip: Annotated[float, Field(ge=0)] | None = None
    clip_known: bool = False
    written: tuple[tuple[str, ...], ...] = ()
    scaler: dict[str, float | int] | None = None
    contributors: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True)
class _Content:
    """What one unit holds: tensors by name, and plain values."""

    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]


class SavedMasks(Protocol):
    """Whoever knows which values of a tensor are kept, where not all of them are (`--masks`)."""

    def mask(self, index: int) -> torch.Tensor | None:
        """Which of the tensor's values are kept, as bool; None: all."""

    def load(self, index: int, mask: torch.Tensor) -> None:
        """What a saved state says of a tensor."""


class ReplicaState:
    """Reads and writes the units of one model and optimizer.

    Args:
        outer: the optimizer that takes rounds into the base, where that is not `optimizer` (R9). Then `optimizer` is
            the learner's own, and its state is what a newcomer begins with.
        muon: steps some parameters in the place of `optimizer`, where one does (MuLoCo); the learner's own, too.
        masks: which values of each tensor are kept; part of the base.

    Attributes:
        optimizers: those of them that there are, by what their state is called in a saved one.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        optimizer: Optimizer,
        masks: SavedMasks,
        outer: Optimizer | None = None,
        muon: Optimizer | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.outer = outer
        self.muon = muon
        named = {SCRIPT: optimizer, OUTER: outer, MUON: muon}
        self.optimizers = {name: each for name, each in named.items() if each is not None}
        self._beside = [(name, each) for name, each in self.optimizers.items() if name != SCRIPT]
        self._masks = masks
        self._tensors = tensors
        kinds = [spec.kind for spec in tensors.manifest.tensors]
        self._singles = [index for index, kind in enumerate(kinds) if kind != "frozen"]
        self._frozen = [index for index, kind in enumerate(kinds) if kind == "frozen"]
        self._group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self._singles) + bool(self._frozen) + 1

    def tensor(self, index: int) -> torch.Tensor:
        """The model's tensor at an index of the manifest."""
        return self._tensors.places[index].tensor()

    def digests(self) -> tuple[bytes, ...]:
        """SHA-256 of every unit."""
        return tuple(_digest(self._read(unit)) for unit in range(self.count))

    def export(
        self, folder: Path, base: BaseOf, progress: RoundProgress, known: Sequence[bytes] = ()
    ) -> tuple[int, ...]:
        """Writes the units, as they are after a round, or at the start (round 0). The parameters hold the base.

        Args:
            base: of buffers, which the model may have moved.
            known: digests of the units of whoever is to load them: what is equal there is not written.

        Returns:
            Which units were not written.

        Raises:
            OSError: the disk refuses.
            NotSupported: the optimizer keeps something that cannot be written.
        """
        self._check_keys()
        left_out = []
        for unit in range(self.count):
            content = self._read(unit, base)
            of_rounds = unit == self.count - 1 and progress.round > 0  # what they have left, of which no digest tells
            if not of_rounds and len(known) == self.count and _digest(content) == known[unit]:
                left_out.append(unit)
                continue
            if unit == self.count - 1:
                content.plain[PROGRESS] = progress.model_dump()
            self._save(folder / unit_file(unit), content)
        return tuple(left_out)

    def load(self, units: Iterable[int], folder: Path, round_: int) -> RoundProgress:
        """Takes units over from FOLDER, of the start (round 0) or of after a round; in all others this state is equal.

        Raises MeshtrainError for a file that does not suit the model or the round.
        """
        progress = RoundProgress()
        for unit in units:
            try:
                with safe_open(folder / unit_file(unit), framework="pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
                    values = json.loads((file.metadata() or {}).get(PLAIN, "{}"))
                progress = RoundProgress.load(values.pop(PROGRESS, progress.model_dump()))
            except (OSError, SafetensorError, ValueError, AttributeError, ValidationError) as error:
                raise MeshtrainError(f"unit {unit} of the state in {folder} cannot be read: {error}") from error
            self._write(unit, _Content(tensors, values))
        if progress.round != round_:
            raise MeshtrainError(f"the state in {folder} is that after round {progress.round}, not after {round_}")
        return progress

    @staticmethod
    def _save(path: Path, content: _Content) -> None:
        tensors = {name: _storable(tensor) for name, tensor in content.tensors.items()}
        try:
            save_file(tensors, path, {PLAIN: json.dumps(content.plain, sort_keys=True)})
        except SafetensorError as error:  # what the system said is in its text only
            raise OSError(f"cannot write {path}: {error}") from error

    def _check_keys(self) -> None:
        known = {id(place.tensor()) for place in self._tensors.places}
        if any(id(key) not in known for key in self.optimizer.state):
            raise NotSupported(
                f"{type(self.optimizer).__name__} keeps state that belongs to no parameter of the model, so its state "
                "cannot be saved: use an optimizer that keeps it by parameter, as those of torch.optim do"
            )

    def _read(self, unit: int, base: BaseOf = lambda _: None) -> _Content:
        if unit < len(self._singles):
            index = self._singles[unit]
            tensor = self._tensors.places[index].tensor()
            state = self.optimizer.state.get(tensor, {})
            of_base = base(index)
            tensors = {VALUE: tensor if of_base is None else of_base}
            for of, beside in self._beside:
                tensors |= {of + name: value for name, value in beside.state.get(tensor, {}).items()}
            if (mask := self._masks.mask(index)) is not None:
                tensors[MASK] = mask
            values = {}
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[STATE + name] = value
                elif isinstance(value, bool | int | float | str | None):
                    values[name] = value
                else:
                    raise NotSupported(
                        f"{type(self.optimizer).__name__} keeps {name} as {type(value).__name__}, which cannot be "
                        "sent to other peers: call mt.prepare before its first step"
                    )
            return _Content(tensors, values)
        if self._frozen and unit == len(self._singles):
            return _Content({str(index): self._tensors.places[index].tensor() for index in self._frozen}, {})
        groups = enumerate(self.optimizer.param_groups)
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
            for n, group in enumerate(self.optimizer.param_groups):
                own = f"{n}."
                values = {name.removeprefix(own): v for name, v in content.plain.items() if name.startswith(own)}
                restore_options(group, values)

    def _write_single(self, index: int, content: _Content) -> None:
        self._copy(index, content.tensors.get(VALUE))
        if MASK in content.tensors:
            self._masks.load(index, content.tensors[MASK])
        tensor = self._tensors.places[index].tensor()
        for of, beside in self._beside:
            found = {
                name.removeprefix(of): _laid_out(value.to(tensor.device), tensor)
                for name, value in content.tensors.items()
                if name.startswith(of)
            }
            if found:
                beside.state[tensor] = found
        if id(tensor) not in self._group_of:
            return
        group = self._group_of[id(tensor)]
        state: dict[str, Any] = dict(content.plain)
        for name, value in content.tensors.items():
            if not name.startswith(STATE):
                continue
            # As torch's own load_state_dict places it: a step counter stays on the CPU unless a kernel reads it.
            on_device = name != STATE + "step" or group.get("capturable") or group.get("fused")
            placed = value.to(tensor.device if on_device else "cpu")
            state[name.removeprefix(STATE)] = _laid_out(placed, tensor)
        if state or tensor in self.optimizer.state:
            self.optimizer.state[tensor] = state

    def _copy(self, index: int, value: torch.Tensor | None) -> None:
        spec, tensor = self._tensors.manifest.tensors[index], self._tensors.places[index].tensor()
        if value is not None and tensor.is_complex():
            value = torch.view_as_complex(value)
        if value is None or value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise MeshtrainError(f"the state to load does not hold {spec.name} as this model has it")
        tensor.copy_(value)


def _laid_out(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """State as the optimizer made it: like its parameter in memory. Fused optimizers take both as they lie there."""
    if value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, contiguous, sharing memory with nothing, of a type that the format has."""
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
