"""R2: what an announced chunk may say of weights, beside what the binds name."""

from typing import Any, cast

import pytest

from meshwire.collectives.exchange import BucketExchange
from meshwire.frames.header import Header, Kind


@pytest.mark.parametrize(
    ("contributors", "told", "right"),
    [(0b100, 8.0, True), (0b100, 8.0 * (1 + 1e-9), False), (0b101, 8.0 * (1 + 1e-9), True), (0b101, 8.1, False)],
)
def test_one_members_weight_is_exact_and_a_sum_as_its_order_rounds_it(
    contributors: int, told: float, right: bool
) -> None:
    """C2: in a gather each divides by what it was told; a weight that differs in a last bit would make means differ."""
    header = Header(kind=Kind.CHUNK, payload_bytes=1, contributors=contributors, weight=told)
    wrong = BucketExchange.unlike(cast(Any, None), header, (contributors, 8.0))
    assert (wrong is None) == right
