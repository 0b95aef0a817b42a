"""Codecs as people type them: parsed to what peers agree on, and written back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire import limits
from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.codecs.spec import Choice, CodecSpec, Family, Number, Reduction

SOME = Family(
    "some",
    Reduction.TWO_SIDED,
    lambda spec, count: int(count * spec.number("ratio")) + 4,
    about="",
    source="",
    parameters=(
        Number("ratio", 1e-4, 1.0, 0.01, "how much"),
        Number("block", 64, 4096, 256, "how long"),
        Choice("rounding", ("near", "sr"), "near", "how"),
        Choice("values", ("fp32", "fp16"), "fp32", "of what"),
    ),
    error_feedback=lambda spec: spec.choice("rounding") == "near",
    example="some:0.01,sr+fp16",
)


def some(typed: str) -> CodecSpec:
    head, plus, after = typed.partition("+")
    return SOME.spec(head, after if plus else None)


@pytest.mark.parametrize(
    ("typed", "canonical"),
    [
        ("", "some"),
        ("0.01", "some"),
        ("0.5", "some:0.5"),
        ("sr,0.5", "some:0.5,sr"),
        ("rounding=sr", "some:sr"),
        ("block=64", "some:block=64"),
        ("block=64,ratio=1+fp16", "some:1,block=64+fp16"),
        ("0.001+fp32", "some:0.001"),
        ("0.12345678901234", "some:0.12345678901234"),
    ],
)
def test_what_is_typed_has_one_canonical_text(typed: str, canonical: str) -> None:
    assert str(some(typed)) == canonical


@given(st.floats(1e-4, 1.0), st.integers(64, 4096), st.sampled_from(["near", "sr"]), st.sampled_from(["fp32", "fp16"]))
def test_the_canonical_text_is_parsed_to_the_same(ratio: float, block: int, rounding: str, values: str) -> None:
    spec = some(f"{ratio!r},block={block},{rounding}+{values}")
    _, _, typed = str(spec).partition("some")
    assert some(typed.removeprefix(":")) == spec
    assert (spec.number("ratio"), spec.number("block")) == (ratio, block)
    assert spec.error_feedback == (rounding == "near")


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        ("2", r"codec some: ratio is '2'; it must be a number from 0.0001 to 1, as in some:0.01,sr\+fp16"),
        ("nan", "ratio is 'nan'; it must be a number from"),
        ("block=fat", "block is 'fat'; it must be a number from 64 to 4096"),
        ("rounding=up", "rounding is 'up'; it must be one of near, sr"),
        ("+int3", "values is 'int3'; it must be one of fp32, fp16"),
        ("half", "'half' is none of its parameters. It takes: ratio is a number from 0.0001 to 1; block is"),
        ("size=3", "'size=3' is none of its parameters"),
        ("0.1,0.2", "'0.2' is none of its parameters"),
        ("values=fp32+fp16", "values is given twice. It takes: ratio is"),
        ("0.1,", "'' is none of its parameters"),
    ],
)
def test_what_is_illegal_is_named_with_what_is_legal(typed: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        some(typed)


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        ("int3", "there is no codec 'int3'; there are fp32, fp16"),
        ("", "there is no codec ''"),
        ("FP32", "there is no codec 'FP32'"),
        ("fp32:", "codec 'fp32:' ends where a parameter should follow"),
        ("fp32:1", "codec fp32: '1' is none of its parameters. It takes none: fp32"),
        ("fp32+fp16", r"codec fp32: nothing can follow a \+ here"),
    ],
)
def test_an_unknown_codec_is_refused(typed: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_codec(typed)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_described_and_fits_into_a_frame(name: str) -> None:
    """W1: a full segment goes into one frame; the example is legal; names can be typed."""
    family, spec = FAMILIES[name], parse_codec(name)
    assert str(spec) == family.name == name
    assert family.about
    assert family.source
    assert parse_codec(family.example or name).family is family
    assert all(parameter.about for parameter in family.parameters)
    for count in (1, 1000, limits.SEGMENT_VALUES_MAX):
        assert 1 <= spec.segment_bytes_max(count) <= limits.FRAME_PAYLOAD_BYTES_MAX


NUMBERS = [
    (family.name, each) for family in FAMILIES.values() for each in family.parameters if isinstance(each, Number)
]


@pytest.mark.parametrize(("name", "parameter"), NUMBERS, ids=lambda of: of if isinstance(of, str) else of.name)
def test_what_is_submitted_is_parsed_again_on_all_devices(name: str, parameter: Number) -> None:
    """A job carries the canonical text; the ends of what is legal are the longest and strangest numbers."""
    for value in (parameter.low, parameter.high, (parameter.low + parameter.high) // 3 or parameter.low):
        spec = parse_codec(f"{name}:{parameter.name}={value}".replace("e+", "e"))
        assert spec.number(parameter.name) == value
        assert parse_codec(str(spec)) == spec


@pytest.mark.parametrize(
    ("typed", "reduction"),
    [
        ("topk", Reduction.TWO_SIDED),
        ("topk:0.05,gather", Reduction.GATHER),
        ("threshold:rms=2,gather+fp32", Reduction.GATHER),
        ("sidco:0.001,gamma,gather", Reduction.GATHER),
        ("dct:16,decay=0.999,gather", Reduction.GATHER),
        ("sidco:exchange=sharded", Reduction.TWO_SIDED),
    ],
)
def test_the_way_may_be_chosen_where_both_make_sense(typed: str, reduction: Reduction) -> None:
    """C2: it follows from what is typed, and is one of those that the family has."""
    spec = parse_codec(typed)
    assert spec.reduction is reduction
    assert reduction in spec.family.reductions
    assert parse_codec(str(spec)) == spec


@pytest.mark.parametrize(
    "typed", ["fp16:gather", "int8:gather", "randomk:0.1,gather", "topk:ring", "topk:exchange=ring"]
)
def test_a_way_that_a_codec_does_not_have_is_refused(typed: str) -> None:
    with pytest.raises(ValueError, match=r"It takes|one of sharded, gather"):
        parse_codec(typed)
