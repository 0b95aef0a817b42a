"""The base in memory that outlives this process: a script that is killed and started again goes on where it was.

By J3 (kept base), on the CPU: parameters, the base beside them if there is one, buffers and the optimizers' tensors lie
in a file (a memfd, where there are such) that the daemon keeps open. They are what the process computes with: nothing
is copied from step to step. The file begins with a header: which round's base lies there, where, and a word that says
"dirty" while a round changes it, while it changes places, or while a local step changes the optimizer's state. After a
kill between these the next process maps what it finds; after a kill within one the header is dirty, and the state comes
from another peer.

With a period (R9) the base lies beside the local weights, which count for nothing in the next process; the optimizer's
state is that of the last local step.
"""

import json
import mmap
import os
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim import Optimizer

from meshtrain.errors import MeshtrainError
from meshtrain.machine import memory_part_bytes
from meshtrain.train.model.optimizers import options, plain, restore_options
from meshtrain.train.model.state import PROGRESS, SCRIPT, RoundProgress
from meshwire.memory_layout.kept_state import (
    DIRTY,
    DIRTY_OFFSET,
    HEADER_BYTES,
    SAMPLE_WORDS,
    WORD_BYTES,
    KeptHeader,
    sample_digest,
)
from meshwire.memory_layout.shared_slots import PAGE_BYTES

ALIGN_BYTES = 64
VALUES = "values"  # of trained parameters, by position
BESIDE = "beside"  # their base, where they hold something else at times
BUFFERS = "buffers"  # the base's, by the manifest's index
REST = "rest"  # all tensors that rounds do not change
STATE = "state"  # of the optimizers, by OF POSITION.NAME, with OF as in `ReplicaState.optimizers`
LIVE, PLAIN, GROUPS = "live", "plain", "groups"

Where = list[Any]  # offset, dtype, shape, stride
Owner = tuple[str, int]  # of a state: whose it is, as in `ReplicaState.optimizers`, and the parameter's position
_OWNER = re.compile(r"([a-z]*\.)?(\d+)")


class ProgressSource(Protocol):
    """Knows what goes with the base besides tensors: `StateSaver` in a job."""

    def progress(self) -> RoundProgress:
        """What rounds have left so far."""


class NoKeptState:
    """Keeps nothing, for a learner whose base ends with its process. `KeptState` says what each call is for."""

    def begin(
        self,
        beside: list[torch.Tensor],
        buffers: MutableMapping[int, torch.Tensor],
        source: ProgressSource,
    ) -> None:
        """The model holds the base. From now on it lies in the file, and the optimizer's state does.

        Args:
            beside: the base beside the parameters, if it is there at times. Its tensors are replaced by others.
            buffers: the base's, by index; they are replaced, too.
            source: tells what goes with the base besides.
        """

    def take_over(self, buffers: Callable[[int], torch.Tensor], round_: int) -> RoundProgress:
        """Model and optimizer become what the process of before has left: the base after this round.

        Args:
            buffers: the model's, by the manifest's index.

        Raises:
            MeshtrainError: it is not there, or not of this model.
        """
        raise MeshtrainError(f"this process has no memory that could hold the base after round {round_}")

    def dirty(self) -> None:
        """The base, or what goes with it, is about to change: of no use until `clean`."""

    def clean(self, round_: int) -> None:
        """The base is that after this round, with all that goes with it. It lies where it was said to be."""

    def turning(self) -> None:
        """The base is about to change places with what the parameters hold, or with what lies beside them: of no use
        until one of the next two."""

    def beside(self) -> None:
        """From now on the base lies beside the parameters, which will hold something else."""

    def in_parameters(self) -> None:
        """The parameters hold the base, as they do at first."""


