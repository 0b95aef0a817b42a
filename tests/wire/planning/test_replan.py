"""18.3: a job whose links are not what it was planned for goes over to other settings, once, and back when they are."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.planning.replan import (
    FASTER_MIN,
    LOOK_S,
    LOOKS,
    RATES,
    Replanned,
    Replanner,
    SettingsForecast,
    StepForecast,
    Why,
)
from meshwire.sync_modes.settings_changes import SettingsInForce

COMPUTE_S = 0.5
SENDS_S = {"fp32": 2.0, "fp16": 1.0, "int8": 0.5, "int4:sr": 0.25}
"""What each takes at the rate that was planned for; the first ones give up least."""


FAST_LINKS_S = {"fp32": 0.8, "fp16": 0.2, "int8": 0.1, "int4:sr": 0.05}
"""The same where fp16 is hidden behind computing."""


def true_s(codec: str, rate: float, sends_s: Mapping[str, float] = SENDS_S) -> float:
    """In step, with as much of what is sent as half of computing takes hidden behind the backward pass."""
    return COMPUTE_S + max(0.0, sends_s[codec] / rate - 0.5 * COMPUTE_S)


def forecast_of(step_s: Callable[[str, float], float]) -> StepForecast:
    """Exactly what steps will take."""
    return StepForecast(compute_s=COMPUTE_S, each=tuple(curve_of(codec, step_s) for codec in SENDS_S))


def curve_of(
    codec: str, step_s: Callable[[str, float], float], period: int = 0, worth: float = 1.0
) -> SettingsForecast:
    """What a step takes with it at each of the rates that plans are made for, as the function has it."""
    curve = tuple(step_s(codec, rate) for rate in RATES)
    return SettingsForecast(codec=codec, period=period, worth=worth, step_s=curve)


def in_step(codec: str) -> SettingsInForce:
    """With no period."""
    return SettingsInForce(codec=codec, period=0)


FORECAST = forecast_of(true_s)


class Job:
    """Steps one after the other, as fast as the codec of now is, and does what is asked for."""

    def __init__(
        self, codec: str, step_s: Callable[[str, float], float], forecast: StepForecast = FORECAST, period: int = 1
    ) -> None:
        self.codec, self.now_s, self.step = codec, 0.0, 0
        self.members: tuple[int, ...] = (0, 1)
        self.slowness = 1.0
        self.asked: list[Replanned] = []
        self._step_s = step_s
        self._replanner = Replanner(forecast, period)

    def run(self, for_s: float, *, obeys: bool = True) -> list[str]:
        """Returns the codecs that it went over to."""
        asked, end_s = len(self.asked), self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += self._step_s(self.codec, self.now_s)
            self.step += 1
            found = self._replanner.look(self.now_s, self.step, in_step(self.codec), self.slowness, self.members)
            if found is not None:
                self.asked.append(found)
                self.codec = found.settings.codec if obeys else self.codec
        return [found.settings.codec for found in self.asked[asked:]]


def test_as_predicted_nothing_changes() -> None:
    """And what is a little slower or faster is no other network."""
    for part in (1.0, 0.8, 1.25):
        for codec in SENDS_S:
            job = Job(codec, lambda codec, _, part=part: true_s(codec, 1.0) / part)  # type: ignore[misc]
            assert job.run(600) == []


def test_slower_links_bring_a_codec_that_sends_less_and_the_first_one_is_tried_again() -> None:
    """Ever more rarely, while the network stays as slow; and it stays when it is as fast."""
    rate = [1.0]
    fast = forecast_of(lambda codec, rate: true_s(codec, rate, FAST_LINKS_S))
    job = Job("fp16", lambda codec, _: true_s(codec, rate[0], FAST_LINKS_S), fast)
    assert job.run(120) == []
    rate[0] = 0.125
    assert job.run((LOOKS + 1) * (LOOK_S + 5) + 20) == ["int4:sr"]
    told = job.asked[0]
    assert told.why is Why.SLOWER
    assert told.step_s == pytest.approx(true_s("fp16", 0.125, FAST_LINKS_S))
    assert told.expected_s == pytest.approx(true_s("int4:sr", 0.125, FAST_LINKS_S), rel=0.3)
    assert job.run(2600) == ["fp16", "int4:sr"] * 3, "after 5, 10 and 20 minutes"
    assert job.asked[1].why is Why.AGAIN
    rate[0] = 1.0
    assert job.run(2600) == ["fp16"]
    assert job.run(600) == []


A_LITTLE_SLOWER = 0.49
"""Steps of fp16 on fast links take 1.32 times as long, and none of what sends less does."""


def test_what_is_tried_again_and_is_slower_is_left_again() -> None:
    """Also by no more than what a prediction may be wrong by: it was seen what the other one takes."""
    rate = [1.0]
    fast = forecast_of(lambda codec, rate: true_s(codec, rate, FAST_LINKS_S))
    job = Job("fp16", lambda codec, _: true_s(codec, rate[0], FAST_LINKS_S), fast)
    rate[0] = 0.125
    assert job.run(200) == ["int4:sr"]
    rate[0] = A_LITTLE_SLOWER
    assert job.run(600) == ["fp16", "int4:sr"]
    assert [found.why for found in job.asked] == [Why.SLOWER, Why.AGAIN, Why.SLOWER]


def test_other_members_are_another_network_by_less_of_a_difference() -> None:
    """Compared with the looks of before, be these a little off the prediction, too."""
    for mistaken in (1.0, 1.25):
        rate = [1.0]
        fast = forecast_of(lambda codec, rate: true_s(codec, rate, FAST_LINKS_S))

        def step_s(codec: str, _: float, mistaken: float = mistaken, rate: list[float] = rate) -> float:
            return mistaken * true_s(codec, rate[0], FAST_LINKS_S)

        job = Job("fp16", step_s, fast)
        assert job.run(120) == []
        job.members = (0, 1, 2)
        assert job.run(120) == [], "nothing has become slower"
        rate[0] = A_LITTLE_SLOWER
        job.members = (0, 1, 2, 3)
        assert job.run(120) == ["int8"]
    rate[0] = 1.0
    job = Job("fp16", lambda codec, _: true_s(codec, rate[0], FAST_LINKS_S), fast)
    assert job.run(120) == []
    rate[0] = A_LITTLE_SLOWER
    assert job.run(120) == [], "among the same it may pass"


def test_where_steps_show_that_links_carry_more_it_goes_over_at_once() -> None:
    """From a codec that takes more of the processor than it spares of the network."""
    rate = [1 / 32]

    def step_s(codec: str, rate: float) -> float:
        return true_s(codec, rate) + (1.0 if codec == "int4:sr" else 0.0)

    job = Job("int4:sr", lambda codec, _: step_s(codec, rate[0]), forecast_of(step_s))
    assert job.run(200) == [], "it is the best of all at that rate"
    rate[0] = 1.0
    assert job.run(200) == ["int8"]
    assert job.asked[-1].why is Why.FASTER
    assert job.run(200) == []


def test_an_evaluation_and_a_call_are_over_sooner() -> None:
    """Of three looks all have to agree."""

    def pauses(codec: str, now_s: float) -> float:
        return true_s(codec, 1.0) + (45.0 if now_s % 150 < true_s(codec, 1.0) else 0.0)

    assert Job("fp16", pauses).run(3000) == []


def test_what_is_not_the_links_fault_is_tried_once_and_taken_back() -> None:
    """A disk that is full of work, say: no codec helps, and the one that gives up least stays."""
    job = Job("fp16", lambda codec, _: true_s(codec, 1.0) + 4.0)
    assert job.run(2000) == ["int4:sr", "fp16"]
    assert [each.why for each in job.asked] == [Why.SLOWER, Why.NO_HELP]
    job.members = (0, 1, 2)
    assert job.run(600) == ["int4:sr", "fp16"], "with another number of members it may be the links"


def test_slow_computing_is_no_slow_network() -> None:
    job = Job("fp16", lambda codec, _: true_s(codec, 1.0) + 3 * COMPUTE_S)
    job.slowness = 4.0
    assert job.run(900) == []


def test_who_is_not_heard_asks_again() -> None:
    job = Job("fp16", lambda codec, _: true_s(codec, 0.1))
    asked = job.run(300, obeys=False)
    assert len(asked) >= 2
    assert set(asked) == {"int4:sr"}


def test_a_learner_or_members_that_come_begin_the_looks_anew() -> None:
    job = Job("fp16", lambda codec, _: true_s(codec, 0.25))
    for again in range(8):
        job.members = (0, 1, 2) if again % 2 else (0, 1)
        assert job.run(LOOKS * LOOK_S - 5) == []
        job.step = 0
        job.run(5)
    assert job.run(LOOKS * (LOOK_S + 5) + 30) == ["int4:sr"]


def test_a_look_holds_two_periods() -> None:
    """Between the rounds of `local:H` steps are fast: a look that ends between them would say nothing."""
    steps = [0]

    def period(_codec: str, _: float) -> float:
        steps[0] += 1
        return 10.0 if steps[0] % 20 == 0 else 1.2

    job = Job("fp16", period, period=20)
    job.run(200)
    assert job._replanner._looks, "of 40 steps or so"
    assert all(each == pytest.approx((19 * 1.2 + 10) / 20, rel=0.1) for each in job._replanner._looks)


def test_a_learner_that_was_started_again_is_looked_at_from_then_on() -> None:
    """Its steps count from 1."""
    job = Job("fp16", lambda codec, _: true_s(codec, 0.25))
    job.step = 10_000
    job.run(50)
    job.step = 0
    assert job.run((LOOKS + 1) * (LOOK_S + 5)) == ["int4:sr"]


def test_a_lower_rate_is_never_faster() -> None:
    """Where a prediction has it so, by a hair, the rate that was seen would be none."""
    bent = SettingsForecast(codec="fp16", period=0, step_s=(1.0, 1.2, 1.1, 1.3, 2.0, 4.0, 8.0, 16.0))
    forecast = StepForecast(compute_s=1.0, each=(bent,))
    takes_s = [round(forecast.step_s(in_step("fp16"), 4.0 / 2 ** (at / 10)), 9) for at in range(71)]
    assert takes_s == sorted(takes_s)


@settings(max_examples=10)
@given(
    st.sampled_from(list(SENDS_S)),
    st.floats(min(RATES), max(RATES)),
    st.lists(st.floats(0.85, 1.15), min_size=7, max_size=7),
)
def test_it_comes_to_rest_near_the_best(first: str, rate: float, noise: list[float]) -> None:
    """Whatever the links carry, and however exact each look is: few changes, and ever fewer."""
    steps = [0]

    def noisy(codec: str, _: float) -> float:
        steps[0] += 1
        return true_s(codec, rate) * noise[steps[0] // 20 % 7]

    job = Job(first, noisy)
    assert len(job.run(1500)) <= 5, "one, and twice there and back"
    began_s, began = job.now_s, job.step
    assert len(job.run(1200)) <= 4, "there and back, while the first one is tried again"
    best_s = min(true_s(codec, rate) for codec in SENDS_S)
    unchanged = first == job.codec and true_s(first, rate) < 1.6 * true_s(first, 1.0)
    assert unchanged or (job.now_s - began_s) / (job.step - began) <= 2.2 * best_s


def test_a_forecast_that_contradicts_itself_breaks_nothing() -> None:
    """It is another device's word: steps are said to be shorter than what is computed in them."""
    forecast = FORECAST.model_copy(update={"compute_s": 1e6})
    job = Job("fp16", lambda codec, _: true_s(codec, 0.1), forecast)
    job.slowness = 0.5
    job.run(900)
    assert forecast.step_s(in_step("fp32"), 1.0, 0.5) > 0


