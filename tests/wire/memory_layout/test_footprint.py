"""The memory of a job before it runs (M1), against sums made by hand."""

import pytest

from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.memory_layout.footprint import ModelSize, fits, footprint, retained_bytes, unapplied_max
from meshwire.memory_layout.shared_slots import MemoryLayout, round_bytes
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import plan_buckets
from meshwire.sync_modes.mode import SyncSettings, sync_settings

RING = collective_for(parse_codec("fp32"))
VALUES = 1_000_000
SGD = ModelSize(
    parameters=4 * VALUES,
    frozen=100,
    buffers=12,
    optimizer="SGD",
    optimizer_state=0,
    optimizer_known=True,
)


def bound(s: int) -> SyncSettings:
    return sync_settings(f"ssp:{s}")


def test_the_example_of_the_rule() -> None:
    """M1: 124 M parameters, s=2, AdamW, fp16: about 6.4 GB + 1.5 GB retained; with c=0 3.5 GB.

    The former is thirteen vectors: base, view, gradients, three of own gradients, two of the optimizer, two of its
    twin, two raw slots, one result slot; with c = 0 there are no view, own gradients and twin, and it is six less. The
    latter is three rounds of two encoded vectors; a fourth round may not be complete everywhere.
    """
    values = 124_000_000
    tensors = tuple(
        TensorSpec(name=f"block{i}", shape=(values // 124,), dtype="float32", kind="parameter") for i in range(124)
    )
    plan = plan_buckets(ModelManifest(tensors=tensors, optimizer="AdamW"))
    encoded_bytes = EncodedLayout(plan, parse_codec("fp16")).total_bytes
    adamw = ModelSize(
        parameters=4 * values,
        frozen=0,
        buffers=0,
        optimizer="AdamW",
        optimizer_state=8 * values,
        optimizer_known=True,
    )
    with_view = footprint(adamw, plan.total_values, encoded_bytes, 0.25, bound(2))
    assert (with_view.total_bytes - with_view.retained) / 1e9 == pytest.approx(6.45, abs=0.05)
    assert with_view.retained - encoded_bytes == 3 * round_bytes(encoded_bytes, 2, RING)
    assert 3 * round_bytes(encoded_bytes, 2, RING) / 1e9 == pytest.approx(1.5, abs=0.05)
    plain = footprint(adamw, plan.total_values, encoded_bytes, 0.0, bound(2))
    assert (plain.total_bytes - plain.retained) / 1e9 == pytest.approx(3.5, abs=0.05)


def test_learners_of_one_device_share_what_their_daemon_keeps() -> None:
    """M1, R6: each has its model and its slots."""
    one = footprint(SGD, VALUES, 4 * VALUES, 0.0, bound(0), parse_codec("topk"))
    three = one.of_learners(3)
    assert (three.learner_bytes, three.raw_slots, three.result_slot) == (
        3 * one.learner_bytes,
        3 * one.raw_slots,
        3 * one.result_slot,
    )
    assert one.residuals > 0
    assert (three.retained, three.residuals) == (one.retained, one.residuals)


def test_every_part_has_its_size() -> None:
    """O2, M1: the base beside the view, s+1 own gradients, a twin, two raw slots, the base of the buffers."""
    momentum = SGD.model_copy(update={"optimizer_state": 4 * VALUES})
    made = footprint(momentum, VALUES, 2 * VALUES, 0.5, bound(3))
    slot_bytes = MemoryLayout.for_bound(VALUES, 3).slot_bytes
    assert dict(made.parts()) == {
        "parameters": 4 * VALUES + 100,
        "view": 4 * VALUES,
        "gradients": 4 * VALUES,
        "own_gradients": 4 * 4 * VALUES,
        "optimizer": 4 * VALUES,
        "twin": 4 * VALUES,
        "buffers": 24,
        "masks": 0,
        "raw_slots": 2 * slot_bytes,
        "result_slot": slot_bytes,
        "mixed": 0,
        "retained": retained_bytes(2 * VALUES, 3, RING),
        "residuals": 0,
    }
    assert made.total_bytes == made.learner_bytes + 3 * slot_bytes + made.retained
    assert made.learner_bytes == sum(size for name, size in made.parts()[:8])


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_without_a_bound_there_is_no_view_and_one_raw_slot(coefficient: float) -> None:
    """R7: s=0 is BSP whatever c is, and its model is the base."""
    made = dict(footprint(SGD, VALUES, 2 * VALUES, coefficient, bound(0)).parts())
    assert (made["view"], made["own_gradients"]) == (0, 0)
    assert made["raw_slots"] == made["result_slot"]


@pytest.mark.parametrize(
    ("sync", "outer_values"), [("local:8", 0), ("diloco:8", 1), ("diloco:8,momentum=0", 0), ("sma:8", 1)]
)
def test_local_steps_keep_the_base_beside_them(sync: str, outer_values: int) -> None:
    """R9: one copy of the parameters, and the outer momentum; nothing is on its way while a learner steps."""
    plain = dict(footprint(SGD, VALUES, 2 * VALUES, 1.0, bound(0)).parts())
    made = dict(footprint(SGD, VALUES, 2 * VALUES, 1.0, sync_settings(sync)).parts())
    assert made["view"] == SGD.parameters
    assert made["optimizer"] == plain["optimizer"] + outer_values * SGD.parameters
    assert {**made, "view": 0, "optimizer": plain["optimizer"]} == plain


@pytest.mark.parametrize(("codec", "value_bytes"), [("fp32", 4), ("int8", 2)])
@pytest.mark.parametrize(("over", "slots"), [("pairs", 3), ("ring", 5)])
def test_weights_that_are_mixed_have_slots_of_their_own(codec: str, value_bytes: int, over: str, slots: int) -> None:
    """R9: the own ones, and each neighbour's of two turns; and in the learner what mixing has moved."""
    values, spec = 2**20, parse_codec(codec)
    plain = dict(footprint(SGD, values, 2 * values, 1.0, sync_settings("local:8"), spec).parts())
    made = footprint(SGD, values, 2 * values, 1.0, sync_settings(f"local:8,gossip=2,over={over}"), spec)
    view = plain["view"] + SGD.parameters
    assert dict(made.parts()) == {**plain, "view": view, "mixed": slots * values * value_bytes}
    layout = MemoryLayout.for_job(values, sync_settings(f"local:8,gossip=2,over={over}"), spec)
    assert layout.mixed_offset(0) == layout.result_offset + layout.slot_bytes
    assert layout.mixed_offset(slots - 1) + values * value_bytes == layout.total_bytes


def test_periods_that_overlap_keep_where_they_began_and_what_they_have_changed() -> None:
    """R9, O2: the base, the start of the period, the changes of s+1 periods, and a twin of the outer optimizer."""
    adamw = SGD.model_copy(update={"optimizer_state": 8 * VALUES})
    made = dict(footprint(adamw, VALUES, 2 * VALUES, 1.0, sync_settings("diloco:8,ssp:2")).parts())
    assert made["view"] == 2 * SGD.parameters
    assert made["own_gradients"] == 3 * SGD.parameters
    assert made["twin"] == SGD.parameters, "not of AdamW, which steps on local weights alone"
    delayed = dict(footprint(adamw, VALUES, 2 * VALUES, 0.0, sync_settings("diloco:8,ssp:2")).parts())
    assert (delayed["view"], delayed["own_gradients"], delayed["twin"]) == (SGD.parameters, 0, 0)


def test_a_larger_bound_never_takes_less() -> None:
    totals = [footprint(SGD, VALUES, 2 * VALUES, 0.5, bound(staleness)).total_bytes for staleness in range(8)]
    assert totals == sorted(set(totals))


@pytest.mark.parametrize("staleness", [0, 2])
def test_error_feedback_keeps_residuals(staleness: int) -> None:
    """C1, V1: a worker's and an owner's, as they are and as they were before each round that may be taken back."""
    made = footprint(SGD, VALUES, VALUES, 0.0, bound(staleness), parse_codec("int8"), members=3)
    assert made.residuals == 2 * (1 + staleness + 1) * 4 * VALUES
    assert made.retained == ((staleness + 1) * 3 + 1) * VALUES, "final bytes, those of the others to sum, the own part"
    alone = footprint(SGD, VALUES, VALUES, 0.0, bound(staleness), parse_codec("int8"))
    assert alone.retained == ((staleness + 1) * 2 + 1) * VALUES, "there are no others"
    star = footprint(SGD, VALUES, VALUES, 0.0, bound(staleness), parse_codec("int8"), members=3, topology="star")
    assert star.retained == ((staleness + 1) * 4 + 1) * VALUES, (
        "in the middle of a star there are whole vectors of theirs"
    )
    assert footprint(SGD, VALUES, VALUES, 0.0, bound(staleness), parse_codec("terngrad")).residuals == 0


def test_fits_says_why() -> None:
    assert fits(2**30, 2**30) == (True, "has 1.0 GiB of memory, and the job takes 1.0 GiB")
    assert fits(2**31, 2**30) == (False, "has 1.0 GiB of memory, and the job takes 2.0 GiB")


@pytest.mark.parametrize("encoded_bytes", [0, 100, 10_000, 1 << 20, 1 << 33])
@pytest.mark.parametrize("staleness", [0, 2, 64])
def test_what_is_kept_for_a_learner_that_does_not_apply_is_bounded(encoded_bytes: int, staleness: int) -> None:
    """Also with a tiny model, of which a round's bookkeeping takes more than its values; and s rounds always fit."""
    retained = round_bytes(encoded_bytes, staleness, RING)
    rounds = unapplied_max(retained, staleness)
    assert rounds > staleness
    assert rounds == 2 * (staleness + 1) or rounds * (retained + 16 * limits.KIB) <= limits.MIB * 1024


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_gather_keeps_what_each_member_has_sent(staleness: int) -> None:
    """C2, M1: m vectors for each round, and no owner's residuals."""
    kept = {
        codec: footprint(SGD, VALUES, 100_000, 0.0, bound(staleness), parse_codec(codec), members=5)
        for codec in ("topk", "topk:gather")
    }
    assert kept["topk:gather"].retained == (staleness + 2) * 5 * 100_000
    assert kept["topk:gather"].residuals == (staleness + 2) * 4 * VALUES
    assert kept["topk"].residuals == 2 * kept["topk:gather"].residuals
    two = footprint(SGD, VALUES, 100_000, 0.0, bound(staleness), parse_codec("topk"), members=2)
    assert kept["topk"].retained == two.retained
