"""What a prepared model consists of: the part of it that all members of a job must have in common."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from meshwire import limits
from meshwire.message_base import Wire
from meshwire.model.schedule import Travel

# torch's names without the prefix "torch."
FLOAT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})
INTEGER_DTYPES = frozenset({"int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"})
OTHER_DTYPES = frozenset(
    {"bool", "complex128", "complex64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}
)
DTYPES = FLOAT_DTYPES | INTEGER_DTYPES | OTHER_DTYPES

TensorName = Annotated[str, StringConstraints(min_length=1, max_length=limits.TENSOR_NAME_CHARS_MAX)]
Dimension = Annotated[int, Field(ge=0, le=limits.VALUES_MAX)]


class TensorSpec(Wire):
    """One tensor of a model.

    Attributes:
        name: as `named_parameters()` and `named_buffers()` give it.
        dtype: torch's name without the prefix, e.g. "float32".
        kind: "parameter" takes part in every round. "buffer" does too (O5): floats in the vector, integers by their
            maximum. "frozen" belongs to the start state only: parameters without gradients, and buffers that can be
            neither averaged nor ordered (bool, complex).
        aliases: other names of the same tensor (tied parameters).
    """

    name: TensorName
    shape: Annotated[tuple[Dimension, ...], Field(max_length=limits.TENSOR_DIMS_MAX)]
    dtype: str
    kind: Literal["parameter", "frozen", "buffer"]
    aliases: Annotated[tuple[TensorName, ...], Field(max_length=limits.TENSOR_ALIASES_MAX)] = ()

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def in_vector(self) -> bool:
        """Whether its values travel in the vector of a round. Empty tensors have none."""
        return self.kind != "frozen" and self.dtype in FLOAT_DTYPES and self.count > 0

    @property
    def in_seal(self) -> bool:
        """Whether its values travel in the seal of a round, where their maximum is taken (O5)."""
        return self.kind == "buffer" and self.dtype in INTEGER_DTYPES

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in (self.name, *self.aliases):
            if not name.isprintable():
                raise ValueError(f"tensor name {name!r} holds characters that cannot be printed")
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name}: unknown dtype {self.dtype[:64]!r}")
        if self.count > limits.VALUES_MAX:
            raise ValueError(f"{self.name}: {self.count} values exceed the limit of {limits.VALUES_MAX}")
        if self.kind == "parameter" and self.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{self.name}: a trainable parameter of dtype {self.dtype} cannot be averaged; "
                f"use one of {', '.join(sorted(FLOAT_DTYPES))}, or requires_grad_(False)"
            )
        if self.kind == "buffer" and self.dtype in OTHER_DTYPES:
            raise ValueError(f"{self.name}: a buffer of dtype {self.dtype} can only be frozen")
        return self


class Momentum(Wire):
    """That of torch's SGD: u <- factor * u + g; the step is u, or with Nesterov g + factor * u."""

    factor: Annotated[float, Field(gt=0, lt=1)]
    nesterov: bool


OPTIMIZERS_JOINT = " and "
NOT_IN_TURNS = (
    "with several optimizers: what it leaves out of the one's gradients would be sent with the other's round, and be "
    "lost. Use a codec that leaves nothing for later: fp32, fp16 or bf16"
)
"""Behind a codec."""


