"""The base of everything that travels as msgpack: frozen, no unknown fields, no coercion between types."""

import hashlib
from typing import Annotated, Any, Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from meshwire import limits

DeviceId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]  # SHA-256
Name = Annotated[str, StringConstraints(min_length=1, max_length=limits.NAME_CHARS_MAX)]


class Wire(BaseModel):
    """A value that crosses a process boundary.

    Sequences are declared as tuples; msgpack returns lists, which are accepted for them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
