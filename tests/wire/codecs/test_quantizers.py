import pytest

from meshwire.codecs.quantizers import QUANTISING_FAMILIES, qsgd_bits
from meshwire.codecs.registry import Reduction, parse_codec

FULL = 65536


@pytest.mark.parametrize(
    ("text", "of_1000", "of_a_segment"),
    [
        ("int8", 1002, 65536 + 128),
        ("int8:block=100", 1020, 65536 + 2 * 656),
        ("int4", 516, 32768 + 1024),
        ("nf4:1024", 502, 32768 + 128),
        ("int4:sr,block=64", 532, 32768 + 2048),
        ("qsgd", 516, 32768 + 1024),
        ("qsgd:127", 1016, 65536 + 1024),
        ("onebit", 133, 8192 + 128),
        ("twobit", 260, 16384 + 128),
        ("terngrad", 204, 13108 + 4),
    ],
)
def test_segments_have_exact_sizes(text: str, of_1000: int, of_a_segment: int) -> None:
    """P5, DESIGN section 8: 1-bit within 2 % of N/8, 2-bit within 1 % of N/4, TernGrad at most 1.7 bits."""
    spec = parse_codec(text)
    assert (spec.segment_bytes_max(1000), spec.segment_bytes_max(FULL)) == (of_1000, of_a_segment)
    assert spec.fixed


def test_they_are_summed_by_the_owner_of_each_shard() -> None:
    """C2: none of them can be added as it is, and another encoding at every hop would lose more than one."""
    assert {family.reduction for family in QUANTISING_FAMILIES} == {Reduction.TWO_SIDED}


@pytest.mark.parametrize(
    ("text", "feedback"),
    [
        *(("int8", True), ("int8:nearest", True), ("int8:sr", False), ("int4:64", True), ("int4:sr,64", False)),
        *(("qsgd", False), ("terngrad", False), ("onebit", True), ("twobit", True)),
    ],
)
def test_what_is_right_on_average_has_no_error_feedback(text: str, feedback: bool) -> None:
    assert parse_codec(text).error_feedback is feedback


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int8:block=8", "block is '8'; it must be a whole number from 16 to 65536"),
        ("int8:block=100.5", "block is '100.5'; it must be a whole number from 16 to 65536"),
        ("int4:up", "rounding is one of nearest, sr"),
        ("qsgd:0", "levels is '0'; it must be a whole number from 1 to 127"),
        ("qsgd:3.5", "levels is '3.5'; it must be a whole number from 1 to 127, as in qsgd:7"),
        ("twobit:rms=0", "rms is '0'; it must be a number from 0.125 to 8, as in twobit:rms=2"),
        ("onebit:-1", "warmup is '-1'; it must be a whole number from 0 to 100000"),
        ("terngrad+fp16", "nothing can follow a +"),
    ],
)
def test_what_is_illegal_is_named_with_what_is_legal(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=text.partition(":")[0].partition("+")[0]) as raised:
        parse_codec(text)
    assert said in str(raised.value)


def test_qsgd_takes_the_bits_of_its_numbers() -> None:
    """Of 2L + 1 numbers."""
    assert [qsgd_bits(levels) for levels in (1, 2, 3, 4, 7, 8, 63, 64, 127)] == [2, 3, 3, 4, 4, 5, 7, 8, 8]
