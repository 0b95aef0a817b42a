"""Who should train together, over links that were measured."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.planning.choose import Pinned, job_settings
from meshwire.planning.measured_link import MeasuredLink
from meshwire.planning.mesh_plan import ACCUMULATED, LARGER_FROM, MeshPlan, Option, fastest
from meshwire.planning.price import CodecPrice, Pricing
from meshwire.planning.quality import EVIDENCE, Quality, worth_of
from meshwire.planning.replan import RATES
from meshwire.planning.step_trace import StepTrace
from meshwire.sync_modes.settings_changes import SettingsInForce
from tests.wire.planning.test_measured_link import link

PRICES = {tried.codec: CodecPrice(0.5e-9, 0.5e-9) for tried in EVIDENCE}
MBIT = 125_000.0


def manifest(values: int) -> ModelManifest:
    specs = (
        TensorSpec(name=f"t{at}", shape=(values // 1000, 100), dtype="float32", kind="parameter") for at in range(10)
    )
    return ModelManifest(tensors=tuple(specs), optimizer="AdamW")


def step(seconds: float) -> StepTrace:
    return StepTrace(
        samples=8,
        steps=20,
        threads=4,
        before_s=0.3 * seconds,
        backward_s=0.6 * seconds,
        after_s=0.1 * seconds,
        copy_s=0.001,
        ready=tuple(1 - at / 10 for at in range(10)),
    )


def station(mbit: float) -> MeasuredLink:
    """One in a cell, whose access point is on the radio alone."""
    rate = mbit * MBIT
    return link(rate, rate, (rate / 2, rate / 2), (False, False))


def plan(values: int, seconds: float, *mbit: float) -> MeshPlan:
    return MeshPlan(Pricing(manifest(values), PRICES), step(seconds), [station(each) for each in mbit])


def test_every_group_of_a_few_and_the_fastest_of_many() -> None:
    few = plan(10_000, 1.0, 10, 20, 30)
    assert few.groups() == [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    many = plan(10_000, 1.0, 10, 60, 30, 20, 50)
    assert many.groups() == [(1,), (1, 4), (1, 2, 4), (1, 2, 3, 4), (0, 1, 2, 3, 4)]
    assert all(set(before) < set(group) for before, group in pairwise(many.groups()))


def test_one_that_is_far_away_is_left_at_home() -> None:
    """A model that just pays on 100 Mbit/s: one station with 1 Mbit/s takes the air from both others."""
    mesh = plan(1_000_000, 1.0, 100, 1)
    options = list(mesh.options(Quality.SAFE))
    choice = fastest(options)
    assert choice is not None
    assert choice.others == (0,)
    everybody = next(option for option in options if option.others == (0, 1))
    assert everybody.price.against_one < 1 < choice.price.against_one


def test_alone_where_no_group_is_faster() -> None:
    mesh = plan(3_000_000, 0.15, 10, 5)
    options = list(mesh.options(Quality.EXACT))
    assert fastest(options) is None
    assert max(option.price.against_one for option in options) < 1
    assert fastest([mesh.best((0,), Quality.FAST)]) is not None, "and what would do it is known"


def test_all_where_computing_is_what_takes_long_and_no_flag_without_a_need() -> None:
    mesh = plan(100_000, 20.0, 50, 50)
    choice = fastest(list(mesh.options(Quality.SAFE)))
    assert choice is not None
    assert choice.others == (0, 1)
    assert (str(choice.price.settings.codec), choice.price.settings.sync.text()) == ("fp32", "bsp")
    assert choice.price.settings == mesh.default((0, 1)).price.settings


def test_a_third_that_gains_nothing_is_not_asked() -> None:
    mesh = plan(100_000, 20.0, 50, 50)
    two, three = mesh.default((0,)), mesh.default((0, 1))

    def at(option: Option, samples_s: float) -> Option:
        return replace(option, price=replace(option.price, samples_s=samples_s))

    level = [at(two, 100.0), at(three, 102.0)]
    found = fastest(level)
    assert found is not None
    assert found is level[0]
    assert fastest([at(two, 100.0), at(three, 104.0)]) is not None
    assert fastest([at(two, 1.04 * two.price.alone_samples_s)]) is None
    assert fastest([at(two, 1.06 * two.price.alone_samples_s)]) is not None


@pytest.mark.parametrize("quality", list(Quality))
def test_no_option_gives_up_more_than_is_wished_for(quality: Quality) -> None:
    for option in plan(1_000_000, 0.2, 20, 50).options(quality):
        assert quality.allows(option.price.settings.quality)
        assert option.price.members == 1 + len(option.others)


# --- laptops that differ ---


def unequal(seconds: float, *speeds: float | None, shares: bool = True, device: str = "cpu") -> MeshPlan:
    links = [station(200).model_copy(update={"peer_speed": speed}) for speed in speeds]
    trace = step(seconds).model_copy(update={"device": device})
    return MeshPlan(Pricing(manifest(10_000), PRICES), trace, links, shares=shares)


def test_batches_follow_speed_and_so_the_slow_one_holds_nobody_up() -> None:
    """One of three is 3x slower: with equal batches it sets the pace; with shares nearly all speed is had."""
    by_speed = unequal(10.0, 1.0, 1 / 3).best((0, 1), Quality.EXACT)
    equal = unequal(10.0, 1.0, 1 / 3, shares=False).best((0, 1), Quality.EXACT)
    assert (by_speed.uneven, equal.uneven) == (True, False)
    assert equal.price.against_one == pytest.approx(1.0, abs=0.05)
    assert 0.85 * (2 + 1 / 3) < by_speed.price.against_one < 2 + 1 / 3


def test_speeds_that_scatter_as_measurements_do_change_no_batch() -> None:
    option = unequal(10.0, 0.85).best((0,), Quality.EXACT)
    assert not option.uneven
    assert option.price.against_one == pytest.approx(2 * 0.85, abs=0.05)


def test_one_alone_is_the_fastest_one_where_it_is_so_beyond_doubt() -> None:
    mesh = unequal(0.02, 0.5, 4.0)
    assert mesh.fastest_alone == 2
    assert mesh.step_alone.samples_s == pytest.approx(4 * 8 / 0.02)
    assert mesh.default((0,)).price.alone_samples_s == mesh.step_alone.samples_s, "also for a group without it"
    assert unequal(0.02, 1.2).fastest_alone == 0


@pytest.mark.parametrize(("speed", "device"), [(None, "cpu"), (4.0, "cuda:0")])
def test_what_is_not_known_is_taken_to_be_as_fast(speed: float | None, device: str) -> None:
    mesh = unequal(10.0, speed, device=device)
    assert mesh.fastest_alone == 0
    assert not mesh.best((0,), Quality.EXACT).uneven


# --- hubs (H1) ---


def with_hub(values: int, seconds: float, to_hub: MeasuredLink, *others: MeasuredLink, **pinned: Any) -> MeshPlan:
    pricing = Pricing(manifest(values), PRICES)
    return MeshPlan(pricing, step(seconds), others, Pinned(**pinned), hubs=[to_hub])


def cable(mbit: float) -> MeasuredLink:
    rate = mbit * MBIT
    return link(rate, rate, (rate, rate), (True, True))


def to_wired_hub(mbit: float) -> MeasuredLink:
    """From a station in a cell to one on a cable, both ways in turn on one air, which each byte crosses once."""
    rate = mbit * MBIT
    return link(rate, rate, (rate / 2, rate / 2), (False, True))


def test_in_a_cell_rounds_go_by_a_hub_on_a_cable() -> None:
    """Four stations and a hub take a third less air than the four alone: 1.5 times as fast where air is all that counts
    (tests/bench/results/hub.md)."""
    stations = [station(50)] * 3
    mesh = with_hub(3_000_000, 0.01, to_wired_hub(100), *stations)
    without = plan(3_000_000, 0.01, 50, 50, 50)
    for quality in (Quality.EXACT, Quality.SAFE):
        best, ring = mesh.best((0, 1, 2), quality), without.best((0, 1, 2), quality)
        assert (best.hubs, ring.hubs) == (True, None)
        assert str(best.price.settings.collective.topology) == "star:4"
        assert (best.price.members, len(best.price.sent_bytes)) == (4, 4)
    fp32, alone = mesh.default((0, 1, 2)).price, without.default((0, 1, 2)).price
    assert alone.step_s / fp32.step_s == pytest.approx(1.5, rel=0.1)


def test_with_and_without_a_hub_this_laptop_is_as_near_to_the_access_point() -> None:
    """The same side of the air, known by the hub's link: a far laptop that plans for two that are near."""
    rate = 1e6 / 0.35
    near, hub = link(rate, rate, (rate / 2, rate / 2), (False, False)), to_wired_hub(1 / 0.3 / 0.125)
    mesh = MeshPlan(Pricing(manifest(1_000_000), PRICES), step(0.1), [near, near], hubs=[hub])
    own = [mesh._network((0, 1), hubs=hubs).links[0].air_bytes_s for hubs in (True, False)]
    assert own == pytest.approx([1e6 / 0.3] * 2, rel=0.06)
    assert own[0] == own[1]


