"""C3: when laptops come or go, the plan of before tells what to go over to: their number is read as another rate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from meshwire.collectives.strategy import collective_for, topology_after
from meshwire.planning.choose import Pinned, wished
from meshwire.planning.measured_link import measured_network
from meshwire.planning.mesh_plan import MeshPlan
from meshwire.planning.network import Network
from meshwire.planning.price import JobSettings, Pricing
from meshwire.planning.quality import Quality
from meshwire.planning.replan import LOOK_S, Replanner, StepForecast
from meshwire.planning.step_trace import StepTrace
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
    everything = wished(Pinned().settings(pricing.manifest), Quality.SAFE)
    for seconds, mbit, (before, after) in product(COMPUTES_S, MBIT, OTHERS):
        trace = step(seconds)
        plan = MeshPlan(pricing, trace, [station(mbit)] * before)
        option = plan.best(plan.everybody, Quality.SAFE)
        forecast = plan.forecast(option, Quality.SAFE)
        if forecast is not None:
            first = option.price.settings
            then, now = (
                dict(steps_of(first, [first, *everything], forecast, pricing, trace, measured_network(links)))
                for links in ([station(mbit)] * before, [station(mbit)] * after)
            )
            yield trained(forecast, in_force(first), (then, range(1 + before)), (now, range(1 + after)))


def in_force(settings: JobSettings) -> SettingsInForce:
    return SettingsInForce(codec=str(settings.codec), period=settings.sync.period)


def steps_of(
    first: JobSettings,
    everything: Sequence[JobSettings],
    forecast: StepForecast,
    pricing: Pricing,
    trace: StepTrace,
    network: Network,
) -> Iterator[tuple[SettingsInForce, float]]:
    """What a step takes with all that a job may go over to, by the topology that it has begun with."""
    for each in everything:
        same = each.sync == first.sync or first.sync.with_period(each.sync.period) == each.sync
        if same and forecast.knows(in_force(each)):
            topology = topology_after(str(first.collective.topology), first.codec, each.codec)
            settings = replace(each, collective=collective_for(each.codec, topology))
            yield in_force(each), pricing.price(settings, (trace,) * len(network.links), network).step_s


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