class _File:
    """Regions of the file, which never move."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._maps: list[tuple[int, mmap.mmap]] = []
        self.size_bytes = 0

    def empty(self) -> None:
        """Begins anew: whatever is in the file is of no use."""
        os.ftruncate(self._descriptor, 0)
        self.take(HEADER_BYTES)

    def open(self) -> None:
        """Maps the file as another process has left it."""
        self.size_bytes = os.fstat(self._descriptor).st_size
        self._maps.append((0, mmap.mmap(self._descriptor, self.size_bytes)))

    def take(self, size_bytes: int) -> tuple[int, int]:
        """A new region: offset, bytes. Raises OSError, ValueError when there is no memory for it."""
        part_bytes = max(PAGE_BYTES, memory_part_bytes())
        offset, size_bytes = self.size_bytes, max(1, -(-size_bytes // part_bytes)) * part_bytes
        os.ftruncate(self._descriptor, offset + size_bytes)
        self._maps.append((offset, mmap.mmap(self._descriptor, size_bytes, offset=offset)))
        self.size_bytes = offset + size_bytes
        return offset, size_bytes

    def _at(self, offset: int) -> tuple[mmap.mmap, int]:
        start, found = next((start, one) for start, one in reversed(self._maps) if start <= offset)
        return found, offset - start

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Reads the bytes of one region."""
        found, at = self._at(offset)
        return found[at : at + size_bytes]

    def write(self, offset: int, data: bytes) -> None:
        """Writes into one region."""
        found, at = self._at(offset)
        found[at : at + len(data)] = data

    def sample(self, region: tuple[int, int]) -> bytes:
        """The words of a region by which it is known again (`meshwire.memory_layout.kept_state.sample_places`)."""
        found, at = self._at(region[0])
        words = region[1] // WORD_BYTES
        step = max(1, -(-words // SAMPLE_WORDS))
        return np.frombuffer(found, np.uint64, count=words, offset=at)[::step].tobytes()

    def tensor(self, where: Where) -> torch.Tensor:
        """The tensor that lies there, sharing the file's memory."""
        offset, dtype, shape, stride = where
        kind, count = getattr(torch, dtype), int(np.prod(shape, dtype=np.int64))
        if not count:
            return torch.empty(shape, dtype=kind)
        found, at = self._at(offset)
        return torch.frombuffer(found, dtype=kind, count=count, offset=at).as_strided(shape, stride)


class KeptState(NoKeptState):
    """Keeps the base of one learner in the file, and knows at each moment whether a successor could use it.

    If the script does what cannot be followed (it moves its model, or its optimizer keeps what is no tensor), the file
    is marked as of no use, and training goes on without it.

    Args:
        descriptor: of the file.
        parameters: that are trained.
        rest: tensors that rounds do not change.
        optimizers: of `ReplicaState.optimizers`: the script's, and those beside it.
    """

    def __init__(
        self,
        descriptor: int,
        parameters: Sequence[torch.Tensor],
        rest: Sequence[torch.Tensor],
        optimizers: Mapping[str, Optimizer],
    ) -> None:
        self._file = _File(descriptor)
        self._parameters = list(parameters)
        self._rest = list(rest)
        self._known = {id(parameter) for parameter in self._parameters}
        self._optimizers = optimizers
        self._script = optimizers[SCRIPT]
        self._index: dict[str, dict[str, Where]] = {}
        self._regions: dict[str, tuple[int, int]] = {}
        self._index_region = self._record_region = (HEADER_BYTES, 0)
        self._states: dict[Owner, dict[str, torch.Tensor]] = {}
        self._plain: dict[str, dict[str, Any]] = {}  # of the optimizers' states, by owner, what is no tensor
        self._live: list[str] = []  # owners of tensors: others have none, or none any more (`OptimizerStep.forget`)
        self._addresses: list[int] = []  # of the parameters' values in the file
        self._header: KeptHeader | None = None
        self._base: str | None = VALUES  # the part that it is; None: it lies whole in none
        self._taken = self._lost = self._changing = False
        self._source: ProgressSource | None = None

    # From one process to the next

    def take_over(self, buffers: Callable[[int], torch.Tensor], round_: int) -> RoundProgress:
        """Takes the base over; see `NoKeptState.take_over`."""
        self._file.open()
        header = KeptHeader.unpack(self._file.read(0, HEADER_BYTES))
        if header is None or header.dirty or header.round != round_:
            raise MeshtrainError(f"memory does not hold the base after round {round_}")
        found = json.loads(self._file.read(*header.index))
        self._index = found["index"]
        self._regions = {part: (region[0], region[1]) for part, region in found["regions"].items()}
        self._index_region, self._record_region = header.index, header.record
        record = json.loads(self._file.read(*header.record).rstrip(b"\0"))
        values = self._tensors(VALUES, self._parameters)
        base = self._tensors(BESIDE, self._parameters) if header.base == self._regions.get(BESIDE) else values
        with torch.no_grad():
            for mine, its in zip(values, base, strict=True):
                if mine is not its:
                    mine.copy_(its)  # until the header is written anew it tells of the base beside
            for name, where in self._index[BUFFERS].items():
                buffers(int(name)).copy_(self._file.tensor(where))
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
        for tensor, value in zip(self._rest, self._tensors(REST, self._rest), strict=True):
            tensor.data = value
        self._take_over_optimizers(record)
        self._header, self._taken = header, True
        return RoundProgress.load(record[PROGRESS])

    def _tensors(self, part: str, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        places = self._index[part]
        for position, tensor in enumerate(like):
            where = places.get(str(position))
            if where is None or where[1:] != _described(tensor):
                raise MeshtrainError("memory holds the base of another model")
        return [self._file.tensor(places[str(position)]) for position in range(len(like))]

    def _take_over_optimizers(self, record: Mapping[str, Any]) -> None:
        live = frozenset(record[LIVE])
        states: dict[Owner, dict[str, Any]] = {_owner(key)[0]: dict(values) for key, values in record[PLAIN].items()}
        for key, where in self._index.get(STATE, {}).items():
            owner, name = _owner(key)
            tensor = self._states.setdefault(owner, {})[name] = self._file.tensor(where)
            if f"{owner[0]}{owner[1]}" in live:
                states.setdefault(owner, {})[name] = tensor
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
        for (of, position), state in states.items():
            self._optimizers[of].state[self._parameters[position]] = state
        for group, values in zip(self._script.param_groups, record[GROUPS], strict=True):
            restore_options(group, values)

    def begin(
        self,
        beside: list[torch.Tensor],
        buffers: MutableMapping[int, torch.Tensor],
        source: ProgressSource,
    ) -> None:
        """Moves the base into the file; see `NoKeptState.begin`."""
        self._source = source
        own = all(_lies_alone(tensor) for tensor in (*self._parameters, *self._rest))
        if not own or not all(map(_is_dense, (*beside, *buffers.values()))):
            self._give_up()
            return
        try:
            if not self._taken:
                self._file.empty()
                self._place(VALUES, dict(enumerate(self._parameters)))
                self._place(REST, dict(enumerate(self._rest)))
            self._place(BESIDE, dict(enumerate(beside)))
            self._place(BUFFERS, buffers)
            if not self._taken:
                for part, tensors in ((VALUES, self._parameters), (REST, self._rest)):
                    for position, tensor in enumerate(tensors):
                        tensor.data = self._moved(part, position, tensor.data)
            for position, tensor in enumerate(beside):
                beside[position] = self._moved(BESIDE, position, tensor)
            for index in list(buffers):
                buffers[index] = self._moved(BUFFERS, index, buffers[index])
            self._write_index()
            self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        except (OSError, ValueError):  # the system gives no such memory
            self._give_up()
            return
        self.clean(source.progress().round)

    # From round to round

    def dirty(self) -> None:
        """Until `clean` the file is of no use; see `NoKeptState.dirty`."""
        self._changing = True
        self._mark_dirty()

    def clean(self, round_: int) -> None:
        """What lies in the file is the base after this round; see `NoKeptState.clean`."""
        if self._lost:
            return
        try:
            self._mark_dirty()
            if self._follow():
                self._changing = False
                self._write_record()
                self._write_header(round_)
                return
        except (OSError, ValueError):
            pass
        self._give_up()

    def turning(self) -> None:
        """Until it is said where the base lies the file is of no use; see `NoKeptState.turning`."""
        self._base = None
        self._mark_dirty()

    def beside(self) -> None:
        """From now on the base lies beside the parameters, which will hold something else."""
        self._lie(BESIDE)

    def in_parameters(self) -> None:
        """The parameters hold the base."""
        self._lie(VALUES)

    def _lie(self, part: str) -> None:
        if self._header is not None and not self._lost and self._base != part:
            self._base = part
            self._write_header(self._header.round)

    def _mark_dirty(self) -> None:
        if self._header is not None:
            self._file.write(DIRTY_OFFSET, DIRTY.to_bytes(WORD_BYTES, "little"))

    def _give_up(self) -> None:
        """Marks the file as holding no base, for good: this optimizer or script cannot be followed."""
        self._mark_dirty()
        self._lost = True

    def _follow(self) -> bool:
        """Whether all that belongs to the base lies in the file: at its first step an optimizer makes its state."""
        if [parameter.data_ptr() for parameter in self._parameters] != self._addresses:
            return False  # the script has moved its model
        new: dict[str, torch.Tensor] = {}
        self._plain, self._live = {}, []
        if not all(self._follow_one(of, optimizer, new) for of, optimizer in self._optimizers.items()):
            return False
        return not new or self._take_in(new)

    def _follow_one(self, of: str, optimizer: Optimizer, new: dict[str, torch.Tensor]) -> bool:
        states = optimizer.state
        for position, parameter in enumerate(self._parameters):
            known, tensors = self._states.get((of, position), {}), 0
            for name, value in states[parameter].items() if parameter in states else ():
                if isinstance(value, torch.Tensor):
                    tensors += 1
                    if known.get(name) is not value:
                        new[f"{of}{position}.{name}"] = value
                elif isinstance(value, bool | int | float | str | None):
                    self._plain.setdefault(f"{of}{position}", {})[name] = value
                else:
                    return False  # neither a tensor nor a plain value
            if tensors:
                self._live.append(f"{of}{position}")
                if tensors < len(known):
                    return False  # some of it is gone
        # Else some of it belongs to nothing that is known here.
        return len(states) <= len(self._known) and all(id(owner) in self._known for owner in states)

    def _take_in(self, new: Mapping[str, torch.Tensor]) -> bool:
        known = self._index.get(STATE, {})
        if any(not _is_dense(new[key]) or (key in known and known[key][1:] != _described(new[key])) for key in new):
            return False
        fresh = {key: value for key, value in new.items() if key not in known}
        self._place(STATE, fresh)
        for key, value in new.items():
            owner, name = _owner(key)
            moved = self._states.setdefault(owner, {})[name] = self._moved(STATE, key, value)
            self._optimizers[owner[0]].state[self._parameters[owner[1]]][name] = moved
        if fresh:
            self._write_index()
        return True

    # In the file

    def _place(self, part: str, tensors: Mapping[Any, torch.Tensor]) -> None:
        known = self._index.setdefault(part, {})
        new = {str(key): tensor for key, tensor in tensors.items() if str(key) not in known}
        if not new and part in self._regions:
            return
        sizes = [-(-tensor.numel() * tensor.element_size() // ALIGN_BYTES) * ALIGN_BYTES for tensor in new.values()]
        self._regions[part] = self._file.take(sum(sizes))
        offset = self._regions[part][0]
        for (key, tensor), size in zip(new.items(), sizes, strict=True):
            known[key] = [offset, *_described(tensor)]
            offset += size

    def _moved(self, part: str, key: object, tensor: torch.Tensor) -> torch.Tensor:
        place = self._file.tensor(self._index[part][str(key)])
        if place.data_ptr() != tensor.data_ptr():
            place.copy_(tensor.detach())
        return place

    def _write_index(self) -> None:
        data = json.dumps({"index": self._index, "regions": self._regions}).encode()
        if len(data) == self._index_region[1] and self._file.read(*self._index_region) == data:
            return  # as the process of before has left it
        offset, _ = self._file.take(len(data))
        self._file.write(offset, data)
        self._index_region = offset, len(data)

    def _write_record(self) -> None:
        groups = [{name: plain(value) for name, value in options(group).items()} for group in self._script.param_groups]
        assert self._source is not None
        progress = self._source.progress().model_dump()
        record = {PROGRESS: progress, LIVE: self._live, PLAIN: self._plain, GROUPS: groups}
        data = json.dumps(record).encode()
        if len(data) > self._record_region[1]:
            self._record_region = self._file.take(2 * len(data))
        self._file.write(self._record_region[0], data.ljust(self._record_region[1], b"\0"))

    def _write_header(self, round_: int) -> None:
        base = self._regions[self._base or VALUES]
        sample = sample_digest(self._file.sample(base))
        index, record = self._index_region, self._record_region
        made = KeptHeader(True, round_, base, index, record, self._file.size_bytes, sample)
        self._file.write(0, made.pack())
        if self._base is not None and not self._changing:
            self._file.write(DIRTY_OFFSET, bytes(WORD_BYTES))  # one word, at once
        self._header = made


def _owner(key: str) -> tuple[Owner, str]:
    """Whose state lies under a key of the index or of the record, and the name of the value, where there is one."""
    found = _OWNER.match(key)
    assert found is not None
    return (found[1] or SCRIPT, int(found[2])), key[found.end() + 1 :]


def _described(tensor: torch.Tensor) -> Where:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Each of its values once and without gaps, in whatever order; on the CPU."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_quantized:
        return False
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _lies_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor can be a part of its memory, which would be left behind."""
    return _is_dense(tensor) and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