def test_a_codec_of_which_nothing_was_predicted_is_left_alone() -> None:
    job = Job("fp16", lambda *_: 30.0)
    job.codec = "onebit"
    assert job.run(900) == []


def test_rates_are_told_as_far_as_steps_show_them() -> None:
    """Where computing hides what is sent, many rates explain a step; where nothing does, the nearest one does."""
    low, high = FORECAST.rates_at(in_step("int4:sr"), true_s("int4:sr", 1.0))
    assert high == RATES[0]
    assert low < 1.0
    low, high = FORECAST.rates_at(in_step("fp32"), true_s("fp32", 0.25))
    assert low < 0.25 < high < 0.5
    assert FORECAST.rates_at(in_step("fp32"), 1e6) == (RATES[-1], RATES[-1])
    assert FORECAST.rates_at(in_step("fp32"), 1e-6) == (RATES[0], RATES[0])


def local_s(period: int, rate: float) -> float:
    """A local step, with its part of a round that nothing hides."""
    return COMPUTE_S + 0.4 / rate / period


PERIODS = {2: 1.0, 4: 0.97, 8: 0.88}
"""By local steps in a round, what a sample is worth."""
OF_PERIODS = StepForecast(
    compute_s=COMPUTE_S,
    each=tuple(
        curve_of("nf4", lambda _, rate, period=period: local_s(period, rate), period, worth)  # type: ignore[misc]
        for period, worth in PERIODS.items()
    ),
)


