"""O12: what a learning rate is multiplied by, by the samples of a round and its number."""

import math

import pytest

from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.rate_rule import WARMUP_ROUNDS, RateRule, parse_rate_rule, rate_rule_of

AT_ONCE = RateRule(kind="linear", warmup=0)


@pytest.mark.parametrize(("samples", "linear"), [(32, 1.0), (64, 2.0), (128, 4.0), (40, 1.25), (7, 1.0)])
def test_the_rate_follows_the_samples_and_is_never_below_the_scripts(samples: int, linear: float) -> None:
    """A short last batch of one learner alone is stepped on as in a script without a job."""
    assert AT_ONCE.factor(1, samples, 32, None) == linear
    assert RateRule(kind="sqrt", warmup=0).factor(1, samples, 32, None) == math.sqrt(linear)


@pytest.mark.parametrize(("kind", "most"), [("linear", 4.0), ("sqrt", 2.0)])
def test_it_rises_from_the_scripts_own_by_equal_amounts(kind: str, most: float) -> None:
    """Goyal et al. 2017, section 2.2: from eta in the first step to k*eta behind the last one of the warm-up."""
    rule = parse_rate_rule(f"{kind},warmup=8")
    factors = [rule.factor(round_, 128, 32, 10**6) for round_ in range(1, 13)]
    assert factors == pytest.approx([1 + (most - 1) * min(8, before) / 8 for before in range(12)])
    assert factors[8:] == [most] * 4, "exactly"


def test_who_leaves_and_returns_is_followed_at_once() -> None:
    rule = parse_rate_rule("linear,warmup=8")
    assert [rule.factor(5, samples, 32, None) for samples in (96, 64, 32)] == [2.0, 1.5, 1.0]


@pytest.mark.parametrize(
    ("epoch", "rounds"),
    [
        (1024, 40),  # of 128 samples: five epochs
        (10**7, WARMUP_ROUNDS),
        (None, WARMUP_ROUNDS),
    ],
)
def test_the_warmup_is_five_epochs_unless_these_are_long(epoch: int | None, rounds: int) -> None:
    rule = parse_rate_rule("linear")
    assert rule.factor(rounds, 128, 32, epoch) < 4.0 == rule.factor(rounds + 1, 128, 32, epoch)
    assert rule.factor(1 + rounds // 2, 128, 32, epoch) == pytest.approx(2.5)


@pytest.mark.parametrize("typed", ["linear", "sqrt", "linear,warmup=0", "sqrt,warmup=200"])
def test_it_is_told_as_it_is_typed(typed: str) -> None:
    assert parse_rate_rule(typed).text() == typed
    assert RateRule.load(parse_rate_rule(typed).model_dump()) == parse_rate_rule(typed)


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "cubic",
        "linear,200",
        "linear,warmup=",
        "linear,warmup=-1",
        "linear,warmup=1.5",
        "linear,warmup=1,a",
        "none,warmup=1",
    ],
)
def test_what_is_none_is_refused_with_what_is_legal(typed: str) -> None:
    with pytest.raises(ValueError, match=r"use linear or sqrt, behind which ,warmup=N"):
        parse_rate_rule(typed)
    with pytest.raises(ValueError, match=r"N from 0 to 10000000"):
        parse_rate_rule("linear,warmup=10000001")


@pytest.mark.parametrize("sync", ["local:8", "diloco:8,stream=2", "local:1,ssp:2", "sma:4", "sparseloco:8", "demo"])
def test_modes_whose_steps_are_not_of_the_rounds_samples_are_refused(sync: str) -> None:
    settings = sync_settings(sync)
    assert rate_rule_of(None, settings) is None
    for typed in ("linear", "sqrt"):
        with pytest.raises(
            ValueError, match=rf"--scale-lr {typed} with --sync {sync}: .* omit it, .*or use --sync bsp"
        ):
            rate_rule_of(typed, settings)


def test_none_is_for_local_steps_which_have_a_rule_of_their_own() -> None:
    """O13. Elsewhere it is so anyway, and nothing of it is in the job."""
    assert rate_rule_of("none", sync_settings("local:8,ssp:1")) == RateRule(kind="none")
    for sync in ("bsp", "ssp:2", "demo"):
        assert rate_rule_of("none", sync_settings(sync)) is None
    assert RateRule(kind="none").factor(9, 128, 32, None) == 1.0


@pytest.mark.parametrize("sync", ["bsp", "ssp:2"])
def test_it_goes_with_rounds_of_gradients(sync: str) -> None:
    assert rate_rule_of("sqrt", sync_settings(sync)) == RateRule(kind="sqrt")
