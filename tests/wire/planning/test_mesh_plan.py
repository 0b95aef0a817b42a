"""Who should train together, over links that were measured."""

from dataclasses import replace
from itertools import pairwise

import pytest

from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.planning.measured_link import MeasuredLink
from meshwire.planning.mesh_plan import MeshPlan, Option, fastest
from meshwire.planning.price import CodecPrice, Pricing
from meshwire.planning.quality import EVIDENCE, Quality
from meshwire.planning.step_trace import StepTrace
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
