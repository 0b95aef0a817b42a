"""How a control message travels: one msgpack array [role, id, type, fields] in one or more control frames (W1, W4).

A *notice* expects nothing. A *request* carries an id that its answers repeat: any number of *events*, then one *reply*
or one *failure*. Every message type is registered once by name; unknown types and unknown fields are refused.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from meshwire import limits
from meshwire.message_base import Wire, what_is_wrong

MessageType = TypeVar("MessageType", bound=type[Wire])

_TYPES: dict[str, type[Wire]] = {}
_NAMES: dict[type[Wire], str] = {}


def message(name: str) -> Any:
    """Class decorator: registers a message type under its wire name."""

    def register(cls: MessageType) -> MessageType:
        assert name not in _TYPES, f"two messages are called {name}"
        _TYPES[name] = cls
        _NAMES[cls] = name
        return cls

    return register


class Role(IntEnum):
    """What a message is to its receiver."""

    NOTICE = 0
    REQUEST = 1
    EVENT = 2
    REPLY = 3
    FAILURE = 4


@message("failure")
class Failure(Wire):
    """A request that could not be done: what, and what to do about it, for a person to read."""

    error: str


@message("done")
class Done(Wire):
    """A request that was done and has nothing to say."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """One message with its role; `id` is 0 for a notice."""

    role: Role
    id: int
    body: Wire


def encode(envelope: Envelope) -> bytes:
    """The control message's payload. Raises ValueError when it exceeds MESSAGE_BYTES_MAX."""
    payload: bytes = msgpack.packb(
        [envelope.role, envelope.id, _NAMES[type(envelope.body)], envelope.body.model_dump()],
        use_bin_type=True,
    )
    if len(payload) > limits.MESSAGE_BYTES_MAX:
        raise ValueError(f"{_NAMES[type(envelope.body)]} of {len(payload)} bytes exceeds {limits.MESSAGE_BYTES_MAX}")
    return payload


def decode(payload: bytes) -> Envelope | str:
    """Reads one control message; never raises on its content. A string says what is wrong with it."""
    try:
        plain = msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=True,
            max_ext_len=0,
            max_map_len=limits.MESSAGE_FIELDS_MAX,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        return f"control message is not msgpack ({type(error).__name__}: {error})"
    if not (isinstance(plain, list) and len(plain) == 4):
        return "control message is not [role, id, type, fields]"
    role, id_, name, fields = plain
    if type(role) is not int or not Role.NOTICE <= role <= Role.FAILURE:
        return f"unknown message role {role!r:.40}"
    if type(id_) is not int or not 0 <= id_ < 2**63 or (id_ == 0) != (role == Role.NOTICE):
        return f"message id {id_!r:.40} does not suit its role"
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        return f"unknown message type {name!r:.80}"
    try:
        return Envelope(Role(role), id_, cls.load(fields))
    except ValidationError as error:
        return f"message {name}: {what_is_wrong(error)}"
    except RecursionError:
        return f"message {name}: nested too deeply"
