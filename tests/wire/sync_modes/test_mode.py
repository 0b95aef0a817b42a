"""How the members keep in step: what a person typed, made into settings or refused (R7, R8, O2, X4a)."""

from typing import Any

import pytest
from pydantic import ValidationError

from meshwire import limits
from meshwire.sync_modes.mode import SyncSettings, own_coefficient, sync_settings


def test_bsp_and_a_bound_of_zero_are_the_same() -> None:
    """R7: s=0 is BSP bit for bit, so nothing may tell them apart."""
    assert sync_settings("bsp") == sync_settings("ssp:0")
    assert sync_settings("ssp:0").text() == "bsp"


def test_defaults_follow_the_bound() -> None:
    """R8: with s > 0 late learners are carried; without a bound there is nothing to carry."""
    assert sync_settings("bsp") == SyncSettings(
        staleness=0, straggler="wait", visibility="eager", own="1", shares="equal"
    )
    assert sync_settings("ssp:2") == SyncSettings(
        staleness=2, straggler="carry", visibility="eager", own="1", shares="speed"
    )


def test_fixed_visibility_brings_what_it_needs() -> None:
    """R8, X4a: reproducible, so nobody is carried and no speed decides."""
    made = sync_settings("ssp:2", visibility="fixed")
    assert (made.straggler, made.shares) == ("wait", "equal")
    assert made.lockstep


def test_shares_follow_speed_where_a_slower_peer_is_to_be_expected() -> None:
    """X4a: with s=0 only if the peers are unequal, for the same run again is what BSP is for."""
    assert sync_settings("bsp").shares == "equal"
    assert sync_settings("bsp", unequal_peers=True).shares == "speed"
    assert sync_settings("bsp", shares="equal", unequal_peers=True).shares == "equal"
    assert sync_settings("ssp:2", visibility="fixed", unequal_peers=True).shares == "equal"


@pytest.mark.parametrize("straggler", ["carry", "wait"])
@pytest.mark.parametrize("shares", ["equal", "speed"])
def test_learners_are_in_lockstep_where_none_is_passed_over_and_shares_are_equal(straggler: str, shares: str) -> None:
    """X2, X4: samples go by turns only if every member takes part in every round with a batch of equal size."""
    made = sync_settings("ssp:1", straggler=straggler, shares=shares)
    assert made.lockstep == (straggler == "wait" and shares == "equal")


@pytest.mark.parametrize("bound", range(0, limits.STALENESS_MAX + 1, 16))
def test_text_is_what_is_typed(bound: int) -> None:
    made = sync_settings(f"ssp:{bound}")
    assert made.staleness == bound
    assert sync_settings(made.text()) == made


@pytest.mark.parametrize(
    ("sync", "period", "outer"),
    [
        ("local:1", 1, "average"),
        ("local:30", 30, "average"),
        ("local:500,nesterov", 500, "nesterov"),
        ("sparseloco:30", 30, "average"),
        ("muloco:30", 30, "nesterov"),
    ],
)
def test_a_period_of_local_steps(sync: str, period: int, outer: str) -> None:
    """R9: rounds are in lockstep as with BSP; only what is between them differs."""
    made = sync_settings(sync)
    assert (made.staleness, made.period, made.outer, made.text()) == (0, period, outer, sync)
    assert made.lockstep
    assert sync_settings(sync, straggler="wait", visibility="eager") == made
    assert sync_settings("bsp").period == 0


@pytest.mark.parametrize(
    "sync",
    [
        *("", "ssp", "ssp:", "ssp:-1", "ssp:1.5", "ssp:٣", "ssp: 2", "SSP:2", "asp", f"ssp:{limits.STALENESS_MAX + 1}"),
        *(
            "local",
            "local:",
            "local:0",
            "local:-1",
            "local:2.5",
            f"local:{limits.PERIOD_MAX + 1}",
            "local:" + "9" * 999,
        ),
        *(
            "sparseloco",
            "sparseloco:0",
            "sparseloco:30,nesterov",
            "muloco",
            "muloco:0",
            "muloco:30,nesterov",
            "local:2,",
            "local:2,average,nesterov",
            "ssp:2,nesterov",
        ),
    ],
)
def test_other_modes_are_refused_with_what_is_possible(sync: str) -> None:
    with pytest.raises(ValueError, match="use bsp; demo; ssp:S with a bound S from 0 to 64, such as ssp:2; or local:H"):
        sync_settings(sync)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync": "bsp", "straggler": "carry"}, "--straggler carry needs a bound above 0, and --sync bsp has none"),
        ({"sync": "ssp:0", "straggler": "carry"}, "--sync ssp:0 has none"),
        ({"sync": "ssp:2", "straggler": "carry", "visibility": "fixed"}, "--visibility fixed needs --straggler wait"),
        ({"sync": "ssp:2", "visibility": "fixed", "shares": "speed"}, "--visibility fixed needs --shares equal"),
        (
            {"sync": "local:8", "straggler": "carry"},
            "--straggler carry needs a bound above 0, and --sync local:8",
        ),
        ({"sync": "local:8", "visibility": "fixed"}, "--visibility fixed is for gradients on their way"),
        (
            {"sync": "local:8", "own": "1"},
            "--own 1 is for gradients on their way, and with --sync local:8",
        ),
        ({"sync": "ssp:2", "straggler": "drop"}, "--straggler drop: use carry or wait"),
        ({"sync": "ssp:2", "visibility": "x"}, "--visibility x: use eager or fixed"),
        ({"sync": "ssp:2", "own": "1/2"}, "--own 1/2: use 0 or 1/m or 1"),
        ({"sync": "ssp:2", "shares": "fair"}, "--shares fair: use equal or speed"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("/", "\\/")):
        sync_settings(**options)


@pytest.mark.parametrize(
    ("own", "coefficient"),
    [(None, 1.0), ("0", 0.0), ("1/m", 0.25), ("1", 1.0)],
)
def test_the_share_of_own_gradients(own: str | None, coefficient: float) -> None:
    """O2: by default own gradients stand in for the mean's."""
    made = sync_settings("ssp:2", own=own)
    assert own_coefficient(made.own, 4) == coefficient


def test_settings_from_another_peer_are_checked() -> None:
    with pytest.raises(ValidationError):
        SyncSettings(staleness=limits.STALENESS_MAX + 1)
    with pytest.raises(ValidationError):
        SyncSettings.load({"staleness": 1, "straggler": "drop"})
