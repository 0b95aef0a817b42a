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


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("tuple", "list"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list):
        for part in schema:
            _fail_fast(part)


class Wire(BaseModel):
    """A value that crosses a process boundary.

    Sequences are declared as tuples; msgpack returns lists, which are accepted for them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Sequences stop at their first wrong item: a megabyte of wrong ones would make gigabytes of errors."""
        schema = handler(source)
        _fail_fast(schema)
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
