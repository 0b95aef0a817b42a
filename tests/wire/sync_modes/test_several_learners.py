"""Which jobs may have several learners on each device (R6), and how many pay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire import limits
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.several_learners import LEARNERS_GAIN, LEGAL, best_learners, next_learners, refusal_of_learners

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


@pytest.mark.parametrize(
    ("cores", "speeds", "tried", "best"),
    [
        (1, [100], 1, 1),
        (8, [100, 109, 400], 2, 1),
        (8, [100, 111, 115], 4, 2),
        (8, [100, 150, 300, 900, 9000], 8, 8),
        (7, [100, 200, 400, 800], 4, 4),
        (64, [1, 2, 4, 8, 16, 32], 16, 16),
    ],
    ids=["one core", "no gain", "less and less", "a core each", "fewer cores", "as many as a device may have"],
)
def test_learners_are_doubled_while_that_pays(cores: int, speeds: list[float], tried: int, best: int) -> None:
    found: dict[int, float] = {}
    while (count := next_learners(found, cores)) is not None:
        found[count] = speeds[count.bit_length() - 1]
    assert max(found) == tried
    assert best_learners(found) == best


@given(st.integers(1, 40), st.lists(st.floats(1e-3, 1e6), min_size=5, max_size=5))
def test_no_number_is_chosen_that_one_half_as_large_would_do_for(cores: int, speeds: list[float]) -> None:
    found: dict[int, float] = {}
    while (count := next_learners(found, cores)) is not None:
        assert count not in found
        found[count] = speeds[count.bit_length() - 1]
    best = best_learners(found)
    assert 1 <= best <= min(cores, limits.LEARNERS_MAX)
    assert best == 1 or found[best] >= LEARNERS_GAIN * found[best // 2]
