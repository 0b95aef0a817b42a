"""How rounds are laid out follows from the codec and the round's number alone (C1)."""

import pytest

from meshwire.codecs.registry import FAMILIES, FP16, buffer_codec, parse_codec
from meshwire.encoded_layout.by_round import RoundLayouts
from tests.wire.collectives.test_strategy import PLAN


@pytest.mark.parametrize("text", [name for name in FAMILIES if not parse_codec(name).warmup])
def test_without_warmup_all_rounds_are_alike(text: str) -> None:
    layouts = RoundLayouts(PLAN, parse_codec(text))
    assert {layouts.of(number) for number in (1, 2, 10**9)} == {layouts.of(1)} == set(layouts.all)
    assert not any(layouts.ends_with(number) for number in range(1, 20))


def test_the_first_rounds_travel_in_fp16_by_the_same_exchange() -> None:
    """Seide et al. 2014: 1-bit begins after dense steps. Parameters alone change: buffers are never in one bit (O5)."""
    onebit = parse_codec("onebit:warmup=3")
    layouts = RoundLayouts(PLAN, onebit)
    dense, steady = layouts.all
    assert [layouts.of(number) for number in (1, 3, 4, 5)] == [dense, dense, steady, steady]
    assert [number for number in range(1, 9) if layouts.ends_with(number)] == [3]
    assert set(dense.codecs[: PLAN.parameter_buckets]) == {FP16}
    assert set(steady.codecs[: PLAN.parameter_buckets]) == {onebit}
    assert dense.codecs[-1] == steady.codecs[-1] == buffer_codec(onebit)
    assert dense.reduction == steady.reduction == onebit.reduction
    assert layouts.bytes_max == dense.total_bytes > steady.total_bytes
