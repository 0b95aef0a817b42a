"""Every value that a message can have, for every message that is registered, and what it looks like on the wire."""

import importlib
import pkgutil
import types
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

import meshwire.messages
from meshwire import limits
from meshwire.addresses import Address
from meshwire.message_base import Wire
from meshwire.messages.envelope import _TYPES, Envelope, Role, encode
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.sync_modes.mode import SyncSettings, sync_settings

for module in pkgutil.iter_modules(meshwire.messages.__path__):
    importlib.import_module(f"meshwire.messages.{module.name}")

MESSAGES: dict[str, type[Wire]] = _TYPES

# Types whose validators ask for more than their fields' limits.
SPECIAL: dict[Any, st.SearchStrategy[Any]] = {
    Address: st.sampled_from([Address(host="192.168.1.20", port=29610), Address(host="fd00::2", port=1)]),
    ModelManifest: st.just(
        ModelManifest(
            tensors=(
                TensorSpec(name="a.weight", shape=(3, 4), dtype="float32", kind="parameter", aliases=("b.weight",)),
                TensorSpec(name="a.count", shape=(), dtype="int64", kind="buffer", aliases=()),
            ),
            optimizer="SGD(lr)",
        )
    ),
}


def limits_of(metadata: list[Any]) -> dict[str, Any]:
    """Lengths, bounds and patterns, whether pydantic or annotated_types expressed them."""
    found: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, FieldInfo):
            found |= limits_of(item.metadata)
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern"):
            if (value := getattr(item, name, None)) is not None:
                found[name] = value
    return found


def values(annotation: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    """Every value that a field may have."""
    bounds = limits_of(metadata)
    shortest, longest = bounds.get("min_length", 0), min(bounds.get("max_length", 8), bounds.get("min_length", 0) + 8)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in SPECIAL:
        return SPECIAL[annotation]
    if origin is Annotated:
        return values(arguments[0], [*arguments[1:], *metadata])
    if origin in (Union, types.UnionType):
        return st.one_of(*(values(argument, metadata) for argument in arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*(values(argument, []) for argument in arguments))
    if origin is tuple:
        items = st.lists(values(arguments[0], []), min_size=shortest, max_size=min(longest, shortest + 2))
        return items.map(tuple)
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        above, below = (
            bounds.get("ge", bounds.get("gt", -limits.NUMBER_MAX - 1) + 1),
            bounds.get("lt", bounds.get("le", limits.NUMBER_MAX) + 1),
        )
        return st.integers(above, below - 1)
    if annotation is float:
        return st.floats(
            min_value=bounds.get("ge", bounds.get("gt")),
            max_value=bounds.get("le"),
            exclude_min="gt" in bounds,
            allow_nan=False,
            allow_infinity=False,
        )
    if annotation is str and "pattern" in bounds:
        return st.from_regex(bounds["pattern"].replace("$", r"\Z"), fullmatch=True)
    if annotation is str:
        return st.text(st.characters(codec="utf-8"), min_size=shortest, max_size=longest)
    if annotation is bytes:
        return st.binary(min_size=shortest, max_size=longest)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return st.sampled_from(annotation)
    assert isinstance(annotation, type), annotation
    assert issubclass(annotation, Wire), annotation
    return messages(annotation)


def messages(cls: type[Wire]) -> st.SearchStrategy[Wire]:
    return st.builds(
        cls, **{name: values(field.annotation, field.metadata) for name, field in cls.model_fields.items()}
    )


def _with(cls: type[Wire], **made: st.SearchStrategy[Any]) -> st.SearchStrategy[Wire]:
    """With these fields so, and all others as they may be."""
    rest = {name: values(field.annotation, field.metadata) for name, field in cls.model_fields.items()}
    return st.builds(cls, **(rest | made))


_MODES = (
    *("bsp", "bsp,accumulate=4", "ssp:3", "local:8,ssp:1", "sma:4"),
    *("diloco:32,stream=4", "muloco:30,stream=3,tau=10", "local:8,stream=4,random", "local:8,gossip=2,over=ring"),
)
SPECIAL[SyncSettings] = st.one_of(
    st.sampled_from([sync_settings(mode) for mode in _MODES]),
    _with(
        SyncSettings,
        fragments=st.just(0),
        delay=st.just(0),
        accumulate=st.just(1),
        random=st.just(False),
        central=st.just(False),
        gossip=st.just(0),
        over=st.just("pairs"),
    ),
)


def control_messages(*roles: Role) -> st.SearchStrategy[bytes]:
    """Payloads of control frames: any message in one of these roles, by default in any."""

    def packed(body: Wire, role: Role, number: int) -> bytes:
        return encode(Envelope(role, 0 if role is Role.NOTICE else number, body))

    any_message = st.sampled_from(sorted(MESSAGES)).flatmap(lambda name: messages(MESSAGES[name]))
    return st.builds(packed, any_message, st.sampled_from(roles or tuple(Role)), st.integers(1, 2**63 - 1))


@cache
def every_message() -> dict[str, Wire]:
    """One valid message of every type, the same in every run."""
    found: dict[str, Wire] = {}

    @settings(
        max_examples=1,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(st.fixed_dictionaries({name: messages(cls) for name, cls in MESSAGES.items()}))
    def collect(made: dict[str, Wire]) -> None:
        found.update(made)

    collect()
    return found