def test_on_a_switch_the_hub_is_left_out() -> None:
    """All that the laptops send comes over its one cable."""
    mesh = with_hub(3_000_000, 0.01, cable(100), cable(100), cable(100))
    best = mesh.best((0, 1), Quality.EXACT)
    assert best.hubs is False
    assert str(best.price.settings.collective.topology) == "ring"
    assert mesh.default((0, 1)).hubs is True, "which --no-plan takes in"
    assert mesh.default((0, 1)).price.step_s > 1.2 * best.price.step_s


def test_where_it_costs_nothing_the_hub_is_taken_in_for_it_keeps_the_state() -> None:
    assert with_hub(10_000, 20.0, cable(100), cable(100)).best((0,), Quality.SAFE).hubs is True


def test_a_topology_that_was_typed_leaves_hubs_out() -> None:
    mesh = with_hub(3_000_000, 0.01, to_wired_hub(100), station(50), topology="ring")
    assert mesh.best((0,), Quality.EXACT).hubs is None


# --- members on cables ---


def with_cables(*cables: bool, typed: str | None = None, ordered: bool = True) -> MeshPlan:
    """A laptop on the air, and others on cables or not, whose steps are short."""
    links = [to_wired_hub(100) if cable else station(50) for cable in cables]
    return MeshPlan(Pricing(manifest(3_000_000), PRICES), step(0.01), links, Pinned(topology=typed), ordered=ordered)


