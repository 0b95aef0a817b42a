"""How the members keep in step: what a person typed, made into settings or refused (R7, R8, O2, X4a)."""

import re
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
        staleness=0, straggler="wait", visibility="eager", own="1", shares="speed"
    )
    assert sync_settings("ssp:2") == SyncSettings(
        staleness=2, straggler="carry", visibility="eager", own="1", shares="speed"
    )


def test_fixed_visibility_brings_what_it_needs() -> None:
    """R8, X4a: reproducible, so nobody is carried and no speed decides."""
    made = sync_settings("ssp:2", visibility="fixed")
    assert (made.straggler, made.shares) == ("wait", "equal")
    assert made.lockstep


@pytest.mark.parametrize("sync", ["bsp", "bsp,accumulate=4", "ssp:2", "local:8", "diloco:8,stream=4,tau=1", "sma:2"])
def test_shares_follow_speed_unless_equal_ones_are_typed(sync: str) -> None:
    """X4a: a laptop that is slow, or becomes so, holds nobody up, whoever has chosen the mode."""
    assert sync_settings(sync).shares == "speed"
    assert sync_settings(sync, shares="equal").shares == "equal"


def test_shares_are_equal_where_speed_decides_nothing_or_something_else() -> None:
    """R8, R9: a run that comes out the same again; periods that end early, where a slower one takes fewer steps."""
    assert sync_settings("ssp:2", visibility="fixed").shares == "equal"
    assert sync_settings("local:8,ssp:1").shares == "equal"
    assert sync_settings("local:8,ssp:1", "wait").shares == "speed"


@pytest.mark.parametrize("straggler", ["carry", "wait"])
@pytest.mark.parametrize("shares", ["equal", "speed"])
def test_learners_are_in_lockstep_where_none_is_passed_over(straggler: str, shares: str) -> None:
    """X2, X4: samples go by turns only if every member takes part in every round, with however many."""
    made = sync_settings("ssp:1", straggler=straggler, shares=shares)
    assert made.lockstep == (straggler == "wait")


@pytest.mark.parametrize("bound", range(0, limits.STALENESS_MAX + 1, 16))
def test_text_is_what_is_typed(bound: int) -> None:
    made = sync_settings(f"ssp:{bound}")
    assert made.staleness == bound
    assert sync_settings(made.text()) == made


@pytest.mark.parametrize(
    ("sync", "period", "outer"),
    [
        ("local:1", 1, (1.0, 0.0)),
        ("local:30", 30, (1.0, 0.0)),
        ("local:30,after=200", 30, (1.0, 0.0)),
        ("diloco:500", 500, (0.7, 0.9)),
        ("diloco:500,rate=0.8", 500, (0.8, 0.9)),
        ("diloco:30,rate=1,momentum=0.95", 30, (1.0, 0.95)),
        ("diloco:30,momentum=0", 30, (0.7, 0.0)),
        ("diloco:30,rate=1.234567", 30, (1.234567, 0.9)),
        ("sparseloco:30", 30, (1.0, 0.0)),
        ("muloco:30", 30, (0.7, 0.9)),
        ("sma:1", 1, (1.0, 0.5)),
        ("sma:8,momentum=0", 8, (1.0, 0.0)),
    ],
)
def test_a_period_of_local_steps(sync: str, period: int, outer: tuple[float, float]) -> None:
    """R9: rounds are in lockstep as with BSP; only what is between them differs."""
    made = sync_settings(sync)
    assert (made.staleness, made.period, (made.outer_rate, made.outer_momentum), made.text()) == (
        0,
        period,
        outer,
        sync,
    )
    assert sync_settings(f"{sync},ssp:0") == made
    assert made.lockstep
    assert sync_settings(sync, straggler="wait", visibility="eager") == made
    assert sync_settings("bsp").period == 0


def test_diloco_without_its_outer_step_is_local_sgd() -> None:
    assert sync_settings("diloco:8,rate=1,momentum=0") == sync_settings("local:8")


