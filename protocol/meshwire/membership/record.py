"""A membership as plain values, to be written down and decided again: how it began, then every input with its time.

The machine is pure, so the same inputs at the same times have the same effects. Plain values are those of JSON: bytes
are {"hex": TEXT}; messages, inputs and effects {"type": NAME, ...their fields}.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from meshwire import limits
from meshwire.membership.effects import Message
from meshwire.membership.inputs import Input
from meshwire.membership.machine import Membership
from meshwire.membership.proposal_checks import list_wrong
from meshwire.message_base import Wire, what_is_wrong
from meshwire.messages.job import Generation, Member
from meshwire.sync_modes.settings_changes import SettingsWish
from meshwire.timeouts import Timeouts

FORMAT = 1  # of what is written; to be counted up when an old record cannot be read any more


@dataclasses.dataclass(frozen=True, slots=True)
class MembershipStart:
    """With what a membership begins: as `Membership` takes it."""

    me: Member
    job: str
    timeouts: Timeouts
    now_s: float
    generation: Generation | None
    known: tuple[str, ...]
    members_max: int

    def machine(self) -> Membership:
        """A new one, which begins so."""
        return Membership(
            self.me,
            self.job,
            self.timeouts,
            self.now_s,
            generation=self.generation,
            known=self.known,
            members_max=self.members_max,
        )


_KINDS: Mapping[str, Any] = MappingProxyType(
    {kind.__name__: kind for kind in (*get_args(Input), *get_args(Message), SettingsWish)}
)
_START = TypeAdapter(MembershipStart)


def plain(value: Any) -> Any:
    """Of an input, an effect, or what they hold. Raises TypeError for anything else: a replay could not read it."""
    if isinstance(value, Wire):
        return {"type": type(value).__name__} | {key: plain(item) for key, item in value.model_dump().items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__} | fields
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"hex": value.hex()}
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    raise TypeError(f"a record cannot hold {value!r}")


def start_of(values: Any) -> MembershipStart:
    """From its plain form, checked as far as a machine relies on it. Raises ValueError, RecursionError."""
    names = {field.name for field in dataclasses.fields(MembershipStart)}
    if not isinstance(values, dict) or {*values} != names | {"type"}:
        raise ValueError(f"a beginning without one of {', '.join(sorted(names))}: of another version of meshtraind")
    try:
        fields = {key: _fields(value) for key, value in values.items() if key != "type"}
        start = _START.validate_python(fields)
    except ValidationError as error:
        raise ValueError(what_is_wrong(error)) from None
    if not 0 < start.members_max <= limits.MEMBERS_MAX:
        raise ValueError(f"a job takes up to {limits.MEMBERS_MAX} devices, not {start.members_max}")
    if (generation := start.generation) is not None:
        if wrong := list_wrong(generation):
            raise ValueError(f"the first generation: {wrong}")
        if generation.job != start.job or start.me not in generation.live.values():
            raise ValueError("the first generation is of another job, or without this device")
    return start


def input_of(values: Any) -> Input:
    """From its plain form. Raises ValueError, RecursionError."""
    kind = _KINDS.get(values.get("type", "")) if isinstance(values, dict) else None
    if kind is None or not issubclass(kind, get_args(Input)):
        raise ValueError("an input that the membership machine does not have")
    made: Input = _made(kind, values)
    return made


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    fields = {key: _revived(value) for key, value in values.items() if key != "type"}
    if not issubclass(kind, Wire) and {*fields} != {field.name for field in dataclasses.fields(kind)}:
        raise ValueError(f"{kind.__name__} has other fields: of another version of meshtraind")
    try:
        return kind.load(fields) if issubclass(kind, Wire) else TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        raise ValueError(f"{kind.__name__}: {what_is_wrong(error)}") from None


def _revived(value: Any) -> Any:
    """What an input holds: a message is made, all else stays as it is until whoever holds it is checked."""
    match value:
        case {"hex": str(text), **rest} if not rest:
            return bytes.fromhex(text)
        case {"type": str(name)}:
            if name not in _KINDS:
                raise ValueError("a message that the protocol of membership does not have")
            return _made(_KINDS[name], value)
        case dict():
            return {key: _revived(item) for key, item in value.items()}
        case list():
            return [_revived(item) for item in value]
    return value


def _fields(value: Any) -> Any:
    """A value of the beginning, where the field says of which kind it is."""
    match value:
        case {"hex": str(text), **rest} if not rest:
            return bytes.fromhex(text)
        case dict():
            return {key: _fields(item) for key, item in value.items() if key != "type"}
        case list():
            return [_fields(item) for item in value]
    return value
