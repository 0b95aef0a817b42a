"""T1: what travels in a round, and where it lies, follows from the manifest and the round's number alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwire import limits
from meshwire.codecs.registry import SEGMENT_FAMILIES, parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.encoded_layout.by_round import RoundLayouts
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.model.manifest import ModelManifest, TensorSpec, first_difference
from meshwire.model.plan import ALIGNMENT_VALUES, Plan, aligned, plan_buckets
from meshwire.model.plans_by_round import RoundPlans
from meshwire.model.schedule import Stretch, Travel, refusal
from meshwire.rounds.learner_state import RoundSettings
from meshwire.sync_modes.mode import sync_settings

SHAPES = ((40, 30), (7,), (90, 100), (33,), (2, 3, 5))


def manifest(*stretches: Stretch) -> ModelManifest:
    tensors = [
        TensorSpec(name=f"w{at}", shape=shape, dtype="float32", kind="parameter") for at, shape in enumerate(SHAPES)
    ]
    buffers = [TensorSpec(name=f"mean{at}", shape=(20,), dtype="float32", kind="buffer") for at in range(2)]
    travel = Travel(stretches=stretches) if stretches else None
    return ModelManifest(tensors=(*tensors, *buffers), optimizer="SGD", travel=travel)


WHOLE = tuple(tensor.count for tensor in manifest().tensors)


def settings_of(plans: RoundPlans, fewer_every: int = 0) -> RoundSettings:
    """Of a member alone, whose rounds have these plans; they come again after so many (0: never)."""
    return RoundSettings(
        ranks=(0,),
        rank=0,
        buckets=len(plans.whole.buckets),
        used_bytes=1,
        integers=0,
        staleness=0,
        straggler="wait",
        rtt_s=0.0,
        fewer=plans.bucket_counts(),
        fewer_every=fewer_every,
    )


@st.composite
def travels(draw: st.DrawFn, *, whole_tensors: bool = False) -> tuple[Stretch, ...]:
    firsts = sorted(draw(st.sets(st.integers(2, 30), max_size=4)) | {1})
    made = []
    for first in firsts:
        counts = [
            draw(st.sampled_from((0, count))) if whole_tensors else draw(st.integers(0, count)) for count in WHOLE
        ]
        if not any(counts[: len(SHAPES)]):
            counts[0] = WHOLE[0]
        made.append(Stretch(first=first, counts=tuple(counts), whole_every=draw(st.integers(0, 7))))
    return tuple(made)


@settings(max_examples=60)
@given(travels(), st.integers(1, 40))
def test_a_rounds_vector_holds_what_travels_and_nothing_else(stretches: tuple[Stretch, ...], number: int) -> None:
    """Each span has its round's length, none overlaps another, and all lie in places of their own bucket: so in bytes a
    round is the sum of what travels in it, each tensor rounded up to a cache line."""
    plan = plan_buckets(manifest(*stretches), 4 * limits.KIB)
    plans = RoundPlans(plan)
    of_round = plans.of(number)
    stretch = max((each for each in stretches if each.first <= number), key=lambda each: each.first)
    whole = stretch.whole_every and number % stretch.whole_every == 0
    counts = WHOLE if whole else stretch.counts
    assert [span.count for span in of_round.spans] == [counts[span.tensor] for span in plan.spans]
    assert [bucket.index for bucket in of_round.buckets] == list(range(len(of_round.buckets)))
    for bucket in of_round.buckets:
        home = plan.buckets[bucket.home]
        assert bucket.start == home.start
        assert bucket.count <= home.count
        at = bucket.start
        for index in bucket.spans:
            assert of_round.spans[index].start == at
            at += aligned(of_round.spans[index].count)
        assert at == bucket.start + bucket.count
    values = sum(bucket.count for bucket in of_round.buckets)
    assert values == sum(map(aligned, counts))
    assert EncodedLayout(of_round, parse_codec("fp32")).total_bytes == 4 * values
    assert values - sum(counts) < ALIGNMENT_VALUES * len(counts)
    assert settings_of(plans).buckets_of(number) == len(of_round.buckets)


@settings(max_examples=40)
@given(travels(whole_tensors=True), st.integers(1, 40))
def test_parameters_that_travel_whole_keep_their_places(stretches: tuple[Stretch, ...], number: int) -> None:
    """T2: so what a codec has left out of them stays where it is, whatever else comes and goes; and so do the owners of
    their segments."""
    plan = plan_buckets(manifest(*stretches), 4 * limits.KIB)
    of_round = RoundPlans(plan).of(number)
    for bucket in of_round.buckets[: of_round.parameter_buckets]:
        assert bucket.count == plan.buckets[bucket.home].count
        for index in bucket.spans:
            assert of_round.spans[index] == plan.spans[index]
    ranks = (0, 1, 2)
    topology = collective_for(parse_codec("int8")).topology
    strategies = [topology.strategy(EncodedLayout(each, parse_codec("int8")), ranks, 1) for each in (plan, of_round)]
    for bucket in of_round.buckets[: of_round.parameter_buckets]:
        assert strategies[1].owned(bucket.index) == strategies[0].owned(bucket.home)


@settings(max_examples=30)
@given(travels())
def test_the_last_round_of_a_length_is_known(stretches: tuple[Stretch, ...]) -> None:
    """M1: memory for vectors of this length is then given back."""
    plans = RoundPlans(plan_buckets(manifest(*stretches)))
    horizon = 60
    for number in range(1, 31):
        later = any(plans.of(other) is plans.of(number) for other in range(number + 1, horizon))
        assert plans.ends_with(number) == (not later)
    assert {id(plans.of(number)) for number in range(1, horizon)} == {id(plan) for plan in plans.all}


@pytest.mark.parametrize("name", SEGMENT_FAMILIES)
def test_warmups_of_codecs_and_lengths_of_rounds_go_together(name: str) -> None:
    stretch = Stretch(first=1, counts=(0, 7, 9000, 33, 30, 20, 0), whole_every=5)
    codec = parse_codec(name)
    layouts = RoundLayouts(plan_buckets(manifest(stretch)), codec)
    plain = RoundLayouts(plan_buckets(manifest()), codec)
    for number in (1, 2, 5, codec.warmup + 1, codec.warmup + 5):
        of_round, at_full_length = layouts.of(number), plain.of(number)
        assert of_round.codecs[0] == at_full_length.codecs[0]
        assert of_round.reduction == at_full_length.reduction
        assert of_round.total_bytes <= layouts.bytes_max
        assert (of_round.plan.total_values, number % 5) != (0, 0)


def test_without_a_schedule_all_rounds_are_the_plan_itself() -> None:
    plan = plan_buckets(manifest())
    assert RoundPlans(plan).of(1) is RoundPlans(plan).of(10**9) is plan
    assert RoundPlans(plan).bucket_counts() == ()


def cut(plan: Plan) -> list[int]:
    return [bucket.start for bucket in plan.buckets]


def test_a_model_that_alstrategies_travels_whole_is_cut_as_ever() -> None:
    """A model of one stage is the baseline, bit for bit."""
    alstrategies = plan_buckets(manifest(Stretch(first=1, counts=WHOLE)), 4 * limits.KIB)
    assert cut(RoundPlans(alstrategies).of(3)) == cut(plan_buckets(manifest(), 4 * limits.KIB))


@pytest.mark.parametrize(
    ("stretches", "wrong"),
    [
        ([Stretch(first=2, counts=WHOLE)], "the first is 1"),
        ([Stretch(first=1, counts=WHOLE), Stretch(first=1, counts=WHOLE)], "ascend"),
        ([Stretch(first=1, counts=WHOLE[:-1])], "not of all"),
        ([Stretch(first=1, counts=(*WHOLE[:-1], 21))], "21 values of mean1 travel; it has 20"),
        ([Stretch(first=1, counts=(0,) * len(WHOLE))], "no trainable parameter"),
        ([], "at least 1 item"),
    ],
)
def test_what_cannot_travel_is_refused(stretches: list[Stretch], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        ModelManifest(tensors=manifest().tensors, optimizer="SGD", travel=Travel(stretches=tuple(stretches)))


def test_members_see_where_their_schedules_part() -> None:
    one = manifest(Stretch(first=1, counts=WHOLE), Stretch(first=9, counts=WHOLE, whole_every=2))
    other = manifest(Stretch(first=1, counts=WHOLE), Stretch(first=8, counts=WHOLE, whole_every=2))
    assert "from round 8 on" in str(first_difference(one, other))
    assert "from round 1 on" in str(first_difference(one, manifest()))
    assert first_difference(one, one) is None
    assert one.digest() != other.digest()
    assert one.state_digest() == other.state_digest(), "a job may be resumed with another schedule"


@pytest.mark.parametrize(
    ("sync", "codec", "named"),
    [
        ("bsp", "int8", None),
        ("local:4", "topk:0.1,gather", None),
        ("ssp:2", "fp32", "--sync bsp, or local:H"),
        ("sma:4", "fp32", "--sync bsp, or local:H"),
        ("bsp", "powersgd:2", "such as int8 or topk"),
        ("bsp", "dgc", "such as int8 or topk"),
    ],
)
def test_what_does_not_go_with_lengths_that_change_is_named(sync: str, codec: str, named: str | None) -> None:
    told = refusal(sync_settings(sync), parse_codec(codec))
    assert (told is None) if named is None else (told is not None and named in told)
