"""The options of an optimizer (learning rates, weight decay, ...) that travel with binds, by O3 (leader's options).

A round is applied on all peers with the options of its leader, the contributor with the largest step of its own (tie:
the lowest rank). So schedules may be ahead or behind on some peers without an error.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgpack
import numpy as np
import torch
from pydantic import Field, StrictBool, StrictInt, ValidationError
from torch.optim import Optimizer

from meshtrain.errors import MeshtrainError
from meshtrain.train.model.optimizers import Options, options, set_option
from meshwire.message_base import Wire
from meshwire.messages.rounds import Bytes

# How a step is computed, not what: it may differ between machines.
LOCAL = frozenset({"foreach", "fused", "capturable", "differentiable"})

Number = StrictBool | StrictInt | Annotated[float, Field(strict=True, allow_inf_nan=False)]
GroupValues = dict[str, Number | tuple[Number, ...]]


class RoundOptions(Wire):
    """The options of one learner's optimizer, as its bind tells them.

    Attributes:
        groups: the numbers among the options of each param group, as when `mt.prepare` was called.
        clip: given to `mt.clip_grad_norm_` in the step before; None without it (O4, clipping).
        clip_known: false in a learner's first step, which has not come so far.
        alone: samples of such a step where one learner trains by itself; None: rates do not follow samples (O12).
    """

    groups: tuple[GroupValues, ...]
    clip: Annotated[float, Field(ge=0)] | None = None  # infinite: only the norm was asked for
    clip_known: bool = False
    alone: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class Hyperparameters:
    """Reads the options of one optimizer for binds, and puts those of a round in force while it is applied.

    Attributes:
        ever_late: whether any step was taken with other options than its bind has told.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._names = [sorted(_numbers(group)) for group in optimizer.param_groups]
        self._state: list[set[str]] = [set() for _ in self._names]  # names that steps have written
        self._told: tuple[GroupValues, ...] | None = None  # by the newest bind
        self.ever_late = False

    def pack(self, clip: float | None, *, clip_known: bool, alone: float | None = None) -> bytes:
        """The values now, for a bind.

        Raises MeshtrainError when they are no longer what they were at `mt.prepare`, e.g. a learning rate of NaN.
        """
        try:
            self._told = self._values()
            return RoundOptions(groups=self._told, clip=clip, clip_known=clip_known, alone=alone).pack()
        except (KeyError, ValidationError) as error:
            raise MeshtrainError(f"the options of {self._name} cannot be told to the other peers: {error}") from error

    def note(self) -> None:
        """A step is about to be taken with the options of now."""
        self.ever_late |= self._told is not None and self._told != self._values()

    def unpack(self, packed: Bytes) -> RoundOptions:
        """Reads what another peer has packed. Raises MeshtrainError when it does not suit this optimizer."""
        try:
            found = RoundOptions.load(msgpack.unpackb(packed))
        except (ValueError, msgpack.UnpackException, ValidationError) as error:
            raise MeshtrainError(f"the options of a round cannot be read: {error}") from error
        shapes = [{name: _shape(value) for name, value in group.items()} for group in found.groups]
        if shapes != [{name: _shape(value) for name, value in group.items()} for group in self._values()]:
            raise MeshtrainError(f"the options of a round are not those of {self._name} on this peer")
        return found

    @contextmanager
    def in_force(self, groups: tuple[GroupValues, ...]) -> Iterator[None]:
        """Inside, the optimizer has these values; afterwards its own again.

        A number that the step itself writes, such as a count of steps or an estimated rate, is state of the base: it
        stays as the step has left it, which is the same on all peers, and rounds do not set it any more.
        """
        own = self._values()
        self.give(self._optimizer, groups)
        begun = self._values()
        try:
            yield
        finally:
            for written, before, after in zip(self._state, begun, self._values(), strict=True):
                written.update(name for name, value in after.items() if value != before[name])
            self.give(self._optimizer, own)

    def give(self, optimizer: Optimizer, groups: tuple[GroupValues, ...]) -> None:
        """Sets these values in an optimizer of the same layout, but for those that are state of the base."""
        for values, written, group in zip(groups, self._state, optimizer.param_groups, strict=False):
            for name, value in values.items():
                if name not in written:
                    set_option(group, name, value)

    @property
    def written(self) -> tuple[tuple[str, ...], ...]:
        """By group, the numbers that steps have written: state of the base."""
        return tuple(tuple(sorted(names)) for names in self._state)

    @written.setter
    def written(self, names: tuple[tuple[str, ...], ...]) -> None:
        self._state = [set(names[group]) if group < len(names) else set() for group in range(len(self._names))]

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__

    def _values(self) -> tuple[GroupValues, ...]:
        groups = zip(self._names, self._optimizer.param_groups, strict=False)  # groups may be added later: frozen ones
        return tuple({name: _number(group[name]) for name in names} for names, group in groups)


def _numbers(group: Options) -> set[str]:
    return {name for name, value in options(group).items() if name not in LOCAL and _shape(_number(value)) is not None}


def _number(value: Any) -> Any:
    """A number out of what holds a single one."""
    return value.item() if isinstance(value, torch.Tensor | np.generic) and math.prod(value.shape) == 1 else value


def _shape(value: Any) -> int | None:
    """How many values it has, -1 for a single one; None for what does not travel."""
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return -1
    if isinstance(value, tuple) and all(_shape(item) == -1 for item in value):
        return len(value)
    return None