@pytest.mark.parametrize(("outer", "sync"), [("average", "local:8"), ("nesterov", "diloco:8")])
def test_what_earlier_versions_have_written_is_read(outer: str, sync: str) -> None:
    """In files of jobs and checkpoints: the outer step by a name."""
    now = sync_settings(sync).model_dump()
    before = {name: value for name, value in now.items() if not name.startswith("outer_")} | {"outer": outer}
    assert SyncSettings.load(before) == sync_settings(sync)
    for wrong in ({"outer": "adam"}, {"outer": ["average"]}, {"outer": outer, "outer_rate": 0.5}):
        with pytest.raises(ValidationError):
            SyncSettings.load(before | wrong)


@pytest.mark.parametrize("sync", ["local:8", "diloco:8,rate=0.5", "sparseloco:8", "muloco:8"])
def test_periods_that_overlap_with_their_exchange(sync: str) -> None:
    """R9: a bound goes with each period; who is slower takes fewer local steps, so batches stay equal."""
    made = sync_settings(f"{sync},ssp:2")
    assert made.text() == f"{sync},ssp:2"
    assert made == sync_settings(sync, shares="equal").model_copy(update={"staleness": 2, "straggler": "carry"})
    assert made.ends_early
    assert (made.shares, made.lockstep) == ("equal", False)
    assert not sync_settings(f"{sync},ssp:2", "wait").ends_early
    assert not sync_settings(sync).ends_early
    fixed = sync_settings(f"{sync},ssp:2", visibility="fixed", own="0")
    assert (fixed.straggler, fixed.own, fixed.lockstep) == ("wait", "0", True)


@pytest.mark.parametrize(
    ("sync", "steps"),
    [("diloco:8,stream=4", 2), ("local:8,stream=8", 1), ("muloco:8,stream=1", 8), ("diloco:8,rate=0.5,stream=2", 4)],
)
def test_parts_of_a_model_take_turns(sync: str, steps: int) -> None:
    """R9: each has a round every H steps, so a round comes every H/P. With a delay one is on its way."""
    made = sync_settings(sync)
    assert (made.text(), made.round_steps, made.steps_in(1), made.overlaps) == (sync, steps, steps, False)
    assert (made.staleness, made.lockstep, made.ends_early) == (0, True, False)
    for delay in (1, steps):
        late = sync_settings(f"{sync},tau={delay}")
        assert late.text() == f"{sync},tau={delay}"
        assert late.overlaps
        assert (late.staleness, late.straggler, late.own, late.ends_early) == (1, "wait", "0", False)
        assert late.lockstep


def test_parts_may_be_drawn() -> None:
    """R9: then each round has the mean of all weights, and is waited for."""
    made = sync_settings("local:64,stream=32,random")
    assert made.text() == sync_settings("local:64,random,stream=32").text() == "local:64,stream=32,random"
    assert made.model_copy(update={"random": False}) == sync_settings("local:64,stream=32")
    for changes in ({"fragments": 1}, {"fragments": 0}, {"muon": True}, {"outer_momentum": 0.5}, {"sparse": True}):
        with pytest.raises(ValidationError):
            SyncSettings.load(made.model_dump() | changes)
    with pytest.raises(ValidationError):
        SyncSettings.load(sync_settings("local:8,stream=2,tau=1").model_dump() | {"random": True})


@pytest.mark.parametrize(
    "changes",
    [
        {"fragments": 3},
        {"period": 0},
        {"delay": 5},
        {"delay": 1, "fragments": 0},
        {"staleness": 0},
        {"staleness": 2},
        {"straggler": "carry"},
        {"delay": 0},
        {"after": 2},
        {"sparse": True},
        {"central": True},
        {"fragments": 0, "delay": 0, "central": True},
        {"fragments": 0, "delay": 0, "staleness": 0, "period": 0, "central": True},
    ],
)
def test_parts_from_another_peer_are_checked(changes: dict[str, Any]) -> None:
    """It may send what nobody can type."""
    made = sync_settings("local:8,stream=2,tau=1").model_dump()
    assert SyncSettings.load(made) == sync_settings("local:8,stream=2,tau=1")
    with pytest.raises(ValidationError):
        SyncSettings.load(made | changes)