class ModelManifest(Wire):
    """All tensors of a model in definition order, and its optimizer.

    Attributes:
        optimizer: class and layout of the optimizer, e.g. its param groups; compared as text.
        momentum: of the optimizer, where the codec takes it over; else None.
        travel: how much of each tensor travels in which rounds; None: all of it in all rounds.
    """

    tensors: Annotated[tuple[TensorSpec, ...], Field(min_length=1, max_length=limits.TENSORS_MAX)]
    optimizer: Annotated[str, Field(max_length=limits.OPTIMIZER_CHARS_MAX)]
    momentum: Momentum | None = None
    travel: Travel | None = None

    @property
    def several_optimizers(self) -> bool:
        """They take turns (O11): the description of one begins with its class, and theirs with all of their classes."""
        return OPTIMIZERS_JOINT in self.optimizer.partition(";")[0]

    @property
    def used_bytes(self) -> int:
        """Of the bitmap in a seal that says which tensors were used (O5)."""
        return math.ceil(len(self.tensors) / 8)

    def state_digest(self) -> bytes:
        """SHA-256 of what a saved state must suit: all but what a resumed job may change: whose the momentum is, and
        what travels when."""
        return self.model_copy(update={"momentum": None, "travel": None}).digest()

    @property
    def integer_values(self) -> int:
        """How many integers a seal carries (O5)."""
        return sum(tensor.count for tensor in self.tensors if tensor.in_seal)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names: set[str] = set()
        for name in self._names():
            if name in names:
                raise ValueError(f"two tensors are named {name}")
            names.add(name)
        values = sum(tensor.count for tensor in self.tensors)
        if values > limits.VALUES_MAX:
            raise ValueError(f"a model of {values} values exceeds the limit of {limits.VALUES_MAX}")
        if not any(tensor.kind == "parameter" and tensor.count for tensor in self.tensors):
            raise ValueError("the model has no trainable parameter: every one is empty or has requires_grad=False")
        if self.integer_values > limits.INTEGER_BUFFER_VALUES_MAX:
            largest = max((tensor for tensor in self.tensors if tensor.in_seal), key=lambda tensor: tensor.count)
            raise ValueError(
                f"the integer buffers hold {self.integer_values} values, the limit is "
                f"{limits.INTEGER_BUFFER_VALUES_MAX}; the largest is {largest.name} with {largest.count}: "
                "a constant table need not be a buffer"
            )
        self._check_travel()
        return self

    def _check_travel(self) -> None:
        for stretch in self.travel.stretches if self.travel is not None else ():
            if len(stretch.counts) != len(self.tensors):
                raise ValueError(f"round {stretch.first} has lengths of {len(stretch.counts)} tensors, not of all")
            for tensor, count in zip(self.tensors, stretch.counts, strict=True):
                most = tensor.count if tensor.in_vector else 0
                if count > most:
                    raise ValueError(f"round {stretch.first}: {count} values of {tensor.name} travel; it has {most}")
            kinds = zip(self.tensors, stretch.counts, strict=True)
            if not any(count for tensor, count in kinds if tensor.kind == "parameter"):
                raise ValueError(f"from round {stretch.first} on no trainable parameter travels")

    def _names(self) -> Iterator[str]:
        for tensor in self.tensors:
            yield tensor.name
            yield from tensor.aliases


def first_difference(a: ModelManifest, b: ModelManifest) -> str | None:
    """How b differs from a, as a sentence that names the first differing tensor; None if they are equal."""
    for index, (ours, theirs) in enumerate(zip(a.tensors, b.tensors, strict=False)):
        if ours.name != theirs.name:
            return f"tensor {index} is {_described(ours)} here and {_described(theirs)} there"
        for field in ("kind", "shape", "dtype", "aliases"):
            mine, other = getattr(ours, field), getattr(theirs, field)
            if mine != other:
                return f"{_described(ours)} has {field} {mine} here and {other} there"
    for longer, shorter, where, elsewhere in ((a, b, "here", "there"), (b, a, "there", "here")):
        if len(longer.tensors) > len(shorter.tensors):
            extra = longer.tensors[len(shorter.tensors)]
            return f"{_described(extra)} exists {where} and not {elsewhere}"
    if a.optimizer != b.optimizer:
        return f"the optimizer is {a.optimizer} here and {b.optimizer} there"
    if a.momentum != b.momentum:
        return f"the optimizer's momentum is {a.momentum} here and {b.momentum} there"
    if a.travel != b.travel:
        return f"{_first_unequal_round(a, b)} is of other tensors, or of other lengths of them, here and there"
    return None


def _first_unequal_round(a: ModelManifest, b: ModelManifest) -> str:
    ours, theirs = (each.travel.stretches if each.travel is not None else () for each in (a, b))
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f"what travels from round {min(mine.first, other.first)} on"
    longer = max(ours, theirs, key=len)
    return f"what travels from round {longer[min(len(ours), len(theirs))].first} on"


def _described(tensor: TensorSpec) -> str:
    return f"{'buffer' if tensor.kind == 'buffer' else 'parameter'} {tensor.name}"