@pytest.mark.parametrize(
    ("cables", "topology", "faster"),
    [((False, True, False), "star:2", 1.5), ((True, False, True), "sharded:1,3", 1.5)],
)
def test_in_a_cell_rounds_go_by_the_laptops_on_cables(cables: tuple[bool, ...], topology: str, faster: float) -> None:
    """One of four: 6 vectors cross the air where a ring has 9; two: 4 for 6, with two in the ring next to each other or
    not."""
    best = with_cables(*cables).best((0, 1, 2), Quality.EXACT)
    ring = with_cables(*cables, typed="ring").best((0, 1, 2), Quality.EXACT)
    assert (str(best.price.settings.collective.topology), str(ring.price.settings.collective.topology)) == (
        topology,
        "ring",
    )
    assert ring.price.step_s / best.price.step_s >= 0.95 * faster


def test_where_ranks_are_somebody_elses_no_topology_names_them() -> None:
    best = with_cables(False, True, False, ordered=False).best((0, 1, 2), Quality.EXACT)
    assert not best.price.settings.collective.topology.named


def test_among_equals_none_is_in_the_middle() -> None:
    on_cables = MeshPlan(Pricing(manifest(3_000_000), PRICES), step(0.01), [cable(100)] * 2)
    for mesh in (with_cables(False, False), on_cables):
        assert not mesh.best((0, 1), Quality.EXACT).price.settings.collective.topology.named


# --- while a job runs ---


def test_a_job_goes_over_to_no_codec_that_does_not_go_its_way() -> None:
    """C3: a topology that is not a codec's usual one stays."""
    mesh = plan(1_000_000, 0.2, 1000, 1000)
    option = mesh.best((0,), Quality.EXACT)
    gathering = replace(option, price=replace(option.price, settings=job_settings("fp32", "bsp", "gather")))
    forecast = mesh.forecast(gathering, Quality.SAFE)
    assert forecast is not None
    assert {each.codec for each in forecast.each} == {"fp32", "fp16", "bf16"}


