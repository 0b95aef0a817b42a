"""What a leader tells in the vector that is summed, and what is made of it where nobody, or somebody else, has (C1)."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Values
from meshtraind.projection.lgc.leader import Announced, announce, default_places, heard, largest_places
from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.encoded_layout.by_round import RoundLayouts
from meshwire.encoded_layout.lgc import Chosen
from tests.daemon.executorring import PLAN

CODECS = (
    "lgc:0.01,warmup=0,refresh=3",
    "lgc:1,warmup=0,refresh=1,latent=2",
    "lgc:0.005,warmup=0,refresh=64",
    "lgc:0.01,conv,warmup=0,refresh=3",
)


@cache
def chosen_of(codec: str) -> Chosen:
    chosen = RoundLayouts(PLAN, parse_codec(codec)).of(1).shorter
    assert isinstance(chosen, Chosen)
    return chosen


def announced(chosen: Chosen, number: int, bucket: int, seed: int) -> Announced:
    numbers = np.random.default_rng(seed)
    values = numbers.standard_normal(chosen.model.buckets[bucket].count).astype(np.float32)
    learnt = numbers.standard_normal(0 if bucket else chosen.learnt_count).astype(np.float32)
    return Announced(largest_places(chosen, number, bucket, values), learnt)


def travelled(sum_: Values, weight: float, form: str) -> Values:
    """The mean, written and read (W3)."""
    coder = codec_named(form)
    mean = sum_ / np.float32(weight)
    for start in range(0, len(mean), limits.SEGMENT_VALUES_MAX):
        run = mean[start : start + limits.SEGMENT_VALUES_MAX]
        area = memoryview(bytearray(coder.spec.segment_bytes_max(len(run))))
        coder.encode_into(run, area)
        coder.decode_into(area, run)
    return mean


@given(
    codec=st.sampled_from(CODECS),
    number=st.integers(1, 200),
    bucket=st.integers(0, PLAN.coded_buckets - 1),
    weight=st.floats(1e-3, 1e6),
    form=st.sampled_from(["fp16", "fp32"]),
    seed=st.integers(0, 100),
)
def test_places_arrive_exactly(codec: str, number: int, bucket: int, weight: float, form: str, seed: int) -> None:
    """Whatever the weight is that the sum is divided by, and after a cast."""
    chosen = chosen_of(codec)
    said = announced(chosen, number, bucket, seed)
    out = np.empty(chosen.announced(bucket)[1], np.float32)
    announce(chosen, bucket, said, out)
    got = heard(chosen, number, bucket, travelled(out, weight, form), weight)
    assert got is not None
    np.testing.assert_array_equal(got.places, said.places)
    if not bucket and chosen.rows:
        np.testing.assert_allclose(got.learnt, said.learnt, rtol=2e-3, atol=weight * 2.0**-25)  # fp16's smallest step


@pytest.mark.parametrize("leaders", [0, 2, 3])
def test_none_and_several_leaders_say_nothing(leaders: int) -> None:
    """A round that runs again in another generation may have them."""
    chosen = chosen_of(CODECS[0])
    total = np.zeros(chosen.announced(0)[1], np.float32)
    for leader in range(leaders):
        out = np.empty_like(total)
        announce(chosen, 0, announced(chosen, 5, 0, leader), out)
        total += out
    assert heard(chosen, 5, 0, travelled(total, 7.0, "fp16"), 7.0) is None


@given(
    value=st.floats(width=32, allow_nan=False, allow_infinity=False), at=st.integers(1, 60), weight=st.floats(0.1, 1e9)
)
def test_what_no_leader_says_is_nobodys(value: float, at: int, weight: float) -> None:
    """Places outside, or twice, are not taken; any number is either a place or refused."""
    chosen = chosen_of("lgc:1,warmup=0,refresh=1")
    out = np.empty(chosen.announced(0)[1], np.float32)
    announce(chosen, 0, announced(chosen, 5, 0, 1), out)
    mean = (out / np.float32(weight)).astype(np.float32)
    mean[at] = value
    got = heard(chosen, 5, 0, mean, weight)
    told = heard(chosen, 5, 0, (out / np.float32(weight)).astype(np.float32), weight)
    assert told is not None
    assert got is None or got.places.tobytes() == told.places.tobytes()  # all are chosen: any other is there twice


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("codec", [CODECS[0], CODECS[3]])
def test_what_is_learnt_are_numbers(codec: str, bad: float) -> None:
    chosen = chosen_of(codec)
    out = np.empty(chosen.announced(0)[1], np.float32)
    announce(chosen, 0, announced(chosen, 5, 0, 1), out)
    mean = out / np.float32(7.0)
    assert heard(chosen, 5, 0, mean, 7.0) is not None
    mean[1 + chosen.announced_places(0) + 4] = bad
    assert heard(chosen, 5, 0, mean, 7.0) is None


@given(codec=st.sampled_from(CODECS), number=st.integers(0, 10**6), bucket=st.integers(0, PLAN.coded_buckets - 1))
def test_default_places_are_in_their_blocks_and_none_twice(codec: str, number: int, bucket: int) -> None:
    chosen = chosen_of(codec)
    places = default_places(chosen, number, bucket)
    assert places.shape == (chosen.blocks(bucket), chosen.block_chosen)
    ends = np.full(len(places), chosen.block_values)
    ends[-1] = chosen.model.buckets[bucket].count - (len(places) - 1) * chosen.block_values
    assert (places >= 0).all()
    assert (places < ends[:, None]).all()
    assert all(len(set(block)) == chosen.block_chosen for block in places.tolist())


def test_default_places_come_round() -> None:
    """Nothing waits for ever where nobody leads."""
    chosen = chosen_of(CODECS[0])
    seen: set[int] = set()
    for number in range(1, chosen.block_values + 1):
        seen |= set(default_places(chosen, number, 0)[0].tolist())
    assert seen == set(range(chosen.block_values))