def test_a_period_of_one_step_cannot_end_early() -> None:
    assert not SyncSettings(period=8, straggler="carry").ends_early, "a peer may send what nobody can type"
    assert sync_settings("local:8,after=7,ssp:1").text() == "local:8,after=7,ssp:1"
    made = sync_settings("local:1,ssp:2")
    assert (made.ends_early, made.straggler, made.shares) == (False, "carry", "speed")


def test_gradients_of_several_steps_make_a_round() -> None:
    """O6: the mode of one step, but for that; its loss is that of the mean, of a larger batch."""
    made = sync_settings("bsp,accumulate=4")
    assert (made.accumulate, made.round_steps, made.steps_in(1)) == (4, 4, 4)
    assert made.text() == "bsp,accumulate=4"
    assert made.measured_as == "bsp"
    assert made.model_copy(update={"accumulate": 1}) == sync_settings("bsp") == sync_settings("bsp,accumulate=1")
    for changes in ({"period": 8}, {"staleness": 1}, {"signs": True}):
        with pytest.raises(ValidationError, match="gradients of 4 steps"):
            SyncSettings.model_validate(made.model_dump() | changes)


@pytest.mark.parametrize("sync", ["local:8,gossip=1", "diloco:8,gossip=7", "local:8,after=3,gossip=2,over=ring"])
def test_weights_may_be_mixed_within_a_period(sync: str) -> None:
    """R9: rounds and their rules are as without."""
    made = sync_settings(sync)
    assert made.text() == sync
    assert made.model_copy(update={"gossip": 0, "over": "pairs"}) == sync_settings(sync.split(",gossip")[0])
    assert sync_settings("local:8,gossip=2,over=pairs") == sync_settings("local:8,gossip=2")


@pytest.mark.parametrize(
    "changes",
    [
        *({"gossip": 8}, {"gossip": -1}, {"gossip": 0}, {"over": "star"}, {"staleness": 1}, {"period": 0}),
        *({"fragments": 2}, {"central": True}, {"sparse": True}, {"muon": True}, {"signs": True}),
    ],
)
def test_mixing_from_another_peer_is_checked(changes: dict[str, Any]) -> None:
    """It may send what nobody can type."""
    made = sync_settings("local:8,gossip=2,over=ring").model_dump()
    assert SyncSettings.load(made) == sync_settings("local:8,gossip=2,over=ring")
    with pytest.raises(ValidationError):
        SyncSettings.load(made | changes)


def test_an_average_that_own_weights_are_drawn_to_waits_for_its_round() -> None:
    assert sync_settings("sma") == sync_settings("sma:1,momentum=0.5,ssp:0")
    assert sync_settings("sma:8,momentum=0").model_copy(update={"central": False}) == sync_settings("local:8")
    with pytest.raises(ValueError, match=r"--sync sma:8,ssp:1: .* use --sync sma:8, which waits, or local:8,ssp:1"):
        sync_settings("sma:8,ssp:1")


def test_rounds_without_a_bound_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"--sync async: rounds without any bound .* use a large one, such as ssp:8"):
        sync_settings("async")


