"""Parts of a model that take turns (R9, T1): which tensors each has, and which rounds carry it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwire.codecs.registry import parse_codec
from meshwire.model.fragments import check_fragments, cut_evenly, fragments_travel, manifest_under
from meshwire.model.manifest import ModelManifest, TensorSpec, first_difference
from meshwire.model.masks import masks_of, travel_of
from meshwire.model.plan import plan_buckets
from meshwire.model.plans_by_round import RoundPlans
from meshwire.model.schedule import Stretch, Travel, refusal
from meshwire.sync_modes.mode import sync_settings
from tests.wire.model.test_travel import settings_of

COUNTS = (1200, 7, 9000, 33, 30)


def spec(name: str, count: int, kind: str = "parameter", dtype: str = "float32") -> TensorSpec:
    return TensorSpec.load({"name": name, "shape": (count,), "dtype": dtype, "kind": kind})


def manifest() -> ModelManifest:
    parameters = [spec(f"w{at}", count) for at, count in enumerate(COUNTS)]
    others = (spec("empty", 0), spec("fixed", 5, "frozen"), spec("mean", 20, "buffer"), spec("n", 1, "buffer", "int64"))
    return ModelManifest(tensors=(parameters[0], *others[:2], *parameters[1:], *others[2:]), optimizer="SGD")


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_every_part_has_its_turn_with_all_of_its_values_and_float_buffers_all(parts: int) -> None:
    """Each trained tensor is in one of P rounds after each other, whole; then they come again, for ever."""
    model = manifest_under(manifest(), sync_settings(f"diloco:{4 * parts},stream={parts}"))
    plans = RoundPlans(plan_buckets(model, 4096))
    for first in (1, 10**9 * parts + 1):
        carried: list[str] = []
        for number in range(first, first + parts):
            plan = plans.of(number)
            names = [span.name for span in plan.spans if span.count and span.name != "mean"]
            assert names
            carried += names
            whole = {span.name: span for span in plans.whole.spans}
            assert all(span == whole[span.name] for span in plan.spans if span.name in (*names, "mean"))
            assert settings_of(plans, parts).buckets_of(number) == len(plan.buckets)
            assert not plans.ends_with(number), "M1: its memory is needed again"
        assert sorted(carried) == [f"w{at}" for at in range(len(COUNTS))]
    assert len(plans.all) == parts, "there is no round in which all values travel"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.data())
def test_the_largest_part_is_as_small_as_it_can_be(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))

    def best(first: int, left: int) -> int:
        if left == 1:
            return sum(sizes[first:])
        ends = range(first + 1, len(sizes) - left + 2)
        return min(max(sum(sizes[first:end]), best(end, left - 1)) for end in ends)

    runs = cut_evenly(sizes, parts)
    assert (len(runs), sum(runs), min(runs) > 0) == (parts, len(sizes), True)
    starts = [sum(runs[:at]) for at in range(parts)]
    assert max(sum(sizes[at : at + run]) for at, run in zip(starts, runs, strict=True)) == best(0, parts)


def test_more_parts_than_tensors_are_refused() -> None:
    """With those that can be: they are as many as divide the period, too."""
    with pytest.raises(ValueError, match=r"5 tensors that are trained.*use stream=1, 2, 3$"):
        fragments_travel(manifest().tensors, sync_settings("local:6,stream=6"))


def test_one_part_is_all_of_the_model() -> None:
    assert manifest_under(manifest(), sync_settings("local:6,stream=1")) == manifest()


def test_parts_belong_to_the_mode_and_masks_to_the_model() -> None:
    in_parts = manifest_under(manifest(), sync_settings("local:6,stream=2"))
    assert manifest_under(in_parts, sync_settings("bsp")) == manifest()
    assert manifest_under(in_parts, sync_settings("local:6,stream=3")).travel != in_parts.travel
    assert in_parts.state_digest() == manifest().state_digest(), "J2: a job may be resumed with other parts"
    assert "from round" in str(first_difference(in_parts, manifest()))
    matrix = TensorSpec(name="m", shape=(40, 30), dtype="float32", kind="parameter")
    masks = masks_of("0.5", sync_settings("bsp"), parse_codec("fp32"))
    masked = ModelManifest(tensors=(matrix,), optimizer="SGD", travel=travel_of((matrix,), masks))
    assert masked.travel is not None
    assert manifest_under(masked, sync_settings("bsp")) == masked


@pytest.mark.parametrize(
    ("codec", "sync", "partial", "told"),
    [
        ("int8", "diloco:8,stream=4,tau=2", False, None),
        ("topk:0.1,gather", "local:8,stream=2", False, None),
        ("twobit", "muloco:8,stream=2", False, None),
        ("powersgd", "local:8,stream=1", False, None),
        ("powersgd", "local:8", True, None),
        ("powersgd", "local:8,stream=2", False, "--codec powersgd.*use another, such as int8 or topk"),
        ("lgc", "local:8,stream=2", False, "use another, such as int8 or topk"),
        ("fp32", "local:8,stream=2", True, "does not go with --masks or mt.Progressive"),
    ],
)
def test_what_does_not_go_with_parts_is_named(codec: str, sync: str, partial: bool, told: str | None) -> None:
    settings = sync_settings(sync)
    if told is None:
        check_fragments(settings, parse_codec(codec), partial=partial)
        return
    with pytest.raises(ValueError, match=told):
        check_fragments(settings, parse_codec(codec), partial=partial)


def test_a_bound_is_refused_still_where_no_learner_knows_its_round() -> None:
    assert refusal(sync_settings("local:8,stream=2,tau=2"), parse_codec("fp32")) is None
    assert refusal(sync_settings("local:8,ssp:1"), parse_codec("fp32")) is not None


@pytest.mark.parametrize(("every", "whole_every"), [(1, 0), (2, 3)])
def test_stretches_that_cannot_come_again_are_refused(every: int, whole_every: int) -> None:
    stretches = (Stretch(first=1, counts=(1,)), Stretch(first=2, counts=(2,), whole_every=whole_every))
    with pytest.raises(ValidationError, match="do not come again"):
        Travel(stretches=stretches, every=every)