def run_periods(
    period: int, rate_at: Callable[[float], float], for_s: float = 600.0, *, keeps_period: bool = False
) -> list[int]:
    """Which periods a job goes over to, at what its links carry at each time."""
    replanner, now_s, found = Replanner(OF_PERIODS), 0.0, []
    for step in range(10_000):
        now_s += local_s(period, rate_at(now_s))
        settings = SettingsInForce(codec="nf4", period=period)
        asked = replanner.look(now_s, step, settings, 1.0, (0, 1), keeps_period=keeps_period)
        if asked is not None:
            period = asked.settings.period
            found.append(period)
        if now_s > for_s:
            break
    return found


def test_slower_links_bring_a_longer_period_and_the_first_one_is_tried_again() -> None:
    assert run_periods(2, lambda _: 1.0) == []
    assert run_periods(2, lambda now_s: 1 / 16 if now_s < 200 else 1.0) == [8, 2]
    assert run_periods(2, lambda now_s: 1 / 16 if now_s < 200 else 1.0, keeps_period=True) == []


def test_a_period_that_is_to_stay_is_no_reason_to_keep_the_codec() -> None:
    curves = [curve_of(codec, true_s, period, 1.0) for codec in ("fp32", "int4:sr") for period in (2, 8)]
    slow = Replanner(StepForecast(compute_s=COMPUTE_S, each=tuple(curves)))
    found = [
        slow.look(400.0 * at, 20 * at, SettingsInForce(codec="fp32", period=2), 1.0, (0,), keeps_period=True)
        for at in range(LOOKS + 2)
    ]
    assert {(one.settings.codec, one.settings.period) for one in found if one is not None} == {("int4:sr", 2)}