@pytest.mark.parametrize(
    "sync",
    [
        *("", "ssp", "ssp:", "ssp:-1", "ssp:1.5", "ssp:٣", "ssp: 2", "SSP:2", "asp", f"ssp:{limits.STALENESS_MAX + 1}"),
        *(
            "local",
            "local:",
        ),
        *(
            "sparseloco",
            "sparseloco:30,rate=1",
            "muloco",
            "muloco:30,momentum=0",
            "local:2,",
            "diloco:2,after=5",
            "local:2,rate=1",
            "local:2,ssp",
            "ssp:2,local:2",
            "diloco:8,nesterov",
            "sma:",
            "sma:8,rate=0.7",
            "sma:8,after=2",
            "ssp:2,rate=1",
            "ssp:2,stream=2",
            "bsp,stream=2",
            "demo,stream=2",
            "local,stream=2",
            "ssp:2,accumulate=2",
            "demo,accumulate=2",
            "local:2,accumulate=2",
            "bsp,accumulate",
            "bsp,accumulate=0",
            "bsp,accumulate=501",
            "bsp,accumulate=2,accumulate=2",
            "bsp,ssp:2",
            "local:2,stream=2,random=1",
            "bsp,gossip=2",
            "ssp:2,gossip=2",
            "ssp:2,random",
        ),
    ],
)
def test_other_modes_are_refused_with_what_is_possible(sync: str) -> None:
    with pytest.raises(ValueError, match="use bsp; demo; ssp:S with a bound S from 0 to 64, such as ssp:2; or local:H"):
        sync_settings(sync)


