import pytest

from meshwire import limits
from meshwire.codecs.registry import FAMILIES, Reduction, parse_codec


@pytest.mark.parametrize(("name", "expected"), [("fp32", 4000), ("fp16", 2004), ("bf16", 2000)])
def test_segments_have_exact_sizes(name: str, expected: int) -> None:
    """DESIGN section 8: wire bytes are really packed, by an exact formula."""
    assert parse_codec(name).segment_bytes_max(1000) == expected


def test_casts_are_linear() -> None:
    """C2: ring for linear codecs."""
    assert {parse_codec(name).reduction for name in ("fp32", "fp16", "bf16")} == {Reduction.LINEAR}
    assert all(family.name == name for name, family in FAMILIES.items())


def test_a_full_segment_fits_into_a_frame() -> None:
    for name in FAMILIES:
        assert parse_codec(name).segment_bytes_max(limits.SEGMENT_VALUES_MAX) <= limits.FRAME_PAYLOAD_BYTES_MAX
