"""Parts that take turns and are drawn (R9, T1, `,random`): which values each has, and what they do not go with."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.model.drawn_parts import DrawnParts
from meshwire.model.fragments import check_fragments, fragments_travel, manifest_under
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import plan_buckets
from meshwire.model.plans_by_round import RoundPlans
from meshwire.model.schedule import refusal
from meshwire.sync_modes.mode import sync_settings

SIZES = st.lists(st.integers(1, 90), min_size=1, max_size=5)


def tensors(counts: list[int]) -> list[TensorSpec]:
    """Of these trained ones, and of two that are not."""
    specs = [TensorSpec(name=f"w{at}", shape=(n,), dtype="float32", kind="parameter") for at, n in enumerate(counts)]
    mean = TensorSpec(name="mean", shape=(20,), dtype="float32", kind="buffer")
    fixed = TensorSpec(name="fixed", shape=(5,), dtype="float32", kind="frozen")
    return [specs[0], fixed, *specs[1:], mean]


def places(drawn: DrawnParts, round_: int, index: int) -> list[int]:
    walk = drawn.of(round_, index)
    return [(walk.first + at * walk.stride) % walk.length for at in range(walk.steps)]


@given(counts=SIZES, parts=st.integers(2, 64), seed=st.integers(0, 2**63 - 1), cycle=st.integers(0, 10**9))
def test_each_value_is_in_one_round_of_a_cycle(counts: list[int], parts: int, seed: int, cycle: int) -> None:
    """So it waits for at most 2P - 1 rounds. Parts are as large as each other, in all and of each tensor."""
    specs = tensors(counts)
    drawn = DrawnParts(specs, parts, seed)
    rounds = range(cycle * parts + 1, (cycle + 1) * parts + 1)
    totals = Counter[int]()
    for index, spec in enumerate(specs):
        if spec.kind != "parameter":
            assert drawn.count(0, index) == 0
            continue
        carried = [places(drawn, number, index) for number in rounds]
        assert sorted(at for run in carried for at in run) == list(range(spec.count))
        assert [len(run) for run in carried] == [drawn.count(part, index) for part in range(parts)]
        assert max(map(len, carried)) - min(map(len, carried)) <= 1
        for part, run in enumerate(carried):
            totals[part] += len(run)
    assert max(totals.values()) - min(totals[part] for part in range(parts)) <= 1


def test_they_are_drawn_anew_in_each_cycle_for_each_tensor_and_job() -> None:
    drawn = DrawnParts(tensors([1000, 1000]), 10, 7)
    found = [places(drawn, number, 0) for number in range(1, 10_000, 10)]
    assert len({tuple(sorted(run)) for run in found}) > 990
    assert places(drawn, 1, 2) != places(drawn, 1, 0) != places(DrawnParts(tensors([1000, 1000]), 10, 8), 1, 0)
    often = Counter(at for run in found for at in run)
    assert len(often) == 1000
    assert 50 < min(often.values()) < max(often.values()) < 170, "100 of 1000 times each, give or take"


def test_how_long_a_value_waits() -> None:
    """Up to 2P - 1 rounds, P in the mean."""
    parts = 8
    drawn = DrawnParts(tensors([64]), parts, 3)
    rounds = {at: [k for k in range(1, 4001) if at in places(drawn, k, 0)] for at in (0, 21, 63)}
    for carried in rounds.values():
        waits = [after - before for before, after in pairwise(carried)]
        assert 1 <= min(waits) <= 3
        assert 2 * parts - 3 <= max(waits) <= 2 * parts - 1
        assert sum(waits) / len(waits) == pytest.approx(parts, rel=0.01)


def test_what_travels_is_equal_on_all_machines() -> None:
    """W: a device with another draw would put values where they do not belong."""
    assert places(DrawnParts(tensors([10, 7]), 4, 42), 9, 0) == [8, 5, 2]
    assert places(DrawnParts(tensors([10, 7]), 4, 42), 10, 2) == [4]


@pytest.mark.parametrize("parts", [2, 7, 64])
def test_the_rounds_vectors_are_as_long_as_what_is_drawn(parts: int) -> None:
    """T1; float buffers travel in all rounds."""
    specs = tensors([1200, 7, 9000, 1])
    model = manifest_under(
        ModelManifest(tensors=tuple(specs), optimizer="SGD"), sync_settings(f"local:{parts},stream={parts},random")
    )
    plans = RoundPlans(plan_buckets(model, 4096))
    drawn = DrawnParts(specs, parts, 5)
    for number in (1, 2, parts, 3 * parts + 2, 10**9):
        for span in plans.of(number).spans:
            spec = specs[span.tensor]
            carried = len(places(drawn, number, span.tensor)) if spec.kind == "parameter" else spec.count
            assert span.count == carried
            assert span.rows == 1 or span.count == spec.count


def test_more_parts_than_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 5 values that are trained.*use stream=5 or less"):
        fragments_travel(tensors([2, 3]), sync_settings("local:6,stream=6,random"))
    assert fragments_travel(tensors([2, 3]), sync_settings("local:5,stream=5,random")) is not None


@pytest.mark.parametrize("codec", FAMILIES)
def test_codecs_that_owe_values_something_are_refused(codec: str) -> None:
    """P1: what one round has left out of a value would be added to another one's."""
    sync, spec = sync_settings("local:8,stream=4,random"), parse_codec(codec)
    if not spec.error_feedback and refusal(sync, spec) is None:
        check_fragments(sync, spec, partial=False)
        return
    with pytest.raises(ValueError, match=r"--sync local:8,stream=4,random with --codec .*use (fp32|another)"):
        check_fragments(sync, spec, partial=False)


def test_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="does not go with --masks"):
        check_fragments(sync_settings("local:8,stream=4,random"), parse_codec("fp32"), partial=True)
