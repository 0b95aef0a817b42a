"""C3: when laptops come or go, the plan of before tells what to go over to: their number is read as another rate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

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

MODELS = ((300_000, 0.1), (3_000_000, 0.5))  # values, and seconds that a step computes
MBIT = (5.0, 20.0, 60.0, 200.0)
OTHERS = ((3, 1), (1, 3))  # beside the device that plans, before and after
LOOKED_S = 1800.0


@dataclass(frozen=True)
class Outcome:
    """What becomes of a job that was planned for other members.

    Attributes:
        regret: how many times as long as need be it takes to a loss, with what it has gone over to.
        kept: the same if it had gone over to nothing.
    """

    regret: float
    kept: float


def outcomes() -> Iterator[Outcome]:
    for (values, seconds), mbit, (before, after), quality in product(MODELS, MBIT, OTHERS, Quality):
        pricing, trace = Pricing(manifest(values), PRICES), step(seconds)
        plan = MeshPlan(pricing, trace, [station(mbit)] * before)
        option = plan.best(plan.everybody, quality)
        forecast = plan.forecast(option, quality)
        if forecast is not None:
            first, network = option.price.settings, measured_network([station(mbit)] * after)
            everything = [first, *wished(Pinned().settings(pricing.manifest), quality)]
            takes_s = dict(steps_of(first, everything, forecast, pricing, trace, network))
            yield trained(forecast, takes_s, in_force(first), range(1 + after))


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
    forecast: StepForecast, takes_s: dict[SettingsInForce, float], first: SettingsInForce, members: Sequence[int]
) -> Outcome:
    """A while of a job whose steps take this long."""
    useful_s = {settings: step_s / forecast.worth(settings) for settings, step_s in takes_s.items()}
    replanner, now, now_s, steps = Replanner(forecast), first, 0.0, 0
    while now_s < LOOKED_S:
        change = replanner.look(now_s, steps, now, 1.0, members)
        now = now if change is None else change.settings
        taken = 1 + int(LOOK_S / takes_s[now])
        now_s, steps = now_s + taken * takes_s[now], steps + taken
    best_s = min(useful_s.values())
    return Outcome(useful_s[now] / best_s, useful_s[first] / best_s)


def test_a_job_of_other_members_comes_near_what_a_plan_for_them_would_take() -> None:
    """Nearly always; else within what a prediction may be wrong by before anything follows from it."""
    found = list(outcomes())
    regrets, kept = sorted(one.regret for one in found), sorted(one.kept for one in found)
    assert len(found) >= 30
    assert median(regrets) < 1.01
    assert regrets[int(0.9 * len(regrets))] < 1.06
    assert regrets[-1] < 1.4
    assert kept[-1] > 1.6, "there was something to go over to"