def test_a_forecast_of_before_periods_is_read() -> None:
    """As jobs have it on disks: else none of them could be gone on with."""
    old = {"compute_s": 0.5, "codecs": [{"codec": "int8", "step_s": [1.0] * len(RATES)}]}
    forecast = StepForecast.load(old)
    assert forecast.knows(in_step("int8"))
    assert forecast.worth(in_step("int8")) == 1.0
    assert StepForecast.load(forecast.model_dump()) == forecast


def test_a_period_that_is_faster_by_no_more_than_its_samples_are_worth_less_is_not_taken() -> None:
    """At this rate a step with a period of 4 takes a quarter longer than with one of 8, and a sixth until a loss."""
    four, eight = (SettingsInForce(codec="nf4", period=period) for period in (4, 8))
    rate = 0.25
    assert OF_PERIODS.step_s(four, rate) > 1.25 * OF_PERIODS.step_s(eight, rate)
    assert OF_PERIODS.useful_step_s(four, rate) < FASTER_MIN * OF_PERIODS.useful_step_s(eight, rate)
    assert run_periods(4, lambda _: rate) == []


def test_a_look_holds_two_of_the_longest_periods() -> None:
    replanner = Replanner(OF_PERIODS)
    for step in range(16):
        replanner.look(step * LOOK_S, step, SettingsInForce(codec="nf4", period=2), 1.0, (0, 1))
    assert not replanner._looks
    replanner.look(16 * LOOK_S, 16, SettingsInForce(codec="nf4", period=2), 1.0, (0, 1))
    assert len(replanner._looks) == 1
