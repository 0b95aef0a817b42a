"""C3: when laptops come or go, the plan of before tells what to go over to: their number is read as another rate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from meshwire.planning.mesh_plan import MeshPlan
from meshwire.planning.price import Pricing
from meshwire.planning.quality import Quality
from meshwire.planning.replan import LOOK_S, RATES, Replanner, StepForecast
from meshwire.sync_modes.settings_changes import SettingsInForce
from tests.wire.planning.test_mesh_plan import PRICES, manifest, station, step

VALUES = 3_000_000
COMPUTES_S = (1.0, 2.0)
MBIT = (160.0, 320.0, 640.0)
OTHERS = ((1, 3), (1, 7))  # beside the device that plans, before and after
WHILE_S = 900.0

Steps = dict[SettingsInForce, float]  # what each takes


@dataclass(frozen=True)
class Outcome:
    """What becomes of a job whose members are others now.

    Attributes:
        regret: how many times as long as need be it takes to a loss, of all that it may go over to.
        kept: the same if it had gone over to nothing.
    """

    regret: float
    kept: float


def outcomes() -> Iterator[Outcome]:
    pricing = Pricing(manifest(VALUES), PRICES)
    for seconds, mbit, (before, after) in product(COMPUTES_S, MBIT, OTHERS):
        plan, there = (MeshPlan(pricing, step(seconds), [station(mbit)] * count) for count in (before, after))
        option = plan.best(plan.everybody, Quality.SAFE)
        forecast = plan.forecast(option, Quality.SAFE)
        if forecast is not None:
            of_those_there = there.forecast(replace(option, others=there.everybody), Quality.SAFE)
            assert of_those_there is not None
            first = option.price.settings
            yield trained(
                forecast,
                SettingsInForce(codec=str(first.codec), period=first.sync.period),
                (steps_of(forecast), range(1 + before)),
                (steps_of(of_those_there), range(1 + after)),
            )


def steps_of(forecast: StepForecast) -> Steps:
    """What is predicted where the links carry what they did."""
    as_planned = RATES.index(1.0)
    return {SettingsInForce(codec=each.codec, period=each.period): each.step_s[as_planned] for each in forecast.each}


def trained(
    forecast: StepForecast,
    first: SettingsInForce,
    before: tuple[Steps, Sequence[int]],
    after: tuple[Steps, Sequence[int]],
) -> Outcome:
    """A while with those that it was planned for, then one with others."""
    replanner, now, now_s, steps = Replanner(forecast), first, 0.0, 0
    for takes_s, members in (before, after):
        until_s = now_s + WHILE_S
        while now_s < until_s:
            change = replanner.look(now_s, steps, now, 1.0, members)
            now = now if change is None else change.settings
            taken = max(1 + int(LOOK_S / takes_s[now]), 5)
            now_s, steps = now_s + taken * takes_s[now], steps + taken
        assert now == first or members is after[1], "as predicted, nothing changes"
    useful_s = {settings: step_s / forecast.worth(settings) for settings, step_s in after[0].items()}
    best_s = min(useful_s.values())
    return Outcome(useful_s[now] / best_s, useful_s[first] / best_s)


def test_a_job_goes_over_to_what_is_near_the_best_for_those_who_are_there() -> None:
    """Of what it may go over to, by a plan that was made for others."""
    found = list(outcomes())
    assert len([one for one in found if one.kept > 1.3]) >= 8, "there is something to go over to"
    assert max(one.regret for one in found) < 1.06
