"""Another codec for a job that runs, where its links turn out to be slower or faster than when it was planned.

What a step takes with each codec was predicted at several rates of the links, before the job began. The rate of now is
the one at which the codec of now is predicted to be as fast as it is seen to be; and the best codec at that rate is the
one to go over to. So nothing is measured while a job runs (W7), and what else has changed counts as well, for a member
more or less on the same air is a lower or a higher rate.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Annotated

from pydantic import Field

from meshwire import limits
from meshwire.message_base import Seconds, Wire
from meshwire.sync_modes.settings_changes import CodecName

RATES = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)
"""At which steps are predicted, in parts of what the links carried when the job was planned."""

LOOK_S = 20.0  # over which a step's time is taken, at least
STEPS_MIN = 4  # that are in it, at least
LOOKS = 3  # that have to agree before anything follows: an evaluation, a checkpoint or a call are over sooner
AGREES = 1.33  # of what was predicted: nine of ten predictions are nearer than that (tests/bench/results/predicted.md)
WORTH = 1.2  # times as fast: less is not worth a change
LEVEL = 1.05  # times as slow counts as equal
TRIES_AFTER_S = 300.0  # whether the network is what it was; then after twice as long, and so on
SLOWNESS_MIN = 0.5  # of the computing: faster than this it was measured under other conditions

StepSeconds = Annotated[float, Field(gt=0, le=limits.SECONDS_MAX)]


class CodecForecast(Wire):
    """What a step is predicted to take with a codec, by `RATES`."""

    codec: CodecName
    step_s: Annotated[tuple[StepSeconds, ...], Field(min_length=len(RATES), max_length=len(RATES))]


class StepForecast(Wire):
    """What a job's steps are predicted to take with each codec that it may go over to.

    Attributes:
        compute_s: of a step, what the slowest member computes.
        codecs: first those that give up least of the loss; the job's first one is among them.
    """

    compute_s: Seconds
    codecs: Annotated[tuple[CodecForecast, ...], Field(min_length=1, max_length=limits.FORECAST_CODECS_MAX)]

    def step_s(self, codec: str, rate: float, slowness: float = 1.0) -> float:
        """What a step takes at a rate between those of `RATES`, where computing takes so many times as long."""
        curve = self._curve(codec)
        at = math.log2(RATES[0] / min(max(rate, RATES[-1]), RATES[0]))
        left = min(int(at), len(curve) - 2)
        part = at - left
        between_s = math.pow(curve[left], 1 - part) * math.pow(curve[left + 1], part)
        # Computing is a part of the step, and is never taken to be faster than twice (`SLOWNESS_MIN`).
        return max(between_s * SLOWNESS_MIN, between_s + (slowness - 1) * self.compute_s)

    def rates_at(self, codec: str, step_s: float, slowness: float = 1.0) -> tuple[float, float]:
        """The lowest and the highest rate at which the codec takes about as long as was seen: several, where computing
        hides what is sent."""
        fine = [RATES[0] * 2 ** (-at / 8) for at in range(8 * (len(RATES) - 1) + 1)]
        takes_s = [self.step_s(codec, rate, slowness) for rate in fine]
        fit = [rate for rate, each_s in zip(fine, takes_s, strict=True) if step_s / AGREES <= each_s <= step_s * AGREES]
        if fit:
            return fit[-1], fit[0]
        if takes_s[-1] < step_s:
            return fine[-1], fine[-1]
        if takes_s[0] > step_s:
            return fine[0], fine[0]
        rate = next(rate for rate, each_s in zip(fine, takes_s, strict=True) if each_s > step_s)
        return rate, rate  # the curve is steeper there than predictions are exact

    def best(self, rate: float, slowness: float = 1.0) -> str:
        """The codec to take at a rate: of those that are about as fast as the fastest, the one that gives up least."""
        takes_s = {each.codec: self.step_s(each.codec, rate, slowness) for each in self.codecs}
        level_s = LEVEL * min(takes_s.values())
        return next(codec for codec, each_s in takes_s.items() if each_s <= level_s)

    def knows(self, codec: str) -> bool:
        """Whether steps with it were predicted."""
        return any(each.codec == codec for each in self.codecs)

    def gives_up_less(self, one: str, other: str) -> bool:
        """Whether the first codec gives up less of the loss than the other one."""
        order = [each.codec for each in self.codecs]
        return order.index(one) < order.index(other)

    def _curve(self, codec: str) -> tuple[float, ...]:
        """Never faster at a lower rate, as the prediction may have it by a hair."""
        found = next(each.step_s for each in self.codecs if each.codec == codec)
        return tuple(accumulate(found, max))


class Why(StrEnum):
    """Why a job goes over to another codec."""

    SLOWER = "the links carry less than when it was planned"
    FASTER = "the links carry more than before"
    AGAIN = "the links may carry what they did when it was planned"
    NO_HELP = "the change before has not helped: it is not the links that are slow"


@dataclass(frozen=True, slots=True)
class Replanned:
    """A codec to go over to.

    Attributes:
        step_s, expected_s: what a step takes now, and is expected to take then.
    """

    codec: str
    why: Why
    step_s: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class _Change:
    """A change that was asked for: what it was to bring, and which rate was believed before."""

    before: str
    after: str
    rate: float
    step_s: float
    expected_s: float
    faster: bool


class Replanner:
    """Follows one job, and says when another codec would be better, and which.

    Slower or faster than predicted is what three looks in a row show, of 20 s or a few steps each. A change that does
    not bring half of what was expected is taken back, and then nothing more is changed. Where a codec sends so little
    that its steps do not tell how much more the links would carry, the first one is tried again, ever more rarely.

    Args:
        forecast: what is compared with what is seen.
        period: local steps to a round, at least 1.
    """

    def __init__(self, forecast: StepForecast, period: int = 1) -> None:
        self.forecast = forecast
        self._steps_min = max(STEPS_MIN, 2 * period)
        self._rate = 1.0  # that is believed
        self._looks: deque[float] = deque(maxlen=LOOKS)  # a step's time in each
        self._began: tuple[float, int] | None = None  # the look of now: when, at which step
        self._members: Sequence[int] = ()
        self._codec: str | None = None
        self._first: str | None = None
        self._changed_s = 0.0
        self._tries_after_s = TRIES_AFTER_S
        self._change: _Change | None = None
        self._gave_up = False

    def look(self, now_s: float, step: int, codec: str, slowness: float, members: Sequence[int]) -> Replanned | None:
        """Takes a look, as often as one likes. Returns the codec to go over to, if another one is better.

        Args:
            step: of the learner here.
            codec: in force.
            slowness: how many times as long computing takes as was predicted; what is not known is 1.
            members: whose learners compute; another number of them is another rate of the links.
        """
        if members != self._members:
            self._change, self._gave_up = None, False
        if codec != self._codec or members != self._members or self._began is None or step < self._began[1]:
            self._looks.clear()
            self._changed_s = now_s if codec != self._codec else self._changed_s
            self._codec, self._members, self._first = codec, members, self._first or codec
            self._began = (now_s, step)
            return None
        began_s, first = self._began
        if now_s - began_s < LOOK_S or step - first < self._steps_min:
            return None
        self._looks.append((now_s - began_s) / (step - first))
        self._began = (now_s, step)
        if len(self._looks) < LOOKS or self._gave_up or not self.forecast.knows(codec):
            return None
        return self._judge(now_s, codec, max(slowness, SLOWNESS_MIN))

    def _judge(self, now_s: float, codec: str, slowness: float) -> Replanned | None:
        """What follows from three looks."""
        forecast, usual_s = self.forecast, sorted(self._looks)[LOOKS // 2]
        change, self._change = self._change, None
        if change is not None and change.after != codec:
            self._rate = change.rate  # nobody has gone over: it is asked for again, if it is still right
        elif change is not None and change.faster and usual_s > math.sqrt(change.step_s * change.expected_s):
            self._gave_up, self._rate = True, 1.0
            return Replanned(change.before, Why.NO_HELP, usual_s, change.step_s)
        seen = [forecast.rates_at(codec, step_s, slowness) for step_s in self._looks]
        before, rate = self._rate, self._rate_seen(seen)
        if rate is None:
            highest = min(high for _, high in seen)
            return self._try_again(now_s, codec, usual_s, min(highest, 1.0), slowness)
        why = Why.SLOWER if rate < before else Why.FASTER
        self._rate = rate
        best = forecast.best(rate, slowness)
        if best == codec:
            return None
        expected_s, takes_s = (forecast.step_s(each, rate, slowness) for each in (best, codec))
        faster = takes_s >= WORTH * expected_s
        if not faster and not forecast.gives_up_less(best, codec):
            return None
        self._change = _Change(codec, best, before, usual_s, usual_s * expected_s / takes_s, faster)
        return Replanned(best, why, usual_s, self._change.expected_s)

    def _try_again(self, now_s: float, codec: str, usual_s: float, rate: float, slowness: float) -> Replanned | None:
        """The job's first codec, where it gives up less, would be as fast at a rate that the links may have, and it is
        time."""
        forecast, first = self.forecast, self._first
        if first is None or not forecast.knows(first) or not forecast.gives_up_less(first, codec):
            return None
        expected_s = forecast.step_s(first, rate, slowness)
        if now_s < self._changed_s + self._tries_after_s or expected_s > LEVEL * AGREES * usual_s:
            return None
        self._tries_after_s *= 2
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
