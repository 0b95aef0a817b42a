"""Another codec or period for a job that runs, where its links turn out to be slower or faster than it was planned for.

What a step takes with each of them was predicted at several rates of the links, before the job began. The rate of now
is the one at which the settings of now are predicted to be as fast as they are seen to be; and the best ones at that
rate are those to go over to. So nothing is measured while a job runs (W7), and what else has changed counts as well,
for a member more or less on the same air is a lower or a higher rate.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Annotated

from pydantic import AliasChoices, Field

from meshwire import limits
from meshwire.message_base import Seconds, Wire
from meshwire.sync_modes.settings_changes import SettingsInForce

RATES = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)
"""At which steps are predicted, in parts of what the links carried when the job was planned."""

LOOK_S = 20.0  # over which a step's time is taken, at least
STEPS_MIN = 4  # that are in it, at least
LOOKS = 3  # that have to agree before anything follows: an evaluation, a checkpoint or a call are over sooner
AGREES = 1.33  # times what was predicted: what a home's network carries comes and goes by as much
OF_OTHERS_AGREES = 1.05  # where members have come or gone: their number is no chance
FASTER_MIN = 1.2  # times as fast: for less nothing is changed
LEVEL = 1.05  # times as slow counts as equal
TRIES_AFTER_S = 300.0  # whether the network is what it was; then after twice as long, and so on
SLOWNESS_MIN = 0.5  # of the computing: faster than this it was measured under other conditions

StepSeconds = Annotated[float, Field(gt=0, le=limits.SECONDS_MAX)]


class SettingsForecast(SettingsInForce):
    """What a local step is predicted to take with these settings, by `RATES`.

    Attributes:
        worth: of a sample, when a loss is to be reached (`quality.worth_of`).
    """

    period: Annotated[int, Field(ge=0, le=limits.PERIOD_MAX)] = 0  # forecasts of before had none
    worth: Annotated[float, Field(gt=0, le=1)] = 1.0
    step_s: Annotated[tuple[StepSeconds, ...], Field(min_length=len(RATES), max_length=len(RATES))]

    def is_of(self, settings: SettingsInForce) -> bool:
        """Whether it is what these are predicted to take."""
        return (self.codec, self.period) == (settings.codec, settings.period)


class StepForecast(Wire):
    """What a job's steps are predicted to take with each codec and period that it may go over to.

    Attributes:
        compute_s: of a step, what the slowest member computes.
        each: first what gives up least of the loss; what the job begins with is among them.
    """

    compute_s: Seconds
    each: Annotated[
        tuple[SettingsForecast, ...],
        Field(
            min_length=1,
            max_length=limits.FORECASTS_MAX,
            validation_alias=AliasChoices("each", "codecs"),  # as jobs have it on disks whose plan knew codecs alone
        ),
    ]

    @property
    def period_max(self) -> int:
        """The longest one, at least 1."""
        return max(1, *(one.period for one in self.each))

    def step_s(self, settings: SettingsInForce, rate: float, slowness: float = 1.0) -> float:
        """What a step takes at a rate between those of `RATES`, where computing takes so many times as long."""
        curve = self._curve(settings)
        at = math.log2(RATES[0] / min(max(rate, RATES[-1]), RATES[0]))
        left = min(int(at), len(curve) - 2)
        part = at - left
        between_s = math.pow(curve[left], 1 - part) * math.pow(curve[left + 1], part)
        # Computing is a part of the step, and is never taken to be faster than twice (`SLOWNESS_MIN`).
        return max(between_s * SLOWNESS_MIN, between_s + (slowness - 1) * self.compute_s)

    def of_period(self, period: int) -> "StepForecast":
        """The same without what has another period."""
        return self.model_copy(update={"each": tuple(one for one in self.each if one.period == period)})

    def worth(self, settings: SettingsInForce) -> float:
        """Of a sample with them, as `SettingsForecast` has it."""
        return self._found(settings).worth

    def useful_step_s(self, settings: SettingsInForce, rate: float, slowness: float = 1.0) -> float:
        """What as much of a training takes as a step in step with fp32 is."""
        return self.step_s(settings, rate, slowness) / self.worth(settings)

    def rates_at(
        self, settings: SettingsInForce, step_s: float, slowness: float = 1.0, agrees: float = AGREES
    ) -> tuple[float, float]:
        """The lowest and the highest rate at which a step takes about as long as was seen: several, where computing
        hides what is sent. `agrees`: how many times as long or short it may be."""
        fine = [RATES[0] * 2 ** (-at / 8) for at in range(8 * (len(RATES) - 1) + 1)]
        takes_s = [self.step_s(settings, rate, slowness) for rate in fine]
        fit = [rate for rate, each_s in zip(fine, takes_s, strict=True) if step_s / agrees <= each_s <= step_s * agrees]
        if fit:
            return fit[-1], fit[0]
        if takes_s[-1] < step_s:
            return fine[-1], fine[-1]
        if takes_s[0] > step_s:
            return fine[0], fine[0]
        rate = next(rate for rate, each_s in zip(fine, takes_s, strict=True) if each_s > step_s)
        return rate, rate  # the curve is steeper there than predictions are exact

    def best(self, rate: float, slowness: float = 1.0) -> SettingsInForce:
        """What to take at a rate: of what is about as soon at a loss as the fastest, that which gives up least."""
        takes_s = [self.useful_step_s(one, rate, slowness) for one in self.each]
        level_s = LEVEL * min(takes_s)
        found = next(one for one, each_s in zip(self.each, takes_s, strict=True) if each_s <= level_s)
        return SettingsInForce(codec=found.codec, period=found.period)

    def knows(self, settings: SettingsInForce) -> bool:
        """Whether steps with them were predicted."""
        return any(one.is_of(settings) for one in self.each)

    def gives_up_less(self, one: SettingsInForce, other: SettingsInForce) -> bool:
        """Whether the first settings give up less of the loss than the other ones."""
        return self.each.index(self._found(one)) < self.each.index(self._found(other))

    def _found(self, settings: SettingsInForce) -> SettingsForecast:
        return next(one for one in self.each if one.is_of(settings))

    def _curve(self, settings: SettingsInForce) -> tuple[float, ...]:
        """Never faster at a lower rate, as the prediction may have it by a hair."""
        return tuple(accumulate(self._found(settings).step_s, max))


class Why(StrEnum):
    """Why a job goes over to other settings."""

    SLOWER = "the links carry less than when it was planned"
    FASTER = "the links carry more than before"
    AGAIN = "the links may carry what they did when it was planned"
    NO_HELP = "the change before has not helped: it is not the links that are slow"


@dataclass(frozen=True, slots=True)
class Replanned:
    """Settings to go over to.

    Attributes:
        step_s, expected_s: what a step takes now, and is expected to take then.
    """

    settings: SettingsInForce
    why: Why
    step_s: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class _Change:
    """A change that was asked for: what it was to bring, and which rate was believed before.

    Attributes:
        limit_s: what steps may take at most, or it has not helped.
        why: of it.
    """

    before: SettingsInForce
    after: SettingsInForce
    rate: float
    step_s: float
    limit_s: float
    why: Why


class Replanner:
    """Follows one job, and says when another codec or period would be better, and which.

    Slower or faster than predicted is what three looks in a row show, of 20 s or a few steps each. Where members have
    come or gone, they are compared with the looks of before, and tell another rate by less of a difference. A change
    that does not bring half of what was expected is taken back, and then nothing more is changed. Where so little is
    sent that steps do not tell how much more the links would carry, what the job began with is tried again, ever more
    rarely, and left again where it is slower.

    Args:
        forecast: what is compared with what is seen.
        round_steps: from one round to the next, where no period says more.
    """

    def __init__(self, forecast: StepForecast, round_steps: int = 1) -> None:
        self.forecast = forecast
        self._steps_min = max(STEPS_MIN, 2 * max(round_steps, forecast.period_max))
        self._rate = 1.0  # that is believed
        self._looks: deque[float] = deque(maxlen=LOOKS)  # a step's time in each
        self._began: tuple[float, int] | None = None  # the look of now: when, at which step
        self._members: Sequence[int] = ()
        self._settings: SettingsInForce | None = None
        self._first: SettingsInForce | None = None
        self._changed_s = 0.0
        self._tries_after_s = TRIES_AFTER_S
        self._change: _Change | None = None
        self._gave_up = False
        self._mistaken: float | None = None  # the prediction, by so many times, as the newest looks had it
        self._of_others = False  # the next looks are the first ones of these members

    def look(
        self,
        now_s: float,
        step: int,
        settings: SettingsInForce,
        slowness: float,
        members: Sequence[int],
        *,
        keeps_period: bool = False,
    ) -> Replanned | None:
        """Takes a look, as often as one likes. Returns the settings to go over to, if others are better.

        Args:
            step: how many the learner here has taken, each local one counted.
            settings: in force.
            slowness: how many times as long computing takes as was predicted; what is not known is 1.
            members: whose learners compute; another number of them is another rate of the links.
            keeps_period: it stays what it is.
        """
        if members != self._members:
            self._change, self._gave_up = None, False
            self._of_others = self._mistaken is not None
        if settings != self._settings or members != self._members or self._began is None or step < self._began[1]:
            self._looks.clear()
            self._changed_s = now_s if settings != self._settings else self._changed_s
            self._settings, self._members, self._first = settings, members, self._first or settings
            self._began = (now_s, step)
            return None
        began_s, first = self._began
        if now_s - began_s < LOOK_S or step - first < self._steps_min:
            return None
        self._looks.append((now_s - began_s) / (step - first))
        self._began = (now_s, step)
        if len(self._looks) < LOOKS or self._gave_up or not self.forecast.knows(settings):
            return None
        forecast = self.forecast.of_period(settings.period) if keeps_period else self.forecast
        return self._judge(forecast, now_s, settings, max(slowness, SLOWNESS_MIN))

    def _judge(
        self, forecast: StepForecast, now_s: float, settings: SettingsInForce, slowness: float
    ) -> Replanned | None:
        """What follows from three looks. `forecast`: of what may be gone over to."""
        usual_s = sorted(self._looks)[LOOKS // 2]
        change, self._change = self._change, None
        if change is not None and change.after != settings:
            self._rate = change.rate  # nobody has gone over: it is asked for again, if it is still right
        elif change is not None and usual_s > change.limit_s:
            again = change.why is Why.AGAIN
            self._gave_up, self._rate = not again, change.rate if again else 1.0
            return Replanned(change.before, Why.SLOWER if again else Why.NO_HELP, usual_s, change.step_s)
        mistaken, agrees = (self._mistaken or 1.0, OF_OTHERS_AGREES) if self._of_others else (1.0, AGREES)
        seen = [forecast.rates_at(settings, step_s / mistaken, slowness, agrees) for step_s in self._looks]
        before, rate = self._rate, self._rate_seen(seen)
        predicted_s = forecast.step_s(settings, before if rate is None else rate, slowness)
        self._mistaken = min(max(usual_s / predicted_s, 1 / AGREES), AGREES)
        self._of_others = False
        if rate is None:
            highest = min(high for _, high in seen)
            return self._try_again(forecast, now_s, settings, usual_s, min(highest, 1.0), slowness)
        why = Why.SLOWER if rate < before else Why.FASTER
        self._rate = rate
        best = forecast.best(rate, slowness)
        if best == settings:
            return None
        useful_s, now_useful_s = (forecast.useful_step_s(each, rate, slowness) for each in (best, settings))
        if now_useful_s < FASTER_MIN * useful_s and not forecast.gives_up_less(best, settings):
            return None
        expected_s, takes_s = (forecast.step_s(each, rate, slowness) for each in (best, settings))
        expected_s *= usual_s / takes_s
        limit_s = math.sqrt(usual_s * expected_s) if usual_s >= FASTER_MIN * expected_s else math.inf
        self._change = _Change(settings, best, before, usual_s, limit_s, why)
        return Replanned(best, why, usual_s, expected_s)

    def _try_again(
        self,
        forecast: StepForecast,
        now_s: float,
        settings: SettingsInForce,
        usual_s: float,
        rate: float,
        slowness: float,
    ) -> Replanned | None:
        """What the job began with, where that gives up less, would be as soon at a loss at a rate that the links may
        have, and it is time."""
        first = self._first
        if first is None or not forecast.knows(first) or not forecast.gives_up_less(first, settings):
            return None
        expected_s = forecast.step_s(first, rate, slowness)
        as_soon_s = usual_s * forecast.worth(first) / forecast.worth(settings)
        if now_s < self._changed_s + self._tries_after_s or expected_s > LEVEL * AGREES * as_soon_s:
            return None
        self._tries_after_s *= 2
        self._change = _Change(settings, first, self._rate, usual_s, FASTER_MIN * as_soon_s, Why.AGAIN)
        self._rate = rate
        return Replanned(first, Why.AGAIN, usual_s, expected_s)

    def _rate_seen(self, seen: Sequence[tuple[float, float]]) -> float | None:
        """The rate that is nearest to the one that is believed, and explains what was seen; None: that one does.

        Args:
            seen: the lowest and the highest rate that explain each look.
        """
        if all(high < self._rate for _, high in seen):
            return max(high for _, high in seen)
        if all(low > self._rate for low, _ in seen):
            return min(low for low, _ in seen)
        return None


assert all(after == before / 2 for before, after in pairwise(RATES)), "StepForecast.step_s counts halves"
