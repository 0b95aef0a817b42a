"""The base of everything that travels as msgpack: frozen, no unknown fields, no coercion between types."""

import hashlib
from typing import Annotated, Any, Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, StringConstraints, ValidationError

from meshwire import limits
from meshwire.text import printable

DeviceId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]  # SHA-256
Name = Annotated[str, StringConstraints(min_length=1, max_length=limits.NAME_CHARS_MAX)]
Seconds = Annotated[float, Field(ge=0, le=limits.SECONDS_MAX)]  # a span, or Unix time
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # chosen by chance, or a model's: not of what is counted


def _limit(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("tuple", "list"):
            schema["fail_fast"] = True
        elif schema.get("type") == "int":
            if "le" not in schema and "lt" not in schema:
                schema["le"] = limits.NUMBER_MAX
            if "ge" not in schema and "gt" not in schema:
                schema["ge"] = -limits.NUMBER_MAX
        for part in schema.values():
            _limit(part)
    elif isinstance(schema, list):
        for part in schema:
            _limit(part)


class Wire(BaseModel):
    """A value that crosses a process boundary.

    Sequences are declared as tuples; msgpack returns lists, which are accepted for them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Sequences stop at their first wrong item: a megabyte of wrong ones would make gigabytes of errors. Numbers
        that say nothing else are at most `limits.NUMBER_MAX`: whoever seeks a file, packs a header or adds up what
        peers have said need not fear one that does not fit."""
        schema = handler(source)
        _limit(schema)
        return schema

    def pack(self) -> bytes:
        """Canonical msgpack: fields in definition order, so equal values have equal bytes."""
        packed: bytes = msgpack.packb(self.model_dump(), use_bin_type=True)
        return packed

    def digest(self) -> bytes:
        """SHA-256 of `pack()`."""
        return hashlib.sha256(self.pack()).digest()

    @classmethod
    def load(cls, plain: Any) -> Self:
        """Validates decoded msgpack. Raises pydantic.ValidationError."""
        return cls.model_validate(plain)


def what_is_wrong(error: ValidationError) -> str:
    """The first error as `field: reason`, short and safe to show: the field's name may be the sender's invention."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part)[: limits.REFUSED_FIELD_CHARS_MAX] for part in first["loc"])
    return printable(f"{where}: {first['msg']}"[: limits.REFUSAL_CHARS_MAX // 2])
