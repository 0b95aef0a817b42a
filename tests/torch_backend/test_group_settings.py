"""P5: no group is made under settings that its collectives would not keep."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtrain.errors import UsageError
from meshtrain.torch_backend.registration import World
from meshwire.model.masks import parse_masks
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.rate_rule import parse_rate_rule
from tests.torch_backend.specs import SPEC


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "int8"},
        {"sync": sync_settings("ssp:2")},
        {"sync": sync_settings("bsp,accumulate=2")},
        {"masks": parse_masks("0.5")},
        {"scale_lr": parse_rate_rule("linear")},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_rounds_are_refused_by_name(settings: dict[str, Any]) -> None:
    """Also where nobody has seen before that the script makes one."""
    spec = SPEC.model_copy(update=settings)
    with pytest.raises(UsageError, match=r"Other codecs, --sync, --masks, --scale-lr and --topology are for scripts"):
        World()._check(cast(Any, SimpleNamespace(welcome=SimpleNamespace(spec=spec))))