@pytest.mark.parametrize(
    ("syncs", "said"),
    [
        (
            ("local:0", "local:-1", "local:2.5", f"local:{limits.PERIOD_MAX + 1}", "local:" + "9" * 999),
            "local:H takes a whole number from 1 to 500",
        ),
        (("sparseloco:0",), "sparseloco:H takes a whole number from 1 to 500"),
        (("muloco:0,stream=2",), "muloco:H takes a whole number from 1 to 500"),
        (("sma:0", "sma:learners", "sma:0,momentum=0"), "sma:H takes a whole number from 1 to 500"),
        (
            ("local:2,after=0", "local:2,after=", "local:2,after=100000"),
            "after=N takes a whole number from 1 to 99999",
        ),
        (("local:2,ssp:65", "local:2,ssp:", "local:2,ssp:-1"), "ssp:S takes a whole number from 0 to 64"),
        (
            ("local:2,stream=0", "local:2,stream=65", "local:2,stream", "local:2,stream=-1", "local:2,stream=1.5"),
            "stream=P takes a whole number from 1 to 64",
        ),
        (("local:2,stream=2,tau=0", "local:2,stream=2,tau"), "tau=T takes a whole number from 1 to 500"),
        (
            ("diloco:8,rate", "diloco:8,rate=", "diloco:8,rate=0", "diloco:8,rate=11", "diloco:8,rate=-1",
             "diloco:8,rate=1e3", "diloco:8,rate=٣"),
            "rate=R takes a number above 0 and up to 10, such as 0.7",
        ),
        (("diloco:8,momentum=1", "diloco:8,momentum="), "momentum=M takes a number from 0 to 0.999, such as 0.9"),
        (("sma,momentum=1.5", "sma:8,momentum=1"), "momentum=M takes a number from 0 to 0.999, such as 0.5"),
        (("local:2,after=1,after=2",), "after is there twice"),
        (("local:2,ssp:1,ssp:1",), "ssp is there twice"),
        (("diloco:8,rate=0.7,rate=0.7",), "rate is there twice"),
        (("local:2,stream=2,stream=2",), "stream is there twice"),
        (("local:8,gossip=0", "local:8,gossip=501", "local:8,gossip"), "gossip=G takes a whole number from 1 to 500"),
        (("local:8,gossip=2,gossip=3",), "gossip is there twice"),
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_is_named_with_those_that_can(syncs: tuple[str, ...], said: str) -> None:
    for sync in syncs:
        with pytest.raises(ValueError, match=f"^--sync {re.escape(sync)}: {re.escape(said)}"):
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
        (
            {"sync": "local:8", "visibility": "fixed"},
            "--visibility fixed is for rounds that a laptop does not wait for",
        ),
        (
            {"sync": "local:8", "own": "1"},
            "--own 1 is for rounds .* with --sync local:8 it waits for each: omit it, or use --sync local:8,ssp:1",
        ),
        (
            {"sync": "local:8,ssp:1", "shares": "speed"},
            "--shares speed with --sync local:8,ssp:1: a slower laptop takes fewer local steps",
        ),
        (
            {"sync": "diloco:8,stream=3"},
            "3 parts cannot take turns within 8 steps.* use stream=1, 2, 4, 8, or another H",
        ),
        ({"sync": "diloco:8,stream=4,tau=3"}, "begins after 2 steps.* use tau from 1 to 2"),
        ({"sync": "local:8,tau=2"}, "tau=T is of parts that take turns: use local:8,stream=4,tau=2"),
        ({"sync": "diloco:6,tau=2"}, "use diloco:6,stream=3,tau=2, or omit it"),
        ({"sync": "diloco:4,tau=3"}, "use diloco:4,stream=1,tau=3, or omit it"),
        ({"sync": "diloco:4,tau=5"}, "use a tau of at most H, 4, or omit it"),
        ({"sync": "sparseloco:8,stream=2"}, "omit ,stream=, or use diloco:H or local:H with it"),
        ({"sync": "sparseloco:8,tau=2"}, "omit ,tau=, or use diloco:H or local:H with it"),
        ({"sync": "sma,stream=2"}, "omit ,stream=, or use local:H with it"),
        ({"sync": "local:8,after=3,stream=2"}, ",stream= does not go with ,after=3"),
        ({"sync": "local:8,stream=2,ssp:1"}, ",stream= does not go with ,ssp:1"),
        ({"sync": "local:8,random"}, ",random is of two and more parts .* use local:8,stream=P,random"),
        ({"sync": "local:8,stream=1,random"}, ",random is of two and more parts"),
        ({"sync": "local:8,stream=2,tau=1,random"}, "omit ,tau=1"),
        ({"sync": "diloco:8,stream=2,random"}, "an outer step .* would move the others: use local:8,stream=P,random"),
        ({"sync": "muloco:8,stream=2,random"}, "would move the others"),
        ({"sync": "sma:8,random"}, "would move the others"),
        ({"sync": "local:8,gossip=8"}, "behind 8 steps comes the round.* use gossip from 1 to 7, or omit it"),
        ({"sync": "local:1,gossip=1"}, "each step is a round.* use a longer period, or omit gossip"),
        ({"sync": "local:8,over=ring"}, "use ,gossip=G with it"),
        ({"sync": "local:8,gossip=2,over=star"}, "over takes pairs or ring"),
        ({"sync": "local:8,gossip=2,ssp:1"}, ",ssp:1 has others: omit one"),
        ({"sync": "local:8,gossip=2,stream=2"}, ",stream=2 has others: omit one"),
        ({"sync": "sma:8,gossip=2"}, "use local:8 or diloco:8 with ,gossip=2, or omit it"),
        ({"sync": "muloco:8,gossip=2"}, "use local:8 or diloco:8 with ,gossip=2, or omit it"),
        ({"sync": "sparseloco:8,gossip=2"}, "use local:8 or diloco:8 with ,gossip=2, or omit it"),
        ({"sync": "local:8,gossip=2", "own": "1"}, "it waits for each: omit it"),
        ({"sync": "sparta:8"}, "typed as local:64,stream=64,random"),
        ({"sync": "dga:8,8"}, "use local:K,ssp:1, of s of them local:K,ssp:s; of T steps, .* local:K,stream=1,tau=T"),
        *(
            ({"sync": name}, "an exact round.* use local:32,gossip=4")
            for name in ("gossip", "push-sum", "noloco:8", "sgp")
        ),
        ({"sync": "post-local:8"}, "typed as local:H,after=N"),
        ({"sync": "local:8,stream=2,tau=1", "own": "1"}, "--own 1 with --sync .* is settled there"),
        ({"sync": "local:8,stream=2,tau=1", "visibility": "fixed"}, "--visibility fixed with --sync .* is settled"),
        ({"sync": "local:8,stream=2,tau=1", "straggler": "carry"}, "--straggler carry needs a bound"),
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
