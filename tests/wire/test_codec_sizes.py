import pytest

from meshwire import limits
from meshwire.codec import CODECS, Reduction


@pytest.mark.parametrize(("name", "expected"), [("fp32", 4000), ("fp16", 2004), ("bf16", 2000)])
def test_segments_have_exact_sizes(name: str, expected: int) -> None:
    """DESIGN section 8: wire bytes are really packed, by an exact formula."""
    assert CODECS[name].segment_bytes(1000) == expected


def test_casts_are_linear() -> None:
    """C2: ring for linear codecs."""
    assert {spec.reduction for spec in CODECS.values()} == {Reduction.LINEAR}
    assert all(spec.name == name for name, spec in CODECS.items())


def test_a_full_segment_fits_into_a_frame() -> None:
    for spec in CODECS.values():
        assert spec.segment_bytes(limits.SEGMENT_VALUES_MAX) <= limits.FRAME_PAYLOAD_BYTES_MAX