@pytest.mark.parametrize("hub", [False, True])
def test_what_a_job_may_go_over_to_is_forecast_at_every_rate(hub: bool) -> None:
    """18.3: the codecs of the wished quality in the same mode, those first that give up least, of which what is within
    the noise is not one more than another; as they are priced."""
    stations = [station(500), station(500)]
    mesh = with_hub(1_000_000, 0.3, to_wired_hub(1000), *stations) if hub else plan(1_000_000, 0.3, 500, 500)
    option = mesh.best((0, 1), Quality.SAFE)
    assert option.hubs is (True if hub else None)
    forecast = mesh.forecast(option, Quality.SAFE)
    assert forecast is not None
    names = [each.codec for each in forecast.each]
    assert [names[0], {*names[1:3]}, {*names[3:]}] == [
        *("fp32", {"fp16", "bf16"}),
        {"int8", "int8:sr", "int4", "int4:sr", "nf4"},
    ]
    chosen = str(option.price.settings.codec)
    assert forecast.step_s(SettingsInForce(codec=chosen, period=0), 1.0) == pytest.approx(option.price.step_s)
    assert forecast.compute_s == option.price.compute_s
    for each in forecast.each:
        assert all(slow >= fast * 0.999 for fast, slow in pairwise(each.step_s))
    slowest, slow = (forecast.each[0].step_s[RATES.index(rate)] for rate in (1 / 32, 1 / 16))
    assert slowest == pytest.approx(2 * slow, rel=0.15)
    assert forecast.best(1 / 32).codec == "int4"
    assert forecast.best(4.0).codec != "int4"


def test_codecs_that_a_job_cannot_go_over_to_or_from_are_not_forecast() -> None:
    """C3: they build on what they have sent before."""
    mesh = plan(1_000_000, 0.3, 20, 20)
    option = mesh.best((0, 1), Quality.FAST)
    bsp = replace(option, price=replace(option.price, settings=job_settings("fp32", "bsp")))
    forecast = mesh.forecast(bsp, Quality.FAST)
    assert forecast is not None
    names = [each.codec for each in forecast.each]
    assert {"fp16", "int8", "nf4"} <= {*names}
    assert not {"powersgd", "lgc", "dgc"} & {*names}
    lowrank = replace(option, price=replace(option.price, settings=job_settings("powersgd", "bsp")))
    assert mesh.forecast(lowrank, Quality.FAST) is None


def test_periods_that_a_job_may_go_over_to_are_forecast_too() -> None:
    """C3: of the same mode, by what they are worth; where the period was typed, none but that; and in step none."""
    mesh = plan(1_000_000, 0.3, 100)
    option = mesh.best((0,), Quality.FAST)

    def periods(sync: str, mesh: MeshPlan = mesh) -> dict[int, float]:
        settings = job_settings("int8", sync)
        begins = replace(option, price=replace(option.price, settings=settings))
        forecast = mesh.forecast(begins, Quality.FAST)
        assert forecast is not None
        assert {one.codec for one in forecast.each} <= {str(tried.codec) for tried in EVIDENCE}
        return {one.period: one.worth for one in forecast.each if one.codec == "int8"}

    found = periods("local:4")
    assert found == {4: worth_of("int8", "local:4"), 8: worth_of("int8", "local:8")}
    assert found[8] < found[4] < 1
    assert periods("bsp") == {0: 1.0}
    typed = MeshPlan(Pricing(manifest(1_000_000), PRICES), step(0.3), [station(100)], Pinned(sync="local:4"))
    assert [*periods("local:4", typed)] == [4]


def test_a_larger_batch_is_told_where_it_brings_much_and_never_chosen() -> None:
    """O6: on a slow link rounds of several steps pay; where computing is what takes long, they bring nothing."""
    slow = plan(1_000_000, 0.2, 20)
    best = slow.best((0,), Quality.SAFE)
    larger = slow.larger_batch(best)
    assert larger is not None
    assert larger.price.settings.sync.accumulate in ACCUMULATED
    assert larger.price.settings.codec == best.price.settings.codec
    assert larger.price.samples_s >= LARGER_FROM * best.price.samples_s
    assert slow.larger_batch(larger) is None
    assert all(option.price.settings.sync.accumulate == 1 for option in slow.options(Quality.FAST))
    sparse = job_settings(None, "sparseloco:8")
    assert slow.larger_batch(replace(best, price=replace(best.price, settings=sparse))) is None, "never tried in step"
    quick = plan(100_000, 20.0, 50)
    assert quick.larger_batch(quick.best((0,), Quality.SAFE)) is None


def test_a_typed_accumulation_is_priced_with_each_codec() -> None:
    found = plan(1_000_000, 0.2, 20)
    typed = MeshPlan(Pricing(manifest(1_000_000), PRICES), step(0.2), [station(20)], Pinned(sync="bsp,accumulate=8"))
    plain, larger = found.best((0,), Quality.EXACT), typed.best((0,), Quality.EXACT)
    assert larger.price.settings.sync.text() == "bsp,accumulate=8"
    assert larger.price.settings.quality is Quality.EXACT
    assert larger.price.samples_s > plain.price.samples_s
