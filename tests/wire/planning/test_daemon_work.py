"""What is fitted to measured rounds is what playing them gives back."""

from dataclasses import replace

import pytest

from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.planning.choose import job_settings
from meshwire.planning.daemon_work import MANY_VALUES, MeasuredRounds, fitted
from meshwire.planning.network import NO_WORK, DaemonWork, cables
from meshwire.planning.price import Binds, CodecPrice, Pricing
from tests.wire.planning.test_mesh_plan import manifest, step

PRICES = {codec: CodecPrice(1e-9, 1e-9) for codec in ("fp32", "fp16", "int8", "topk:0.1")}
FEW = dict.fromkeys(PRICES, 0.4e-3)
MANY = {"fp32": 40e-3, "fp16": 80e-3, "int8": 150e-3}
ONE_TENSOR = ModelManifest(
    tensors=(TensorSpec(name="t", shape=(MANY_VALUES,), dtype="float32", kind="parameter"),), optimizer="SGD"
)


def counted_s(codec: str, prices: dict[str, CodecPrice], work: DaemonWork) -> float:
    network = replace(cables(2, 1e12, 0.0), work=work)
    return Pricing(ONE_TENSOR, prices).processor_s(job_settings(codec, "bsp"), network)


@pytest.mark.parametrize("codec", MANY)
def test_a_round_that_was_measured_is_counted_as_it_was(codec: str) -> None:
    work, prices = fitted(PRICES, MeasuredRounds(FEW, MANY))
    assert counted_s(codec, prices, work) == pytest.approx(MANY[codec], rel=0.01)
    assert prices["fp32"].rest_s == 0
    assert prices["topk:0.1"] == PRICES["topk:0.1"], "not measured"


def test_twice_as_slow_a_processor_takes_twice_as_long_for_all() -> None:
    slow_prices = {codec: CodecPrice(2e-9, 2e-9) for codec in PRICES}
    slow = MeasuredRounds({c: 2 * s for c, s in FEW.items()}, {c: 2 * s for c, s in MANY.items()})
    work, prices = fitted(PRICES, MeasuredRounds(FEW, MANY))
    slow_work, slower = fitted(slow_prices, slow)
    for once, twice in ((work.byte_s, slow_work.byte_s), (work.message_s, slow_work.message_s)):
        assert twice == pytest.approx(2 * once)
    assert slow_work.round_s == pytest.approx(2 * work.round_s)
    assert slower["int8"].rest_s == pytest.approx(2 * prices["int8"].rest_s)


def test_figures_below_what_is_counted_take_nothing_away() -> None:
    work, prices = fitted(PRICES, MeasuredRounds(FEW, dict.fromkeys(MANY, 1e-6)))
    assert work.byte_s == 0
    assert {price.rest_s for price in prices.values()} == {0}


@pytest.mark.parametrize("sync", ["bsp", "ssp:2"])
def test_no_bound_hides_what_a_daemon_does_for_every_round(sync: str) -> None:
    """A tiny model on a fast network: rounds follow each other no faster than a daemon can begin and end them."""
    work = DaemonWork(0.0, 0.0, 5e-3)
    network = replace(cables(2, 1e12, 0.0), work=work)
    pricing, steps, settings = Pricing(manifest(10_000), PRICES), (step(1e-3),) * 2, job_settings("fp32", sync)
    price = pricing.price(settings, steps, network)
    assert price.step_s >= work.round_s
    assert price.against_one < 0.5
    assert pricing.waits_for(settings, steps, network) is Binds.PROCESSOR
    assert pricing.price(settings, steps, replace(network, work=NO_WORK)).against_one > 2 * price.against_one


def test_a_daemon_takes_cores_from_a_training_that_uses_all() -> None:
    """The more of them the step has, the less it is held up."""
    network = replace(cables(2, 1e12, 0.0), work=DaemonWork(round_s=0.01))
    pricing, settings = Pricing(manifest(1_000_000), PRICES), job_settings("fp32", "ssp:2")
    few, many = (step(0.2).model_copy(update={"threads": count}) for count in (1, 16))
    assert pricing.price(settings, (few,) * 2, network).step_s > pricing.price(settings, (many,) * 2, network).step_s
