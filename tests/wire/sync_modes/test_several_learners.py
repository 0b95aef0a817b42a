"""Which jobs may have several learners on each device (R6)."""

import pytest

from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.several_learners import LEGAL, refusal_of_learners

PLAIN = {"masks": False, "by_torchrun": False, "independent": False, "restarts": False}


@pytest.mark.parametrize(
    "sync", ["bsp", "ssp:0", "demo", "local:4", "local:4,after=2", "diloco:4", "muloco:4", "sparseloco:4", "sma:2"]
)
def test_every_mode_in_which_rounds_are_waited_for_may(sync: str) -> None:
    assert refusal_of_learners(sync_settings(sync), **PLAIN) is None


@pytest.mark.parametrize(
    "sync",
    ["ssp:1", "local:4,ssp:1", "local:4,stream=2", "diloco:4,stream=2,tau=1", "local:4,gossip=2", "bsp,accumulate=2"],
)
def test_any_other_is_refused_with_those(sync: str) -> None:
    why = refusal_of_learners(sync_settings(sync), **PLAIN)
    assert why is not None
    assert f"--sync {sync}: " in why
    assert f"use {LEGAL}" in why


@pytest.mark.parametrize("asked", sorted(PLAIN))
def test_what_has_no_rounds_of_all_values_is_refused(asked: str) -> None:
    option = {"by_torchrun": "engine torchrun", "restarts": "restart"}.get(asked, asked)
    why = refusal_of_learners(sync_settings("bsp"), **(PLAIN | {asked: True}))
    assert why is not None
    assert f"--{option}" in why
